"""Compare methods at equal loss on the new data: interpolated curves, and intervals from a paired bootstrap."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RATIOS = (1.02, 1.05, 1.10)
"""New losses to compare at, as multiples of that of plain training."""

Rows = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """One model on the curve of a method: its loss on the new data, and what it lost on every row of a test set."""

    new: float
    lost: Rows


@dataclass(frozen=True)
class Interval:
    """A mean, its standard error and its 95 % interval."""

    mean: float
    error: float
    low: float
    high: float


def encoded(values: Sequence[float]) -> str | list[float]:
    """What was lost on every row, for a record: zeros and ones as a string, other numbers rounded."""
    if all(value in (0, 1) for value in values):
        return "".join(str(int(value)) for value in values)
    return [round(value, 5) for value in values]


def decoded(stored: Sequence[str] | Sequence[float]) -> Rows:
    """The numbers of a record."""
    return np.array([float(value) for value in stored])


def at_loss(curve: Sequence[Point], loss: float) -> Rows | None:
    """Interpolate what is lost at a given loss on the new data.

    Args:
        curve: The points of a method, in any order.
        loss: The loss on the new data.

    Returns:
        What is lost on every row: that of the best point with at most this loss, or of a mixture of two neighbors if it
        is lower. None if no point has so low a loss.
    """
    points = sorted(curve, key=lambda point: point.new)
    found = [point.lost for point in points if point.new <= loss]
    for a, b in itertools.pairwise(points):
        if a.new <= loss <= b.new and b.new > a.new:
            share = (loss - a.new) / (b.new - a.new)
            found.append((1 - share) * a.lost + share * b.lost)
    return min(found, key=lambda rows: float(rows.mean())) if found else None


def paired(differences: Mapping[int, Rows], draws: int = 10_000, seed: int = 0) -> Interval:
    """Bootstrap the mean difference of two methods, over seeds and, within them, over the rows of the test set.

    Of n seeds n - 1 are drawn, because the variance of n draws is too small by (n - 1) / n (Rao and Wu 1988).

    Args:
        differences: By seed, the difference on every row. All seeds have the same rows.
        draws: Number of resamples.
        seed: Seed of the resamples.

    Returns:
        The mean over seeds and rows. Its error has the part of the rows and, with several seeds, that of the seeds.
    """
    values = np.stack(list(differences.values()))
    seeds, rows = values.shape
    rng = np.random.default_rng(seed)
    means = np.empty(draws)
    for i in range(draws):
        means[i] = values[np.ix_(rng.integers(0, seeds, max(seeds - 1, 1)), rng.integers(0, rows, rows))].mean()
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(values.mean()), float(means.std(ddof=1)), float(low), float(high))

"""Loss curves: the measured increase of a task's loss as a function of its quadratic approximation.

    rise = R(q),    q = 1/2 dw^T F dw / N

Near the mode the quadratic is accurate; at the distances to which new tasks push the weights, the loss rises faster.
How much faster is measured on the task's own data while they are available (`limpet.forgetting.measurement`), and only
a handful of numbers is stored.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from limpet.errors import finite_number, positive_whole

EXPECTED = 0.06
"""The q, in nats per example, that a task is expected to accumulate in the end; strengths are chosen for this q."""

MARGIN = 2.0
"""Safety factor on strengths: the loss on unseen examples rises more than on training examples.

Chosen on permuted MNIST.
"""

AGREE = 2.5
"""Largest ratio of the coherent curve to the loss curve at which the quadratic is said to describe the network."""

KEPT = 64
"""Largest number of tasks stored individually; beyond it the two oldest are merged."""


@dataclass(frozen=True)
class Curve:
    """R(q), interpolated: log(R / q) is linear in log q between the measured points, and R / q is constant outside.

    Attributes:
        predicted: The predicted increases q of the measured points, in ascending order.
        measured: The measured increases R(q) at these points, which never decrease.

    Examples:
        >>> curve = Curve.through([(0.01, 0.01), (0.1, 0.2)])
        >>> round(curve(0.1), 6), round(curve(0.2), 6), round(curve(0.001), 6)
        (0.2, 0.4, 0.001)
        >>> Curve()(0.3)  # nothing measured: the plain quadratic
        0.3
    """

    predicted: tuple[float, ...] = ()
    measured: tuple[float, ...] = ()

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Fit a nondecreasing curve through measured points.

        Args:
            points: Pairs (predicted, measured) of increases. Pairs that are not positive or not finite are dropped.

        Returns:
            The curve.
        """
        seen = sorted({q: rise for q, rise in points if q > 0 and rise > 0 and math.isfinite(rise)}.items())
        return cls(tuple(q for q, _ in seen), tuple(accumulate((rise for _, rise in seen), max)))

    def __call__(self, q: float) -> float:
        """Return the increase of the loss where the quadratic predicts q."""
        return q * _interpolated(q, self.predicted, self._ratios)

    @property
    def strength(self) -> float:
        """Recommended multiplier of the task's Fisher: the slope of the curve at the expected q, times a margin."""
        return MARGIN * self.slope(EXPECTED)

    def slope(self, q: float) -> float:
        """Return R'(q), the factor by which the quadratic must be multiplied to rise as fast as the loss at q.

        The derivative is smoothed over the measured points and never decreases.

        Args:
            q: The predicted increase, in nats per example.

        Returns:
            The slope; 1 if nothing was measured.
        """
        return _interpolated(q, self.predicted, self._slopes)

    @cached_property
    def _ratios(self) -> list[float]:
        return [rise / q for q, rise in zip(self.predicted, self.measured, strict=True)]

    @cached_property
    def _slopes(self) -> list[float]:
        """R/q (1 + p) at the points, with p the exponent of the growth of R/q, averaged over both sides of a point."""
        known, ratios = self.predicted, self._ratios
        powers = [
            math.log(ratios[i + 1] / ratios[i]) / math.log(known[i + 1] / known[i]) for i in range(len(known) - 1)
        ]
        before, after = [0.0, *powers], [*powers, 0.0]
        slopes = (ratio * (1 + (before[i] + after[i]) / 2) for i, ratio in enumerate(ratios))
        return list(accumulate(slopes, max))


def _interpolated(q: float, knots: Sequence[float], values: Sequence[float]) -> float:
    """Interpolate at q, linearly on log-log scales between the knots and constant outside; 1 if there are none."""
    if not knots:
        return 1.0
    after = bisect.bisect_right(knots, q)
    if after in (0, len(knots)):
        return values[min(after, len(knots) - 1)]
    low, high = values[after - 1], values[after]
    share = math.log(q / knots[after - 1]) / math.log(knots[after] / knots[after - 1])
    return float(low * (high / low) ** share)


@dataclass(frozen=True)
class TaskRecord:
    """A consolidated task.

    Attributes:
        examples: Number of examples of the task.
        curve: The loss curve of the task.
        since: Value of `TaskHistory.travelled` when the task was consolidated.
        coherent: The drift along coherent displacements (`limpet.forgetting.coherent`); None if not measured.
    """

    examples: int
    curve: Curve
    since: float
    coherent: Curve | None = None

    @cached_property
    def quadratic_holds(self) -> bool | None:
        """Whether coherent displacements cost about what others with the same quadratic cost; None if not measured."""
        if self.coherent is None or not self.curve.predicted:
            return None
        return all(self.coherent(q) <= AGREE * self.curve(q) for q in self.coherent.predicted)

    def rise(self, q: float) -> float:
        """Return the increase of the loss where the quadratic predicts q: the larger of both curves if they differ."""
        if self.coherent is None or self.quadratic_holds:
            return self.curve(q)
        return max(self.curve(q), self.coherent(q))

    @property
    def measured_to(self) -> float:
        """The largest q that a curve was measured at; 0 if none was."""
        curves = (self.curve, self.coherent or Curve())
        return max((curve.predicted[-1] for curve in curves if curve.predicted), default=0.0)


@dataclass(frozen=True)
class TaskHistory:
    """The loss curve of each task and the q accumulated since it was learned, stored in addition to the Gaussian.

    A task that was consolidated at `since` has accumulated travelled - since, and moving by another q increases its
    loss by  rise = R(travelled - since + q) - R(travelled - since).

    Attributes:
        tasks: Records of the tasks, oldest first.
        travelled: Sum of the q of all moves from mode to mode.
    """

    tasks: tuple[TaskRecord, ...] = ()
    travelled: float = 0.0

    def learned(self, examples: int, curve: Curve, moved: float, coherent: Curve | None = None) -> TaskHistory:
        """Add a task.

        Args:
            examples: Number of examples of the task.
            curve: The loss curve of the task.
            moved: The q of the move from the previous mode to that of the task.
            coherent: The coherent curve of the task, if it was measured.

        Returns:
            The history with the task. Beyond the limit on stored tasks, the two oldest are merged.
        """
        travelled = self.travelled + moved
        tasks = (*self.tasks, TaskRecord(examples, curve, travelled, coherent))
        if len(tasks) > KEPT:
            tasks = (_merged(*tasks[:2]), *tasks[2:])
        return TaskHistory(tasks, travelled)

    def with_curves(self, curve: Curve, coherent: Curve | None) -> TaskHistory:
        """Replace the curves of the newest task."""
        return replace(self, tasks=(*self.tasks[:-1], replace(self.tasks[-1], curve=curve, coherent=coherent)))

    def measured_again(self) -> TaskHistory:
        """Reset the accumulated q of every task to zero, for curvature that was re-estimated at the newest mode."""
        return replace(self, tasks=tuple(replace(task, since=self.travelled) for task in self.tasks))

    def rises(self, q: float) -> list[float]:
        """Predict the increase of every task's mean loss.

        Args:
            q: The quadratic prediction since the last consolidation, in nats per example.

        Returns:
            The increase for each task, oldest first, in nats per example.
        """
        behind = [(task, self.travelled - task.since) for task in self.tasks]
        return [task.rise(before + q) - task.rise(before) for task, before in behind]

    def drift(self, q: float) -> float | None:
        """Predict the drift KL(before || now) since the last consolidation, averaged over the tasks.

        Args:
            q: The quadratic prediction since the last consolidation, in nats per example.

        Returns:
            The drift, in nats per example; None unless the coherent curves of all tasks were measured.
        """
        curves = [task.coherent for task in self.tasks if task.coherent is not None]
        if not curves or len(curves) < len(self.tasks):
            return None
        return self.mean([curve(q) for curve in curves])

    def doubt(self, q: float) -> str | None:
        """Say why a forecast cannot be trusted.

        Args:
            q: The quadratic prediction since the last consolidation, in nats per example.

        Returns:
            The reason; None if the curves of all tasks were measured this far, and agree.
        """
        if not q:
            return None
        if any(task.quadratic_holds is None for task in self.tasks) or not self.tasks:
            return "it was not measured how the old loss increases around these weights"
        if not all(task.quadratic_holds for task in self.tasks):
            return "the curvature does not describe this network: coherent steps cost far more than it predicts"
        if any(self.travelled - task.since + q > task.measured_to for task in self.tasks):
            return "the weights are further away than the loss was measured"
        return None

    def mean(self, values: Sequence[float]) -> float:
        """Average one value per task, weighted by the number of examples."""
        total = sum(task.examples for task in self.tasks)
        return sum(task.examples * value for task, value in zip(self.tasks, values, strict=True)) / total

    def plain(self) -> dict[str, Any]:
        """Convert to JSON-serializable values."""
        tasks = [[t.examples, t.since, list(t.curve.predicted), list(t.curve.measured)] for t in self.tasks]
        coherent = [t.coherent and [list(t.coherent.predicted), list(t.coherent.measured)] for t in self.tasks]
        return {"travelled": self.travelled, "tasks": tasks, "coherent": coherent}

    @classmethod
    def restore(cls, values: Mapping[str, Any] | None) -> TaskHistory:
        """Invert `plain`.

        Args:
            values: The values; None, as in older files, gives an empty history.

        Returns:
            The history.

        Raises:
            ValueError: If the values are not those of a history.
        """
        if values is None:
            return cls()
        coherent = values.get("coherent", [None] * len(values["tasks"]))  # older files have none
        tasks = tuple(
            TaskRecord(
                positive_whole("examples", n),
                _restored(q, rise),
                finite_number("since", since),
                None if other is None else _restored(*other),
            )
            for (n, since, q, rise), other in zip(values["tasks"], coherent, strict=True)
        )
        return cls(tasks, finite_number("travelled", values["travelled"]))


def _restored(predicted: Sequence[Any], measured: Sequence[Any]) -> Curve:
    """Check the points of a stored curve."""
    if len(predicted) != len(measured):
        raise ValueError("a loss curve must have as many measured as predicted increases")
    return Curve(_rising(predicted), _rising(measured))


def _rising(values: Sequence[Any]) -> tuple[float, ...]:
    """Check that the points of a curve are positive and do not decrease."""
    numbers = tuple(finite_number("a point of a loss curve", value) for value in values)
    if any(a > b for a, b in pairwise(numbers)) or not all(numbers):
        raise ValueError("the points of a loss curve must be positive and must not decrease")
    return numbers


def _merged(a: TaskRecord, b: TaskRecord) -> TaskRecord:
    """Merge two tasks into one, averaging their curves and `since` by number of examples."""
    examples = a.examples + b.examples

    def average(one: Curve, other: Curve) -> Curve:
        knots = one.predicted or other.predicted
        return Curve.through((q, (a.examples * one(q) + b.examples * other(q)) / examples) for q in knots)

    since = (a.examples * a.since + b.examples * b.since) / examples
    coherent = None if a.coherent is None or b.coherent is None else average(a.coherent, b.coherent)
    return TaskRecord(examples, average(a.curve, b.curve), since, coherent)

"""Random numbers that depend only on a seed and on the example they are drawn for.

The label drawn for an example is therefore the same in every batch, order and process. Equal examples are told apart by
their occurrence: the first, second, ... one in a pass have independent draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

BITS = 24

HASHED_AT_ONCE = 1 << 16
"""Number of elements that are converted at once on a CPU, so that they stay in its cache."""

_MIXING = tuple(
    (np.array(shift, np.uint64), np.array(factor, np.uint64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
)
_LAST_SHIFT = np.array(31, np.uint64)


class PerExampleRNG:
    """One stream of uniform random numbers per example of a batch.

    Args:
        seeds: Integer seeds of shape (examples,).
    """

    def __init__(self, seeds: Tensor) -> None:
        self.seeds = seeds
        self._drawn = 0

    @classmethod
    def of(cls, tensors: Sequence[Tensor], seed: int, occurrences: Occurrences | None = None) -> PerExampleRNG:
        """Create streams for the examples given by the rows of some tensors.

        Args:
            tensors: Tensors whose first dimension is the examples; together they identify an example.
            seed: Seed common to all examples.
            occurrences: How often each example has been drawn for so far; updated. None treats every example as new.

        Returns:
            The streams, in the order of the rows.
        """
        seeds = _digest(tensors[0]) + _mixed_number(seed)
        for tensor in tensors[1:]:
            seeds = _mixed(seeds) + _digest(tensor).to(seeds.device)
        seeds = _mixed(seeds)
        return cls(seeds if occurrences is None else occurrences.told_apart(seeds))

    def uniform(self, shape: torch.Size) -> Tensor:
        """Draw uniform numbers in (0, 1); the first dimension of the shape is the examples."""
        size = shape[1:].numel()
        positions = _mixed_range(self._drawn, self._drawn + size, self.seeds.device)
        self._drawn += size
        bits = (_mixed(self.seeds.unsqueeze(-1) + positions) >> (63 - BITS)) & ((1 << BITS) - 1)
        return ((bits.double() if bits.device.type == "cpu" else bits.float()) + 0.5).div(1 << BITS).reshape(shape)


class Occurrences:
    """Counts how often each example has occurred in a pass, so that equal examples get independent draws.

    A repeated example is told apart by the number of its occurrence and by `rank`; a first occurrence only by itself.

    Args:
        rank: Rank of this process, whose repeated examples are others than those of the other ranks.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._count: dict[int, int] = {}

    def told_apart(self, seeds: Tensor) -> Tensor:
        """Count examples, and return a seed for every one that differs between equal examples.

        Args:
            seeds: Seeds of shape (examples,), equal for equal examples.

        Returns:
            The seeds, changed for examples that have occurred before.
        """
        numbers, found = [], seeds.tolist()
        new = dict.fromkeys(found, 1)
        if len(new) == len(found) and self._count.keys().isdisjoint(new):  # all are new, as nearly always
            self._count |= new
            return seeds
        for seed in found:
            number = self._count.get(seed, 0)
            self._count[seed] = number + 1
            numbers.append(number)
        if not any(numbers):
            return seeds
        repeats = torch.tensor(numbers, device=seeds.device)
        return torch.where(repeats > 0, _mixed(seeds + _mixed(repeats + (self.rank << 40))), seeds)

    def tensors(self) -> Tensor:
        """Return the counts as a matrix with a row (seed, count) for every example."""
        return torch.tensor(list(self._count.items()), dtype=torch.int64).reshape(-1, 2)

    def add(self, counts: Tensor) -> None:
        """Add counts returned by `tensors`."""
        for seed, count in counts.tolist():
            self._count[seed] = self._count.get(seed, 0) + count


Random = torch.Generator | PerExampleRNG | None
"""A source of random numbers; None is the global generator of torch."""


def uniform(shape: torch.Size, like: Tensor, random: Random) -> Tensor:
    """Draw uniform random numbers.

    Args:
        shape: Shape of the result; the first dimension is the examples.
        like: Tensor with the dtype and the device of the result.
        random: Source of random numbers.

    Returns:
        Numbers in the unit interval.
    """
    if isinstance(random, PerExampleRNG):
        return random.uniform(shape).to(like.device, like.dtype)
    return torch.rand(shape, generator=random, device=like.device, dtype=like.dtype)


def normal(shape: torch.Size, like: Tensor, random: Random) -> Tensor:
    """Draw standard normal random numbers.

    Args:
        shape: Shape of the result; the first dimension is the examples.
        like: Tensor with the dtype and the device of the result.
        random: Source of random numbers.

    Returns:
        Numbers from N(0, 1).
    """
    if isinstance(random, PerExampleRNG):
        return (math.sqrt(2) * torch.erfinv(2 * random.uniform(shape) - 1)).to(like.device, like.dtype)
    return torch.randn(shape, generator=random, device=like.device, dtype=like.dtype)


def _digest(tensor: Tensor) -> Tensor:
    """Hash every row, with all its bits, to an integer."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = tensor.detach().reshape(len(tensor), -1)
    if flat.is_floating_point():
        kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        flat = flat.contiguous().view(kinds[flat.element_size()])
    weights = _odd_weights(flat.shape[1], flat.device)
    if flat.device.type != "cpu":
        return (flat.to(torch.int64) * weights).sum(1)
    some = max(1, HASHED_AT_ONCE // max(flat.shape[1], 1))
    found = [rows.to(torch.int64) @ weights for rows in torch.split(flat, some)]
    return found[0] if len(found) == 1 else torch.cat(found)


@lru_cache(maxsize=4)
def _odd_weights(count: int, device: torch.device) -> Tensor:
    return _mixed_range(1, count + 1, device) | 1


@lru_cache(maxsize=4)
def _mixed_number(number: int) -> int:
    return int(_mixed(torch.tensor(number)))


@lru_cache(maxsize=4)
def _mixed_range(start: int, stop: int, device: torch.device) -> Tensor:
    return _mixed(torch.arange(start, stop, device=device))


def _mixed(x: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood 2014) in wrapping integer arithmetic."""
    if x.device.type == "cpu" and x.dim():  # numpy starts an operation faster, and a batch has few numbers
        y = x.numpy().view(np.uint64)
        for shift, factor in _MIXING:
            shifted = y >> shift
            shifted ^= y
            shifted *= factor
            y = shifted
        return torch.from_numpy((y ^ (y >> _LAST_SHIFT)).view(np.int64))
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & ((1 << 33) - 1))

"""Random numbers that depend on a seed and on the example they are for, and on nothing else.

So a label that is drawn for an example is the same in whatever batch, order or process the example is met.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BITS = 24


class PerExampleRNG:
    """A stream of uniform numbers for each example of a batch."""

    def __init__(self, seeds: Tensor) -> None:
        self.seeds = seeds  # (examples,), whole numbers
        self._drawn = 0

    @classmethod
    def of(cls, tensors: Sequence[Tensor], seed: int) -> PerExampleRNG:
        """For examples that are the rows of these tensors."""
        seeds = torch.full((len(tensors[0]),), seed, dtype=torch.int64, device=tensors[0].device)
        for tensor in tensors:
            seeds = _mixed(seeds) + _digest(tensor).to(seeds.device)
        return cls(_mixed(seeds))

    def uniform(self, shape: torch.Size) -> Tensor:
        """Numbers in (0, 1), of which the first dimension are the examples."""
        size = shape[1:].numel()
        places = torch.arange(self._drawn, self._drawn + size, device=self.seeds.device)
        self._drawn += size
        bits = (_mixed(self.seeds.unsqueeze(-1) + _mixed(places)) >> (63 - BITS)) & ((1 << BITS) - 1)
        return ((bits.double() if bits.device.type == "cpu" else bits.float()) + 0.5).div(1 << BITS).reshape(shape)


Random = torch.Generator | PerExampleRNG | None


def uniform(shape: torch.Size, like: Tensor, random: Random) -> Tensor:
    """Uniform numbers, in the dtype and on the device of `like`."""
    if isinstance(random, PerExampleRNG):
        return random.uniform(shape).to(like.device, like.dtype)
    return torch.rand(shape, generator=random, device=like.device, dtype=like.dtype)


def normal(shape: torch.Size, like: Tensor, random: Random) -> Tensor:
    """Normal numbers, in the dtype and on the device of `like`."""
    if isinstance(random, PerExampleRNG):
        return (math.sqrt(2) * torch.erfinv(2 * random.uniform(shape) - 1)).to(like.device, like.dtype)
    return torch.randn(shape, generator=random, device=like.device, dtype=like.dtype)


def _digest(tensor: Tensor) -> Tensor:
    """A whole number for every row, from all its bits."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = tensor.detach().reshape(len(tensor), -1)
    if flat.is_floating_point():
        kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        flat = flat.contiguous().view(kinds[flat.element_size()])
    weights = _mixed(torch.arange(1, flat.shape[1] + 1, device=flat.device)) | 1
    return (flat.to(torch.int64) * weights).sum(1)


def _mixed(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), in numbers that wrap around."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & ((1 << 33) - 1))

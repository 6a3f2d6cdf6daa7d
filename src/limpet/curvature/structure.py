"""Which structure a block gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from limpet.curvature.accumulators import (
    Accumulator,
    DenseAccumulator,
    DiagonalAccumulator,
    KroneckerAccumulator,
)
from limpet.model.blocks import Block
from limpet.precision.block_diagonal import cut
from limpet.precision.storage import AS_USED, Storage

MOST_PIECES = 7
"""Pieces that a side is cut into at most. A longer one, as a vocabulary is, keeps a diagonal: more pieces would keep
next to nothing of what lies beside it."""


@dataclass(frozen=True)
class Structure:
    """Which structure a block gets: what the user asked for, as far as the block has it."""

    name: str
    max_factor_size: int
    rest: Storage = AS_USED

    def of(self, block: Block) -> str:
        """The structure of this block: a diagonal where there are no Kronecker factors."""
        return "diagonal" if self.name.startswith("kronecker") and not block.factored else self.name

    def sides(self, block: Block) -> dict[str, Any]:
        """What the sides keep, as `Kronecker.start` takes it.

        A side up to `max_side` (a bias not counted) keeps a matrix, a longer one a matrix in even pieces, up to
        `MOST_PIECES` of them; one that is longer still, or of one-hot data, a diagonal.
        """
        one_hot = bool(block.layers) and all(layer.data_one_hot for layer in block.layers)
        *_, out, in_ = block.shape
        bias = block.bias
        *most, last = cut(in_ - bias, self.max_factor_size) if in_ > bias else (0,)
        sizes = {"inputs": (*most, last + bias), "outputs": cut(out, self.max_factor_size)}
        return {
            "inputs_diagonal": len(sizes["inputs"]) > MOST_PIECES,
            "outputs_diagonal": one_hot or len(sizes["outputs"]) > MOST_PIECES,
            **{f"{side}_sizes": some if len(some) <= MOST_PIECES else None for side, some in sizes.items()},
        }

    def size(self, block: Block) -> int:
        """Numbers that a memory of one task holds for this block, its mean included: what blocks are assigned by."""
        weights, name = math.prod(block.shape), self.of(block)
        if name in ("diagonal", "dense"):
            return weights + weights ** (2 if name == "dense" else 1)
        sides = self.sides(block)
        *groups, out, in_ = block.shape
        squares = 0
        for side, length in (("inputs", in_), ("outputs", out)):
            if not sides[f"{side}_diagonal"]:
                squares += sum(size**2 for size in sides[f"{side}_sizes"] or (length,))
        return 2 * weights + math.prod(groups) * (out + in_ + squares)

    def accumulator(self, block: Block, like: Tensor) -> Accumulator:
        """Zero sums for this block."""
        name = self.of(block)
        if name == "diagonal":
            return DiagonalAccumulator(block, like)
        if name == "dense":
            return DenseAccumulator(block, like)
        return KroneckerAccumulator(block, like, **self.sides(block))

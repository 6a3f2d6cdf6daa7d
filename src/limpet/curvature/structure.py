"""Structure of the Fisher of each block: Kronecker-factored, diagonal or dense."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
from limpet.precision.sketch import sketch_columns
from limpet.precision.storage import AS_USED, Storage
from limpet.precision.truncated_basis import is_truncated

MOST_PIECES = 7
"""Largest number of diagonal blocks that a factor is split into.

A longer side, such as a vocabulary, gets a diagonal factor: with more blocks, almost no off-diagonal entries would
remain.
"""


@dataclass(frozen=True)
class Structure:
    """The requested structure, and how it applies to each block.

    Args:
        name: "kronecker", "kronecker-sum", "diagonal" or "dense".
        max_factor_size: Largest side that gets a full factor; longer ones are split into diagonal blocks.
        rest: How eigenbases are stored while they are not in use.
        rank: Number of eigenvectors to keep of each full factor. None keeps all of them.
        energy: Part of the trace of each full factor that its eigenvectors should hold, instead of a rank.
    """

    name: str
    max_factor_size: int
    rest: Storage = AS_USED
    rank: int | None = None
    energy: float | None = None

    def of(self, block: Block) -> str:
        """The structure of this block: the requested one, or "diagonal" if the block has no Kronecker factors."""
        return "diagonal" if self.name.startswith("kronecker") and not block.factored else self.name

    def sides(self, block: Block) -> dict[str, Any]:
        """Shapes of the two factors of a block.

        A side up to `max_factor_size` (not counting the bias) gets a full factor, and a longer one a factor with up to
        `MOST_PIECES` diagonal blocks, whose sizes differ by at most one. A side that is longer still, or has one-hot
        data, gets a diagonal. With a rank that is at most an eighth of the side there is no need for diagonal blocks,
        because the factor is summed as a sketch.

        Args:
            block: A block with Kronecker factors.

        Returns:
            The keyword arguments `inputs_diagonal`, `outputs_diagonal`, `inputs_sizes` and `outputs_sizes` of
            `Kronecker.start` and `KroneckerAccumulator`.
        """
        one_hot = bool(block.layers) and all(layer.data_one_hot for layer in block.layers)
        *_, out, in_ = block.shape
        bias = block.bias
        *most, last = cut(in_ - bias, self._longest(in_ - bias)) if in_ > bias else (0,)
        sizes = {"inputs": (*most, last + bias), "outputs": cut(out, self._longest(out))}
        return {
            "inputs_diagonal": len(sizes["inputs"]) > MOST_PIECES,
            "outputs_diagonal": one_hot or len(sizes["outputs"]) > MOST_PIECES,
            **{f"{side}_sizes": some if len(some) <= MOST_PIECES else None for side, some in sizes.items()},
        }

    def _longest(self, side: int) -> int:
        """Largest size of the diagonal blocks of a factor with this many rows."""
        sketched = sketch_columns(side, self.rank) is not None and side <= MOST_PIECES * self.max_factor_size
        return side if sketched else self.max_factor_size

    def sketches(self, block: Block) -> dict[str, int]:
        """Return the number of columns of the sketches that a pass sums in place of the factors of a block, by side."""
        sides, found = self.sides(block), {}
        for side, length in (("in", block.shape[-1]), ("out", block.shape[-2])):
            name = f"{side}puts"
            columns = sketch_columns(length, self.rank)
            whole = not sides[f"{name}_diagonal"] and len(sides[f"{name}_sizes"] or (length,)) == 1
            if columns is not None and whole and self.name == "kronecker":
                found[side] = columns
        return found

    def complete(self, blocks: Iterable[Block]) -> Structure:
        """Return the structure without a rank, unless a side of a block is too long for a complete factor.

        Args:
            blocks: The blocks.

        Returns:
            The structure, for curvature that is used once and not stored.
        """
        long = any(max(block.shape[-2:]) > self.max_factor_size for block in blocks if block.factored)
        return self if long else replace(self, rank=None, energy=None)

    def size(self, block: Block) -> int:
        """Number of elements that a memory of one task stores for this block, mean included; used to balance ranks."""
        weights, name = math.prod(block.shape), self.of(block)
        if name in ("diagonal", "dense"):
            return weights + weights ** (2 if name == "dense" else 1)
        sides = self.sides(block)
        *groups, out, in_ = block.shape
        vectors, values = 0, 1
        for side, length in (("inputs", in_), ("outputs", out)):
            sizes, diagonal = sides[f"{side}_sizes"] or (length,), sides[f"{side}_diagonal"]
            kept = self.rank if is_truncated(sizes, diagonal, self.rank) else None
            if not diagonal:
                vectors += sum(size * (kept or size) for size in sizes)
            values *= length if kept is None else kept + 1
        return weights + math.prod(groups) * (values + out + in_ + vectors)

    def accumulator(self, block: Block, like: Tensor) -> Accumulator:
        """Create the accumulator for this block, on the device of `like`."""
        name = self.of(block)
        if name == "diagonal":
            return DiagonalAccumulator(block, like)
        if name == "dense":
            return DenseAccumulator(block, like)
        return KroneckerAccumulator(block, like, **self.sides(block), sketches=self.sketches(block))

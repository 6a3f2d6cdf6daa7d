"""Which structure a block gets."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from limpet.curvature.accumulators import (
    Accumulator,
    DenseAccumulator,
    DiagonalAccumulator,
    KroneckerAccumulator,
)
from limpet.curvature.blocks import Block
from limpet.precision.rest import AS_USED, Rest


@dataclass(frozen=True)
class Structure:
    """Which structure a block gets: what the user asked for, as far as the block has it."""

    name: str
    max_side: int
    rest: Rest = AS_USED

    def of(self, block: Block) -> str:
        """The structure of this block: a diagonal where there are no Kronecker factors."""
        return "diagonal" if self.name.startswith("kronecker") and not block.factored else self.name

    def sides(self, block: Block) -> dict[str, bool]:
        """Which sides keep a diagonal factor: one-hot data, or longer than `max_side`."""
        one_hot = bool(block.layers) and all(layer.data_one_hot for layer in block.layers)
        *_, out, in_ = block.shape
        return {"inputs_diagonal": in_ > self.max_side, "outputs_diagonal": one_hot or out > self.max_side}

    def accumulator(self, block: Block, like: Tensor) -> Accumulator:
        """Zero sums for this block."""
        name = self.of(block)
        if name == "diagonal":
            return DiagonalAccumulator(block, like)
        if name == "dense":
            return DenseAccumulator(block, like)
        return KroneckerAccumulator(block, like, **self.sides(block))

"""Sums over examples from which the terms of a block's precision are made, one class a structure.

Everything here is a sum, so that passes can be stopped and go on, and processes can add theirs up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from limpet.curvature.blocks import Block
from limpet.errors import UnsupportedError
from limpet.layers import Call, Embedding, MatrixLayer, example_gradients, squared_gradients
from limpet.layers.base import CHUNK
from limpet.precision import DenseTerm, DiagonalTerm, KroneckerTerm, Term

DENSE_LIMIT = 20_000
"""Weights in a block up to which the dense structure is allowed (3.2 GB in float64)."""


class Accumulator(ABC):
    """What one block's Fisher needs. `calls` are all uses of the block's weights in one forward pass."""

    def __init__(self, block: Block, like: Tensor) -> None:
        self.block = block
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        self.device = like.device

    def zeros(self, *shape: int) -> Tensor:
        """Zeros to sum into: float32 or better, whatever the model's dtype."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def add_data(self, calls: Sequence[Call]) -> None:
        """Take in what the forward pass tells, once a batch."""
        return

    @abstractmethod
    def add_gradients(self, calls: Sequence[Call]) -> None:
        """Take in the gradients of one root."""

    @abstractmethod
    def add_example(self, gradient: Tensor) -> None:
        """Take in the gradient of one example (direct blocks)."""

    @abstractmethod
    def terms(self, scale: float) -> list[Term]:
        """The Fisher, times `scale`."""

    @abstractmethod
    def sums(self) -> dict[str, Tensor]:
        """All that was summed so far, by name: what a checkpoint keeps, and what processes would add up."""

    @abstractmethod
    def load(self, sums: Mapping[str, Tensor]) -> None:
        """Go on from such sums."""


class KroneckerAccumulator(Accumulator):
    """For every kind of layer that uses the weights: the mean of the data's and the sum of the gradients' squares.

    With a the data and g the gradients over all examples n, positions and calls r, Q = mean of a a^T and
    H = sum of g g^T. Calls of a reused module count as positions, padding does not.
    """

    def __init__(self, block: Block, like: Tensor, *, inputs_diagonal: bool, outputs_diagonal: bool) -> None:
        super().__init__(block, like)
        self.diagonal = {"in": inputs_diagonal, "out": outputs_diagonal}
        self.data: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.count: dict[str, int] = {}

    def _side(self, sums: dict[str, Tensor], kind: str, side: str, *, diagonal: bool) -> Tensor:
        *groups, out, in_ = self.block.shape
        size = in_ if side == "in" else out
        if kind not in sums:
            sums[kind] = self.zeros(*groups, size) if diagonal else self.zeros(*groups, size, size)
        return sums[kind]

    def add_data(self, calls: Sequence[Call]) -> None:
        for call in calls:
            layer = call.layer
            side = "out" if layer.data_left else "in"
            diagonal = self.diagonal[side] or layer.data_one_hot
            total = self._side(self.data, layer.kind, side, diagonal=diagonal)
            if isinstance(layer, Embedding):
                counts = layer.counts(call, self.dtype)
                total += counts
                seen = int(counts.sum())
            else:
                ones = isinstance(layer, MatrixLayer) and layer.has_bias
                rows = call.data.flatten(-3, -2)
                if call.real is not None:
                    rows = rows[call.real.flatten()]
                add_gram(total, rows, ones=ones, diagonal=diagonal)
                seen = rows.shape[-2]
            self.count[layer.kind] = self.count.get(layer.kind, 0) + seen

    def add_gradients(self, calls: Sequence[Call]) -> None:
        for call in calls:
            side = "in" if call.layer.data_left else "out"
            gradient = call.layer.gradient_rows(call)
            total = self._side(self.gradients, call.layer.kind, side, diagonal=self.diagonal[side])
            add_gram(total, gradient.flatten(-3, -2), ones=False, diagonal=self.diagonal[side])

    def add_example(self, gradient: Tensor) -> None:
        raise UnsupportedError(f"{self.block.name} has no Kronecker factors")

    def sums(self) -> dict[str, Tensor]:
        kept = {f"data/{kind}": tensor for kind, tensor in self.data.items()}
        kept |= {f"gradients/{kind}": tensor for kind, tensor in self.gradients.items()}
        return kept | {f"count/{kind}": torch.tensor(count) for kind, count in self.count.items()}

    def load(self, sums: Mapping[str, Tensor]) -> None:
        for name, tensor in sums.items():
            part, _, kind = name.partition("/")
            if part == "count":
                self.count[kind] = int(tensor)
            else:
                (self.data if part == "data" else self.gradients)[kind] = tensor.to(self.device)

    def terms(self, scale: float) -> list[Term]:
        found: list[Term] = []
        for kind, data in self.data.items():
            if kind not in self.gradients:
                continue
            layer = next(layer for layer in self.block.layers if layer.kind == kind)
            data_diagonal = layer.data_one_hot or self.diagonal["out" if layer.data_left else "in"]
            gradients_diagonal = self.diagonal["in" if layer.data_left else "out"]
            mean = mirrored(data, data_diagonal) / max(self.count[kind], 1)
            summed = mirrored(self.gradients[kind], gradients_diagonal) * scale
            if layer.data_left:
                found.append(KroneckerTerm(summed, mean, gradients_diagonal, data_diagonal))
            else:
                found.append(KroneckerTerm(mean, summed, data_diagonal, gradients_diagonal))
        return found


class DiagonalAccumulator(Accumulator):
    """The sum over examples of the squared gradients: the exact diagonal of the Fisher."""

    def __init__(self, block: Block, like: Tensor) -> None:
        super().__init__(block, like)
        self.squares = self.zeros(*block.shape)

    def add_gradients(self, calls: Sequence[Call]) -> None:
        self.squares += squared_gradients(calls, self.block.shape.numel()).to(self.dtype)

    def add_example(self, gradient: Tensor) -> None:
        self.squares += gradient.to(self.dtype).square()

    def terms(self, scale: float) -> list[Term]:
        return [DiagonalTerm(self.squares * scale)]

    def sums(self) -> dict[str, Tensor]:
        return {"squares": self.squares}

    def load(self, sums: Mapping[str, Tensor]) -> None:
        self.squares = sums["squares"].to(self.device)


class DenseAccumulator(Accumulator):
    """The sum over examples of the outer products of the gradients: the Fisher of the block itself."""

    def __init__(self, block: Block, like: Tensor) -> None:
        super().__init__(block, like)
        size = block.shape.numel()
        if size > DENSE_LIMIT:
            raise UnsupportedError(
                f"structure='dense' takes at most {DENSE_LIMIT} weights in a block, {block.name} has {size}: "
                "use structure='kronecker'"
            )
        self.matrix = self.zeros(size, size)

    def add_gradients(self, calls: Sequence[Call]) -> None:
        count = calls[0].layer.example_count(calls[0])
        step = max(1, CHUNK // self.block.shape.numel())
        for start in range(0, count, step):
            gradients = example_gradients(calls, slice(start, start + step)).flatten(1)
            add_gram(self.matrix, gradients, ones=False, diagonal=False)

    def add_example(self, gradient: Tensor) -> None:
        add_gram(self.matrix, gradient.reshape(1, -1), ones=False, diagonal=False)

    def terms(self, scale: float) -> list[Term]:
        return [DenseTerm(mirrored(self.matrix, False) * scale)]

    def sums(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}

    def load(self, sums: Mapping[str, Tensor]) -> None:
        self.matrix = sums["matrix"].to(self.device)


def add_gram(total: Tensor, rows: Tensor, *, ones: bool, diagonal: bool) -> None:
    """total += rows^T rows, of which only the upper triangle is right until `mirrored`.

    `ones` stands for one more column of ones, which is not copied in; `diagonal` sums the squares alone. A large
    symmetric product is made in strips that leave most of the lower triangle out: a third less work.
    """
    rows = rows.to(total.dtype)
    width = rows.shape[-1]
    if diagonal:
        total[..., :width] += rows.square().sum(-2)
        if ones:
            total[..., width] += rows.shape[-2]
        return
    if rows.dim() > 2:
        total[..., :width, :width] += rows.mT @ rows
    else:
        strip = width if width < STRIP_FROM else -(-width // STRIPS)
        for start in range(0, width, max(strip, 1)):
            stop = min(start + strip, width)
            total[start:stop, start:width].addmm_(rows[:, start:stop].mT, rows[:, start:])
    if ones:
        total[..., :width, width] += rows.sum(-2)
        total[..., width, width] += rows.shape[-2]


STRIP_FROM = 256
STRIPS = 4


def mirrored(total: Tensor, diagonal: bool) -> Tensor:
    """The symmetric matrix of which `add_gram` made the upper triangle."""
    return total if diagonal else total.triu() + total.triu(1).mT

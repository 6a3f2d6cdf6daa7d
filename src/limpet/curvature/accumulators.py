"""Accumulators for the Fisher of one block, one class per structure.

Every statistic is a sum over examples, so a pass can be interrupted and resumed, and ranks can be combined with an
all-reduce.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from limpet.curvature.gram import add_gram, add_grams, mirror_
from limpet.errors import UnsupportedError
from limpet.layers import Call, Embedding, Layer, MatrixLayer, example_gradients, squared_gradients
from limpet.layers.base import CHUNK, flat_parts
from limpet.model.blocks import Block
from limpet.precision import DenseTerm, DiagonalTerm, KroneckerTerm, Matrix, Term
from limpet.precision.block_diagonal import Side, find, joined, named, pieces
from limpet.precision.sketch import Sketch

DENSE_LIMIT = 20_000
"""Largest number of weights in a block for which the dense structure is allowed (3.2 GB in float64)."""


class Accumulator(ABC):
    """Running sums from which the Fisher of one block is computed.

    Throughout, `calls` are all uses of the block's weights in one forward pass.

    Args:
        block: The block whose Fisher is accumulated.
        like: A tensor on the device of the sums; the sums are in its dtype, or in float32 if that is wider.
    """

    def __init__(self, block: Block, like: Tensor) -> None:
        self.block = block
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        self.device = like.device

    def zeros(self, *shape: int) -> Tensor:
        """Allocate zeros to sum into, in float32 or wider whatever the model's dtype."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def add_data(self, calls: Sequence[Call]) -> None:
        """Add the layer inputs recorded in the forward pass. Called once per batch."""
        return

    @abstractmethod
    def add_gradients(self, calls: Sequence[Call]) -> None:
        """Add the gradients of one backward pass, that is, of one column of a square root of the output Hessian."""

    @abstractmethod
    def add_example(self, gradient: Tensor) -> None:
        """Add the gradient of a single example (per-sample blocks)."""

    @abstractmethod
    def terms(self, scale: float) -> list[Term]:
        """Return the terms of the Fisher, multiplied by `scale`."""

    @abstractmethod
    def sums(self) -> dict[str, Tensor]:
        """Return the sums so far, by name: what a checkpoint stores and what ranks reduce."""

    @abstractmethod
    def load(self, sums: Mapping[str, Tensor]) -> None:
        """Restore sums returned by `sums`."""


class KroneckerAccumulator(Accumulator):
    """K-FAC factors, one pair for every layer that uses the weights.

    With a the layer inputs and g the output gradients over all examples n, positions and calls r, Q = mean of a a^T
    and H = sum of g g^T. Calls of a reused module count as positions; padding does not.

    Args:
        block: The block whose Fisher is accumulated.
        like: A tensor on the device of the sums; the sums are in its dtype, or in float32 if that is wider.
        inputs_diagonal: Whether to keep only the diagonal of the input factor.
        outputs_diagonal: Whether to keep only the diagonal of the output factor.
        inputs_sizes: Sizes of the diagonal blocks of the input factor. None stores the full matrix.
        outputs_sizes: Sizes of the diagonal blocks of the output factor. None stores the full matrix.
        sketches: Number of columns of the sketches that are summed in place of the factors, by side ("in", "out").
    """

    def __init__(
        self,
        block: Block,
        like: Tensor,
        *,
        inputs_diagonal: bool,
        outputs_diagonal: bool,
        inputs_sizes: tuple[int, ...] | None = None,
        outputs_sizes: tuple[int, ...] | None = None,
        sketches: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(block, like)
        *_, out, in_ = block.shape
        self.diagonal = {"in": inputs_diagonal, "out": outputs_diagonal}
        self.sizes = {"in": inputs_sizes or (in_,), "out": outputs_sizes or (out,)}
        self.sketches = sketches or {}
        self.uses = {id(layer): block.use(layer) for layer in block.layers}
        self.data: dict[str, Matrix | Sketch] = {}
        self.gradients: dict[str, Matrix | Sketch] = {}
        self.count: dict[str, int] = {}

    def _side(self, sums: dict[str, Matrix | Sketch], kind: str, side: str, *, diagonal: bool) -> Matrix | Sketch:
        *groups, _, _ = self.block.shape
        sizes = self.sizes[side]
        if kind not in sums and side in self.sketches and not diagonal:
            sums[kind] = Sketch.zeros(groups, sum(sizes), self.sketches[side], self.zeros())
        elif kind not in sums:
            matrix = [] if diagonal else [self.zeros(*groups, size, size) for size in sizes]
            sums[kind] = self.zeros(*groups, sum(sizes)) if diagonal else joined(matrix)
        return sums[kind]

    def add_data(self, calls: Sequence[Call]) -> None:
        """Add the inputs of each call to its input factor."""
        for call in calls:
            layer, use = call.layer, self.uses[id(call.layer)]
            side = "out" if layer.data_left else "in"
            diagonal = self.diagonal[side] or layer.data_one_hot
            total = self._side(self.data, use, side, diagonal=diagonal)
            if isinstance(layer, Embedding) and isinstance(total, Tensor):
                counts = layer.counts(call, self.dtype)
                total += counts
                seen = int(counts.sum())
            else:
                ones = isinstance(layer, MatrixLayer) and layer.has_bias
                parts: Iterable[Tensor] = _real_rows(call, layer)
                seen = layer.row_count(call)
                if call.real is not None:
                    parts = list(parts)
                    seen = sum(rows.shape[-2] for rows in parts)
                add = add_grams if call.same_input is None else call.same_input.add_to
                add(total, parts, ones=ones, diagonal=diagonal)
            self.count[use] = self.count.get(use, 0) + seen

    def add_gradients(self, calls: Sequence[Call]) -> None:
        """Add the output gradients of each call to its output factor."""
        for call in calls:
            side = "in" if call.layer.data_left else "out"
            gradient = call.layer.gradient_rows(call)
            total = self._side(self.gradients, self.uses[id(call.layer)], side, diagonal=self.diagonal[side])
            add_grams(total, flat_parts(gradient), ones=False, diagonal=self.diagonal[side])

    def fewer_inputs_than_side(self) -> bool:
        """Whether an input factor is a matrix with fewer inputs (examples times positions) than rows.

        The inputs then lie in the span of its eigenvectors of nonzero eigenvalue.
        """
        if self.diagonal["in"]:
            return False
        side = max(self.sizes["in"])
        used = [use for use in map(self.block.use, self.block.layers) if use in self.count]
        left = {self.block.use(layer) for layer in self.block.layers if layer.data_left}
        return any(self.count[use] < side for use in used if use not in left)

    def add_example(self, gradient: Tensor) -> None:
        """Raise an error: per-sample gradients have no Kronecker factors."""
        raise UnsupportedError(
            f"{self.block.name} is measured per sample and has no Kronecker factors: use structure='diagonal'"
        )

    def sums(self) -> dict[str, Tensor]:
        """Return the factors and the row counts."""
        kept: dict[str, Tensor] = {}
        for part, matrices in (("data", self.data), ("gradients", self.gradients)):
            for kind, matrix in matrices.items():
                name = f"{part}/{kind}"
                kept |= matrix.named(name) if isinstance(matrix, Sketch) else named(name, matrix)
        return kept | {f"count/{kind}": torch.tensor(count) for kind, count in self.count.items()}

    def load(self, sums: Mapping[str, Tensor]) -> None:
        """Restore the factors and the row counts."""
        for kind in map(self.block.use, self.block.layers):
            if f"count/{kind}" in sums:
                self.count[kind] = int(sums[f"count/{kind}"])
            for part, matrices in (("data", self.data), ("gradients", self.gradients)):
                name = f"{part}/{kind}"
                found, sketch = find(name, sums), Sketch.find(name, sums, self.device)
                if found is not None:
                    matrices[kind] = joined([piece.to(self.device) for piece in pieces(found)])
                elif sketch is not None:
                    matrices[kind] = sketch

    def terms(self, scale: float) -> list[Term]:
        """Return one Kronecker term for every layer that uses the weights."""
        found: list[Term] = []
        for kind in [kind for kind in self.data if kind in self.gradients]:
            layer = next(layer for layer in self.block.layers if self.block.use(layer) == kind)
            data_diagonal = layer.data_one_hot or self.diagonal["out" if layer.data_left else "in"]
            gradients_diagonal = self.diagonal["in" if layer.data_left else "out"]
            # a sum is dropped when its factor is made, because both are as large as the memory
            mean = _finished(self.data.pop(kind), data_diagonal, 1 / max(self.count[kind], 1))
            summed = _finished(self.gradients.pop(kind), gradients_diagonal, scale)
            if layer.data_left:
                found.append(KroneckerTerm(summed, mean, gradients_diagonal, data_diagonal))
            else:
                found.append(KroneckerTerm(mean, summed, data_diagonal, gradients_diagonal))
        return found


class DiagonalAccumulator(Accumulator):
    """Exact diagonal of the Fisher: the sum over examples of the squared gradients.

    Args:
        block: The block whose Fisher is accumulated.
        like: A tensor on the device of the sums; the sums are in its dtype, or in float32 if that is wider.
    """

    def __init__(self, block: Block, like: Tensor) -> None:
        super().__init__(block, like)
        self.squares = self.zeros(*block.shape)

    def add_gradients(self, calls: Sequence[Call]) -> None:
        """Add the squared per-sample gradients."""
        self.squares += squared_gradients(calls, self.block.shape.numel()).to(self.dtype)

    def add_example(self, gradient: Tensor) -> None:
        """Add the square of one example's gradient."""
        self.squares += gradient.to(self.dtype).square()

    def terms(self, scale: float) -> list[Term]:
        """Return the diagonal term."""
        return [DiagonalTerm(self.squares * scale)]

    def sums(self) -> dict[str, Tensor]:
        """Return the sum of squared gradients."""
        return {"squares": self.squares}

    def load(self, sums: Mapping[str, Tensor]) -> None:
        """Restore the sum of squared gradients."""
        self.squares = sums["squares"].to(self.device)


class DenseAccumulator(Accumulator):
    """Full Fisher of the block: the sum over examples of the outer products of the gradients.

    Args:
        block: The block whose Fisher is accumulated.
        like: A tensor on the device of the sums; the sums are in its dtype, or in float32 if that is wider.

    Raises:
        UnsupportedError: If the block has more than `DENSE_LIMIT` weights.
    """

    def __init__(self, block: Block, like: Tensor) -> None:
        super().__init__(block, like)
        size = block.shape.numel()
        if size > DENSE_LIMIT:
            raise UnsupportedError(
                f"structure='dense' supports at most {DENSE_LIMIT} weights per block, but {block.name} has {size}: "
                "use structure='kronecker'"
            )
        self.matrix = self.zeros(size, size)

    def add_gradients(self, calls: Sequence[Call]) -> None:
        """Add the outer products of the per-sample gradients."""
        count = calls[0].layer.example_count(calls[0])
        step = max(1, CHUNK // self.block.shape.numel())
        for start in range(0, count, step):
            gradients = example_gradients(calls, slice(start, start + step)).flatten(1)
            add_gram(self.matrix, gradients, ones=False, diagonal=False)

    def add_example(self, gradient: Tensor) -> None:
        """Add the outer product of one example's gradient."""
        add_gram(self.matrix, gradient.reshape(1, -1), ones=False, diagonal=False)

    def terms(self, scale: float) -> list[Term]:
        """Return the dense term."""
        return [DenseTerm(mirror_(self.matrix) * scale)]

    def sums(self) -> dict[str, Tensor]:
        """Return the sum of outer products."""
        return {"matrix": self.matrix}

    def load(self, sums: Mapping[str, Tensor]) -> None:
        """Restore the sum of outer products."""
        self.matrix = sums["matrix"].to(self.device)


def _real_rows(call: Call, layer: Layer) -> Iterator[Tensor]:
    """Yield the rows of the data of a call without those of padding, in parts."""
    parts = layer.parts(call) if isinstance(layer, MatrixLayer) else [(slice(None), call.data)]
    for examples, data in parts:
        rows = data.flatten(-3, -2)
        yield rows if call.real is None else rows[call.real[examples].flatten()]


def _finished(total: Matrix | Sketch, diagonal: bool, scale: float) -> Side:
    """Return `scale` times the factor of a sum, whose tensors may be changed: with the triangles left out before."""
    if isinstance(total, Sketch):
        return total.recovered() * scale
    return total * scale if diagonal else joined([mirror_(piece).mul_(scale) for piece in pieces(total)])

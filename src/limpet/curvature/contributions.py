"""Contributions of single examples to the Fisher of a block, for clipping (`limpet.curvature.private_pass`).

The accumulators here keep what one batch contributes, example by example, instead of summing over examples. An
example's input factor is the mean of a a^T over its positions, its output factor the sum of g g^T over its positions
and backward passes. Where these are rows (positions x width), norms come from their Gram matrices, and the weighted sum
over examples is one matrix product, so that no matrix per example is formed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from limpet.curvature.accumulators import Accumulator, DiagonalAccumulator, KroneckerAccumulator
from limpet.curvature.batch_step import UnforeseenError
from limpet.layers import Call, Embedding, Layer, MatrixLayer, example_gradients
from limpet.model.blocks import Block
from limpet.precision import DenseTerm, DiagonalTerm, KroneckerTerm, Term
from limpet.precision.block_diagonal import joined
from limpet.precision.linalg import widened

Sums = list[Tensor]
"""A statistic: the diagonal blocks of a symmetric matrix, or one diagonal."""


class Contribution(ABC):
    """What every example of a batch contributes to one statistic."""

    symmetric: bool
    """Whether the statistic is a symmetric matrix rather than a diagonal."""

    @abstractmethod
    def norms(self) -> Tensor:
        """Return the Frobenius norm of each example's contribution, in float64."""

    @abstractmethod
    def summed(self, weights: Tensor) -> Sums:
        """Return the sum of the contributions, each multiplied by its weight, in float64."""


@dataclass(frozen=True)
class Rows(Contribution):
    """Contributions sum_m x_m x_m^T of several rows x_m per example.

    Args:
        rows: The rows, of shape (..., examples, rows, width).
        sizes: Sizes of the diagonal blocks that are kept. None keeps only the diagonal.
    """

    rows: Tensor
    sizes: tuple[int, ...] | None

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """Whether the statistic is a symmetric matrix rather than a diagonal."""
        return self.sizes is not None

    def _pieces(self) -> list[Tensor]:
        assert self.sizes is not None
        ends = torch.tensor([0, *self.sizes]).cumsum(0).tolist()
        return [widened(self.rows)[..., start:stop] for start, stop in pairwise(ends)]

    def norms(self) -> Tensor:
        """Return the norms, from whichever Gram matrix of the rows is smaller."""
        if self.sizes is None:
            squares = widened(self.rows).square().sum(-2).square().sum(-1)
            return _over_groups(squares).sqrt()
        total = torch.zeros((), dtype=torch.float64)
        for piece in self._pieces():
            gram = piece @ piece.mT if piece.shape[-2] <= piece.shape[-1] else piece.mT @ piece
            total = total + _over_groups(gram.square().sum((-2, -1)))
        return total.sqrt()

    def summed(self, weights: Tensor) -> Sums:
        """Return the weighted sum of the matrices or diagonals."""
        scale = weights.sqrt().unsqueeze(-1).unsqueeze(-1)
        if self.sizes is None:
            return [(widened(self.rows) * scale).square().sum((-3, -2))]
        flat = [(piece * scale).flatten(-3, -2) for piece in self._pieces()]
        return [piece.mT @ piece for piece in flat]


@dataclass(frozen=True)
class Values(Contribution):
    """Contributions that are given as they are, to a diagonal.

    Args:
        values: The contributions, of shape (examples, ...).
    """

    values: Tensor
    symmetric = False

    def norms(self) -> Tensor:
        """Return the norms."""
        return widened(self.values).flatten(1).square().sum(1).sqrt()

    def summed(self, weights: Tensor) -> Sums:
        """Return the weighted sum."""
        values = widened(self.values)
        return [(weights @ values.flatten(1)).reshape(values.shape[1:])]


def _over_groups(numbers: Tensor) -> Tensor:
    """Sum numbers of shape (..., examples) over the leading dimensions."""
    return numbers.reshape(-1, numbers.shape[-1]).sum(0)


class Contributions(Accumulator):
    """Base class: what the examples of one batch contribute to the Fisher of one block.

    Args:
        block: The block.
        like: A tensor with the dtype and device of the result.
        count: Number of examples in the batch.
    """

    def __init__(self, block: Block, like: Tensor, count: int) -> None:
        super().__init__(block, like)
        self.count = count

    @abstractmethod
    def statistics(self) -> dict[str, Contribution]:
        """Return the contributions by the name of the statistic."""

    @abstractmethod
    def private_terms(self, sums: Mapping[str, Sums], rows: int, scale: float) -> list[Term]:
        """Build the terms of the Fisher from private sums over all examples.

        Args:
            sums: The sums by statistic.
            rows: Number of examples in them.
            scale: Factor of the Fisher.

        Returns:
            The terms.
        """

    def by_example(self, rows: Tensor) -> Tensor:
        """Check that rows of shape (..., examples, positions, width) have the examples of the batch.

        All rows of a batch of one example belong to it, whatever their shape.
        """
        if self.count == 1:
            return rows.flatten(-3, -2).unsqueeze(-3)
        if rows.shape[-3] != self.count:
            raise UnforeseenError({self.block.name})
        return rows

    def like(self, tensor: Tensor) -> Tensor:
        """Convert a sum to the dtype and device of the block."""
        return tensor.to(self.device, self.dtype)

    def terms(self, scale: float) -> list[Term]:
        """Not used: terms are built from private sums."""
        raise NotImplementedError

    def sums(self) -> dict[str, Tensor]:
        """Return nothing, because nothing may be stored without noise."""
        return {}

    def load(self, sums: Mapping[str, Tensor]) -> None:
        """Not used."""
        raise NotImplementedError


class KroneckerContributions(Contributions):
    """Input and output factors of every example, for every layer that uses the weights.

    Args:
        block: The block.
        like: A tensor with the dtype and device of the result.
        count: Number of examples in the batch.
        form: An accumulator of the block, which has the sizes of its factors.
    """

    def __init__(self, block: Block, like: Tensor, count: int, form: KroneckerAccumulator) -> None:
        super().__init__(block, like, count)
        self.form = form
        self.data: dict[str, list[Tensor]] = {}  # rows, or for an embedding the counts of its tokens
        self.positions: dict[str, Tensor] = {}
        self.gradients: dict[str, list[Tensor]] = {}

    def add_data(self, calls: Sequence[Call]) -> None:
        """Keep the inputs of each call."""
        for call in calls:
            use, layer = self.block.use(call.layer), call.layer
            if isinstance(layer, Embedding):
                if self.count > 1:
                    raise UnforeseenError({self.block.name})
                rows = layer.counts(call, self.dtype).unsqueeze(0)
                positions = rows.sum(-1)
            else:
                data = call.data
                if isinstance(layer, MatrixLayer) and layer.has_bias:
                    data = torch.cat([data, data.new_ones(*data.shape[:-1], 1)], -1)
                real = torch.ones(data.shape[-3:-1], device=data.device) if call.real is None else call.real
                real = real.reshape(data.shape[-3:-1]).unsqueeze(-1).to(data.dtype)
                rows, real = self.by_example(data * real), self.by_example(real)
                positions = real.sum((-2, -1))
            self.data.setdefault(use, []).append(rows)
            self.positions[use] = self.positions.get(use, 0) + widened(positions)

    def add_gradients(self, calls: Sequence[Call]) -> None:
        """Keep the output gradients of each call."""
        for call in calls:
            rows = self.by_example(call.layer.gradient_rows(call))
            self.gradients.setdefault(self.block.use(call.layer), []).append(rows)

    def add_example(self, gradient: Tensor) -> None:
        """Raise an error, as `KroneckerAccumulator` does."""
        self.form.add_example(gradient)

    def _uses(self) -> dict[str, Layer]:
        """The layers with data and gradients, by use."""
        found = {self.block.use(layer): layer for layer in self.block.layers}
        return {use: layer for use, layer in found.items() if use in self.data and use in self.gradients}

    def _sizes(self, side: str, *, one_hot: bool = False) -> tuple[int, ...] | None:
        return None if self.form.diagonal[side] or one_hot else self.form.sizes[side]

    def statistics(self) -> dict[str, Contribution]:
        """Return the mean of the inputs' outer products, and the sum of those of the gradients, for every use."""
        found: dict[str, Contribution] = {}
        for use, layer in self._uses().items():
            sides = ("out", "in") if layer.data_left else ("in", "out")
            positions = self.positions[use].clamp_min(1)
            if isinstance(layer, Embedding):
                counts = widened(torch.stack(self.data[use]).sum(0))
                found[f"{use}/data"] = Values(counts / positions.unsqueeze(-1))
            else:
                rows = widened(torch.cat(self.data[use], -2)) / positions.sqrt().unsqueeze(-1).unsqueeze(-1)
                found[f"{use}/data"] = Rows(rows, self._sizes(sides[0], one_hot=layer.data_one_hot))
            gradients = torch.cat(self.gradients[use], -2)
            found[f"{use}/gradients"] = Rows(gradients, self._sizes(sides[1]))
        return found

    def private_terms(self, sums: Mapping[str, Sums], rows: int, scale: float) -> list[Term]:
        """Return one Kronecker term for every layer that uses the weights."""
        found: list[Term] = []
        for use, layer in self._uses().items():
            sides = ("out", "in") if layer.data_left else ("in", "out")
            diagonal = layer.data_one_hot or self.form.diagonal[sides[0]]
            mean = joined([self.like(total / rows) for total in sums[f"{use}/data"]])
            total = joined([self.like(total * scale) for total in sums[f"{use}/gradients"]])
            if layer.data_left:
                found.append(KroneckerTerm(total, mean, self.form.diagonal[sides[1]], diagonal))
            else:
                found.append(KroneckerTerm(mean, total, diagonal, self.form.diagonal[sides[1]]))
        return found


class GradientContributions(Contributions):
    """Squares or outer products of the gradient of every example, for the diagonal and dense structures.

    Args:
        block: The block.
        like: A tensor with the dtype and device of the result.
        count: Number of examples in the batch.
        form: An accumulator of the block.
    """

    def __init__(self, block: Block, like: Tensor, count: int, form: Accumulator) -> None:
        super().__init__(block, like, count)
        self.diagonal = isinstance(form, DiagonalAccumulator)
        self.gradients: list[Tensor] = []

    def add_gradients(self, calls: Sequence[Call]) -> None:
        """Keep the gradient of every example, of one backward pass."""
        if any(call.layer.example_count(call) != self.count for call in calls):
            raise UnforeseenError({self.block.name})
        self._keep(example_gradients(calls, slice(0, self.count)))

    def add_example(self, gradient: Tensor) -> None:
        """Keep the gradient of the only example, of one backward pass."""
        if self.count > 1:
            raise UnforeseenError({self.block.name})
        self._keep(gradient.unsqueeze(0))

    def _keep(self, gradients: Tensor) -> None:
        gradients = widened(gradients)
        if not self.diagonal:
            self.gradients.append(gradients.flatten(1).unsqueeze(1))
        elif self.gradients:
            self.gradients[0] += gradients.square()
        else:
            self.gradients.append(gradients.square())

    def statistics(self) -> dict[str, Contribution]:
        """Return the squares or outer products, summed over the backward passes."""
        if not self.gradients:
            zero = torch.zeros(self.count, *self.block.shape, dtype=torch.float64)
            self._keep(zero)
        if self.diagonal:
            return {"squares": Values(self.gradients[0])}
        return {"matrix": Rows(torch.cat(self.gradients, 1), (self.block.shape.numel(),))}

    def private_terms(self, sums: Mapping[str, Sums], rows: int, scale: float) -> list[Term]:
        """Return the diagonal or dense term."""
        if self.diagonal:
            return [DiagonalTerm(self.like(sums["squares"][0] * scale))]
        return [DenseTerm(self.like(sums["matrix"][0] * scale))]


def contributions(block: Block, like: Tensor, count: int, form: Accumulator) -> Contributions:
    """Create the contributions of a batch to a block.

    Args:
        block: The block.
        like: A tensor with the dtype and device of the result.
        count: Number of examples in the batch.
        form: An accumulator of the block in its structure.

    Returns:
        Empty contributions.
    """
    if isinstance(form, KroneckerAccumulator):
        return KroneckerContributions(block, like, count, form)
    return GradientContributions(block, like, count, form)

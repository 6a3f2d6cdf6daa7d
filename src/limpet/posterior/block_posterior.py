"""The Gaussian of one block of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from limpet.model import Block
from limpet.precision import Diagonal, Precision
from limpet.precision.weighted import WeightedSum


@dataclass(frozen=True)
class BlockPosterior:
    """One block: penalty(w) = 1/2 (w - mean)^T L (w - mean) + slope^T (w - mean).

    The slope is there only where the penalties of several tasks, each around its own mean, are kept as one.
    """

    block: Block
    mean: Tensor
    precision: Precision
    linear_term: Tensor | None = None
    tasks: int = 0  # tasks whose Fisher is in the precision

    def matrix(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The block's weights as its matrix, in the dtype the memory is kept in."""
        return self.block.gather(weights).to(self.mean.device, self.mean.dtype)

    def value(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The penalty, differentiable."""
        d = self.matrix(weights) - self.mean
        value = self.precision.quadratic(d) / 2
        return value if self.linear_term is None else value + (self.linear_term * d).sum()

    def displacement(self, weights: Mapping[str, Tensor]) -> Tensor:
        """w - mean, without a graph."""
        return self.matrix(weights).detach() - self.mean

    def gradient(self, d: Tensor, apply: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The gradient of the penalty at a displacement; `apply` is the precision's, or its `applier`."""
        gradient = (apply or self.precision.apply)(d)
        return gradient if self.linear_term is None else gradient + self.linear_term

    def proximal(self, d: Tensor, step: float) -> Tensor:
        """argmin over e of 1/(2 step) ||e - d||^2 + penalty(mean + e): the displacement d, pulled back."""
        return self.precision.proximal(d if self.linear_term is None else d - step * self.linear_term, step)

    def as_diagonals(self) -> list[BlockPosterior]:
        """The same parameters, each by itself, with what is known of them as a diagonal."""
        pieces = []
        block = self.block
        columns = [block.split(tensor) for tensor in (self.mean, *self.precision.diagonals())]
        linear_terms = [None] * len(block.parameters) if self.linear_term is None else block.split(self.linear_term)
        for part, mean, plain, total, linear_term in zip(block.as_per_sample(), *columns, linear_terms, strict=True):
            values = WeightedSum(part.matrix([plain]), part.matrix([total]))
            diagonal = Diagonal(part.shape, self.precision.prior, values)
            kept = None if linear_term is None else part.matrix([linear_term])
            pieces.append(BlockPosterior(part, part.matrix([mean]), diagonal, kept, self.tasks))
        return pieces

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors kept for the block."""
        own = [self.mean] if self.linear_term is None else [self.mean, self.linear_term]
        return self.precision.nbytes + sum(tensor.untyped_storage().nbytes() for tensor in own)

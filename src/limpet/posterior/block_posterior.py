"""Gaussian posterior of one block of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from limpet.model import Block
from limpet.precision import Diagonal, Precision
from limpet.precision.weighted import WeightedSum


@dataclass(frozen=True)
class BlockPosterior:
    """Gaussian of one block, with penalty(w) = 1/2 (w - mean)^T L (w - mean) + linear_term^T (w - mean).

    Args:
        block: The parameters of the block, and how they form a matrix.
        mean: The mean, in the shape of the block.
        precision: The precision L.
        linear_term: Linear term of the penalty. None except where the penalties of several tasks, each around its own
            mean, are merged into one.
        tasks: Number of tasks whose Fisher is included in the precision.
    """

    block: Block
    mean: Tensor
    precision: Precision
    linear_term: Tensor | None = None
    tasks: int = 0

    def matrix(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the block's weights as a matrix, on the device and in the dtype of the mean."""
        return self.block.gather(weights).to(self.mean.device, self.mean.dtype)

    def value(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the penalty, differentiable with respect to the weights."""
        d = self.matrix(weights) - self.mean
        value = self.precision.quadratic(d) / 2
        return value if self.linear_term is None else value + (self.linear_term * d).sum()

    def displacement(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return w - mean, detached."""
        return self.matrix(weights).detach() - self.mean

    def gradient(self, d: Tensor, apply: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the gradient of the penalty at a displacement.

        Args:
            d: The displacement w - mean.
            apply: Multiplies by the precision. Default: `precision.apply`.

        Returns:
            The gradient, in the shape of the block.
        """
        gradient = (apply or self.precision.apply)(d)
        return gradient if self.linear_term is None else gradient + self.linear_term

    def proximal(self, d: Tensor, step: float) -> Tensor:
        """Proximal step of the penalty: argmin over e of 1/(2 step) ||e - d||^2 + penalty(mean + e).

        Args:
            d: The displacement w - mean before the step.
            step: The step size.

        Returns:
            The displacement after the step.
        """
        return self.precision.proximal(d if self.linear_term is None else d - step * self.linear_term, step)

    def as_diagonals(self) -> list[BlockPosterior]:
        """Split into one block per parameter, each with the diagonal of the precision."""
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
        """Size of all tensors stored for the block, in bytes."""
        own = [self.mean] if self.linear_term is None else [self.mean, self.linear_term]
        return self.precision.nbytes + sum(tensor.untyped_storage().nbytes() for tensor in own)

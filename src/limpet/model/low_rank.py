"""The low-rank update of a weight matrix that a LoRA adapter adds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LowRank:
    """The update scaling * left @ right that an adapter adds to a weight matrix.

    Attributes:
        a: The parameter A of shape (rank, in, ...).
        b: The parameter B of shape (out, rank, ...).
        scaling: Factor of the update.
        transposed: Whether the weight is stored as (in, out), so that (B A)^T is added.
        weight: The weight that the update is added to.
    """

    a: nn.Parameter
    b: nn.Parameter
    scaling: float
    transposed: bool
    weight: nn.Parameter | None = None

    @property
    def left(self) -> Tensor:
        """Left factor of shape (rows of the weight, rank)."""
        return self.a.flatten(1).mT if self.transposed else self.b.flatten(1)

    @property
    def right(self) -> Tensor:
        """Right factor of shape (rank, columns of the weight)."""
        return self.b.flatten(1).mT if self.transposed else self.a.flatten(1)

    def gradients(self, left: Tensor, right: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Convert gradients with respect to the factors to gradients with respect to the parameters A and B.

        Args:
            left: Gradient with respect to `left`, of the same shape.
            right: Gradient with respect to `right`, of the same shape.

        Yields:
            Each parameter with its gradient, in the shape of the parameter.
        """
        of_a, of_b = (left.mT, right.mT) if self.transposed else (right, left)
        yield self.a, of_a.reshape(self.a.shape)
        yield self.b, of_b.reshape(self.b.shape)

    def written(self, left: Tensor, right: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Compute parameter values with which the adapter adds left @ right to the weight.

        If the product has a lower rank than the adapter, the unused ranks keep their A and get a B of zero, so that
        they can still be trained.

        Args:
            left: Left factor of the update, of shape (rows of the weight, at most rank).
            right: Right factor of the update, of shape (at most rank, columns of the weight).

        Yields:
            Each parameter with its new value.
        """
        missing = self.left.shape[1] - left.shape[1]
        left, right = F.pad(left, (0, missing)), F.pad(right, (0, 0, 0, missing))
        (a, of_a), (b, of_b) = self.gradients(left, right / self.scaling)
        if missing:
            of_a = of_a.clone()
            of_a[-missing:] = a.detach()[-missing:].to(of_a)
        yield from ((a, of_a), (b, of_b))

    def added(self, shape: torch.Size) -> Tensor:
        """Return the update in the shape of the weight, differentiable with respect to the parameters."""
        return (self.scaling * (self.left @ self.right)).reshape(shape)

"""Penalty of a block that trains through low-rank adapters (LoRA): W = base + sum of scaling B A.

The displacement in the eigenbasis of the block's precision is

    c = U_H^T (base - mean) U_Q + sum of scaling (U_H^T B) (A U_Q),

where the first term is constant while the base is frozen (and zero if the memory's mean is the base), and the factors
of the second have low rank. With G = L c, the gradients of 1/2 c^T L c are

    in B: scaling U_H (G (A U_Q)^T),    in A: scaling ((U_H^T B)^T G) U_Q^T.

For a weight of shape out x in and rank r this costs a few times r (out^2 + in^2 + out in) multiplications, never
out in (out + in).

For a memory of a single task, L = prior + Q (x) H, and without an offset the cost is lower still. With all adapters
concatenated into one B (including the scaling) and one A,

    penalty = 1/2 tr((B^T H B) (A Q A^T)) + prior / 2 tr((B^T B) (A A^T)),
    in B: H B (A Q A^T) + prior B (A A^T),    in A: (B^T H B) A Q + prior (B^T B) A,

which costs r (out^2 + in^2) multiplications and allocates nothing of the size of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.model import PER_SAMPLE
from limpet.model.low_rank import LowRank
from limpet.posterior.block_posterior import BlockPosterior
from limpet.precision import Kronecker, Precision, Rotation


@dataclass(frozen=True)
class KroneckerSpectrum:
    """The precision prior + Q (x) H, represented by the eigenvalues of its factors.

    Args:
        h: Eigenvalues of H.
        q: Eigenvalues of Q.
        prior: Prior precision.
    """

    h: Tensor
    q: Tensor
    prior: float

    def times(self, factor: float) -> KroneckerSpectrum:
        """Return the spectrum of prior + factor Q (x) H."""
        return replace(self, h=factor * self.h)


class LoRAPenalty:
    """Displacement, penalty and gradients of one block with adapters.

    Args:
        held: The posterior of the block.
        parameters: The base parameters of the block, in its order.
        adapters: The low-rank adapters of these parameters.
    """

    def __init__(self, held: BlockPosterior, parameters: Sequence[nn.Parameter], adapters: Sequence[LowRank]) -> None:
        self.held, self.parameters, self.adapters = held, parameters, adapters
        self._known: tuple[Any, Tensor | None] = (None, None)  # state of the base weights, and base - mean
        linear_term = held.linear_term
        self.linear_term = None if linear_term is None else self.sides().into(linear_term)
        self.product = self._product(held.precision) if linear_term is None else None
        self.fisher_product = self._product(held.precision.fisher())

    def sides(self) -> Rotation:
        """Return U_H and U_Q. Not cached, since the bases may be offloaded between calls."""
        return Rotation() if self.held.block.kind == PER_SAMPLE else self.held.precision.sides()

    @property
    def rotated(self) -> bool:
        """Whether `coordinates` are in the eigenbasis of the precision."""
        return self.held.block.kind != PER_SAMPLE and isinstance(self.held.precision, Kronecker)

    def fits(self, held: BlockPosterior, parameters: Sequence[nn.Parameter], adapters: Sequence[LowRank]) -> bool:
        """Whether this object is still valid for a block.

        Args:
            held: The current posterior of the block.
            parameters: Its current base parameters.
            adapters: Its current adapters.

        Returns:
            True if all of them are the ones this object was created with.
        """
        ours, theirs = (
            [(id(one.a), id(one.b), one.scaling, one.transposed) for one in some] for some in (self.adapters, adapters)
        )
        same = all(a is b for a, b in zip(self.parameters, parameters, strict=True))
        return self.held is held and same and ours == theirs

    def without_base(self) -> LoRAPenalty:
        """Compute the offset of the base from the mean, and let go of the base, which is frozen.

        Returns:
            This object.
        """
        offset = self._offset()
        self.parameters, self._known = (), ([], offset)
        return self

    def coordinates(self) -> Tensor:
        """Return w - mean in the eigenbasis of the block, differentiable with respect to the adapters."""
        start, sides = self._offset(), self.sides()
        for adapter in self.adapters:
            left, right = self._factors(adapter, sides)
            added = adapter.scaling * (left @ right)
            added = added.reshape(self.held.block.shape)
            start = added if start is None else start + added
        return torch.zeros_like(self.held.mean) if start is None else start

    def _product(self, precision: Precision) -> KroneckerSpectrum | None:
        """The precision as prior + Q (x) H; None if it does not have this form or the block is per-sample."""
        found = precision.separable() if isinstance(precision, Kronecker) else None
        if found is None or self.held.block.kind == PER_SAMPLE:
            return None
        h, q = (values.to(self.held.mean) for values in found)
        return KroneckerSpectrum(h, q, precision.prior)

    def value(self) -> Tensor:
        """Return the penalty of the block, differentiable with respect to the adapters."""
        if self.product is not None and self.starts_at_the_mean:
            return self._closed_value(self.product)
        c = self.coordinates()
        value = (c * self.held.precision.apply_in_sides(c)).sum() / 2
        return value if self.linear_term is None else value + (self.linear_term * c).sum()

    def rise(self) -> float:
        """Return the predicted increase of the loss, 1/2 d^T F d."""
        with torch.no_grad():
            if self.fisher_product is not None and self.starts_at_the_mean:
                return float(self._closed_value(self.fisher_product))
            c = self.coordinates()
            return float((c * self.held.precision.fisher().apply_in_sides(c)).sum()) / 2

    @property
    def starts_at_the_mean(self) -> bool:
        """Whether the base equals the mean, so that the whole displacement is due to the adapters."""
        return self._offset() is None

    def penalty_gradients(self, product: KroneckerSpectrum) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each adapter parameter with the gradient of the penalty, for a precision of the form prior + Q (x) H.

        Requires `starts_at_the_mean`.

        Args:
            product: The eigenvalues of Q and H, and the prior.

        Yields:
            Each parameter with its gradient.
        """
        of_left, of_right = self._closed_gradients(product)
        start = 0
        for adapter in self.adapters:
            stop = start + adapter.left.shape[1]
            yield from adapter.gradients(adapter.scaling * of_left[:, start:stop], of_right[start:stop])
            start = stop

    def _factors_of(self, product: KroneckerSpectrum) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """B with its scaling and A of all adapters, and H B and A Q."""
        like, sides = self.held.mean, self.sides()
        left = [one.scaling * one.left.to(like.device, like.dtype) for one in self.adapters]
        right = [one.right.to(like.device, like.dtype) for one in self.adapters]
        B, A = (left[0], right[0]) if len(left) == 1 else (torch.cat(left, 1), torch.cat(right))
        return B, A, sides.rows_weighted(product.h, B), sides.columns_weighted(product.q, A)

    def _closed_value(self, product: KroneckerSpectrum) -> Tensor:
        """The penalty in closed form, differentiable."""
        B, A, HB, AQ = self._factors_of(product)
        fisher = ((B.mT @ HB) * (AQ @ A.mT)).sum()
        return (fisher + product.prior * ((B.mT @ B) * (A @ A.mT)).sum()) / 2

    def _closed_gradients(self, product: KroneckerSpectrum) -> tuple[Tensor, Tensor]:
        """The gradients of `_closed_value` with respect to B and A."""
        B, A, HB, AQ = self._factors_of(product)
        of_B, of_A = HB @ (AQ @ A.mT), (B.mT @ HB) @ AQ
        if product.prior:
            of_B = torch.addmm(of_B, B, A @ A.mT, alpha=product.prior)
            of_A = torch.addmm(of_A, B.mT @ B, A, alpha=product.prior)
        return of_B, of_A

    def pull(self, c: Tensor) -> Tensor:
        """Return the gradient of the penalty with respect to `coordinates`."""
        pulled = self.held.precision.apply_in_sides(c)
        return pulled if self.linear_term is None else pulled + self.linear_term

    def gradients(self, pulled: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Map a gradient with respect to `coordinates` to a gradient for each adapter parameter."""
        sides = self.sides()
        for adapter in self.adapters:
            left, right = self._factors(adapter, sides)
            matrix = pulled.reshape(left.shape[0], right.shape[1])
            of_left = sides.rows_back(adapter.scaling * (matrix @ right.mT))
            of_right = sides.columns_back(adapter.scaling * (left.mT @ matrix), adapter.right.shape[1])
            yield from adapter.gradients(of_left, of_right)

    def back(self, c: Tensor) -> Tensor:
        """Rotate from the eigenbasis back to the block."""
        return self.sides().back(c)

    def _factors(self, adapter: LowRank, sides: Rotation) -> tuple[Tensor, Tensor]:
        """U_H^T left and right U_Q. Adapters do not affect the bias column of the block, if there is one."""
        like = self.held.mean
        left, right = (factor.to(like.device, like.dtype) for factor in (adapter.left, adapter.right))
        bias = 0 if self.held.block.kind == PER_SAMPLE else self.held.block.shape[-1] - right.shape[1]
        if sides.columns is None and bias:
            return sides.rows_into(left), F.pad(right, (0, bias))
        return sides.rows_into(left), sides.columns_into(right)

    @torch.no_grad()
    def _offset(self) -> Tensor | None:
        """Offset base - mean in the eigenbasis of the block; None if it is zero.

        Recomputed when a base weight has changed, and on every call if one is trainable: fused optimizers do not
        increment the version counter of the tensors they update.
        """
        state = [(parameter.data_ptr(), parameter._version) for parameter in self.parameters]
        if self._known[0] != state or any(parameter.requires_grad for parameter in self.parameters):
            weights = dict(zip(self.held.block.parameters, self.parameters, strict=True))
            offset = self.held.displacement(weights)
            self._known = state, self.sides().into(offset) if bool(offset.any()) else None
        return self._known[1]

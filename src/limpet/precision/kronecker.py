"""A sum of Kronecker products in constant size: two orthonormal bases and one matrix of eigenvalues.

A sum of Kronecker products is not a Kronecker product. Kept here is

    L = prior * I + (U_Q (x) U_H) diag(D) (U_Q (x) U_H)^T

and, to choose the bases by, the two partial traces of the sum, which add up exactly:
P_Q = sum of strength tr(H) Q and P_H = sum of strength tr(Q) H, both as eigenvalues in their bases.
To take Q (x) H in, the new bases V are the eigenvectors of the new partial traces, the old D is carried over
with the squared entries of the change of basis, and the new term's diagonal in that basis is added:

    D <- (V_H^T U_H)^2 D (U_Q^T V_Q)^2 + strength diag(V_H^T H V_H) diag(V_Q^T Q V_Q)^T

It keeps the trace, stays positive semi-definite, and is exact for one task and for T equal tasks. Of all
precisions that are diagonal in the new bases it is the nearest to the sum in the Frobenius norm. A basis with
free eigenvalues is the form of George et al. (2018), "Fast approximate natural gradient descent in a
Kronecker-factored eigenbasis".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from limpet.precision.base import Facts, Precision, check_shape, fact, inverse_root, noise, optional_fact
from limpet.precision.linalg import symmetric_eigen, widened
from limpet.precision.rest import AS_USED, Rest
from limpet.precision.spectrum import Spectrum
from limpet.precision.terms import KroneckerTerm, Term
from limpet.precision.weighted import WeightedSum

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Basis:
    """One side of a block: orthonormal columns U (the identity where None) and the partial trace in them."""

    vectors: Tensor | None
    trace: Tensor
    diagonal: bool  # this side stays the identity: its factor is, or is kept, diagonal
    rest: Rest = AS_USED  # how the columns lie while nobody uses them

    @property
    def columns(self) -> Tensor | None:
        """U, ready for use."""
        return None if self.vectors is None else self.vectors.to(self.trace.device, self.trace.dtype)

    def take(self, factor: Tensor, weight: Tensor) -> tuple[Basis, Tensor | None, Tensor]:
        """Add weight * factor (float64) to the partial trace.

        Returns the new basis, the squared change of basis from old to new (None where it is the identity),
        and the diagonal of the factor in the new basis.
        """
        old = widened(self.trace)
        if self.diagonal:
            return self._keep(None, old + weight * factor), None, factor
        values, new = symmetric_eigen(self._summed(old) + weight.unsqueeze(-1) * factor)
        overlap = new.mT if self.vectors is None else new.mT @ widened(self.vectors)
        carry = overlap.square()
        # Stored bases are rounded, so columns sum to 1 only almost; made exact, the trace is kept exactly.
        carry /= carry.sum(-2, keepdim=True)
        return self._keep(new, values), carry, (factor @ new).mul_(new).sum(-2)

    def _summed(self, trace: Tensor) -> Tensor:
        """The partial trace as a matrix."""
        if self.vectors is None:
            return torch.diag_embed(trace)
        vectors = widened(self.vectors)
        return (vectors * trace.unsqueeze(-2)) @ vectors.mT

    def _keep(self, vectors: Tensor | None, trace: Tensor) -> Basis:
        like = self.trace
        # contiguous, so that a memory read back from its file multiplies bit for bit the same
        kept = None if vectors is None else self.rest.lay(vectors.to(like.device, like.dtype).contiguous())
        return replace(self, vectors=kept, trace=trace.to(like.device, like.dtype))


@dataclass(frozen=True)
class Kronecker(Precision):
    """L = prior * I + (U_Q (x) U_H) diag(D) (U_Q (x) U_H)^T, with D in the shape of the block."""

    structure = "kronecker"
    shape: torch.Size
    prior: float
    inputs: Basis
    outputs: Basis
    values: WeightedSum

    @classmethod
    def start(
        cls,
        shape: torch.Size,
        prior: float,
        like: Tensor,
        *,
        inputs_diagonal: bool = False,
        outputs_diagonal: bool = False,
        rest: Rest = AS_USED,
    ) -> Kronecker:
        """The prior alone."""

        def side(shape: torch.Size, diagonal: bool) -> Basis:
            return Basis(None, torch.zeros(shape, dtype=like.dtype, device=like.device), diagonal, rest)

        *groups, out, in_ = shape
        return cls(
            shape,
            prior,
            side(torch.Size([*groups, in_]), inputs_diagonal),
            side(torch.Size([*groups, out]), outputs_diagonal),
            WeightedSum.zero(shape, like),
        )

    @property
    def _full(self) -> Tensor:
        return self.values.total + self.prior

    def rotate(self, v: Tensor) -> Tensor:
        """U_H^T v U_Q: the block in the eigenbasis."""
        rows, columns = self.sides()
        v = v if rows is None else rows.mT @ v
        return v if columns is None else v @ columns

    def rotate_back(self, v: Tensor) -> Tensor:
        """U_H v U_Q^T, the inverse of `rotate`."""
        rows, columns = self.sides()
        v = v if rows is None else rows @ v
        return v if columns is None else v @ columns.mT

    def add(self, term: Term, strength: float) -> Self:
        if not isinstance(term, KroneckerTerm):
            raise TypeError(f"a kronecker precision takes a KroneckerTerm, not {type(term).__name__}")
        q = _as_side(term.inputs, term.inputs_diagonal, self.inputs.diagonal)
        h = _as_side(term.outputs, term.outputs_diagonal, self.outputs.diagonal)
        q_trace, h_trace = _trace(q, self.inputs.diagonal), _trace(h, self.outputs.diagonal)
        weight = max(strength, 1e-9)  # a task of strength 0 chooses the bases where no other does
        inputs, carry_in, q_values = self.inputs.take(q, weight * h_trace.unsqueeze(-1))
        outputs, carry_out, h_values = self.outputs.take(h, weight * q_trace.unsqueeze(-1))

        def carry(old: Tensor) -> Tensor:
            old = old if carry_out is None else carry_out @ old
            return old if carry_in is None else old @ carry_in.mT

        fresh = (h_values.unsqueeze(-1) * q_values.unsqueeze(-2)).clamp_min(0)
        values = self.values.add(fresh, strength, carry)
        return replace(self, inputs=inputs, outputs=outputs, values=values)

    def scale(self, factor: float) -> Self:
        def scaled(basis: Basis) -> Basis:
            return replace(basis, trace=factor * basis.trace)

        return replace(
            self,
            prior=factor * self.prior,
            inputs=scaled(self.inputs),
            outputs=scaled(self.outputs),
            values=self.values.scale(factor),
        )

    def fisher(self) -> Self:
        return replace(self, prior=0.0, values=WeightedSum(self.values.plain, None, 1.0))

    def apply(self, v: Tensor) -> Tensor:
        factor, values = self.values.factored
        scaled = values * self.rotate(v)
        rows, columns = self.sides()
        if columns is None or v.dim() > 2:
            return torch.add(self.prior * v, self.rotate_back(scaled), alpha=factor)
        # the same in one product: prior v + factor (U_H scaled) U_Q^T
        left = scaled if rows is None else rows @ scaled
        return torch.addmm(v, left, columns.mT, beta=self.prior, alpha=factor)

    def sides(self) -> tuple[Tensor | None, Tensor | None]:
        return self.outputs.columns, self.inputs.columns

    def apply_in_sides(self, v: Tensor) -> Tensor:
        return self._full * v

    def separable(self) -> tuple[Tensor, Tensor] | None:
        """(h, q) in float64 where D = h q^T: after one task (or equal ones), when L - prior is Q (x) H. Else None."""
        total = self.values.total
        rows, columns = widened(total).sum(-1), widened(total).sum(-2)
        if len(self.shape) > 2 or not rows.any():
            return None
        columns = columns / columns.sum()
        if (rows.unsqueeze(-1) * columns - widened(total)).norm() > 1e-6 * widened(total).norm():
            return None
        return rows, columns

    def applier(self) -> Callable[[Tensor], Tensor]:
        """After one task (or equal ones) L is prior + Q (x) H itself: H v Q takes half the work of the eigenbasis."""
        product = self.separable()
        if product is None or self.inputs.vectors is None or self.outputs.vectors is None:
            return self.apply
        (h, q), U_q, U_h = product, widened(self.inputs.vectors), widened(self.outputs.vectors)
        like = self.values.plain
        Q = ((U_q * q) @ U_q.mT).to(like.device, like.dtype)
        H = ((U_h * h) @ U_h.mT).to(like.device, like.dtype)
        return lambda v: torch.addmm(v, H @ v, Q, beta=self.prior)

    def quadratic(self, v: Tensor) -> Tensor:
        return (self._full * self.rotate(v).square()).sum()

    def proximal(self, v: Tensor, step: float) -> Tensor:
        factor, values = self.values.factored
        one = values.new_tensor(1 + step * self.prior)
        resistance = torch.add(one, values, alpha=step * factor)
        if self.rounded:  # only what the penalty takes away goes through the bases, so the rest loses nothing there
            return v - self.rotate_back(self.rotate(v) * (1 - 1 / resistance))
        return self.rotate_back(self.rotate(v) / resistance)

    @property
    def rounded(self) -> bool:
        """Whether the bases are not quite orthonormal."""
        return any(basis.rest.dtype and basis.vectors is not None for basis in (self.inputs, self.outputs))

    def spectrum(self) -> Spectrum:
        return Spectrum(self.values.plain, self.values.total, self.prior, self.rotate, self.rotate_back)

    def solve(self, v: Tensor) -> Tensor:
        return self.rotate_back(self.rotate(v) * inverse_root(self._full).square())

    def trace(self) -> Tensor:
        return widened(self._full).sum()

    def log_determinant(self) -> Tensor:
        return widened(self._full).log().sum()

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        drawn = noise(self.shape, self.values.plain, generator)
        return self.rotate_back(drawn * inverse_root(self._full))

    def dense(self) -> Tensor:
        n = self.shape.numel()
        identity = torch.eye(n, dtype=self.values.plain.dtype, device=self.values.plain.device)
        return torch.stack([self.apply(row.reshape(self.shape)).flatten() for row in identity])

    def diagonals(self) -> tuple[Tensor, Tensor]:
        def in_place(values: Tensor) -> Tensor:
            rows, columns = self.sides()
            values = values if rows is None else rows.square() @ values
            return values if columns is None else values @ columns.square().mT

        return in_place(self.values.plain), in_place(self.values.total)

    def tensors(self) -> dict[str, Tensor]:
        kept = self.values.tensors("eigenvalues")
        for name, basis in (("inputs", self.inputs), ("outputs", self.outputs)):
            kept[f"{name}.trace"] = basis.trace
            if basis.vectors is not None:
                kept[f"{name}.vectors"] = basis.vectors
        return kept

    def facts(self) -> Facts:
        return {
            "prior": self.prior,
            "strength": self.values.strength,
            "inputs_diagonal": self.inputs.diagonal,
            "outputs_diagonal": self.outputs.diagonal,
            **self.inputs.rest.facts(),
        }

    @classmethod
    def restore(cls, shape: torch.Size, tensors: Mapping[str, Tensor], facts: Facts) -> Self:
        *groups, out, in_ = shape
        rest = Rest.of(facts)

        def side(name: str, size: int) -> Basis:
            trace = check_shape(f"{name}.trace", tensors[f"{name}.trace"], (*groups, size))
            vectors = tensors.get(f"{name}.vectors")
            if vectors is not None:
                vectors = rest.lay(check_shape(f"{name}.vectors", vectors, (*groups, size, size)))
            return Basis(vectors, trace, bool(facts[f"{name}_diagonal"]), rest)

        for name in ("eigenvalues", "eigenvalues.weighted"):
            if name in tensors:
                check_shape(name, tensors[name], shape)
        values = WeightedSum.restore("eigenvalues", tensors, optional_fact(facts, "strength"))
        return cls(shape, fact(facts, "prior"), side("inputs", in_), side("outputs", out), values)


def _as_side(factor: Tensor, is_diagonal: bool, wants_diagonal: bool) -> Tensor:
    """The factor in float64, as a diagonal or as a matrix, whichever that side of the block keeps."""
    factor = widened(factor)
    if is_diagonal == wants_diagonal:
        return factor
    return factor.diagonal(dim1=-2, dim2=-1) if wants_diagonal else torch.diag_embed(factor)


def _trace(factor: Tensor, diagonal: bool) -> Tensor:
    return factor.sum(-1) if diagonal else factor.diagonal(dim1=-2, dim2=-1).sum(-1)

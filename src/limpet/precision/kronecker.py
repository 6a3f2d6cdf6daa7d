"""A sum of Kronecker products in constant size: two orthonormal bases and one matrix of eigenvalues.

A sum of Kronecker products is not a Kronecker product. This module stores

    L = prior * I + (U_Q (x) U_H) diag(D) (U_Q (x) U_H)^T

and, to choose the bases, the two partial traces of the sum, which are additive over tasks:
P_Q = sum of strength tr(H) Q and P_H = sum of strength tr(Q) H, both stored as eigenvalues in their bases.
To add Q (x) H, the eigenvectors of the updated partial traces become the new bases V, the old D is carried over with
the squared entries of the change of basis, and the diagonal of the new term in the new bases is added:

    D <- (V_H^T U_H)^2 D (U_Q^T V_Q)^2 + strength diag(V_H^T H V_H) diag(V_Q^T Q V_Q)^T

The update preserves the trace, stays positive semi-definite, and is exact for one task and for T equal tasks. Of all
precisions that are diagonal in the new bases, it is the nearest to the sum in the Frobenius norm. A Kronecker-factored
eigenbasis with free eigenvalues is EKFAC (George et al. 2018, "Fast approximate natural gradient descent in a
Kronecker-factored eigenbasis"). A factor that is too large to be stored in full is block-diagonal (`block_diagonal`),
and all of the above then holds for the block-diagonal factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from limpet.precision.base import (
    Metadata,
    Precision,
    check_shape,
    inverse_root,
    metadata_number,
    noise,
    optional_metadata_number,
)
from limpet.precision.basis import Basis, as_side, summed
from limpet.precision.block_diagonal import Matrix, Orthogonal, diagonal, joined, pieces
from limpet.precision.linalg import widened
from limpet.precision.reflections import Reflections
from limpet.precision.rotation import Rotation
from limpet.precision.spectrum import Spectrum
from limpet.precision.storage import AS_USED, Storage
from limpet.precision.terms import KroneckerTerm, Term
from limpet.precision.truncated_basis import TruncatedBasis, is_truncated, truncated
from limpet.precision.validity import check_non_negative
from limpet.precision.weighted import WeightedSum

if TYPE_CHECKING:
    from typing_extensions import Self


LEAST_WEIGHT = 1e-9
"""Smallest weight of a task in the partial traces: one of strength 0 determines the bases if no other does."""

SEPARABLE = 1e-6
"""Relative distance up to which a matrix of eigenvalues is treated as an outer product."""


@dataclass(frozen=True)
class Kronecker(Precision):
    """Precision L = prior * I + (U_Q (x) U_H) diag(D) (U_Q (x) U_H)^T with D in the shape of the block.

    Args:
        shape: Shape of the block.
        prior: Prior precision.
        inputs: Eigenbasis U_Q of the input factor.
        outputs: Eigenbasis U_H of the output factor.
        values: Eigenvalues D, in the shape of the block.
    """

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
        inputs_sizes: tuple[int, ...] | None = None,
        outputs_sizes: tuple[int, ...] | None = None,
        rest: Storage = AS_USED,
        rank: int | None = None,
        energy: float | None = None,
    ) -> Kronecker:
        """Create the precision of a block before the first task, which is the prior alone.

        Args:
            shape: Shape of the block.
            prior: Prior precision.
            like: Tensor whose dtype and device the precision gets.
            inputs_diagonal: Whether to keep only the diagonal of the input factor.
            outputs_diagonal: Whether to keep only the diagonal of the output factor.
            inputs_sizes: Sizes of the diagonal blocks of the input factor. Defaults to one block.
            outputs_sizes: Sizes of the diagonal blocks of the output factor. Defaults to one block.
            rest: How the eigenvectors are stored between uses.
            rank: Number of eigenvectors to keep of each factor that has one block. Defaults to all of them.
            energy: Instead of `rank`: the part of the trace of such a factor that its eigenvectors should hold.

        Returns:
            The precision.
        """
        *groups, out, in_ = shape

        def side(size: int, diagonal: bool, sizes: tuple[int, ...] | None) -> Basis:
            sizes = sizes or (size,)
            if rank is not None and is_truncated(sizes, diagonal, rank):
                return TruncatedBasis.start(groups, size, rank, like, rest)
            if energy is not None and is_truncated(sizes, diagonal, 1):
                return TruncatedBasis.start(groups, size, 1, like, rest, energy)
            trace = torch.zeros((*groups, size), dtype=like.dtype, device=like.device)
            return Basis(None, trace, diagonal, sizes, rest)

        inputs, outputs = side(in_, inputs_diagonal, inputs_sizes), side(out, outputs_diagonal, outputs_sizes)
        stored = torch.Size((*groups, outputs.length, inputs.length))
        return cls(shape, prior, inputs, outputs, WeightedSum.zero(stored, like))

    @property
    def _full(self) -> Tensor:
        """The eigenvalues of L, including the prior, in the shape of the block."""
        return self._spread(self.values.total) + self.prior

    def _spread(self, values: Tensor) -> Tensor:
        """Return eigenvalues in the shape of the block, from the stored ones."""
        return self.outputs.spread(self.inputs.spread(values).mT).mT

    @property
    def plain(self) -> Tensor:
        """The eigenvalues of the sum of F_t, in the shape of the block."""
        return self._spread(self.values.plain)

    @property
    def _bases(self) -> dict[str, Basis]:
        """The two bases by name."""
        return {"inputs": self.inputs, "outputs": self.outputs}

    def rotate(self, v: Tensor) -> Tensor:
        """Return U_H^T v U_Q, the block in the eigenbasis."""
        return self.sides().into(v)

    def rotate_back(self, v: Tensor) -> Tensor:
        """Return U_H v U_Q^T, the inverse of `rotate`."""
        return self.sides().back(v)

    def add(self, term: Term, strength: float) -> Self:
        """Return L + strength * F for a `KroneckerTerm`, projected onto the new eigenbasis."""
        if not isinstance(term, KroneckerTerm):
            raise TypeError(f"a kronecker precision takes a KroneckerTerm, not {type(term).__name__}")
        q = as_side(term.inputs, term.inputs_diagonal, self.inputs)
        h = as_side(term.outputs, term.outputs_diagonal, self.outputs)
        q_trace, h_trace = (
            widened(diagonal(factor, basis.diagonal)).sum(-1) for factor, basis in ((q, self.inputs), (h, self.outputs))
        )
        weight = max(strength, LEAST_WEIGHT)
        inputs, carry_in, q_values = self.inputs.take(q, weight * h_trace.unsqueeze(-1))
        outputs, carry_out, h_values = self.outputs.take(h, weight * q_trace.unsqueeze(-1))

        fresh = (h_values.unsqueeze(-1) * q_values.unsqueeze(-2)).clamp_min(0)
        values = self.values.add(fresh, strength, _both_sides(carry_out, carry_in))
        return replace(self, inputs=inputs, outputs=outputs, values=values)._as_product()

    def scale(self, factor: float) -> Self:
        """Return factor * L, including the prior."""
        return replace(
            self,
            prior=factor * self.prior,
            inputs=self.inputs.scaled(factor),
            outputs=self.outputs.scaled(factor),
            values=self.values.scale(factor),
        )

    def truncate(self, inputs: int, outputs: int, rest: Storage | None = None) -> Self:
        """Return L with each factor truncated to its largest eigenvalues and the mean of the others.

        The trace is preserved, and of all precisions of this form with these eigenvectors it is the nearest to L in the
        Frobenius norm.

        Args:
            inputs: Number of eigenvectors to keep of the input factor.
            outputs: Number of eigenvectors to keep of the output factor.
            rest: How eigenvectors are stored between uses. Defaults to how they are now.

        Returns:
            A new precision. Factors that are diagonal, split into blocks or no larger keep their eigenvectors.
        """
        rest = self.inputs.rest if rest is None else rest
        columns, carry_in = truncated(self.inputs, inputs, rest)
        rows, carry_out = truncated(self.outputs, outputs, rest)
        values = self.values.carried(_both_sides(carry_out, carry_in))
        return replace(self, inputs=columns, outputs=rows, values=values)._as_product()

    def with_inputs_of(self, other: Kronecker) -> Self:
        """Return L with the input eigenvectors of another precision, if both have as many and they are truncated.

        Args:
            other: A precision whose input factor is a multiple of this one's (`limpet.precision.same_factor`).
        """
        own, shared = self.inputs, other.inputs
        if not (isinstance(own, TruncatedBasis) and isinstance(shared, TruncatedBasis) and own.rank == shared.rank):
            return self
        return replace(self, inputs=replace(own, vectors=shared.vectors))

    def _as_product(self) -> Self:
        """Return a truncated precision of one task, or of equal ones, with the eigenvalues that its traces give."""
        found = self._product()
        if found is None:
            return self
        plain = widened(self.values.plain)
        gap, size = ((widened(found) - plain).norm(dim=(-2, -1)), plain.norm(dim=(-2, -1)))
        if not bool((gap <= SEPARABLE * size).all()):
            return self
        return replace(self, values=replace(self.values, plain=found))

    def _product(self) -> Tensor | None:
        """Return D = P_H P_Q^T / (strength tr(P_Q)) from the eigenvalues of the partial traces.

        None if no basis is truncated, or the strengths differ. Then D is stored.
        """
        small = any(isinstance(basis, TruncatedBasis) for basis in self._bases.values())
        if not small or self.values.mixed is not None or self.values.strength is None:
            return None
        h, q = widened(self.outputs.trace), widened(self.inputs.trace)
        total = self.inputs.spread(q).sum(-1) * max(self.values.strength, LEAST_WEIGHT)
        found = h.unsqueeze(-1) * (q / total.clamp_min(torch.finfo(q.dtype).tiny).unsqueeze(-1)).unsqueeze(-2)
        return found.to(self.values.plain.device, self.values.plain.dtype)

    @property
    def _is_product(self) -> bool:
        """Whether the eigenvalues need not be stored, because the traces give them bit for bit."""
        found = self._product()
        return found is not None and torch.equal(found, self.values.plain)

    def fisher(self) -> Self:
        """Return the sum of the F_t alone: no prior, and every strength 1."""
        return replace(self, prior=0.0, values=self.values.unweighted())

    def apply(self, v: Tensor) -> Tensor:
        """Return L v."""
        factor, values = self.values.factored
        sides = self.sides()
        values = self._spread(values)
        if not isinstance(sides.columns, Tensor) or v.dim() > 2:
            return torch.add(self.prior * v, sides.weighted(values, v), alpha=factor)
        scaled = values * sides.into(v)
        # The same in a single matrix product: prior v + factor (U_H scaled) U_Q^T.
        return torch.addmm(v, sides.rows_back(scaled), sides.columns.mT, beta=self.prior, alpha=factor)

    def sides(self) -> Rotation:
        """Return the eigenbases U_H and U_Q."""
        return Rotation(self.outputs.columns, self.inputs.columns)

    def apply_in_sides(self, v: Tensor) -> Tensor:
        """Return L v with v and the result in the eigenbasis, where L is diagonal."""
        return self._full * v

    def separable(self) -> tuple[Tensor, Tensor] | None:
        """Return (h, q) in float64 with D = h q^T, or None if D is not an outer product.

        D is an outer product after one task, or after equal tasks, when L - prior * I is Q (x) H. Always None for
        blocks with groups.
        """
        total = self._spread(self.values.total)
        rows, columns = widened(total).sum(-1), widened(total).sum(-2)
        if len(self.shape) > 2 or not rows.any():
            return None
        columns = columns / columns.sum()
        if (rows.unsqueeze(-1) * columns - widened(total)).norm() > SEPARABLE * widened(total).norm():
            return None
        return rows, columns

    def applier(self) -> Callable[[Tensor], Tensor]:
        """Return a version of `apply` for repeated use.

        After one task, or after equal tasks, L is prior * I + Q (x) H, and H v Q takes half the work of the eigenbasis.
        """
        small = any(isinstance(basis, TruncatedBasis) for basis in self._bases.values())
        # offloaded bases stay off the device, and truncated ones small
        product = None if small or self.inputs.rest.offload else self.separable()
        if product is None or self.inputs.vectors is None or self.outputs.vectors is None:
            return self.apply
        like = self.values.plain

        def multiplied_out(vectors: Orthogonal, values: Tensor) -> Matrix:
            parts = pieces(vectors)
            each = zip(parts, values.split_with_sizes([part.shape[-1] for part in parts]), strict=True)
            made = [summed(part.to(values.device), some) for part, some in each]
            return joined([matrix.to(like.device, like.dtype) for matrix in made])

        H = multiplied_out(self.outputs.vectors, product[0])
        Q = multiplied_out(self.inputs.vectors, product[1])
        if not isinstance(Q, Tensor):
            return lambda v: self.prior * v + (H @ v) @ Q
        return lambda v: torch.addmm(v, H @ v, Q, beta=self.prior)

    def quadratic(self, v: Tensor) -> Tensor:
        """Return v^T L v, differentiable in v."""
        return (self._full * self.rotate(v).square()).sum()

    def proximal(self, v: Tensor, step: float) -> Tensor:
        """Return the proximal step (I + step L)^-1 v, elementwise in the eigenbasis."""
        factor, values = self.values.factored
        values = self._spread(values)
        one = values.new_full((), 1 + step * self.prior)  # filled on the device: new_tensor copies from the host
        proximal_denominator = torch.add(one, values, alpha=step * factor)
        sides = self.sides()
        if self.rounded:  # rotate only the change, so that what the penalty leaves alone is not rounded
            return v - sides.back(sides.into(v) * (1 - 1 / proximal_denominator))
        if self.inputs.truncated:
            return sides.weighted(proximal_denominator.reciprocal(), v)
        return sides.back(sides.into(v) / proximal_denominator)

    @property
    def rounded(self) -> bool:
        """Whether the bases are stored in reduced precision, and so are only approximately orthonormal."""
        return any(basis.rounded for basis in self._bases.values())

    def spectrum(self) -> Spectrum:
        """Return the eigenvalues of L and of its Fisher in the Kronecker-factored eigenbasis."""
        spread, counts = None, None
        if self.values.plain.shape != self.shape:
            spread, counts = self._spread, self.outputs.counts.unsqueeze(-1) * self.inputs.counts
        values = self.values
        return Spectrum(values.plain, values.total, self.prior, self.rotate, self.rotate_back, spread, counts)

    def solve(self, v: Tensor) -> Tensor:
        """Return L^-1 v, elementwise in the eigenbasis."""
        sides = self.sides()
        return sides.back(sides.into(v) * inverse_root(self._full).square())

    def trace(self) -> Tensor:
        """Return the trace of L, in float64."""
        return widened(self._full).sum()

    def eigenvalue_bound(self) -> float:
        """Return the largest eigenvalue of L."""
        return self.values.largest() + self.prior

    def log_determinant(self) -> Tensor:
        """Return log det L, in float64."""
        return widened(self._full).log().sum()

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw one sample from N(0, L^-1)."""
        drawn = noise(self.shape, self.values.plain, generator)
        return self.rotate_back(drawn * inverse_root(self._full))

    def dense(self) -> Tensor:
        """Return L as a matrix over W flattened row by row."""
        n = self.shape.numel()
        identity = torch.eye(n, dtype=self.values.plain.dtype, device=self.values.plain.device)
        return torch.stack([self.apply(row.reshape(self.shape)).flatten() for row in identity])

    def diagonals(self) -> tuple[Tensor, Tensor]:
        """Return the diagonals of the sum of F_t and of the sum of strength_t F_t, in the shape of the block."""

        def in_place(values: Tensor) -> Tensor:
            sides = self.sides()
            values = values if sides.rows is None else sides.rows.square() @ values
            return values if sides.columns is None else values @ sides.columns.square().mT

        return in_place(self.plain), in_place(self._spread(self.values.total))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""
        kept = {} if self._is_product else self.values.tensors("eigenvalues")
        for name, basis in self._bases.items():
            kept |= basis.tensors(name)
        return kept

    def metadata(self) -> Metadata:
        """Return the numbers to save alongside the tensors."""
        return {
            "prior": self.prior,
            "strength": self.values.strength,
            **self.inputs.metadata("inputs"),
            **self.outputs.metadata("outputs"),
            **self.inputs.rest.metadata(),
            **({"product": True} if self._is_product else {}),
        }

    def check(self) -> None:
        """Check that the bases are orthonormal, and that no eigenvalue is negative."""
        for name, tensor in self.values.tensors("eigenvalues").items():
            check_non_negative(name, tensor)
        for name, basis in self._bases.items():
            basis.check(name)

    @property
    def nbytes(self) -> int:
        """Number of bytes that the tensors take, including what completes truncated bases."""
        found = [basis.vectors for basis in self._bases.values()]
        derived = sum(each.triangle.nbytes for each in found if isinstance(each, Reflections))
        return super().nbytes + derived + (self.values.plain.nbytes if self._is_product else 0)

    @classmethod
    def restore(cls, shape: torch.Size, tensors: Mapping[str, Tensor], metadata: Metadata) -> Self:
        """Rebuild a precision from its `tensors` and `metadata`."""
        *groups, out, in_ = shape

        def side(name: str, size: int) -> Basis:
            kind = TruncatedBasis if f"{name}_rank" in metadata else Basis
            return kind.restore(name, (*groups, size), tensors, metadata)

        inputs, outputs = side("inputs", in_), side("outputs", out)
        stored, strength = (*groups, outputs.length, inputs.length), optional_metadata_number(metadata, "strength")
        prior = metadata_number(metadata, "prior")
        if metadata.get("product"):
            zero = replace(WeightedSum.zero(torch.Size(stored), inputs.trace), strength=strength)
            found = cls(shape, prior, inputs, outputs, zero)
            product = found._product()
            if product is None or "eigenvalues" in tensors:
                raise ValueError("the eigenvalues of the precision are missing, or given twice")
            return replace(found, values=replace(zero, plain=product))
        for name in ("eigenvalues", "eigenvalues.weighted"):
            if name in tensors:
                check_shape(name, tensors[name], stored)
        return cls(shape, prior, inputs, outputs, WeightedSum.restore("eigenvalues", tensors, strength))


def _both_sides(left: Matrix | None, right: Matrix | None) -> Callable[[Tensor], Tensor]:
    """Return the map from values to left values right^T; None is the identity."""

    def carry(values: Tensor) -> Tensor:
        values = values if left is None else left @ values  # the old ones are freed here
        return values if right is None else values @ right.mT

    return carry

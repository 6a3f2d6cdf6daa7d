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

from collections.abc import Callable, Mapping, Sequence
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
from limpet.precision.block_diagonal import Matrix, diagonal, find, joined, named, pieces, recut
from limpet.precision.linalg import symmetric_eigen, widened
from limpet.precision.rotation import Rotation
from limpet.precision.spectrum import Spectrum
from limpet.precision.storage import AS_USED, Storage
from limpet.precision.terms import KroneckerTerm, Term
from limpet.precision.validity import check_non_negative, check_orthonormal
from limpet.precision.weighted import WeightedSum

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Basis:
    """Eigenbasis of one factor: orthonormal columns U, and the eigenvalues of the partial trace in it.

    Args:
        vectors: U, as stored. None is the identity.
        trace: Eigenvalues of the partial trace (..., n).
        diagonal: Whether the factor is diagonal, or approximated by its diagonal, so that U stays the identity.
        sizes: Sizes of the diagonal blocks that the factor is split into.
        rest: How U is stored between uses.
    """

    vectors: Matrix | None
    trace: Tensor
    diagonal: bool
    sizes: tuple[int, ...]
    rest: Storage = AS_USED

    @property
    def columns(self) -> Matrix | None:
        """U in the dtype and on the device of use. None is the identity."""
        return None if self.vectors is None else self.vectors.to(self.trace.device, self.trace.dtype)

    def check(self, name: str) -> None:
        """Raise ValueError unless the basis is orthonormal and the eigenvalues are not negative.

        Args:
            name: Name of the basis, for the error message.
        """
        check_non_negative(f"{name}.trace", self.trace)
        if self.diagonal and self.vectors is not None:
            raise ValueError(f"{name} is diagonal, but has eigenvectors")
        for part in () if self.columns is None else pieces(self.columns):
            check_orthonormal(f"{name}.vectors", part, self.rest.epsilon)

    def take(self, factor: Matrix, weight: Tensor) -> tuple[Basis, Matrix | None, Tensor]:
        """Add weight * factor to the partial trace.

        Args:
            factor: Kronecker factor of the new term, in float64.
            weight: Multiplier, one number for each group.

        Returns:
            The new basis, the squared change of basis from old to new (None if it is the identity), and the diagonal of
            the factor in the new basis.
        """
        if not isinstance(factor, Tensor):
            return self._take_by_piece(factor.pieces, weight)
        old = widened(self.trace)
        if self.diagonal:
            return self._keep(None, old + weight * factor), None, factor
        known = None if self.vectors is None else pieces(self.vectors)[0].to(self.trace.device)
        # Converted to float64 twice, so that no copy is alive during the eigendecomposition, when memory use peaks.
        values, new = symmetric_eigen(summed(known, old) + weight.unsqueeze(-1) * factor)
        overlap = new.mT if known is None else new.mT @ widened(known)
        carry = overlap.square()
        # Stored bases are rounded, so columns sum to 1 only approximately; normalized, they preserve the trace.
        carry /= carry.sum(-2, keepdim=True)
        return self._keep(new, values), carry, (factor @ new).mul_(new).sum(-2)

    def _take_by_piece(self, factor: Sequence[Tensor], weight: Tensor) -> tuple[Basis, Matrix, Tensor]:
        """Apply `take` to each diagonal block."""
        known = [None] * len(self.sizes) if self.vectors is None else pieces(self.vectors)
        taken = [
            Basis(vectors, trace, False, (size,), self.rest).take(piece, weight)
            for piece, vectors, trace, size in zip(
                factor, known, self.trace.split_with_sizes(self.sizes, -1), self.sizes, strict=True
            )
        ]
        vectors = joined([part for basis, _, _ in taken for part in pieces(_not_none(basis.vectors))])
        carry = joined([part for _, carry, _ in taken for part in pieces(_not_none(carry))])
        trace = torch.cat([basis.trace for basis, _, _ in taken], -1)
        return replace(self, vectors=vectors, trace=trace), carry, torch.cat([values for _, _, values in taken], -1)

    def _keep(self, vectors: Tensor | None, trace: Tensor) -> Basis:
        """Return the basis with these eigenvectors and eigenvalues, stored as specified by `rest`."""
        like = self.trace
        # Contiguous, so that a memory loaded from a file gives bit-identical products.
        kept = None if vectors is None else self.rest.lay(vectors.to(like.device, like.dtype).contiguous())
        return replace(self, vectors=kept, trace=trace.to(like.device, like.dtype))


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

        Returns:
            The precision.
        """
        *groups, out, in_ = shape

        def side(size: int, diagonal: bool, sizes: tuple[int, ...] | None) -> Basis:
            trace = torch.zeros((*groups, size), dtype=like.dtype, device=like.device)
            return Basis(None, trace, diagonal, sizes or (size,), rest)

        return cls(
            shape,
            prior,
            side(in_, inputs_diagonal, inputs_sizes),
            side(out, outputs_diagonal, outputs_sizes),
            WeightedSum.zero(shape, like),
        )

    @property
    def _full(self) -> Tensor:
        """The eigenvalues of L, including the prior, in the shape of the block."""
        return self.values.total + self.prior

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
            diagonal(factor, basis.diagonal).sum(-1) for factor, basis in ((q, self.inputs), (h, self.outputs))
        )
        weight = max(strength, 1e-9)  # a task of strength 0 still determines the bases if no other does
        inputs, carry_in, q_values = self.inputs.take(q, weight * h_trace.unsqueeze(-1))
        outputs, carry_out, h_values = self.outputs.take(h, weight * q_trace.unsqueeze(-1))

        def carry(old: Tensor) -> Tensor:
            old = old if carry_out is None else carry_out @ old
            return old if carry_in is None else old @ carry_in.mT

        fresh = (h_values.unsqueeze(-1) * q_values.unsqueeze(-2)).clamp_min(0)
        values = self.values.add(fresh, strength, carry)
        return replace(self, inputs=inputs, outputs=outputs, values=values)

    def scale(self, factor: float) -> Self:
        """Return factor * L, including the prior."""

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
        """Return the sum of the F_t alone: no prior, and every strength 1."""
        return replace(self, prior=0.0, values=self.values.unweighted())

    def apply(self, v: Tensor) -> Tensor:
        """Return L v."""
        factor, values = self.values.factored
        sides = self.sides()
        scaled = values * sides.into(v)
        if not isinstance(sides.columns, Tensor) or v.dim() > 2:
            return torch.add(self.prior * v, sides.back(scaled), alpha=factor)
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
        total = self.values.total
        rows, columns = widened(total).sum(-1), widened(total).sum(-2)
        if len(self.shape) > 2 or not rows.any():
            return None
        columns = columns / columns.sum()
        if (rows.unsqueeze(-1) * columns - widened(total)).norm() > 1e-6 * widened(total).norm():
            return None
        return rows, columns

    def applier(self) -> Callable[[Tensor], Tensor]:
        """Return a version of `apply` for repeated use.

        After one task, or after equal tasks, L is prior * I + Q (x) H, and H v Q takes half the work of the eigenbasis.
        """
        product = None if self.inputs.rest.offload else self.separable()  # keep offloaded bases off the device
        if product is None or self.inputs.vectors is None or self.outputs.vectors is None:
            return self.apply
        like = self.values.plain

        def multiplied_out(vectors: Matrix, values: Tensor) -> Matrix:
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
        one = values.new_full((), 1 + step * self.prior)  # filled on the device: new_tensor copies from the host
        proximal_denominator = torch.add(one, values, alpha=step * factor)
        sides = self.sides()
        if self.rounded:  # rotate only the change, so that what the penalty leaves alone is not rounded
            return v - sides.back(sides.into(v) * (1 - 1 / proximal_denominator))
        return sides.back(sides.into(v) / proximal_denominator)

    @property
    def rounded(self) -> bool:
        """Whether the bases are stored in reduced precision, and so are only approximately orthonormal."""
        return any(basis.rest.dtype and basis.vectors is not None for basis in self._bases.values())

    def spectrum(self) -> Spectrum:
        """Return the eigenvalues of L and of its Fisher in the Kronecker-factored eigenbasis."""
        return Spectrum(self.values.plain, self.values.total, self.prior, self.rotate, self.rotate_back)

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

        return in_place(self.values.plain), in_place(self.values.total)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""
        kept = self.values.tensors("eigenvalues")
        for name, basis in self._bases.items():
            kept[f"{name}.trace"] = basis.trace
            if basis.vectors is not None:
                kept |= named(f"{name}.vectors", basis.vectors)
        return kept

    def metadata(self) -> Metadata:
        """Return the numbers to save alongside the tensors."""
        return {
            "prior": self.prior,
            "strength": self.values.strength,
            "inputs_diagonal": self.inputs.diagonal,
            "outputs_diagonal": self.outputs.diagonal,
            **{f"{n}_sizes": list(b.sizes) for n, b in self._bases.items() if len(b.sizes) > 1},
            **self.inputs.rest.metadata(),
        }

    def check(self) -> None:
        """Check that the bases are orthonormal, and that no eigenvalue is negative."""
        for name, tensor in self.values.tensors("eigenvalues").items():
            check_non_negative(name, tensor)
        for name, basis in self._bases.items():
            basis.check(name)

    @classmethod
    def restore(cls, shape: torch.Size, tensors: Mapping[str, Tensor], metadata: Metadata) -> Self:
        """Rebuild a precision from its `tensors` and `metadata`."""
        *groups, out, in_ = shape
        rest = Storage.of(metadata)

        def side(name: str, size: int) -> Basis:
            trace = check_shape(f"{name}.trace", tensors[f"{name}.trace"], (*groups, size))
            sizes = tuple(map(int, metadata.get(f"{name}_sizes", [size])))
            if sum(sizes) != size or min(sizes, default=0) < min(size, 1):
                raise ValueError(f"{name}_sizes are {sizes}, which do not sum to the size of the factor, {size}")
            vectors = find(f"{name}.vectors", tensors)
            if vectors is not None:
                each = zip(pieces(vectors), sizes, strict=True)
                checked = [check_shape(f"{name}.vectors", part, (*groups, n, n)) for part, n in each]
                vectors = joined([rest.lay(part) for part in checked])
            return Basis(vectors, trace, bool(metadata[f"{name}_diagonal"]), sizes, rest)

        for name in ("eigenvalues", "eigenvalues.weighted"):
            if name in tensors:
                check_shape(name, tensors[name], shape)
        values = WeightedSum.restore("eigenvalues", tensors, optional_metadata_number(metadata, "strength"))
        return cls(shape, metadata_number(metadata, "prior"), side("inputs", in_), side("outputs", out), values)


def as_side(factor: Matrix, is_diagonal: bool, basis: Basis) -> Matrix:
    """Convert a Kronecker factor to the form of its basis: a diagonal, a full matrix or diagonal blocks.

    Args:
        factor: Matrix (..., n, n), full or block-diagonal, or its diagonal (..., n).
        is_diagonal: Whether `factor` is a diagonal.
        basis: Eigenbasis of that factor in the block's precision.

    Returns:
        The factor in float64.
    """
    if basis.diagonal:
        return widened(diagonal(factor, is_diagonal))
    if isinstance(factor, Tensor) and is_diagonal:
        return joined([torch.diag_embed(widened(part)) for part in factor.split_with_sizes(basis.sizes, -1)])
    return joined([widened(piece) for piece in pieces(recut(factor, basis.sizes))])


def summed(vectors: Tensor | None, values: Tensor) -> Tensor:
    """Build a matrix from its eigendecomposition.

    Args:
        vectors: Orthonormal eigenvectors (..., n, n). None is the identity.
        values: Eigenvalues (..., n), in float64.

    Returns:
        The matrix (..., n, n), in float64.
    """
    if vectors is None:
        return torch.diag_embed(values)
    vectors = widened(vectors)
    return (vectors * values.unsqueeze(-2)) @ vectors.mT


def _not_none(matrix: Matrix | None) -> Matrix:
    """Narrow the type of a matrix that is known not to be None."""
    assert matrix is not None
    return matrix

"""The eigenbasis of a factor that is truncated to its largest eigenvalues and the mean of the others.

    factor = U diag(t) U^T + t_0 (I - U U^T),    U (n, r) orthonormal, r much smaller than n

A truncated basis stores r + 1 eigenvalues per side, so a precision with two of them has (r + 1) x (r + 1) eigenvalues.
It is used like a complete one: `limpet.precision.reflections` completes U without storing the complement. The factor
keeps its trace, and so does a precision to which tasks are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from limpet.errors import finite_number, positive_whole
from limpet.precision.base import Metadata, check_shape
from limpet.precision.basis import Basis
from limpet.precision.block_diagonal import Matrix, Side, diagonal, joined, pieces
from limpet.precision.linalg import symmetric_eigen, top_eigen, widened
from limpet.precision.reflections import Reflections, leading_columns
from limpet.precision.spiked import Spiked
from limpet.precision.storage import EIGHT_BITS, Storage
from limpet.precision.validity import check_non_negative

if TYPE_CHECKING:
    from typing_extensions import Self


def is_truncated(sizes: Sequence[int], diagonal: bool, rank: int | None) -> bool:
    """Return whether a rank truncates a factor: not if it is diagonal or split, or has at most rank + 1 rows.

    With n - 1 eigenvectors of n, the mean of the rest is exact.

    Args:
        sizes: Sizes of the diagonal blocks of the factor.
        diagonal: Whether the factor is diagonal.
        rank: Number of eigenvectors to keep. None keeps all of them.
    """
    return rank is not None and not diagonal and len(sizes) == 1 and rank < sizes[0] - 1


@dataclass(frozen=True)
class TruncatedBasis(Basis):
    """Eigenbasis of one factor: r eigenvectors, completed by reflections, and r + 1 eigenvalues.

    Args:
        vectors: The complete basis; None before the first task.
        trace: Eigenvalues of the partial trace (..., r + 1). The last is the mean over the complement.
        diagonal: False.
        sizes: Size n of the factor.
        rest: How the reflections are stored between uses.
        energy: Part of the trace that the eigenvectors hold after every task. None keeps their number.
    """

    energy: float | None = None

    @classmethod
    def start(
        cls, groups: Sequence[int], size: int, rank: int, like: Tensor, rest: Storage, energy: float | None = None
    ) -> TruncatedBasis:
        """Create the basis before the first task.

        Args:
            groups: Leading dimensions of the block.
            size: Size n of the factor.
            rank: Number r of eigenvectors to keep, less than n - 1.
            like: Tensor whose dtype and device the basis gets.
            rest: How the reflections are stored between uses.
            energy: Part of the trace that the eigenvectors should hold, instead of a constant number of them.

        Returns:
            The basis.
        """
        trace = torch.zeros((*groups, rank + 1), dtype=like.dtype, device=like.device)
        return cls(None, trace, False, (size,), rest, energy)

    @property
    def truncated(self) -> bool:
        """True."""
        return True

    @property
    def rank(self) -> int:
        """Number r of eigenvectors."""
        return self.trace.shape[-1] - 1

    @property
    def complement(self) -> int:
        """Dimension n - r of the complement."""
        return self.sizes[0] - self.rank

    @property
    def length(self) -> int:
        """Number of eigenvalues that are stored, r + 1."""
        return self.rank + 1

    @property
    def counts(self) -> Tensor:
        """How many columns of the complete basis each of the stored eigenvalues belongs to."""
        found = self.trace.new_ones(self.length)
        found[-1] = self.complement
        return found

    def spread(self, values: Tensor) -> Tensor:
        """Return one eigenvalue for every column of the complete basis, from r + 1 along the last dimension."""
        rest = values[..., -1:].expand(*values.shape[:-1], self.complement)
        return torch.cat([values[..., :-1], rest], -1)

    @property
    def rounded(self) -> bool:
        """False: products of reflections are orthogonal to full precision."""
        return False

    def check(self, name: str) -> None:
        """Raise ValueError unless the reflections are finite and the eigenvalues are not negative.

        Args:
            name: Name of the basis, for the error message.
        """
        check_non_negative(f"{name}.trace", self.trace)
        if isinstance(self.vectors, Reflections) and not bool(torch.isfinite(self.vectors.triangle).all()):
            raise ValueError(f"{name}.reflections are zero, inf or nan, so they are not the basis of a curvature")

    def take(self, factor: Side, weight: Tensor) -> tuple[Basis, Matrix | None, Tensor]:
        """Add weight * factor to the partial trace, and truncate it again.

        Args:
            factor: Kronecker factor of the new term: full, or of low rank plus a multiple of the identity.
            weight: Multiplier, one number for each group.

        Returns:
            The new basis, the map from old to new eigenvalues (None before the first task), and the diagonal of the
            factor in the new basis, with its mean over the complement.
        """
        known = self.known
        if isinstance(factor, Spiked):
            total = factor if known is None else factor * weight.squeeze(-1) + known
            values, top = total.top_eigen(self.rank)
            whole = total.diagonal().sum(-1)
        else:
            assert isinstance(factor, Tensor)
            factor = widened(factor)
            full = factor if known is None else weight.unsqueeze(-1) * factor + known.dense()
            values, top = top_eigen(full, self.rank) if self.energy is None else eigen_holding(full, self.energy)
            whole = full.diagonal(dim1=-2, dim2=-1).sum(-1)
        # the first task is decomposed without its weight, so that layers with the same input have equal eigenvectors
        if known is None:
            values, whole = weight * values, weight.squeeze(-1) * whole
        values, top = values.flip(-1), top.flip(-1)  # the largest first, because their reflections are kept best
        count = self.sizes[0] - top.shape[-1]
        kept = self._keep(top, with_rest(values, whole, count))
        in_basis = (factor @ top).mul_(top).sum(-2)
        trace = diagonal(factor).sum(-1)
        return kept, self._carry(top, known), with_rest(in_basis, trace, count)

    @property
    def known(self) -> Spiked | None:
        """The partial trace in float64; None before the first task."""
        if not isinstance(self.vectors, Reflections):
            return None
        vectors = self.vectors.to(self.trace.device, self.trace.dtype).first()
        trace = widened(self.trace)
        return Spiked.of_eigen(widened(vectors), trace[..., :-1], trace[..., -1])

    def _carry(self, new: Tensor, known: Spiked | None) -> Tensor | None:
        """Return the matrix that takes the r + 1 eigenvalues in the old basis to their means in the new one.

        A new eigenvector has the squared overlaps with the old ones, and the remainder of 1 with their complement; the
        complement gets what is left of everything, so the trace is preserved. Before the first task there is nothing to
        take over, and None if there are as many new ones.
        """
        if known is None:
            same = new.shape[-1] == self.rank
            return None if same else new.new_zeros((*new.shape[:-2], new.shape[-1] + 1, self.length))
        overlap = (new.mT @ known.columns).square()
        outside = (1 - overlap.sum(-1, keepdim=True)).clamp_min(0)  # of new eigenvectors, in the old complement
        lost = (1 - overlap.sum(-2, keepdim=True)).clamp_min(0)  # of old eigenvectors, in the new complement
        corner = (self.complement - outside.sum(-2, keepdim=True)).clamp_min(0)
        below = torch.cat([lost, corner], -1) / (self.sizes[0] - new.shape[-1])
        return torch.cat([torch.cat([overlap, outside], -1), below], -2)

    def _keep(self, vectors: Tensor | None, trace: Tensor) -> Self:
        """Return the basis with these eigenvectors and eigenvalues, stored as specified by `rest`."""
        assert vectors is not None
        like = self.trace
        laid = Reflections.completing(vectors).to(like.device, like.dtype).laid(self.rest)
        return replace(self, vectors=laid, trace=trace.to(like.device, like.dtype))

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""
        kept = {f"{name}.trace": self.trace}
        if isinstance(self.vectors, Reflections):
            kept[f"{name}.reflections"] = self.vectors.vectors
            if self.vectors.scale is not None:
                kept[f"{name}.reflections.scale"] = self.vectors.scale
            if self.vectors.leading is not None:
                kept[f"{name}.reflections.leading"] = self.vectors.leading
        return kept

    def metadata(self, name: str) -> Metadata:
        """Return the numbers to save alongside the tensors."""
        energy: Metadata = {} if self.energy is None else {f"{name}_energy": self.energy}
        return {f"{name}_diagonal": False, f"{name}_rank": self.rank, **energy}

    @classmethod
    def restore(cls, name: str, shape: Sequence[int], tensors: Mapping[str, Tensor], metadata: Metadata) -> Basis:
        """Rebuild a basis from its `tensors` and `metadata`; the arguments are those of `Basis.restore`."""
        *groups, size = shape
        rank, rest = positive_whole(f"{name}_rank", metadata[f"{name}_rank"]), Storage.of(metadata)
        if rank >= size:
            raise ValueError(f"{name}_rank is {rank}, but the factor has {size} rows")
        energy = metadata.get(f"{name}_energy")
        energy = None if energy is None else part_of_trace(energy)
        trace = check_shape(f"{name}.trace", tensors[f"{name}.trace"], (*groups, rank + 1))
        vectors = tensors.get(f"{name}.reflections")
        if vectors is None:
            return cls(None, trace, False, (size,), rest, energy)
        leading = tensors.get(f"{name}.reflections.leading")  # of 8 bits only, and not in older files
        first = 0 if leading is None else leading_columns(rank)
        check_shape(f"{name}.reflections", vectors, (*groups, size, rank - first))
        if rest.dtype != EIGHT_BITS:
            return cls(Reflections.of(rest.lay(vectors)), trace, False, (size,), rest, energy)
        scale = tensors[f"{name}.reflections.scale"]
        check_shape(f"{name}.reflections.scale", scale, (*groups, 1, rank - first))
        where = "cpu" if rest.offload else vectors.device
        if leading is not None:
            leading = check_shape(f"{name}.reflections.leading", leading, (*groups, size, first))
            leading = leading.to(where, torch.float16)
        packed = Reflections.of(vectors.to(where, torch.int8), scale.to(where, torch.float32), leading)
        return cls(packed, trace, False, (size,), rest, energy)


def part_of_trace(energy: float) -> float:
    """Return an `energy` that is a part of a trace; raises ValueError if it is not in (0, 1]."""
    if not 0 < finite_number("energy", energy) <= 1:
        raise ValueError(f"energy must be in (0, 1], not {energy}: it is a part of the trace of each factor")
    return energy


def eigen_holding(matrix: Tensor, energy: float) -> tuple[Tensor, Tensor]:
    """Compute the largest eigenvalues that hold a part of the trace, at least one and all but one at most.

    Args:
        matrix: Symmetric matrix (..., n, n) without negative eigenvalues.
        energy: The part. In each of the leading dimensions they hold at least this much.

    Returns:
        The eigenvalues in ascending order (..., r), and their eigenvectors (..., n, r).
    """
    values, vectors = symmetric_eigen(matrix)
    held = values.clamp_min(0).flip(-1).cumsum(-1)
    missing = (held < energy * held[..., -1:]).sum(-1)
    rank = min(int(missing.max()) + 1, matrix.shape[-1] - 1)
    return values[..., -rank:], vectors[..., -rank:]


def with_rest(values: Tensor, total: Tensor, count: int) -> Tensor:
    """Append the mean of the values that are left out.

    Args:
        values: The first values (..., r).
        total: Sum of all values (...).
        count: Number of values that are left out.

    Returns:
        The values (..., r + 1).
    """
    rest = ((total - values.sum(-1)) / count).clamp_min(0)
    return torch.cat([values, rest.unsqueeze(-1)], -1)


def _orthonormal(basis: Basis) -> list[Tensor]:
    """Return the blocks of a complete basis in the dtype of use, orthonormal again if they were rounded."""
    assert basis.columns is not None
    found = []
    for part in pieces(basis.columns):
        if basis.rounded:
            q, r = torch.linalg.qr(widened(part))
            part = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).to(part.device, part.dtype)
        found.append(part.contiguous())
    return found


def truncated(basis: Basis, rank: int, rest: Storage) -> tuple[Basis, Tensor | None]:
    """Truncate a basis to its largest eigenvalues.

    Args:
        basis: The basis.
        rank: Number of eigenvectors to keep.
        rest: How they are stored between uses.

    Returns:
        The truncated basis, and the map from the old to the new stored eigenvalues. A basis that is diagonal, split
        into blocks or not larger keeps its eigenvectors, and the map is None.
    """
    size = basis.length
    if basis.diagonal or len(basis.sizes) > 1 or basis.vectors is None or rank >= size - 1:
        if basis.vectors is None:
            return replace(basis, rest=rest), None
        if isinstance(basis.vectors, Reflections):
            complete = basis.vectors.to(basis.trace.device, basis.trace.dtype)
            return replace(basis, rest=rest, vectors=complete.laid(rest)), None
        return replace(basis, rest=rest, vectors=joined([rest.lay(part) for part in _orthonormal(basis)])), None
    trace, count = widened(basis.trace), basis.sizes[0] - rank
    old = basis.columns
    assert old is not None
    known = old.first() if isinstance(old, Reflections) else pieces(old)[0]
    order = trace[..., : known.shape[-1]].argsort(-1, descending=True)
    kept = order[..., :rank]
    weights = torch.ones_like(trace)
    if isinstance(basis, TruncatedBasis):
        weights[..., -1] = basis.complement
    carry = torch.zeros(*trace.shape[:-1], rank + 1, size, dtype=trace.dtype, device=trace.device)
    carry[..., :rank, :].scatter_(-1, kept.unsqueeze(-1), 1.0)
    carry[..., rank, :] = (1 - carry[..., :rank, :].sum(-2)) * weights / count
    start = TruncatedBasis.start(trace.shape[:-1], basis.sizes[0], rank, basis.trace, rest)
    top = widened(known).gather(-1, kept.unsqueeze(-2).expand(*known.shape[:-1], rank))
    return start._keep(top, (carry @ trace.unsqueeze(-1)).squeeze(-1)), carry

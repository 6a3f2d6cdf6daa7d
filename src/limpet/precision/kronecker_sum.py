"""Every Kronecker product kept: exact, and growing with the tasks. The reference for `kronecker`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from limpet.errors import UnsupportedError
from limpet.precision.base import Metadata, Precision, check_shape, metadata_number, noise
from limpet.precision.block_diagonal import Matrix, diagonal, find, joined, named, pieces
from limpet.precision.kronecker import Kronecker
from limpet.precision.linalg import conjugate_gradients, symmetric_eigen, widened
from limpet.precision.spectrum import Spectrum
from limpet.precision.storage import AS_USED, Storage
from limpet.precision.terms import KroneckerTerm, Term

if TYPE_CHECKING:
    from typing_extensions import Self

WRITTEN_OUT_LIMIT = 4096
"""Weights in a block up to which the log-determinant and samples go by the dense matrix."""


@dataclass(frozen=True)
class KroneckerSum(Precision):
    """L = prior * I + sum of strength_t Q_t (x) H_t.

    Solves go by conjugate gradients with the eigenbasis form as preconditioner, so that form is kept as well.
    """

    structure = "kronecker-sum"
    shape: torch.Size
    prior: float
    terms: tuple[KroneckerTerm, ...]
    strengths: tuple[float, ...]
    eigenbasis: Kronecker

    @classmethod
    def start(
        cls,
        shape: torch.Size,
        prior: float,
        like: Tensor,
        *,
        rest: Storage = AS_USED,
        **sides: Any,
    ) -> KroneckerSum:
        """The prior alone; `sides` as for `Kronecker.start`."""
        return cls(shape, prior, (), (), Kronecker.start(shape, prior, like, rest=rest, **sides))

    @property
    def _like(self) -> Tensor:
        return self.eigenbasis.values.plain

    def add(self, term: Term, strength: float) -> Self:
        eigenbasis = self.eigenbasis.add(term, strength)
        assert isinstance(term, KroneckerTerm)
        kept = KroneckerTerm(
            term.inputs.to(self._like.device, self._like.dtype),
            term.outputs.to(self._like.device, self._like.dtype),
            term.inputs_diagonal,
            term.outputs_diagonal,
        )
        return replace(self, terms=(*self.terms, kept), strengths=(*self.strengths, strength), eigenbasis=eigenbasis)

    def scale(self, factor: float) -> Self:
        return replace(
            self,
            prior=factor * self.prior,
            terms=tuple(term.scaled(factor) for term in self.terms),
            eigenbasis=self.eigenbasis.scale(factor),
        )

    def fisher(self) -> Self:
        strengths = tuple(1.0 for _ in self.terms)
        return replace(self, prior=0.0, strengths=strengths, eigenbasis=self.eigenbasis.fisher())

    def apply(self, v: Tensor) -> Tensor:
        result = self.prior * v
        for term, strength in zip(self.terms, self.strengths, strict=True):
            result = result + strength * term.apply(v)
        return result

    def proximal(self, v: Tensor, step: float) -> Tensor:
        return conjugate_gradients(
            lambda x: x + step * self.apply(x),
            v,
            lambda x: self.eigenbasis.proximal(x, step),
            tolerance=_tolerance(v),
        )

    def spectrum(self) -> Spectrum:
        """That of the eigenbasis form: exact for one task and for equal ones, near for others."""
        return self.eigenbasis.spectrum()

    def solve(self, v: Tensor) -> Tensor:
        return conjugate_gradients(self.apply, v, self.eigenbasis.solve, tolerance=_tolerance(v))

    def trace(self) -> Tensor:
        total = torch.tensor(self.prior * self.shape.numel(), dtype=torch.float64)
        for term, strength in zip(self.terms, self.strengths, strict=True):
            q = widened(diagonal(term.inputs, term.inputs_diagonal)).sum(-1)
            h = widened(diagonal(term.outputs, term.outputs_diagonal)).sum(-1)
            total = total.to(q.device) + strength * (q * h).sum()
        return total

    def log_determinant(self) -> Tensor:
        values, _ = symmetric_eigen(self._small_dense("log-determinant"))
        return values.log().sum()

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        factor = torch.linalg.cholesky(widened(self._small_dense("sample")))
        drawn = noise(self.shape, self._like, generator).flatten()
        solved: Tensor = torch.linalg.solve_triangular(factor.mT, widened(drawn).unsqueeze(-1), upper=True)
        return solved.reshape(self.shape).to(self._like.device, self._like.dtype)

    def _small_dense(self, what: str) -> Tensor:
        if self.shape.numel() > WRITTEN_OUT_LIMIT:
            raise UnsupportedError(
                f"kronecker-sum has no {what} above {WRITTEN_OUT_LIMIT} weights in a block (this one has "
                f"{self.shape.numel()}): use structure='kronecker', which has it in closed form"
            )
        return self.dense()

    def dense(self) -> Tensor:
        n = self.shape.numel()
        identity = torch.eye(n, dtype=self._like.dtype, device=self._like.device)
        return torch.stack([self.apply(row.reshape(self.shape)).flatten() for row in identity])

    def diagonals(self) -> tuple[Tensor, Tensor]:
        plain = torch.zeros(self.shape, dtype=self._like.dtype, device=self._like.device)
        total = plain.clone()
        for term, strength in zip(self.terms, self.strengths, strict=True):
            h = widened(diagonal(term.outputs, term.outputs_diagonal)).unsqueeze(-1)
            product = (h * widened(diagonal(term.inputs, term.inputs_diagonal)).unsqueeze(-2)).to(plain)
            plain, total = plain + product, total + strength * product
        return plain, total

    def tensors(self) -> dict[str, Tensor]:
        kept = {f"eigenbasis.{name}": tensor for name, tensor in self.eigenbasis.tensors().items()}
        for i, term in enumerate(self.terms):
            kept |= named(f"terms.{i}.inputs", term.inputs) | named(f"terms.{i}.outputs", term.outputs)
        return kept

    def metadata(self) -> Metadata:
        return {**self.eigenbasis.metadata(), "prior": self.prior, "strengths": list(self.strengths)}

    @classmethod
    def restore(cls, shape: torch.Size, tensors: Mapping[str, Tensor], metadata: Metadata) -> Self:
        *groups, out, in_ = shape
        inner = {k.removeprefix("eigenbasis."): t for k, t in tensors.items() if k.startswith("eigenbasis.")}
        eigenbasis = Kronecker.restore(shape, inner, metadata)

        def side(name: str, size: int) -> tuple[Matrix, bool]:
            found = find(name, tensors)
            if found is None:
                raise KeyError(name)
            parts = pieces(found)
            if len(parts) == 1 and parts[0].dim() == len(groups) + 1:
                return check_shape(name, parts[0], (*groups, size)), True
            rows = [part.shape[-1] for part in parts] if len(parts) > 1 else [size]
            if sum(rows) != size:
                raise ValueError(f"{name} is in pieces of shape {rows}, and the side has {size}")
            each = zip(parts, rows, strict=True)
            return joined([check_shape(name, part, (*groups, n, n)) for part, n in each]), False

        terms = []
        for i in range(len(metadata["strengths"])):
            q, q_diagonal = side(f"terms.{i}.inputs", in_)
            h, h_diagonal = side(f"terms.{i}.outputs", out)
            terms.append(KroneckerTerm(q, h, q_diagonal, h_diagonal))
        strengths = tuple(metadata_number({"strength": s}, "strength") for s in metadata["strengths"])
        return cls(shape, metadata_number(metadata, "prior"), tuple(terms), strengths, eigenbasis)


def _tolerance(v: Tensor) -> float:
    return 1e-12 if v.dtype == torch.float64 else 1e-7

"""Sum of Kronecker products with every product stored: exact, but growing with the number of tasks.

It serves as the reference for `kronecker`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from limpet.errors import LimpetError, UnsupportedError
from limpet.precision.base import SINGULAR, Metadata, Precision, check_shape, metadata_number, noise
from limpet.precision.block_diagonal import Matrix, diagonal, find, joined, named, pieces
from limpet.precision.kronecker import Kronecker
from limpet.precision.linalg import conjugate_gradients, symmetric_eigen, widened
from limpet.precision.spectrum import Spectrum
from limpet.precision.storage import AS_USED, Storage
from limpet.precision.terms import KroneckerTerm, Term
from limpet.precision.validity import check_non_negative, check_positive_semidefinite

if TYPE_CHECKING:
    from typing_extensions import Self

WRITTEN_OUT_LIMIT = 4096
"""Largest number of weights in a block for which the log-determinant and samples use the dense matrix."""

TRACE_TOLERANCE = 1e-2
"""Allowed relative difference between the traces of the sum and of its eigenbasis form, which are equal but for
rounding errors."""


@dataclass(frozen=True)
class KroneckerSum(Precision):
    """Precision L = prior * I + sum of strength_t Q_t (x) H_t.

    Linear systems are solved by conjugate gradients with the eigenbasis form, which is stored as well, as the
    preconditioner.

    Args:
        shape: Shape of the block.
        prior: Prior precision.
        terms: Kronecker factors of each task.
        strengths: Strength of each task.
        eigenbasis: The same precision in the `Kronecker` structure.
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
        """Create the precision of a block before the first task, which is the prior alone.

        Args:
            shape: Shape of the block.
            prior: Prior precision.
            like: Tensor whose dtype and device the precision gets.
            rest: How the eigenvectors are stored between uses.
            **sides: Form of the two factors, as in `Kronecker.start`.

        Returns:
            The precision.
        """
        return cls(shape, prior, (), (), Kronecker.start(shape, prior, like, rest=rest, **sides))

    @property
    def _like(self) -> Tensor:
        """A tensor of the stored dtype and device."""
        return self.eigenbasis.values.plain

    def add(self, term: Term, strength: float) -> Self:
        """Return L + strength * F for a `KroneckerTerm`."""
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
        """Return factor * L, including the prior."""
        return replace(
            self,
            prior=factor * self.prior,
            terms=tuple(term.scaled(factor) for term in self.terms),
            eigenbasis=self.eigenbasis.scale(factor),
        )

    def fisher(self) -> Self:
        """Return the sum of the F_t alone: no prior, and every strength 1."""
        strengths = tuple(1.0 for _ in self.terms)
        return replace(self, prior=0.0, strengths=strengths, eigenbasis=self.eigenbasis.fisher())

    def apply(self, v: Tensor) -> Tensor:
        """Return L v."""
        result = self.prior * v
        for term, strength in zip(self.terms, self.strengths, strict=True):
            result = result + strength * term.apply(v)
        return result

    def proximal(self, v: Tensor, step: float) -> Tensor:
        """Return the proximal step (I + step L)^-1 v, by conjugate gradients."""
        return conjugate_gradients(
            lambda x: x + step * self.apply(x),
            v,
            lambda x: self.eigenbasis.proximal(x, step),
            tolerance=_tolerance(v),
        )

    def spectrum(self) -> Spectrum:
        """Return the spectrum of the eigenbasis form: exact for one task and for equal tasks, otherwise approximate."""
        return self.eigenbasis.spectrum()

    def solve(self, v: Tensor) -> Tensor:
        """Return L^-1 v, by conjugate gradients."""
        return conjugate_gradients(self.apply, v, self.eigenbasis.solve, tolerance=_tolerance(v))

    def trace(self) -> Tensor:
        """Return the trace of L, in float64."""
        total = torch.tensor(self.prior * self.shape.numel(), dtype=torch.float64)
        for term, strength in zip(self.terms, self.strengths, strict=True):
            q = widened(diagonal(term.inputs, term.inputs_diagonal)).sum(-1)
            h = widened(diagonal(term.outputs, term.outputs_diagonal)).sum(-1)
            total = total.to(q.device) + strength * (q * h).sum()
        return total

    def log_determinant(self) -> Tensor:
        """Return log det L from the dense matrix, in float64.

        Raises:
            UnsupportedError: If the block has more than `WRITTEN_OUT_LIMIT` weights.
        """
        values, _ = symmetric_eigen(self._small_dense("log-determinants"))
        return values.log().sum()

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw one sample from N(0, L^-1), using the dense matrix.

        Args:
            generator: Random number generator. Defaults to the global one.

        Returns:
            The sample, in the shape of the block.

        Raises:
            UnsupportedError: If the block has more than `WRITTEN_OUT_LIMIT` weights.
            LimpetError: If the precision is singular.
        """
        factor, failed = torch.linalg.cholesky_ex(widened(self._small_dense("sampling")))
        if failed:
            raise LimpetError(SINGULAR)
        drawn = noise(self.shape, self._like, generator).flatten()
        solved: Tensor = torch.linalg.solve_triangular(factor.mT, widened(drawn).unsqueeze(-1), upper=True)
        return solved.reshape(self.shape).to(self._like.device, self._like.dtype)

    def _small_dense(self, what: str) -> Tensor:
        """Return L as a matrix, or raise an error if the block is too large."""
        if self.shape.numel() > WRITTEN_OUT_LIMIT:
            raise UnsupportedError(
                f"structure='kronecker-sum' supports {what} only for blocks of at most {WRITTEN_OUT_LIMIT} weights, "
                f"but this block has {self.shape.numel()}: use structure='kronecker', which has a closed form"
            )
        return self.dense()

    def dense(self) -> Tensor:
        """Return L as a matrix over W flattened row by row."""
        n = self.shape.numel()
        identity = torch.eye(n, dtype=self._like.dtype, device=self._like.device)
        return torch.stack([self.apply(row.reshape(self.shape)).flatten() for row in identity])

    def diagonals(self) -> tuple[Tensor, Tensor]:
        """Return the diagonals of the sum of F_t and of the sum of strength_t F_t, in the shape of the block."""
        plain = torch.zeros(self.shape, dtype=self._like.dtype, device=self._like.device)
        total = plain.clone()
        for term, strength in zip(self.terms, self.strengths, strict=True):
            h = widened(diagonal(term.outputs, term.outputs_diagonal)).unsqueeze(-1)
            product = (h * widened(diagonal(term.inputs, term.inputs_diagonal)).unsqueeze(-2)).to(plain)
            plain, total = plain + product, total + strength * product
        return plain, total

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""
        kept = {f"eigenbasis.{name}": tensor for name, tensor in self.eigenbasis.tensors().items()}
        for i, term in enumerate(self.terms):
            kept |= named(f"terms.{i}.inputs", term.inputs) | named(f"terms.{i}.outputs", term.outputs)
        return kept

    def metadata(self) -> Metadata:
        """Return the numbers to save alongside the tensors."""
        return {**self.eigenbasis.metadata(), "prior": self.prior, "strengths": list(self.strengths)}

    def check(self) -> None:
        """Check that the factors are positive semi-definite, and that the eigenbasis form is that of their sum."""
        self.eigenbasis.check()
        for i, term in enumerate(self.terms):
            sides = (("inputs", term.inputs, term.inputs_diagonal), ("outputs", term.outputs, term.outputs_diagonal))
            for side, factor, is_diagonal in sides:
                for part in pieces(factor):
                    (check_non_negative if is_diagonal else check_positive_semidefinite)(f"terms.{i}.{side}", part)
        exact, approximate = float(self.trace()), float(self.eigenbasis.trace())
        if not abs(exact - approximate) <= TRACE_TOLERANCE * exact:
            raise ValueError("the eigenvalues do not add up to the trace of the terms")

    @classmethod
    def restore(cls, shape: torch.Size, tensors: Mapping[str, Tensor], metadata: Metadata) -> Self:
        """Rebuild a precision from its `tensors` and `metadata`."""
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
                raise ValueError(
                    f"{name} has blocks of sizes {rows}, which do not sum to the size of the factor, {size}"
                )
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
    """Return the relative residual at which conjugate gradients stop, by dtype."""
    return 1e-12 if v.dtype == torch.float64 else 1e-7

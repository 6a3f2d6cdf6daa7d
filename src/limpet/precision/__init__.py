"""Structured precisions of one parameter block: one module per structure, one shared interface (`Precision`)."""

from limpet.precision.base import Metadata, Precision
from limpet.precision.block_diagonal import BlockDiagonal, Matrix
from limpet.precision.dense import Dense
from limpet.precision.diagonal import Diagonal
from limpet.precision.kronecker import Kronecker
from limpet.precision.kronecker_sum import KroneckerSum
from limpet.precision.rotation import Rotation
from limpet.precision.spectrum import Spectrum
from limpet.precision.terms import DenseTerm, DiagonalTerm, KroneckerTerm, Term

STRUCTURES: dict[str, type[Diagonal] | type[Kronecker] | type[KroneckerSum] | type[Dense]] = {
    kind.structure: kind for kind in (Diagonal, Kronecker, KroneckerSum, Dense)
}

__all__ = [
    "STRUCTURES",
    "BlockDiagonal",
    "Dense",
    "DenseTerm",
    "Diagonal",
    "DiagonalTerm",
    "Kronecker",
    "KroneckerSum",
    "KroneckerTerm",
    "Matrix",
    "Metadata",
    "Precision",
    "Rotation",
    "Spectrum",
    "Term",
]

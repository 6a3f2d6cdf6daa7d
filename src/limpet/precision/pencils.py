"""Choice of the path between two curvatures by the structure of the block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from limpet.precision.base import Precision
from limpet.precision.dense import Dense
from limpet.precision.dense_pencil import DensePencil
from limpet.precision.diagonal import Diagonal
from limpet.precision.diagonal_pencil import DiagonalPencil
from limpet.precision.kronecker_pencil import KroneckerPencil
from limpet.precision.pencil import Damping, MovedBlock, Pencil
from limpet.precision.terms import Term


def pencil(
    old: Precision,
    new: Sequence[Term],
    parts: Sequence[Tensor],
    *,
    columns: slice,
    linear_term: Tensor | None = None,
    offset: Tensor | None = None,
    damping: Damping | None = None,
) -> Pencil:
    """Build the path of a block between an old and a new curvature.

    Args:
        old: Precision of the block. Only its Fisher is used, without prior and strengths.
        new: Fisher of the block on the new data, as computed by a curvature pass.
        parts: Tensors in the shape of the block that add up to the displacement D.
        columns: Columns that may move.
        linear_term: Linear term of the old penalty, if that is not centered at X = 0.
        offset: Subtracted from the first part in `low_rank`.
        damping: Damping of both curvatures. Defaults to `Damping()`.

    Returns:
        The path, in the dtype of the parts.
    """
    kinds: dict[type[Precision], Callable[..., Pencil]] = {Diagonal: DiagonalPencil, Dense: DensePencil}
    kind = kinds.get(type(old), KroneckerPencil)
    return kind(old, new, MovedBlock(parts, columns, linear_term, offset, damping or Damping()))

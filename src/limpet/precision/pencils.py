"""The path of a block between two curvatures, in whichever structure the block has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from limpet.precision.base import Precision
from limpet.precision.dense import Dense
from limpet.precision.dense_pencil import DensePencil
from limpet.precision.diagonal import Diagonal
from limpet.precision.diagonal_pencil import DiagonalPencil
from limpet.precision.kronecker_pencil import KroneckerPencil
from limpet.precision.pencil import Damping, Pencil
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
    """The path of a block between an old and a new curvature.

    Args:
        old: The precision of the block. Only its Fisher counts, without its prior and strengths.
        new: The Fisher of the block on the new data, as a curvature pass gives it.
        parts: Tensors in the shape of the block that add up to D.
        columns: The columns that may move.
        linear_term: The linear term of the old penalty, where that is not centred at X = 0.
        offset: What `low_rank` takes off the first part.
        damping: What is added to the diagonals.

    Returns:
        The path, in the dtype of the parts.
    """
    kinds: dict[type[Precision], Callable[..., Pencil]] = {Diagonal: DiagonalPencil, Dense: DensePencil}
    kind = kinds.get(type(old), KroneckerPencil)
    return kind(old, new, parts, columns=columns, linear_term=linear_term, offset=offset, damping=damping)

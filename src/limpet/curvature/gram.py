"""Gram matrices: sums of outer products, from which every Kronecker factor is computed."""

from __future__ import annotations

from torch import Tensor

from limpet.precision import Matrix
from limpet.precision.sketch import Sketch

STRIP_FROM = 256
"""Width from which a symmetric product is computed in strips."""

STRIPS = 4


def add_gram(total: Matrix | Sketch, rows: Tensor, *, ones: bool, diagonal: bool) -> None:
    """Add rows^T rows to `total` in place.

    Only the upper triangle is valid until `mirrored` is applied. A large symmetric product is computed in strips that
    skip most of the lower triangle, which saves a third of the work.

    Args:
        total: The matrix to add to: full, block-diagonal (only these blocks are computed), a diagonal, or a sketch.
        rows: The rows, of shape (..., rows, width).
        ones: Whether to append a column of ones to `rows`, without copying it.
        diagonal: Whether `total` is a diagonal, so that only squares are summed.
    """
    if isinstance(total, Sketch):
        total.add(rows, ones=ones)
        return
    if not isinstance(total, Tensor):
        start, last = 0, total.pieces[-1]
        for piece in total.pieces:
            stop = start + piece.shape[-1]
            add_gram(piece, rows[..., start:stop], ones=ones and piece is last, diagonal=False)
            start = stop
        return
    rows = rows.to(total.dtype)
    width = rows.shape[-1]
    if diagonal:
        total[..., :width] += rows.square().sum(-2)
        if ones:
            total[..., width] += rows.shape[-2]
        return
    if rows.dim() > 2:
        total[..., :width, :width] += rows.mT @ rows
    else:
        strip = width if width < STRIP_FROM else -(-width // STRIPS)
        for start in range(0, width, max(strip, 1)):
            stop = min(start + strip, width)
            total[start:stop, start:width].addmm_(rows[:, start:stop].mT, rows[:, start:])
    if ones:
        total[..., :width, width] += rows.sum(-2)
        total[..., width, width] += rows.shape[-2]


def mirrored(total: Tensor) -> Tensor:
    """Return the symmetric matrix whose upper triangle was computed by `add_gram`."""
    found = total.triu()
    return found.add_(total.triu(1).mT)

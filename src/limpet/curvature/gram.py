"""Gram matrices: sums of outer products, from which every Kronecker factor is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from limpet.precision import Matrix
from limpet.precision.sketch import Sketch

STRIP_FROM = 256
"""Width from which a symmetric product is computed in strips."""

STRIPS, MULTIPLE = 6, 16
"""Number of strips, and what the width of a strip is rounded up to a multiple of: kernels handle such widths best."""

MIRRORED_AT_ONCE = 256
"""Number of rows that are mirrored at a time."""


def add_gram(total: Matrix | Sketch, rows: Tensor, *, ones: bool, diagonal: bool) -> None:
    """Add rows^T rows to `total` in place.

    Only the upper triangle is valid until `mirror_` is applied. A large symmetric product is computed in strips that
    skip most of the lower triangle, which saves two fifths of the work.

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
        total[..., :width].add_(rows.square().sum(-2))
        if ones:
            total[..., width].add_(rows.shape[-2])
        return
    inner = total[..., :width, :width] if ones else total
    if rows.dim() > 2:
        inner.add_(rows.mT @ rows)
    elif width < STRIP_FROM:  # most networks have many narrow factors, so every operation counts
        inner.addmm_(rows.mT, rows)
    else:
        for start, stop in strips(width):
            inner[start:stop, start:].addmm_(rows[:, start:stop].mT, rows[:, start:])
    if ones:
        total[..., :width, width].add_(rows.sum(-2))
        total[..., width, width].add_(rows.shape[-2])


def add_grams(total: Matrix | Sketch, parts: Iterable[Tensor], *, ones: bool, diagonal: bool) -> None:
    """Add rows^T rows to `total` in place, with rows given in parts; otherwise like `add_gram`."""
    for rows in parts:
        add_gram(total, rows, ones=ones, diagonal=diagonal)


def strips(width: int) -> Iterator[tuple[int, int]]:
    """Yield the first row, and the row after the last one, of each strip of a symmetric product of this width."""
    strip = max(width, 1) if width < STRIP_FROM else -(-width // (STRIPS * MULTIPLE)) * MULTIPLE
    for start in range(0, width, strip):
        yield start, min(start + strip, width)


def mirror_(total: Tensor) -> Tensor:
    """Copy the upper triangle, which `add_gram` computed, to the lower one, in place, and return the matrix."""
    size = total.shape[-1]
    for start in range(0, size, MIRRORED_AT_ONCE):
        stop = min(start + MIRRORED_AT_ONCE, size)
        own = total[..., start:stop, start:stop]
        own.copy_(own.triu() + own.triu(1).mT)
        total[..., stop:, start:stop] = total[..., start:stop, stop:].mT
    return total

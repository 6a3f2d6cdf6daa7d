"""Sums of outer products: what every factor is made of."""

from __future__ import annotations

from torch import Tensor

from limpet.precision import Matrix

STRIP_FROM = 256
STRIPS = 4


def add_gram(total: Matrix, rows: Tensor, *, ones: bool, diagonal: bool) -> None:
    """total += rows^T rows, of which only the upper triangle is right until `mirrored`, and in pieces only those.

    `ones` stands for one more column of ones, which is not copied in; `diagonal` sums the squares alone. A large
    symmetric product is made in strips that leave most of the lower triangle out: a third less work.
    """
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
    """The symmetric matrix of which `add_gram` made the upper triangle."""
    return total.triu() + total.triu(1).mT

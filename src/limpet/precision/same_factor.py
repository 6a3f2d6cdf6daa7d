"""Find factors that are multiples of one another: those of layers with the same input.

In a transformer the query, key and value projections read one tensor, and the gate and up projections another. After
one task their input factors are equal up to a positive number, so they have the same eigenvectors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from limpet.precision.basis import Basis
from limpet.precision.block_diagonal import pieces
from limpet.precision.linalg import widened
from limpet.precision.reflections import Reflections

Eigenvectors = Callable[[], Tensor]

SAME = 1e-4
"""Largest difference of two factors, relative to their norm, that is attributed to rounding."""


def same_factors(bases: Mapping[str, Basis]) -> dict[str, str]:
    """Find the bases whose partial traces are multiples of each other, by computation and not by name.

    Args:
        bases: Eigenbases by name. Those that are diagonal or split into blocks, or have no task yet, are skipped.

    Returns:
        The name of the first such basis, for every basis after it.
    """
    found: dict[str, str] = {}
    firsts: dict[object, list[tuple[str, Basis]]] = defaultdict(list)
    for name, basis in bases.items():
        if basis.vectors is None or basis.diagonal or len(basis.sizes) > 1:
            continue
        others = firsts[basis.sizes, basis.trace.shape]
        match = next((other for other, kept in others if _same(kept, basis)), None)
        if match is None:
            others.append((name, basis))
        else:
            found[name] = match
    return found


def _same(one: Basis, other: Basis) -> bool:
    """Whether |A V - V diag(t)| is small, for one factor A and eigenvectors V and eigenvalues t of the other."""
    (values, a), (t, b) = (_spectrum(each) for each in (one, other))
    norm = SAME * t.norm(dim=-1)
    gap = (values.sort(-1).values - t.sort(-1).values).norm(dim=-1)
    if not bool((gap <= norm).all()):  # nearly always, and without a product of matrices
        return False
    u, v = a(), b()
    residual = u @ (values.unsqueeze(-1) * (u.mT @ v)) - v * t.unsqueeze(-2)
    return bool((torch.linalg.matrix_norm(residual) <= norm).all())


def _spectrum(basis: Basis) -> tuple[Tensor, Eigenvectors]:
    """Return the eigenvalues of the factor divided by its trace, and a function that returns its eigenvectors.

    A truncated factor is a multiple of the identity plus a matrix of low rank. These are those of the latter.
    """
    trace = widened(basis.trace)
    trace = trace / basis.spread(trace).sum(-1, keepdim=True).clamp_min(torch.finfo(trace.dtype).tiny)
    columns = basis.columns
    if isinstance(columns, Reflections):
        return trace[..., :-1] - trace[..., -1:], lambda: widened(columns.first())
    assert columns is not None
    return trace, lambda: widened(pieces(columns)[0])

"""Find factors that are multiples of one another: those of layers with the same input.

In a transformer the query, key and value projections read one tensor, and the gate and up projections another. After
one task their input factors are equal up to a positive number, so they have the same eigenvectors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from limpet.precision.basis import Basis
from limpet.precision.block_diagonal import pieces
from limpet.precision.linalg import widened
from limpet.precision.reflections import Reflections

Spectral = tuple[Basis, Tensor]
"""A basis, and its eigenvalues divided by their sum."""

CLOSE, FLOOR = 1e-3, 1e-9
"""Largest difference of two eigenvalues, relative to them and to the largest one, that is attributed to rounding."""

EXACT, ROUNDED = 1e-6, 0.02
"""The same for the product of a factor with the eigenvectors of the other, if they are stored as used, and if not."""


def same_factors(bases: Mapping[str, Basis]) -> dict[str, str]:
    """Find the bases whose partial traces are multiples of each other, by computation and not by name.

    All eigenvalues have to agree, after division by the trace. A few large ones may be most of the norm of a factor, so
    that it would be nearly equal to others without it.

    Args:
        bases: Eigenbases by name. Those that are diagonal or split into blocks, or have no task yet, are skipped.

    Returns:
        The name of the first such basis, for every basis after it.
    """
    found: dict[str, str] = {}
    firsts: dict[object, list[tuple[str, Spectral]]] = defaultdict(list)
    for name, basis in bases.items():
        if basis.vectors is None or basis.diagonal or len(basis.sizes) > 1:
            continue
        others, own = firsts[basis.sizes, basis.trace.shape], (basis, _normalized(basis))
        match = next((other for other, first in others if _same(own, first)), None)
        if match is None:
            others.append((name, own))
        else:
            found[name] = match
    return found


def _normalized(basis: Basis) -> Tensor:
    """Return the stored eigenvalues divided by the trace, in float64."""
    trace = widened(basis.trace)
    return trace / basis.spread(trace).sum(-1, keepdim=True).clamp_min(torch.finfo(trace.dtype).tiny)


def _same(one: Spectral, other: Spectral) -> bool:
    """Whether the eigenvalues agree, and |A V - V diag(t)| is small for A of one factor, and V and t of the other."""
    (basis, values), (first, t) = one, other
    ascending, expected = values.sort(-1).values, t.sort(-1).values
    close = (ascending - expected).abs() <= CLOSE * expected + FLOOR * expected[..., -1:]
    if not bool(close.all()):  # nearly always, and without a product of matrices
        return False
    (values, u), (t, v) = _low_rank(basis, values), _low_rank(first, t)
    residual = u @ (values.unsqueeze(-1) * (u.mT @ v)) - v * t.unsqueeze(-2)
    most = EXACT if basis.rest.dtype is None and first.rest.dtype is None else ROUNDED
    return bool((torch.linalg.matrix_norm(residual) <= most * t.norm(dim=-1)).all())


def _low_rank(basis: Basis, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors; of a truncated factor, without its multiple of the identity."""
    columns = basis.columns
    if isinstance(columns, Reflections):
        return values[..., :-1] - values[..., -1:], widened(columns.first())
    assert columns is not None
    return values, widened(pieces(columns)[0])

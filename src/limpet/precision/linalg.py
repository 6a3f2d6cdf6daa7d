"""Robust numerical routines: symmetric and generalized eigensolvers, conjugate gradients and bisection."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from limpet.errors import LimpetError

NOT_FINITE = "a curvature factor contains inf or nan: check the data and the weights for inf or nan"

SUBSPACE_FROM, SUBSPACE_POWERS = 8, 3
"""The range finder is used for matrices of at least 8 times the rank, with 3 power iterations."""


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, on the CPU if its device does not support float64."""
    if tensor.device.type == "mps":
        tensor = tensor.cpu()
    return tensor.to(torch.float64)


def all_finite(tensor: Tensor) -> bool:
    """Return whether all entries are finite.

    The sum of a tensor, which takes one pass over it and no room, is finite only if all its entries are. It can also
    overflow, so the entries are looked at one by one if it is not.

    Args:
        tensor: The tensor.

    Returns:
        Whether no entry is inf or nan.
    """
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def symmetric_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the eigendecomposition of positive semi-definite matrices.

    Works in float64 on the matrix divided by its largest entry, so badly scaled input loses no digits. LAPACK's
    divide-and-conquer solver can fail to converge; the fallbacks are a copy perturbed by a relative 1e-12 and then the
    singular value decomposition, which is equivalent for a positive semi-definite matrix.

    Args:
        matrix: Matrices (..., n, n).

    Returns:
        The eigenvalues (..., n), clamped at 0, and orthonormal eigenvectors (..., n, n).

    Raises:
        LimpetError: If an entry is inf or nan.
    """
    matrix = widened(matrix)
    if not bool(torch.isfinite(matrix).all()):
        raise LimpetError(NOT_FINITE)
    matrix = (matrix + matrix.mT) / 2
    size = matrix.abs().amax(dim=(-2, -1), keepdim=True)
    matrix = matrix / torch.where(size > 0, size, torch.ones_like(size))
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except RuntimeError:  # includes torch.linalg.LinAlgError
        values, vectors = _fallback_eigen(matrix)
    return values.clamp_min(0) * size.squeeze(-1), vectors


def top_eigen(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Compute the largest eigenvalues of positive semi-definite matrices, and their eigenvectors.

    If the rank is at most an eighth of the size, they are computed on the subspace of a range finder instead of by a
    complete decomposition. The eigenvectors are orthonormal and
    the values are those of the matrix in their span. Where the spectrum falls off slowly, the last of them are mixed
    with what follows: for eigenvalues 1/i they hold at least 99.9 % of what the exact ones hold.

    Args:
        matrix: Matrices (..., n, n).
        rank: Number of eigenvalues.

    Returns:
        The eigenvalues (..., rank), ascending and clamped at 0, and orthonormal eigenvectors (..., n, rank).

    Raises:
        LimpetError: If an entry is inf or nan.
    """
    matrix = widened(matrix)
    n = matrix.shape[-1]
    if rank * SUBSPACE_FROM > n:
        values, vectors = symmetric_eigen(matrix)
        return values[..., -rank:], vectors[..., -rank:].contiguous()
    if not bool(torch.isfinite(matrix).all()):
        raise LimpetError(NOT_FINITE)
    span = leading_range(matrix, rank + max(16, rank // 4), SUBSPACE_POWERS)
    values, vectors = symmetric_eigen(span.mT @ matrix @ span)
    return values[..., -rank:], span @ vectors[..., -rank:]


def leading_range(matrix: Tensor, size: int, powers: int) -> Tensor:
    """Find orthonormal columns that approximately span the leading left singular vectors of matrices.

    A randomized range finder with power iterations and a fixed seed (Halko, Martinsson and Tropp 2011, algorithm 4.4).

    Args:
        matrix: Matrices (..., rows, columns).
        size: Number of columns to find.
        powers: Number of power iterations.

    Returns:
        The columns (..., rows, size).
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(matrix.shape[-1], size, dtype=matrix.dtype, generator=generator).to(matrix.device)
    basis: Tensor = torch.linalg.qr(matrix @ start)[0]
    for _ in range(powers):
        basis = torch.linalg.qr(matrix.mT @ basis)[0]
        basis = torch.linalg.qr(matrix @ basis)[0]
    return basis


def generalised_eigen(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Solve the generalized eigenproblem V^T new V = I and V^T old V = diag(s), in float64.

    With new = L L^T and E the eigenvectors of L^-1 old L^-T, V = L^-T E and V^-T = L E (Golub and Van Loan, section
    8.7).

    Args:
        new: Positive definite matrices (..., n, n).
        old: Positive semi-definite matrices (..., n, n).

    Returns:
        V, V^-T and s.

    Raises:
        LimpetError: If `new` is not positive definite, or an entry is inf or nan.
    """
    new, old = widened(new), widened(old)
    try:
        factor = torch.linalg.cholesky(new)
    except RuntimeError as error:
        raise LimpetError(
            "the damped curvature of the new data is not positive definite: check the new data and the weights for inf "
            "or nan"
        ) from error
    reduced = torch.linalg.solve_triangular(factor, old, upper=False)
    reduced = torch.linalg.solve_triangular(factor, reduced.mT, upper=False)
    values, vectors = symmetric_eigen(reduced)
    return torch.linalg.solve_triangular(factor.mT, vectors, upper=True), factor @ vectors, values


def _fallback_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Compute an eigendecomposition for which `eigh` failed to converge."""
    ramp = torch.linspace(0, 1e-12, matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    try:
        values, vectors = torch.linalg.eigh(matrix + torch.diag_embed(ramp))
    except RuntimeError:
        vectors, values, _ = torch.linalg.svd(matrix)
    return values, vectors


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    target: Tensor,
    precondition: Callable[[Tensor], Tensor],
    *,
    tolerance: float,
    steps: int = 2000,
) -> Tensor:
    """Solve apply(x) = target by preconditioned conjugate gradients.

    If the tolerance is not reached, the last iterate is returned without an error.

    Args:
        apply: Positive definite linear map.
        target: Right-hand side.
        precondition: Approximate inverse of `apply`, which also gives the starting point.
        tolerance: Relative residual at which to stop.
        steps: Maximum number of steps.

    Returns:
        The solution x.
    """
    goal = tolerance * target.norm()
    x = precondition(target)
    residual = target - apply(x)
    z = precondition(residual)
    direction, rho = z, (residual * z).sum()
    for _ in range(steps):
        if residual.norm() <= goal:
            break
        applied = apply(direction)
        rate = rho / (direction * applied).sum()
        x = x + rate * direction
        residual = residual - rate * applied
        z = precondition(residual)
        rho, previous = (residual * z).sum(), rho
        direction = z + (rho / previous) * direction
    return x


def bisected(holds: Callable[[float], bool], *, furthest: float, close: float) -> tuple[float, float]:
    """Find by bisection, on a logarithmic scale, where a condition that holds for small numbers stops holding.

    Args:
        holds: Condition on a number > 0.
        furthest: The search runs from exp(-furthest) to exp(furthest).
        close: The two results differ by at most a factor of exp(close).

    Returns:
        The largest number found for which the condition holds, and the smallest for which it does not; a bound of the
        search if there is none.
    """
    low, high = -furthest, furthest
    while high - low > close:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(math.exp(middle)) else (low, middle)
    return math.exp(low), math.exp(high)


def falls_to(value: Callable[[float], float], level: float, *, furthest: float, close: float) -> tuple[float, float]:
    """Find where a decreasing function > 0 falls to a level, with few evaluations.

    The secant through the last two points, in logarithms of both number and value, proposes the next number; a proposal
    outside of the bracket, or a bracket that did not halve in three steps, is replaced by bisection.

    Args:
        value: Decreasing function of a number > 0.
        level: The level, >= 0.
        furthest: The search runs from exp(-furthest) to exp(furthest).
        close: The number found is within a factor of exp(close) of the crossing, or its value of the level.

    Returns:
        A number, and its value, which is at most the level unless the value at exp(furthest) is above it.
    """
    low, high, goal = -furthest, furthest, math.log(max(level, 1e-300))
    at, slope, last = 0.0, -1.0, None
    found: tuple[float, float] | None = None
    widths: list[float] = []
    while high - low > close:
        if not low < at < high or (len(widths) > 2 and high - low > widths[-3] / 2):
            at = (low + high) / 2
        widths.append(high - low)
        here = value(math.exp(at))
        excess = math.log(max(here, 1e-300)) - goal
        if excess > 0:
            low = at
        else:
            high, found = at, (math.exp(at), here)
            if excess > -close:
                break
        if last is not None and (last[1] - excess) * (at - last[0]) > 0:
            slope = (excess - last[1]) / (at - last[0])
        last = at, excess
        # aims at the middle of the accepted values, so that a small error of the slope costs no further evaluation
        at -= (excess + close / 2) / slope
    return found or (math.exp(high), value(math.exp(high)))

"""Numerics that do not give up: a symmetric eigensolver, conjugate gradients, bisection."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from limpet.errors import LimpetError


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float64, on the CPU where its device has no float64."""
    if tensor.device.type == "mps":
        tensor = tensor.cpu()
    return tensor.to(torch.float64)


def symmetric_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (clamped at 0) and orthonormal eigenvectors of positive semi-definite matrices (..., n, n).

    Works in float64 on the matrix divided by its largest entry, so badly scaled input costs no digits.
    LAPACK's divide-and-conquer solver can fail to converge; then a copy moved by a relative 1e-12 is tried,
    and last the singular value decomposition, which for a positive semi-definite matrix is the same thing.
    """
    matrix = widened(matrix)
    if not bool(torch.isfinite(matrix).all()):
        raise LimpetError("a curvature factor holds inf or nan: look for inf or nan in the data or the weights")
    matrix = (matrix + matrix.mT) / 2
    size = matrix.abs().amax(dim=(-2, -1), keepdim=True)
    matrix = matrix / torch.where(size > 0, size, torch.ones_like(size))
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except RuntimeError:  # torch.linalg.LinAlgError among them
        values, vectors = _stubborn_eigen(matrix)
    return values.clamp_min(0) * size.squeeze(-1), vectors


def generalised_eigen(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """V, V^-T and s with V^T new V = I and V^T old V = diag(s), for positive definite matrices (..., n, n).

    With new = L L^T and E the eigenvectors of L^-1 old L^-T, V = L^-T E and V^-T = L E (Golub and Van Loan, section
    8.7). In float64.
    """
    new, old = widened(new), widened(old)
    try:
        factor = torch.linalg.cholesky(new)
    except RuntimeError as error:
        raise LimpetError(
            "a curvature factor of the new data is singular although it is damped: look for inf or nan in the data"
        ) from error
    reduced = torch.linalg.solve_triangular(factor, old, upper=False)
    reduced = torch.linalg.solve_triangular(factor, reduced.mT, upper=False)
    values, vectors = symmetric_eigen(reduced)
    return torch.linalg.solve_triangular(factor.mT, vectors, upper=True), factor @ vectors, values


def _stubborn_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
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
    steps: int = 200,
) -> Tensor:
    """Solve apply(x) = target for a positive definite `apply`, to a relative residual of `tolerance`."""
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
    """The last number > 0 for which something holds that holds for small ones, and the first for which it does not.

    Between exp(-furthest) and exp(furthest), to a factor of exp(close).
    """
    low, high = -furthest, furthest
    while high - low > close:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(math.exp(middle)) else (low, middle)
    return math.exp(low), math.exp(high)

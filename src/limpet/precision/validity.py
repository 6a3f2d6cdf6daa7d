"""Checks of what holds for every precision that was computed, applied to those that come from a file."""

from __future__ import annotations

import torch
from torch import Tensor

PROBES = 3
"""Number of random vectors on which a basis is tested."""
SYMMETRY = 1e-4
"""Allowed asymmetry, relative to the largest diagonal entry."""
DEFINITENESS = 1e-5
"""Allowed size of negative eigenvalues, relative to the trace. Rounding to float32 causes about 1e-7."""


def check_non_negative(name: str, tensor: Tensor) -> None:
    """Raise ValueError if a tensor has negative entries, or entries that are not numbers.

    Args:
        name: Name of the tensor, for the error message.
        tensor: The tensor.
    """
    if tensor.numel() and not float(tensor.min()) >= 0:
        raise ValueError(f"{name} has negative entries")


def check_orthonormal(name: str, vectors: Tensor, epsilon: float) -> None:
    """Raise ValueError unless the columns of square matrices V are orthonormal.

    Compares V^T V x with x for random vectors x, which takes a few products with vectors instead of one with a matrix.
    The vectors differ from call to call, so that no basis can be made to pass. A deviation of V^T V from the identity
    by s in a single direction is missed with a probability of about (tolerance sqrt(n) / s)^PROBES.

    Args:
        name: Name of the basis, for the error message.
        vectors: Matrices V (..., n, n).
        epsilon: Resolution of the dtype that V is stored in. Rounding to it changes V^T V x by about 0.4 epsilon, at
            most by about epsilon.
    """
    tolerance = 1e-4 + 1.5 * epsilon
    generator = torch.Generator()
    generator.seed()
    x = torch.randn(vectors.shape[-1], PROBES, generator=generator).to(vectors.device, vectors.dtype)
    x = x / x.norm(dim=0)
    deviation = (vectors.mT @ (vectors @ x) - x).norm(dim=-2)
    if vectors.numel() and not float(deviation.max()) <= tolerance:
        raise ValueError(f"the columns of {name} are not orthonormal, so they are not the basis of a curvature")


def check_positive_semidefinite(name: str, matrix: Tensor) -> None:
    """Raise ValueError unless matrices are symmetric and positive semi-definite, up to rounding errors.

    The matrix plus `DEFINITENESS` times its trace must have a Cholesky decomposition.

    Args:
        name: Name of the matrix, for the error message.
        matrix: Matrices (..., n, n).
    """
    if not matrix.numel():
        return
    matrix = matrix.cpu() if matrix.device.type == "mps" else matrix  # which has no Cholesky decomposition
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    check_non_negative(f"the diagonal of {name}", diagonal)
    largest = diagonal.amax(-1)
    asymmetry = (matrix - matrix.mT).abs_().amax((-2, -1))
    if not bool((asymmetry <= SYMMETRY * largest).all()):
        raise ValueError(f"{name} is not symmetric")
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))[..., None, None]
    scaled = matrix / scale
    shift = DEFINITENESS * scaled.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) + torch.finfo(scaled.dtype).tiny
    scaled.diagonal(dim1=-2, dim2=-1).add_(shift)
    if bool(torch.linalg.cholesky_ex(scaled).info.any()):
        raise ValueError(f"{name} has negative eigenvalues")

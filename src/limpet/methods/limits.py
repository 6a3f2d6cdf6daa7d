"""Limits of the penalty: no overflow in a step, and no pull that the curvature of a loaded memory does not explain.

With d = w - mean, the gradient of a block's penalty is L d + linear_term. Every L that was computed is positive
semi-definite, so the first term pulls the weights towards the mean; a proximal step never takes them beyond it. The
linear term and the control variates of a run are gradients of the penalty at earlier weights, so their size is bounded
by that of L:

    |linear_term| <= sum over tasks of |L| |d|,    |control variate| <= |L| |d| + |linear_term|.

States in which they are larger by a factor of `SLACK` with |d| = 1 + |mean| are rejected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from limpet.errors import CurvatureError
from limpet.forgetting.budget import FURTHEST
from limpet.posterior import BlockPosterior
from limpet.protection.bound_block import ProximalState

SLACK = 100.0
LARGEST_MULTIPLIER = math.exp(FURTHEST + 3)
"""Largest multiplier of the Fisher with a budget (`limpet.forgetting.budget`)."""


def finite(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor if all its entries are finite; raise ValueError otherwise."""
    if tensor.numel():
        low, high = (float(one) for one in tensor.aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"{name} contains inf or nan")
    return tensor


def check_strength(held: BlockPosterior, strength: float) -> None:
    """Raise CurvatureError if the penalty of a block overflows after a task was added.

    Args:
        held: The posterior of the block, with the task.
        strength: The strength of the task.
    """
    if not _fits(held.mean.dtype, held.precision.eigenvalue_bound(), _size(held)):
        raise CurvatureError(
            f"the curvature of {held.block.name} times strength {strength:g} is too large for {held.mean.dtype}: "
            "use a smaller strength, or scale inputs and weights down"
        )


def check_block(held: BlockPosterior) -> None:
    """Check a block that comes from a file.

    Args:
        held: The posterior of the block.

    Raises:
        ValueError: If its precision is invalid, its penalty overflows, or its linear term is larger than the curvature
            can explain.
    """
    name = held.block.name
    try:
        held.precision.check()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    stiffness, size = held.precision.eigenvalue_bound(), _size(held)
    if not _fits(held.mean.dtype, stiffness, size):
        raise ValueError(
            f"{name}: the precision or the mean is so large that the penalty overflows in {held.mean.dtype}. Make the "
            "memory again with a smaller strength"
        )
    bound = SLACK * max(held.tasks, 1) * stiffness * size
    if held.linear_term is not None and not float(held.linear_term.norm()) <= bound:
        raise ValueError(f"{name}: the linear term is larger than the curvature of the tasks can explain")


def check_proximal(state: ProximalState, blocks: Iterable[BlockPosterior]) -> None:
    """Check the state of a running protection that comes from a file.

    Args:
        state: The state, with the control variates of this rank.
        blocks: The posteriors of the blocks.

    Raises:
        ValueError: If the multiplier of a budget is out of range, or a control variate or residual is larger than the
            curvature or the weights can explain.
    """
    if state.multiplier is not None and not abs(state.multiplier) <= FURTHEST:
        raise ValueError(f"the multiplier of the budget is out of range: {state.multiplier:g}")
    for held in blocks:
        stiffness, size = held.precision.eigenvalue_bound(), _size(held)
        if state.multiplier is not None:
            fisher = held.precision.fisher().eigenvalue_bound()
            stiffness = max(stiffness, held.precision.prior + LARGEST_MULTIPLIER * fisher)
        constant = 0.0 if held.linear_term is None else float(held.linear_term.norm())
        pull = SLACK * (stiffness * size + constant)
        rounding = SLACK * torch.finfo(torch.bfloat16).eps * size
        limits = (("force", state.control_variate, pull), ("residual", state.residual, rounding))
        for kind, tensors, bound in limits:
            for name in tensors.keys() & set(held.block.parameters):
                if not float(tensors[name].norm()) <= bound:
                    raise ValueError(f"{kind}/{name} is larger than the memory's curvature and mean can explain")


def _fits(dtype: torch.dtype, stiffness: float, size: float) -> bool:
    """Whether 1/2 d^T L d and L d are finite in a dtype, for eigenvalues up to `stiffness` and |d| up to `size`."""
    return stiffness * size**2 <= torch.finfo(dtype).max


def _size(held: BlockPosterior) -> float:
    """A typical size of displacements, 1 + |mean|."""
    return 1 + float(held.mean.norm())

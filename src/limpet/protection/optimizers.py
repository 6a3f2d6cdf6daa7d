"""Support for torch optimizers: which ones are supported, in which mode, and their effective step size."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from limpet.errors import UnsupportedError, positive_whole

MODES = ("auto", "proximal", "gradient", "repair")


def inner_optimizer(optimizer: Any) -> Any:
    """Unwrap an optimizer, since the wrappers of accelerate and Lightning do not run step hooks.

    Args:
        optimizer: A `torch.optim.Optimizer`, possibly wrapped.

    Returns:
        The innermost optimizer.

    Raises:
        UnsupportedError: If it is not a `torch.optim.Optimizer`.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            f"protect needs a torch.optim.Optimizer, not {type(optimizer).__name__}: for other kinds of optimizers, "
            "add memory.penalty() / examples to the loss"
        )
    return optimizer


def refuse_unsupported(optimizer: Any) -> None:
    """Reject optimizers in which step hooks would have no effect, or the wrong one.

    Args:
        optimizer: The optimizer.

    Raises:
        UnsupportedError: If the optimizer is not supported.
    """
    kinds = [f"{base.__module__}.{base.__name__}" for base in type(optimizer).__mro__]
    reasons = {
        "torch.optim.lbfgs.LBFGS": "it evaluates its closure many times in one step, and a penalty that is not part "
        "of the loss would break its curvature estimate: add memory.penalty() / examples to the loss",
        "torch.optim.sparse_adam.SparseAdam": "it accepts only sparse gradients, but the gradient of the penalty is "
        "dense: use Adam, and nn.Embedding with sparse=False",
        "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": "every process steps only its own "
        "shard of the weights: use a plain optimizer with FSDP2 (fully_shard)",
    }
    for kind in kinds:
        if reasons.get(kind):
            raise UnsupportedError(f"{kind.rpartition('.')[2]} is not supported: {reasons[kind]}")
        if kind.startswith("deepspeed."):
            raise UnsupportedError(
                "DeepSpeed steps its own copy of the weights, so changes to the model's weights would be overwritten: "
                "use FSDP2 (fully_shard) with a plain optimizer"
            )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter).__name__ == "FlatParameter" or hasattr(parameter, "_fsdp_flattened"):
                raise UnsupportedError(
                    "FSDP1 is not supported, because it flattens the weights of several layers into one parameter: use "
                    "FSDP2 (fully_shard) instead"
                )


def sgd_step(group: dict[str, Any]) -> float:
    """Compute the effective step size of SGD for a constant gradient.

    The momentum buffer then converges to (1 - dampening) / (1 - momentum) times the gradient.

    Args:
        group: A parameter group of `torch.optim.SGD`.

    Returns:
        lr (1 - dampening) / (1 - momentum).

    Raises:
        UnsupportedError: If momentum or dampening is not in [0, 1).
    """
    momentum, dampening = float(group["momentum"]), float(group["dampening"])
    if not momentum:
        return float(group["lr"])
    if not 0 <= momentum < 1 or not 0 <= dampening < 1:
        raise UnsupportedError(
            f"SGD with momentum {momentum:g} and dampening {dampening:g} has no stationary step size: keep both below "
            "1, or use mode='gradient'"
        )
    return float(group["lr"]) * (1 - dampening) / (1 - momentum)


def mode_for(
    optimizer: Any, mode: str, every: int, adapted: Sequence[str], *, no_repair: str | None, prefer_repair: bool
) -> str:
    """Choose how an optimizer is protected.

    Args:
        optimizer: The optimizer.
        mode: "proximal", "gradient", "repair", or "auto" to choose by the kind of optimizer.
        every: Apply the penalty every so many steps.
        adapted: Names of the blocks that train through low-rank adapters.
        no_repair: Why the memory cannot repair the model; None if it can.
        prefer_repair: Whether "auto" chooses repair over gradient where both are possible.

    Returns:
        "proximal", "gradient" or "repair".

    Raises:
        ValueError: If `mode` is unknown or `every` is not a positive integer.
        UnsupportedError: If proximal or repair mode was requested and is not possible.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    positive_whole("every", every)
    # a subclass that overrides step (LARS, sign descent) has a different step size
    sgd = isinstance(optimizer, torch.optim.SGD) and _written(type(optimizer)) is _written(torch.optim.SGD)
    if mode == "auto":
        if sgd and not adapted:
            return "proximal"
        return "repair" if prefer_repair and no_repair is None else "gradient"
    if mode == "repair" and no_repair is not None:
        raise UnsupportedError(f"mode='repair' is not possible: {no_repair}")
    if mode == "proximal" and adapted:
        raise UnsupportedError(
            f"proximal mode has no closed form for blocks that train through low-rank adapters ({few(adapted)}): use "
            "mode='gradient', or leave out mode="
        )
    if mode == "proximal" and not sgd:
        raise UnsupportedError(
            f"proximal mode needs torch.optim.SGD, which has a single step size, but {type(optimizer).__name__} scales "
            "every weight differently: use mode='gradient'"
        )
    return mode


def _written(kind: type[torch.optim.Optimizer]) -> Any:
    """Return the step method without the wrappers that torch adds."""
    return inspect.unwrap(kind.step)


def penalty_weight(examples: int, reduction: str, batch_size: int | None) -> float:
    """Compute the weight of the penalty relative to the user's loss.

    Args:
        examples: Number of examples of the task.
        reduction: How the loss of a batch is reduced, "mean" or "sum".
        batch_size: Number of examples that the loss of one step sums over; required for "sum".

    Returns:
        1 / examples for "mean", batch_size / examples for "sum".

    Raises:
        ValueError: If `reduction` is unknown, or `batch_size` is missing or not a positive integer.
    """
    examples = positive_whole("examples, the number of examples of the task,", examples)
    if reduction == "mean":
        return 1 / examples
    if reduction != "sum":
        raise ValueError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
    if batch_size is None:
        raise ValueError(
            "reduction='sum' needs batch_size=, the number of examples that the loss of one step sums over"
        )
    return positive_whole("batch_size", batch_size) / examples


def few(names: Sequence[str]) -> str:
    """Join the first three names and the number of the remaining ones."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

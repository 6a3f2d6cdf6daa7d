"""What has to be known of other people's optimizers: which can be protected, how, and how long their steps are."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from limpet.errors import UnsupportedError, positive_whole

MODES = ("auto", "proximal", "gradient")


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer whose step really runs: accelerate and Lightning wrap it, and their wrappers run no hooks."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            f"protect needs a torch.optim.Optimizer, not {type(optimizer).__name__}: with another kind of optimizer "
            "add memory.penalty() / examples to the loss"
        )
    return optimizer


def refuse_unsupported(optimizer: Any) -> None:
    """Say no to optimizers in which a hook would do nothing, or the wrong thing."""
    kinds = [f"{base.__module__}.{base.__name__}" for base in type(optimizer).__mro__]
    reasons = {
        "torch.optim.lbfgs.LBFGS": "LBFGS searches along a line with many evaluations of its closure in one step, and "
        "a penalty that it does not know of would break its curvature: add memory.penalty() / examples to the loss",
        "torch.optim.sparse_adam.SparseAdam": "SparseAdam takes sparse gradients only, and the penalty's is dense: use "
        "Adam, or add memory.penalty() / examples to the loss",
        "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": "every process steps only its own "
        "share of the weights: use a plain optimizer with FSDP2 (fully_shard)",
    }
    for kind in kinds:
        if reasons.get(kind):
            raise UnsupportedError(f"{kind.rpartition('.')[2]} cannot be protected: {reasons[kind]}")
        if kind.startswith("deepspeed."):
            raise UnsupportedError(
                "DeepSpeed keeps the weights that it steps to itself, so nothing done to the model's own would last: "
                "use FSDP2 (fully_shard) with a plain optimizer"
            )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter).__name__ == "FlatParameter" or hasattr(parameter, "_fsdp_flattened"):
                raise UnsupportedError(
                    "FSDP1 flattens the weights of several layers into one: use FSDP2 (fully_shard) instead"
                )


def sgd_step(group: dict[str, Any]) -> float:
    """The step size of SGD at rest: the momentum buffer there is (1 - dampening) / (1 - momentum) gradients."""
    momentum, dampening = float(group["momentum"]), float(group["dampening"])
    if not momentum:
        return float(group["lr"])
    if not 0 <= momentum < 1 or not 0 <= dampening < 1:
        raise UnsupportedError(
            f"SGD with momentum {momentum:g} and dampening {dampening:g} has no step size at rest: keep both below 1, "
            "or use mode='gradient'"
        )
    return float(group["lr"]) * (1 - dampening) / (1 - momentum)


def mode_for(optimizer: Any, mode: str, every: int, adapted: Sequence[str]) -> str:
    """How the optimizer is protected: as was asked, or by its kind; `adapted` names blocks with adapters."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    positive_whole("every", every)
    # a subclass with a step of its own (LARS, sign descent) has another step size
    sgd = isinstance(optimizer, torch.optim.SGD) and _written(type(optimizer)) is _written(torch.optim.SGD)
    if mode == "auto":
        return "proximal" if sgd and not adapted else "gradient"
    if mode == "proximal" and adapted:
        raise UnsupportedError(
            f"{few(adapted)} train through low-rank adapters, in which no proximal map is closed: leave out mode=, "
            "and the gradient of the penalty joins every step"
        )
    if mode == "proximal" and not sgd:
        raise UnsupportedError(
            f"proximal mode needs torch.optim.SGD, whose step has one size; {type(optimizer).__name__} scales every "
            "weight by itself: use mode='gradient'"
        )
    return mode


def _written(kind: type[torch.optim.Optimizer]) -> Any:
    """The step method as it is written, under what torch wraps it in."""
    return inspect.unwrap(kind.step)


def penalty_weight(examples: int, reduction: str, batch_size: int | None) -> float:
    """What the penalty is multiplied by, beside the user's loss."""
    examples = positive_whole("examples, the number of examples of the task,", examples)
    if reduction == "mean":
        return 1 / examples
    if reduction != "sum":
        raise ValueError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
    if batch_size is None:
        raise ValueError("reduction='sum' needs batch_size=, the number of examples that a step's loss sums over")
    return positive_whole("batch_size", batch_size) / examples


def few(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

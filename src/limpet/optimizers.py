"""What has to be known of other people's optimizers."""

from __future__ import annotations

from typing import Any

import torch

from limpet.errors import UnsupportedError


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

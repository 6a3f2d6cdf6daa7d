"""Compensated rounding of half-precision weights, so that changes smaller than their resolution accumulate.

A bfloat16 weight has 8 significant bits: adding a change below 1/512 of it changes nothing. A proximal step changes
most weights by less than that, in every step, so the weights would never move. As in Kahan summation, the part that is
rounded away is kept in float32,

    exact = w + r,    w = the half-precision weight, r = the residual,

and proximal steps act on the exact weight: exact -> w = round(exact), r = exact - w. The step of SGD itself would be
rounded in the same way, and more of it than of the penalty, so its update is recomputed in float32 from the gradient
and the momentum (`sgd_update`) and replaces the rounded one wherever the two agree within the resolution of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from limpet.distributed import is_sharded, local
from limpet.protection.bound_block import Group


class Rounding:
    """The exact values of half-precision weights. Weights in float32 or wider are passed through.

    Its methods are to be called under `torch.no_grad()`.

    Args:
        residual: The residuals by parameter name, updated in place.
    """

    def __init__(self, residual: dict[str, Tensor]) -> None:
        self._residual = residual
        self._tracked: dict[str, nn.Parameter] = {}
        self._before: dict[str, Tensor] = {}  # weights before the step
        self._exact: dict[str, Tensor] = {}  # exact weights after the step, until `settle`

    def track(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep residuals for those of the parameters that are in half precision and not sharded."""
        self._tracked = {name: p for name, p in parameters.items() if is_half(p) and not is_sharded(p)}

    def before_step(self) -> None:
        """Remember the weights before a step."""
        self._before = {name: p.clone() for name, p in self._tracked.items() if p.grad is not None}

    def after_step(self, state: Mapping[Any, Any], group_of: Mapping[nn.Parameter, Group]) -> None:
        """Compute the exact weights after a step of SGD.

        Args:
            state: The state of the optimizer, with the momentum.
            group_of: The parameter group of every parameter.
        """
        for name, before in self._before.items():
            parameter = self._tracked[name]
            start, rounded = before.float(), parameter.float()
            exact = start + sgd_update(parameter, start, state.get(parameter, {}), group_of[parameter])
            # where the optimizer did something else, its result stands
            resolution = 2 * torch.finfo(parameter.dtype).eps * torch.maximum(start.abs(), rounded.abs())
            exact = torch.where((exact - rounded).abs() <= resolution, exact, rounded)
            self._exact[name] = exact + self._residual[name] if name in self._residual else exact
        self._before = {}

    def reopen(self) -> None:
        """Compute the exact weights between two steps."""
        known = self._residual
        self._exact = {name: p.detach().float() + known[name] for name, p in self._tracked.items() if name in known}

    def weight(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Return the exact weight, or this rank's shard of a weight that has no residual; to be changed in place."""
        found = self._exact.get(name)
        return local(parameter) if found is None else found

    def write(self, name: str, parameter: nn.Parameter, weight: Tensor) -> None:
        """Set a parameter to a new value, and keep what is rounded away."""
        if name not in self._tracked:
            local(parameter).copy_(local(weight))
            return
        local(parameter).copy_(weight)
        self._residual[name] = weight.float() - parameter.float()
        self._exact.pop(name, None)

    def settle(self) -> None:
        """Write the exact weights that are still open to their parameters."""
        for name, exact in list(self._exact.items()):
            self.write(name, self._tracked[name], exact)


def is_half(tensor: Tensor) -> bool:
    """Whether a tensor is of a floating type narrower than float32."""
    return tensor.is_floating_point() and torch.finfo(tensor.dtype).bits < 32


def sgd_update(parameter: nn.Parameter, start: Tensor, state: Mapping[str, Any], group: Group) -> Tensor:
    """Compute the last update of `torch.optim.SGD` in float32.

    Args:
        parameter: The parameter, with its gradient.
        start: The weight before the step, in float32.
        state: The state of the parameter after the step.
        group: Its parameter group.

    Returns:
        -lr (gradient + weight_decay start), with the gradient replaced by the momentum buffer where there is one, or
        with Nesterov momentum added to it.
    """
    assert parameter.grad is not None
    gradient = parameter.grad.to_dense().float()
    gradient = -gradient if group.get("maximize") else gradient
    if group.get("weight_decay"):
        gradient = gradient + group["weight_decay"] * start
    momentum = state.get("momentum_buffer")
    if momentum is not None:
        gradient = gradient + group["momentum"] * momentum.float() if group["nesterov"] else momentum.float()
    return -float(group["lr"]) * gradient

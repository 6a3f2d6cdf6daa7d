"""Proximal mode: a proximal step of the penalty after the steps of SGD."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from limpet.distributed import local
from limpet.errors import UnsupportedError
from limpet.model import Block
from limpet.protection.binding import Binding
from limpet.protection.bound_block import ProximalUpdate, SteppedBlock
from limpet.protection.optimizers import sgd_step
from limpet.protection.penalty_step import PenaltyStep


class ProximalStep(PenaltyStep):
    """Takes the proximal step after a step of SGD; with every=k after every k of them, with ProxSkip's control variate.

    Args:
        *args: As for `PenaltyStep`.
        optimizer: The optimizer, whose state has the momentum.
        **options: As for `PenaltyStep`.
    """

    def __init__(self, *args: Any, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        super().__init__(*args, **options)
        self._optimizer = optimizer
        self._sizes: list[float] = []  # step size of every block in this step
        self._open = 0  # steps since the last proximal step

    def bind(self, binding: Binding) -> None:
        """Use these blocks and parameters from now on; raise an error if a block has no single step size."""
        super().bind(binding)
        for bound in binding.reached:
            self._common_step(bound)
        named = {name: binding.parameters[name] for one in binding.reached for name in one.block.parameters}
        self.rounding.track(named)

    def before_step(self, scale: Tensor | None) -> None:
        """Compute the step sizes, before the step so that an error leaves the weights unchanged."""
        self._sizes = [self._step_size(bound) for bound in self.binding.reached]
        self.rounding.before_step()

    def restore(self) -> None:
        """Do nothing: gradients are not changed in this mode."""

    def after_step(self) -> None:
        """Add the control variates after a step and, every so many steps, take the proximal step."""
        state = self.state
        state.count += 1
        self._open += any(self._sizes)
        self.rounding.after_step(self._optimizer.state, self.binding.group_of)
        moves: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for bound, step in zip(self.binding.reached, self._sizes, strict=True):
            if not step:
                continue
            block = bound.block
            state.pending[block.name] = state.pending.get(block.name, 0.0) + step
            if self.every > 1 and block.parameters[0] in state.control_variate:
                weights, control_variates = moves.setdefault(step, ([], []))
                weights += map(self.rounding.weight, block.parameters, bound.parameters)
                control_variates += (local(state.control_variate[parameter]) for parameter in block.parameters)
        for step, (weights, control_variates) in moves.items():
            torch._foreach_add_(weights, control_variates, alpha=step)
        if state.count % self.every == 0:
            self._take_proximal_step()
        self.rounding.settle()

    @property
    def unfinished(self) -> bool:
        """Whether there were steps since the last proximal step."""
        return bool(self.state.pending)

    @torch.no_grad()
    def finish(self) -> None:
        """Take the proximal step for the steps since the last one."""
        self.rounding.reopen()
        self._take_proximal_step()
        self.rounding.settle()

    def _take_proximal_step(self) -> None:
        """Take the proximal step for all optimizer steps since the last one."""
        pending, bound = self.state.pending, self.binding
        totals = {one.block.name: s for one in bound.reached if (s := pending.pop(one.block.name, 0.0))}
        steps = {
            name: totals[b.block.name] for b in bound.reached if b.block.name in totals for name in b.block.parameters
        }
        weights = {name: self.rounding.weight(name, bound.parameters[name]) for name in steps}
        control_variates = self.state.control_variate if self.every > 1 else {}
        whole = bound.exchange.bring(_WithoutPenalty(weights, control_variates, steps))
        moved = [one for one in bound.bound if one.block.name in totals]
        updates = [
            ProximalUpdate(b, totals[b.block.name], b.held.displacement(whole), totals[b.block.name] * self.weight)
            for b in moved
        ]
        self._apply_updates(updates, list(steps))
        self.penalised, self._open = self.penalised + self._open, 0

    def _step_size(self, bound: SteppedBlock) -> float:
        """Compute the step size s of a block in this step; 0 if the block has no gradient."""
        known = [parameter.grad is not None for parameter in bound.parameters]
        if not any(known):
            return 0.0
        if not all(known):
            raise _unequal_steps(bound.block)
        return self._common_step(bound)

    def _common_step(self, bound: SteppedBlock) -> float:
        """Return the step size shared by all parameters of a block; raise an error if they differ."""
        sizes = {None if group is None else sgd_step(group) for group in bound.groups}
        size = sizes.pop()
        if sizes or size is None:
            raise _unequal_steps(bound.block)
        return size


class _WithoutPenalty(Mapping[str, Tensor]):
    """The weights without the control variates added since the last proximal step: w - S h."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        control_variates: Mapping[str, Tensor],
        steps: Mapping[str, float],  # S, by parameter
    ) -> None:
        self._weights, self._control_variates, self._steps = weights, control_variates, steps

    def __getitem__(self, name: str) -> Tensor:
        weight, step = self._weights[name], self._steps[name]
        if name not in self._control_variates:
            return weight
        return torch.sub(weight, local(self._control_variates[name]), alpha=step)

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


def _unequal_steps(block: Block) -> UnsupportedError:
    """Create the error for a block whose parameters have different step sizes, or only some of them a gradient."""
    return UnsupportedError(
        f"proximal mode steps all parameters of {block.name} as one block ({', '.join(block.parameters)}), but their "
        "step sizes differ or some have no gradient: give all of them the same lr and momentum and a gradient, or use "
        "mode='gradient'"
    )

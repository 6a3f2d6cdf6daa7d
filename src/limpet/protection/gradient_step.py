"""Gradient mode: the gradient of the penalty is added to that of the loss before a step, and removed after it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from limpet.posterior.lora import scale_down
from limpet.protection.added_gradients import AddedGradients
from limpet.protection.bound_block import BoundBlock, Part, ProximalUpdate, SteppedBlock
from limpet.protection.penalty_step import PenaltyStep


class GradientStep(PenaltyStep):
    """Adds the gradient of the penalty to the gradient of the loss, with every=k recomputed every k steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._added = AddedGradients()
        self._applied = False  # whether the gradient of the penalty was added in this step

    def before_step(self, scale: Tensor | None) -> None:
        """Replace every gradient by its sum with the weighted gradient of the penalty."""
        for parameter, group, part in self._penalty_parts():
            weight = -self.weight if group.get("maximize") else self.weight
            self._added.add(parameter, part, weight=weight, scale=scale)
        self._applied = len(self._added) > 0

    def after_step(self) -> None:
        """Count the step."""
        self.penalised += self._applied

    @property
    def unfinished(self) -> bool:
        """Whether a budget is to be enforced."""
        return self.budget is not None

    def _penalty_parts(self) -> Iterator[Part]:
        """Yield the gradient of the penalty for every parameter, not yet divided by the number of examples."""
        if self.every == 1:
            yield from self._fresh_parts()
            return
        state, parameters, group_of = self.state, self.binding.parameters, self.binding.group_of
        names = {parameter: name for name, parameter in parameters.items()}
        if state.count % self.every == 0:
            state.control_variate = {}
        # blocks without a gradient at the last update have no stored penalty gradient yet
        for p, _, part in self._fresh_parts(without={parameters[name] for name in state.control_variate}):
            state.control_variate[names[p]] = part.to(p.device, torch.promote_types(p.dtype, torch.float32), copy=True)
        state.count += 1
        for name, part in state.control_variate.items():
            if parameters[name] in group_of:
                yield parameters[name], group_of[parameters[name]], part

    def _fresh_parts(self, without: Collection[nn.Parameter] = ()) -> Iterator[Part]:
        """Recompute the gradient of the penalty, except for blocks with a parameter in `without`."""
        if self.budget is None:
            reached = [one for one in self.binding.reached if one.stepped and one.targets.isdisjoint(without)]
            yield from self._gradients(reached)
            return
        stepped = [bound for bound in self.binding.bound if bound.stepped and bound.targets.isdisjoint(without)]
        measured = [bound.measured() for bound in stepped]
        if without:
            for _, parts in measured:
                yield from parts(self.factor)
            return
        rise = sum(found for found, _ in measured) + self._rise_of_others(stepped)
        self.factor = self.budget.follow(rise / self.old_examples)
        self.state.multiplier = self.budget.state
        self.state.count += self.every == 1
        for _, parts in measured:
            yield from parts(self.factor)

    def _gradients(self, reached: Sequence[SteppedBlock]) -> Iterator[Part]:
        """Yield the gradient of the penalty of these blocks, for every parameter that the optimizer steps."""
        plain = []
        for one in reached:
            if isinstance(one, BoundBlock) and one.lora is not None:
                yield from one.penalty_parts()
            else:
                plain.append(one.block)
        if not plain:
            return
        blocks, names = {block.name for block in plain}, [name for block in plain for name in block.parameters]
        parameters, group_of, exchange = self.binding.parameters, self.binding.group_of, self.binding.exchange
        whole = exchange.bring({name: parameters[name] for name in names})
        found = (
            (name, (part,))
            for bound in self.binding.bound
            if bound.block.name in blocks
            for name, part in bound.block.scatter(bound.gradient(bound.held.displacement(whole))).items()
        )
        for name, (part,) in exchange.give(found, names, 1):
            if parameters[name] in group_of:
                yield parameters[name], group_of[parameters[name]], part

    def restore(self) -> None:
        """Restore the user's gradients, unless something else has replaced them."""
        self._added.restore()

    @torch.no_grad()
    def finish(self) -> None:
        """With a budget, take one proximal step to end within it.

        Its step size is small, so that the prior, which is part of it, has almost no effect. There is no closed form in
        the factors of adapters, so these are scaled down, all by the same factor.
        """
        if self.budget is None:
            return
        whole = [bound for bound in self.binding.bound if bound.lora is None]
        partial = any(group is None for bound in whole for group in bound.groups)
        for _ in range(20 if partial else 1):  # parameters that are not stepped stay, so one solution is not enough
            updates = [ProximalUpdate(b, 1.0, b.held.displacement(b.weights()), 1e-3 * self.weight) for b in whole]
            self._apply_updates(updates, [name for b in whole for name in b.block.parameters])
            if not self.factor:
                break
        lora = [bound.lora for bound in self.binding.bound if bound.lora is not None]
        if lora:
            others = self._rise_of_others([bound for bound in self.binding.bound if bound.lora is not None])
            left = max(self.budget.quadratic * self.old_examples - others, 0.0)
            scale_down(lora, left)

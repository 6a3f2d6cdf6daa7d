"""Gradient mode: the gradient of the penalty is added to that of the loss before a step, and removed after it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from limpet.model.adapters import adapted_parameters
from limpet.protection.added_gradients import AddedGradients
from limpet.protection.binding import Binding
from limpet.protection.bound_block import BoundBlock, Part, ProximalUpdate, SteppedBlock
from limpet.protection.penalty_step import PenaltyStep


class GradientStep(PenaltyStep):
    """Adds the gradient of the penalty to the gradient of the loss, with every=k recomputed every k steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._added = AddedGradients()
        self._adapted: set[str] = set()  # blocks with active adapters, trained or not
        self._untrained: float | None = None  # 1/2 d^T F d of the blocks that the optimizer does not step
        self._applied = False  # whether the gradient of the penalty was added in this step

    def bind(self, binding: Binding) -> None:
        """Use these blocks and parameters from now on."""
        super().bind(binding)
        self._adapted, self._untrained = set(self.posterior.adapted_blocks()), None

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
        reached = [one for one in self.binding.reached if one.stepped and one.targets.isdisjoint(without)]
        stepped, whole = self._gathered(reached)
        exchange = self.binding.exchange
        measured = [bound.measured(whole) for bound in stepped]
        if not without:
            rise = exchange.total(sum(found for found, _ in measured)) + self._rise_of_the_rest(reached, stepped)
            self.factor = self.budget.follow(rise / self.old_examples)
            self.state.multiplier = self.budget.state
            self.state.count += self.every == 1
        yield from exchange.scatter((part for _, parts in measured for part in parts(self.factor)), reached)

    def _rise_of_the_rest(self, reached: Sequence[SteppedBlock], stepped: Sequence[BoundBlock]) -> float:
        """Compute 1/2 d^T F d of all other blocks, in a sharded model only once, because that gathers their weights."""
        if self.posterior.sharding is None or len(reached) < len(self.binding.reached):
            return self._rise_of_others(stepped)
        if self._untrained is None:
            self._untrained = self._rise_of_others(stepped)
        return self._untrained

    def _gathered(self, reached: Sequence[SteppedBlock]) -> tuple[list[BoundBlock], Mapping[str, Tensor]]:
        """Return those of these blocks that this rank owns, with their current weights, whole."""
        names, exchange = {one.block.name for one in reached}, self.binding.exchange
        exchange.refresh(names)
        plain = [name for one in reached if one.block.name not in self._adapted for name in one.block.parameters]
        whole = exchange.bring({name: self.binding.parameters[name] for name in plain})
        return [bound for bound in self.binding.bound if bound.block.name in names], whole

    def _gradients(self, reached: Sequence[SteppedBlock]) -> Iterable[Part]:
        """Return the gradient of the penalty of these blocks, for every parameter that the optimizer steps."""
        stepped, whole = self._gathered(reached)
        return self.binding.exchange.scatter((part for one in stepped for part in one.penalty_parts(whole)), reached)

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
        plain = [one for one in self.binding.reached if one.block.name not in self._adapted]
        partial = any(group is None for one in plain for group in one.groups)
        for _ in range(20 if partial else 1):  # parameters that are not stepped stay, so one solution is not enough
            stepped, whole = self._gathered(plain)
            updates = [ProximalUpdate(b, 1.0, b.held.displacement(whole), 1e-3 * self.weight) for b in stepped]
            self._apply_updates(updates, [name for one in plain for name in one.block.parameters])
            if not self.factor:
                break
        self._scale_adapters([one for one in self.binding.reached if one.block.name in self._adapted])

    def _scale_adapters(self, reached: Sequence[SteppedBlock]) -> None:
        """Scale the adapters down, all by the same factor, until the forecast is within the budget.

        The increase is quadratic in the factor if the whole displacement is due to the adapters; otherwise it shrinks
        more slowly, and the scaling is repeated.
        """
        if not reached or self.budget is None:
            return
        names, exchange = {one.block.name for one in reached}, self.binding.exchange
        stepped = [bound for bound in self.binding.bound if bound.block.name in names]
        most = max(self.budget.quadratic * self.old_examples - self._rise_of_others(stepped), 0.0)
        weights = {weight for one in reached for weight in one.parameters}
        adapted = adapted_parameters(self.posterior.model).items()
        trained = [one.b for weight, some in adapted if weight in weights for one in some if one.b.requires_grad]
        for _ in range(20):
            exchange.refresh(names)
            rise = exchange.total(sum(one.lora.rise() for one in stepped if one.lora is not None))
            if rise <= most * (1 + 1e-6):
                return
            for b in trained:
                b.mul_(math.sqrt(most / rise))

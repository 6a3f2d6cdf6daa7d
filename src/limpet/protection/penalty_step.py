"""What the two modes of protection have in common: the penalty that they apply, and its budget.

Both apply the same objective, mean loss + penalty(w) / N. Without a budget, with d = w - mean,

    penalty(w) = 1/2 d^T (prior + sum of strength_t F_t) d + linear_term^T d,

where only a method with one mean per task has a linear term (`limpet.PerTaskLaplace`). With a budget,

    penalty(w) = 1/2 d^T (prior + m F) d,    F = sum of F_t,

which is the Lagrangian of the constraint that the forecast, a function of 1/2 d^T F d, stays within the budget
(`limpet.forgetting.budget`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from limpet.distributed import is_sharded
from limpet.forgetting.budget import CLOSE, Budget
from limpet.posterior import Posterior
from limpet.protection.binding import Binding
from limpet.protection.bound_block import BoundBlock, ProximalState, ProximalUpdate
from limpet.protection.rounding import Rounding


class PenaltyStep(ABC):
    """Applies the penalty in every step of an optimizer.

    Args:
        posterior: The posterior of the memory.
        weight: Weight of the penalty relative to the loss, 1 / N for a mean.
        state: State carried from step to step.
        budget: Multiplier of the penalty that keeps the forecast within a budget; None to use the strengths.
        old_examples: Number of examples that the memory has consolidated.

    Attributes:
        binding: The blocks and parameters that the optimizer steps.
        factor: The last multiplier m of the Fisher; 1 without a budget.
        penalised: Number of steps to which the penalty has been applied.
    """

    def __init__(
        self,
        posterior: Posterior,
        *,
        weight: float,
        state: ProximalState,
        budget: Budget | None = None,
        old_examples: int = 0,
    ) -> None:
        self.posterior, self.weight, self.state = posterior, weight, state
        self.budget, self.old_examples = budget, old_examples
        self.binding = Binding()
        self.rounding = Rounding(state.residual)
        self.factor = 1.0
        self.penalised = 0

    @property
    def every(self) -> int:
        """The period of the penalty, in steps."""
        return self.state.every

    def bind(self, binding: Binding) -> None:
        """Use these blocks and parameters from now on."""
        self.binding = binding

    @abstractmethod
    def before_step(self, scale: Tensor | None) -> None:
        """Prepare a step, with the gradients of the loss in place.

        Args:
            scale: The factor by which the optimizer divides the gradients inside its step; None for 1.
        """

    @abstractmethod
    def restore(self) -> None:
        """Restore the user's gradients, whether or not the step was completed."""

    @abstractmethod
    def after_step(self) -> None:
        """Handle the weights after a completed step."""

    @property
    def unfinished(self) -> bool:
        """Whether `finish` would change weights."""
        return False

    @abstractmethod
    def finish(self) -> None:
        """Change the weights as necessary at the end of training."""

    @torch.no_grad()
    def value(self) -> float:
        """Compute the penalty at the current weights, as it is added to the loss. A collective if sharded."""
        if self.budget is None:
            return float(self.posterior.penalty()) * self.weight
        value, weights, own = self.factor * sum(self.posterior.rises().values()), self.posterior.weights(), 0.0
        for held in self.posterior.held.values():
            if held.precision.prior:
                own += held.precision.prior / 2 * float(held.displacement(weights).square().sum())
        return (value + self.binding.exchange.total(own)) * self.weight

    @property
    def over_budget(self) -> bool:
        """Whether the forecast at the current weights exceeds the budget, by more than rounding errors."""
        if self.budget is None:
            return False
        return self._rise_of_others(()) > (1 + CLOSE) * self.budget.quadratic * self.old_examples

    def _rise_of_others(self, bounds: Sequence[BoundBlock]) -> float:
        """Compute 1/2 d^T F d of all other blocks."""
        return sum(self.posterior.rises(without={bound.held.block.name for bound in bounds}).values())

    def _apply_updates(self, updates: Sequence[ProximalUpdate], names: Sequence[str]) -> None:
        """Apply the proximal updates of this rank's blocks, and write the results of all ranks to the parameters."""
        factor = None
        if self.budget is not None and names:
            others, total = self._rise_of_others([update.bound for update in updates]), self.binding.exchange.total
            factor = self.budget.solve(lambda m: (total(sum(u.rise(m) for u in updates)) + others) / self.old_examples)
            self.factor, self.state.multiplier = factor, self.budget.state
        found = (pair for update in updates for pair in self._updated(update, factor))
        bound = self.binding
        for name, (weight, *control_variate) in bound.exchange.give(found, names, 1 if self.every == 1 else 2):
            parameter = bound.parameters[name]
            if parameter in bound.group_of:
                self.rounding.write(name, parameter, weight)
            for h in control_variate:
                self.state.control_variate[name] = h if is_sharded(h) else h.to(parameter, copy=True).contiguous()

    def _updated(self, update: ProximalUpdate, factor: float | None) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Yield the parameters of a block after its proximal step and, if every > 1, their control variates."""
        held, pulled = update.bound.held, update.pulled(factor)
        columns = [held.block.split(held.mean + pulled)]
        if self.every > 1:
            columns.append(held.block.split(pulled.sub_(update.d).div_(update.total)))
        for name, *tensors in zip(held.block.parameters, *columns, strict=True):
            yield name, tuple(tensors)

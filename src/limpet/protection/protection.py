"""Protect a memory during training: add the penalty to an optimizer through its step hooks.

The objective is mean loss + (1 / N) penalty(w). Two modes apply the penalty in every step:

- gradient: before the step, grad += gradient of the penalty / N. Works with all supported optimizers, but SGD diverges
  if the penalty is stiff. With every=k the gradient of the penalty is recomputed every k steps and reused in between,
  which has the same fixed point at a k-th of the cost.
- proximal: after the step to v, w <- argmin 1/(2 s) ||w - v||^2 + penalty(w) / N, which is stable for any penalty. For
  SGD, whose effective step size is s = lr (1 - dampening) / (1 - momentum), with or without Nesterov momentum. With
  every=k the proximal step is taken every k steps with the control variate of ProxSkip (Mishchenko et al. 2022), which
  preserves the fixed point: with h the control variate, an estimate of -gradient of the penalty / N, after every step
  w += s h; every k steps, with S the sum of the s since the last proximal step, z = w - S h, w = prox_S(z),
  h = (w - z) / S.

The third mode, repair, leaves the steps alone and repairs the model when training ends
(`limpet.protection.repair_step`).

With a budget instead of a strength, the Fisher is multiplied by a Lagrange multiplier (`limpet.forgetting.budget`).

Several memories can protect one optimizer, but only one of them in proximal mode: the gradients of penalties add up,
while two proximal steps in sequence are not the proximal step of the sum of two penalties. The same holds for repairs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from limpet.distributed import current, is_sharded, together
from limpet.errors import LimpetError, LimpetWarning, UnsupportedError, warn
from limpet.forgetting.budget import Budget
from limpet.forgetting.displacement import displacements_from_memory
from limpet.forgetting.forecast import Forecast
from limpet.forgetting.repair import Repair
from limpet.model import full_precision
from limpet.posterior import Posterior
from limpet.protection.added_gradients import loss_gradient
from limpet.protection.binding import Binding, bind, parameter_groups
from limpet.protection.bound_block import ProximalState
from limpet.protection.gradient_step import GradientStep
from limpet.protection.optimizers import inner_optimizer, mode_for, penalty_weight
from limpet.protection.penalty_step import PenaltyStep
from limpet.protection.proximal_step import ProximalStep
from limpet.protection.repair_step import Repairer, RepairStep
from limpet.protection.rounding import is_half
from limpet.protection.step_hooks import StepHooks, skips_step
from limpet.protection.summary import ProtectionSummary, not_protected
from limpet.protection.weight_watch import WeightWatch


class StepObserver(Protocol):
    """Interface for observing the gradients of the loss, before the penalty is added, and the steps."""

    def before_step(self, gradients: dict[str, Tensor]) -> None:
        """Handle the gradients of the loss, before the weights change.

        Args:
            gradients: The gradients, by parameter name.
        """

    def after_step(self) -> None:
        """Handle the weights after the step, penalty included."""


class Protection:
    """Context manager that adds the penalty of a memory to every step of an optimizer.

    Created by `memory.protect`: `with memory.protect(optimizer, examples=N): ...`.

    Args:
        posterior: The posterior of the memory.
        optimizer: The optimizer that trains the model, possibly wrapped by accelerate or Lightning.
        examples: Number of examples N of the new task.
        forecast: Computes the forecast at the current weights, for the summary.
        every: Recompute the gradient of the penalty, or take the proximal step, every so many steps.
        mode: "gradient", "proximal", "repair", or "auto": proximal for plain SGD without adapters, otherwise gradient
            or repair.
        reduction: How the loss of a batch is reduced, "mean" or "sum".
        batch_size: Number of examples that the loss of one step sums over; required for reduction="sum".
        state: State of an interrupted protection to resume from. Ignored if its `every` or mode differs.
        budget: Multiplier of the penalty that keeps the forecast within a budget; None to use the strengths.
        old_examples: Number of examples that the memory has consolidated.
        repairer: Repairs the model, or why the memory cannot.
        batches: The new data, for mode "repair"; None to record a sample of the inputs.
        prefer_repair: Whether "auto" chooses repair over gradient where both are possible.
        observer: Called before every step with the gradients of the loss, and again after the step.
        on_enter: Called with this object when the context is entered.
        on_exit: Called when the context is left, with whether it was left without an exception.

    Raises:
        ValueError: If an option is invalid.
        UnsupportedError: If the optimizer or the combination of options is not supported.

    Attributes:
        posterior: The posterior of the memory.
        optimizer: The optimizer, without wrappers.
        mode: "gradient", "proximal" or "repair".
        every: The period of the penalty, in steps.
        examples: Number of examples N of the new task.
        weight: Weight of the penalty relative to the loss, 1 / N for a mean.
        state: State carried from step to step, to be saved with the memory.
        steps: Number of steps of the optimizer so far.
        skipped: Number of steps that the optimizer skipped because GradScaler had found inf.
    """

    _active: ClassVar[weakref.WeakSet[Protection]] = weakref.WeakSet()

    def __init__(
        self,
        posterior: Posterior,
        optimizer: Any,
        *,
        examples: int,
        forecast: Callable[[], Forecast],
        every: int = 1,
        mode: str = "auto",
        reduction: str = "mean",
        batch_size: int | None = None,
        state: ProximalState | None = None,
        budget: Budget | None = None,
        old_examples: int = 0,
        repairer: Repairer | str = "this memory measures no curvature",
        batches: Iterable[Any] | None = None,
        prefer_repair: bool = False,
        observer: StepObserver | None = None,
        on_enter: Callable[[Protection], None] = lambda _: None,
        on_exit: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.posterior = posterior
        self.optimizer = inner_optimizer(optimizer)
        no_repair = repairer if isinstance(repairer, str) else None
        adapted = posterior.adapted_blocks()
        self.mode = mode_for(self.optimizer, mode, every, adapted, no_repair=no_repair, prefer_repair=prefer_repair)
        self.every, self.examples = every, examples
        self.weight = penalty_weight(examples, reduction, batch_size)
        fits = state is not None and (state.every, state.mode) == (every, self.mode)
        self.state = state if state is not None and fits else ProximalState(every, mode=self.mode)
        self.steps, self.skipped = 0, 0
        self._budget = budget if old_examples and self.mode != "repair" else None
        if self._budget is not None and self.state.multiplier is not None:
            self._budget.state = self.state.multiplier
        self._penalty_step = self._step_for(old_examples, repairer, batches)
        self._observer, self._forecast = observer, forecast
        self._on_enter, self._on_exit = on_enter, on_exit
        self._hooks: StepHooks | None = None
        self._entered = False
        self._groups: list[tuple[int, int]] = []  # to notice when the optimizer's groups change
        self._watch = WeightWatch([])
        self._forecasts: tuple[float, Forecast | None] = (0.0, None)  # on entry and on exit
        self._warnings: tuple[str, ...] = ()

    def _step_for(self, old_examples: int, repairer: Repairer | str, batches: Iterable[Any] | None) -> PenaltyStep:
        options: dict[str, Any] = {"weight": self.weight, "state": self.state, "old_examples": old_examples}
        if self.mode == "repair":
            assert not isinstance(repairer, str)  # `mode_for` raises
            return RepairStep(self.posterior, repairer=repairer, batches=batches, **options)
        if self.mode == "gradient":
            return GradientStep(self.posterior, budget=self._budget, **options)
        return ProximalStep(self.posterior, optimizer=self.optimizer, budget=self._budget, **options)

    @property
    def factor(self) -> float:
        """The last multiplier of the Fisher; 1 without a budget."""
        return self._penalty_step.factor

    @property
    def repair(self) -> Repair | None:
        """The repair at the end of training, in mode "repair"; None before that, or if it was not possible."""
        return self._penalty_step.repair if isinstance(self._penalty_step, RepairStep) else None

    @property
    def binding(self) -> Binding:
        """The blocks and parameters that the optimizer steps."""
        return self._penalty_step.binding

    def __enter__(self) -> Protection:
        if self._hooks is not None:
            raise LimpetError("this protection is already active: create another one with memory.protect(...)")
        self._entered, self._watch = True, WeightWatch([])
        self._on_enter(self)
        try:
            with self._on_all_ranks("on entry"):
                self._bind()
                if isinstance(self._penalty_step, RepairStep):
                    self._penalty_step.check()
                self._warn_of_rounding()
                self._forecasts = (float(self._forecast()), None)
        except BaseException:
            self._on_exit(False)
            raise
        self.steps, self.skipped, self._penalty_step.penalised, self._warnings = 0, 0, 0, ()
        self._hooks = StepHooks(
            self.optimizer,
            start=self._start_step,
            before=self._before_step,
            after=self._after_step,
            restore=self._penalty_step.restore,
        )
        if isinstance(self._penalty_step, RepairStep):
            self._penalty_step.start()
        self._active.add(self)
        return self

    def _on_all_ranks(self, when: str) -> AbstractContextManager[None]:
        """Guard what the ranks of a sharded memory do together; local protections communicate nothing."""
        return together(f"protect ({when})", None if self.posterior.sharding is None else current())

    def __del__(self) -> None:
        if not getattr(self, "_entered", True):
            warn(
                "memory.protect(...) was called but never entered, so nothing was protected: use it in a `with` "
                "statement",
                LimpetWarning,
            )

    def _bind(self) -> None:
        """Match blocks to parameter groups. Called again whenever the optimizer's groups change during training."""
        self._groups = parameter_groups(self.optimizer)
        binding = bind(self.posterior, self.optimizer, mode=self.mode, budget=self._budget is not None)
        self._reject_second(binding)
        self._penalty_step.bind(binding)
        if [id(p) for p in self._watch.parameters] != [id(p) for p in binding.targets]:
            self._watch = WeightWatch(binding.targets)

    def _reject_second(self, binding: Binding) -> None:
        if self.mode == "gradient":
            return
        for other in self._active - {self}:
            same = other.optimizer is self.optimizer and other.mode == self.mode
            if same and not set(binding.targets).isdisjoint(other.binding.targets):
                what = "proximal steps" if self.mode == "proximal" else "repairs"
                raise UnsupportedError(
                    f"another memory already protects weights of this optimizer in {self.mode} mode, and two {what} in "
                    "sequence do not minimize the sum of two penalties: pass mode='gradient' to one of the two calls "
                    "of protect"
                )

    def _warn_of_rounding(self) -> None:
        """Warn where weights in half precision lose small steps; the proximal step keeps them (`Rounding`)."""
        half = {p.dtype for p in self.binding.targets if is_half(p) and (self.mode == "gradient" or is_sharded(p))}
        for dtype in half:
            warn(
                f"protected weights are {str(dtype).removeprefix('torch.')}, in which steps below "
                f"1/{round(2 / torch.finfo(dtype).eps)} of a weight are rounded away, those of the penalty included: "
                "keep the weights in float32 and train under torch.autocast",
                LimpetWarning,
            )

    def __exit__(self, *exception: object) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        self._active.discard(self)
        self._penalty_step.restore()
        finished = exception[0] is None
        if isinstance(self._penalty_step, RepairStep):
            self._penalty_step.stop()
            self._on_exit(finished)
            if finished:
                self._repair(self._penalty_step)
            return
        if finished:
            with self._on_all_ranks("on exit"):
                self._finish()
        self._on_exit(finished)

    def _repair(self, step: RepairStep) -> None:
        """Repair the model, unless training has not moved it."""
        if self._moved():
            step.run()
        self._forecasts = self._forecasts[0], self._forecast()
        self._warnings = () if step.failure is None else (step.failure,)

    def _moved(self) -> bool:
        """Whether weights that the memory covers have moved, on any rank."""
        if self.posterior.on_any_rank(self._watch.moved()):
            return True
        if not self.steps:
            return False
        # the watch looks at a few weights, which training may have left where they were
        found = next(displacements_from_memory(self.posterior), None)
        return self.posterior.on_any_rank(found is not None)

    def _finish(self) -> None:
        """Complete what the last steps left open, and check that the protection was effective."""
        step, notes = self._penalty_step, []
        self._watch.look()
        # before `finish`, which moves the weights of a resumed run that has no step left
        cause = not_protected(self.optimizer, self._watch, self.steps, step.penalised)
        if step.unfinished:
            if self._replaced():
                notes.append("the weights were replaced after the last step, so they were left as they are")
            else:
                with full_precision():
                    step.finish()
                self._mark()
        self._forecasts = self._forecasts[0], self._forecast()
        if cause is None and notes and step.over_budget:
            cause = "the weights were replaced after the last step, by weights whose forecast exceeds the budget"
        if cause is not None:
            notes.append(cause)
            warn(cause, LimpetWarning)
        self._warnings = tuple(notes)

    def _replaced(self) -> bool:
        """Whether the weights are others than the last step left, on any rank."""
        found, sharding = self._watch.replaced(), self.posterior.sharding
        return found if sharding is None else bool(sharding.ranks.numbers(float(found))[0])

    def summary(self) -> ProtectionSummary:
        """Summarize what the protection has done so far or, after the `with` block, in all.

        Returns:
            Counts of steps, forecasts on entry and now (or on exit), and what is wrong, if anything. While the
            protection of a sharded memory is active, this is a collective.
        """
        before, after = self._forecasts
        after = self._forecast() if self._hooks is not None else after
        return ProtectionSummary(
            mode=self.mode,
            every=self.every,
            examples=self.examples,
            steps=self.steps,
            penalised=self._penalty_step.penalised,
            skipped=self.skipped,
            forecast_before=before,
            forecast_after=None if after is None else float(after),
            forecast_doubt=None if after is None else after.doubt,
            repair_strength=None if self.repair is None else self.repair.strength,
            warnings=self._warnings,
        )

    def penalty(self) -> float:
        """Compute the penalty at the current weights, as added to the loss.

        Returns:
            The weighted penalty.
        """
        return self._penalty_step.value()

    def _start_step(self) -> None:
        """Notice what has happened to the weights and to the optimizer since the last step."""
        self._watch.look()
        if parameter_groups(self.optimizer) != self._groups:
            self._bind()

    @torch.no_grad()
    @full_precision()
    def _before_step(self) -> None:
        """Process the gradients of the loss before the step: call the observer and add the penalty."""
        self._penalty_step.restore()
        if skips_step(self.optimizer):
            return
        scale = getattr(self.optimizer, "grad_scale", None)  # a fused optimizer divides by it inside the step
        if self._observer is not None:
            gradients = {
                name: gradient
                for bound in self.binding.bound
                for name, parameter in bound.weights().items()
                if (gradient := loss_gradient(parameter)) is not None
            }
            self._observer.before_step(
                {name: g if scale is None else g / scale.to(g.device) for name, g in gradients.items()}
            )
        with self._on_all_ranks("before a step"):
            self._penalty_step.before_step(scale)

    @torch.no_grad()
    @full_precision()
    def _after_step(self) -> None:
        self._penalty_step.restore()
        if skips_step(self.optimizer):
            self.skipped += 1
            return
        self.steps += 1
        with self._on_all_ranks("after a step") if self.mode == "proximal" else nullcontext():
            self._penalty_step.after_step()
        if self._observer is not None:
            self._observer.after_step()
        self._mark()

    def _mark(self) -> None:
        """Remember the weights as those that this step left, also for other protections of the optimizer."""
        for one in {self, *self._active}:
            if one.optimizer is self.optimizer:
                one._watch.mark(sample=one._penalty_step.unfinished)

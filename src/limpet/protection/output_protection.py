"""Protect a model's outputs during training: add a divergence from the outputs before to the loss of every step.

The objective is mean loss + weight * mean KL(before || now). The gradient of the second term is computed by a forward
and a backward pass of our own before the optimizer steps, and added to the gradients of the loss for that step only.
With every=k that happens in every k-th step, with k times the weight, so that the mean gradient is the same.

The forward pass runs in eval mode, and in the autocast state of the user's last forward pass. Modes, buffers, random
states and the user's gradients are the same afterwards. In a distributed run, sums and counts are added up over the
ranks, because the module inside DistributedDataParallel is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from limpet.distributed import current, is_sharded
from limpet.errors import LimpetError, LimpetWarning, UnsupportedError, positive_whole, warn
from limpet.forgetting.reference import divergence
from limpet.likelihoods import Likelihood
from limpet.model import Forward, full_precision, preserve_state, trainable
from limpet.model.context import autocast_as, autocast_state, eager, plain_recurrence
from limpet.protection.added_gradients import AddedGradients
from limpet.protection.optimizers import inner_optimizer, refuse_unsupported
from limpet.protection.recorder import StepInputs
from limpet.protection.step_hooks import StepHooks, skips_step
from limpet.protection.summary import not_protected
from limpet.protection.weight_watch import WeightWatch

NOT_CALLED = (
    "the optimizer took {steps} steps, but the model's forward method was never called with gradients enabled, so "
    "there were no inputs to compare outputs on and nothing was protected: call the model itself rather than its parts "
    "(if it is compiled and was called before, call torch.compiler.reset() before protect)"
)

OVERFLOW = (
    "the divergence from the outputs before, or its gradient, contained inf or nan in {overflows} of {compared} "
    "comparisons; nothing was added in these steps: train under torch.autocast in bfloat16, or in float32"
)


@dataclass(frozen=True)
class Compared:
    """A batch, and the outputs before on it.

    Attributes:
        batch: The batch, on the device of the model.
        summary: The likelihood's summary of the outputs before.
        forward: The function that computes the outputs now, if the default does not.
    """

    batch: Any
    summary: Mapping[str, Tensor]
    forward: Forward | None


class OutputSource(Protocol):
    """What an `OutputProtection` needs to know of a memory."""

    model: nn.Module
    likelihood: Likelihood

    @property
    def on_new_inputs(self) -> bool:
        """Whether outputs are compared on the inputs of the user's own forward passes."""

    def compared(self, step: int, inputs: Sequence[Any]) -> Iterator[Compared]:
        """Yield what is compared in a step.

        Args:
            step: Number of the comparison, counted from 0.
            inputs: The batches that the model was called on since the last step.
        """


@dataclass(frozen=True)
class OutputSummary:
    """What a protection of outputs did.

    Attributes:
        method: Name of the method.
        every: The period of the comparison, in steps.
        weight: Weight of the divergence relative to the loss.
        steps: Number of steps of the optimizer.
        penalised: Number of those steps in which outputs were compared.
        skipped: Number of further steps that the optimizer skipped because GradScaler had found inf.
        divergence: Mean KL(before || now) in the last comparison, in nats; None if there was none.
        drift: Drift on held-out inputs at the end; None without any, or after an error.
        warnings: What is wrong, if anything.
    """

    method: str
    every: int
    weight: float
    steps: int
    penalised: int
    skipped: int
    divergence: float | None
    drift: float | None
    warnings: tuple[str, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log, by name."""
        found = {
            "outputs_steps": float(self.steps),
            "outputs_penalised_steps": float(self.penalised),
            "outputs_skipped_steps": float(self.skipped),
            "outputs_divergence": self.divergence,
            "outputs_drift": self.drift,
        }
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        found = [
            f"{name} {value:.4g}"
            for name, value in (("divergence", self.divergence), ("drift", self.drift))
            if value is not None
        ]
        first = (
            f"{self.steps} steps, {self.penalised} with outputs compared{skipped} ({self.method}, every {self.every}, "
            f"weight {self.weight:g})" + (f"; {', '.join(found)}" if found else "")
        )
        return "\n".join([first, *(f"warning: {one}" for one in self.warnings)])


class OutputProtection:
    """Context manager that adds the divergence of outputs to every step of an optimizer.

    Created by the `protect` of `limpet.SelfRehearsal` and `limpet.Distillation`.

    Args:
        source: What is compared.
        optimizer: The optimizer that trains the model, possibly wrapped by accelerate or Lightning.
        method: Name of the method, for the summary.
        weight: Weight of the divergence relative to the loss of a step.
        every: Compare outputs in every this many steps.
        count: Number of steps that an interrupted training run has taken before.
        drift: Measures the drift for the summary; returns None if it cannot.
        on_enter: Called with this object when the context is entered.
        on_exit: Called when the context is left, with whether it was left without an exception.

    Raises:
        ValueError: If an option is invalid.
        UnsupportedError: If the optimizer or the model is not supported.

    Attributes:
        optimizer: The optimizer, without wrappers.
        every: The period of the comparison, in steps.
        weight: Weight of the divergence relative to the loss of a step.
        count: Number of steps since training began, those before an interruption included.
        steps: Number of steps of the optimizer so far.
        penalised: Number of those steps in which outputs were compared.
        skipped: Number of steps that the optimizer skipped because GradScaler had found inf.
    """

    def __init__(
        self,
        source: OutputSource,
        optimizer: Any,
        *,
        method: str,
        weight: float,
        every: int = 1,
        count: int = 0,
        drift: Callable[[], float | None] = lambda: None,
        on_enter: Callable[[OutputProtection], None] = lambda _: None,
        on_exit: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.optimizer = inner_optimizer(optimizer)
        refuse_unsupported(self.optimizer)
        if any(is_sharded(parameter) for parameter in source.model.parameters()):
            raise UnsupportedError(
                "outputs of a model that is sharded with fully_shard cannot be protected: use "
                "DistributedDataParallel, or protect the weights with limpet.OnlineLaplace"
            )
        self.every, self.weight, self.count = positive_whole("every", every), weight, count
        self.steps = self.penalised = self.skipped = 0
        self._source, self._method, self._measured = source, method, drift
        self._on_enter, self._on_exit = on_enter, on_exit
        self._added = AddedGradients()
        self._inputs = StepInputs(source.model, keep=False)
        self._hooks: StepHooks | None = None
        self._watch = WeightWatch([])
        self._applied = False  # whether outputs were compared in this step
        self._overflows: Tensor | int = 0  # comparisons that were not finite
        self._divergence: Tensor | None = None
        self._drift: float | None = None
        self._warnings: tuple[str, ...] = ()

    def __enter__(self) -> OutputProtection:
        if self._hooks is not None:
            raise LimpetError("this protection is already active: create another one with memory.protect(...)")
        own = set(self._source.model.parameters())
        trained = [parameter for parameter, _ in self._parameters() if parameter in own]
        if not trained:
            raise UnsupportedError(
                "the optimizer trains no parameter of this memory's model, so there is nothing to protect: pass the "
                "optimizer of this model"
            )
        self._on_enter(self)
        self._watch = WeightWatch(trained)
        self.steps = self.penalised = self.skipped = self._overflows = 0
        self._inputs.keep = self._due
        self._inputs.start()
        self._hooks = StepHooks(
            self.optimizer,
            start=lambda: None,
            before=self._before_step,
            after=self._after_step,
            restore=self._added.restore,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        self._inputs.stop()
        self._inputs.clear()
        self._added.restore()
        finished = exception[0] is None
        try:
            if finished:
                self._finish()
        finally:
            self._on_exit(finished)

    def _finish(self) -> None:
        """Measure the drift, and check that the protection was effective."""
        self._drift = self._measured()
        cause, overflows = None, int(self._overflows)
        if not self.steps:
            cause = not_protected(self.optimizer, self._watch, 0, 0)
        elif not self.penalised:
            cause = NOT_CALLED.format(steps=self.steps)
        elif overflows:
            cause = OVERFLOW.format(overflows=overflows, compared=self.penalised)
        if cause is not None:
            self._warnings = (cause,)
            warn(cause, LimpetWarning)

    def summary(self) -> OutputSummary:
        """Summarize what the protection has done so far or, after the `with` block, in all.

        Returns:
            Counts of steps, the last divergence, the drift at the end, and what is wrong, if anything.
        """
        last = None if self._divergence is None else float(self._divergence)
        counts = {"steps": self.steps, "penalised": self.penalised, "skipped": self.skipped}
        return OutputSummary(
            self._method, self.every, self.weight, divergence=last, drift=self._drift, warnings=self._warnings, **counts
        )

    def penalty(self) -> float:
        """Return the weighted divergence of the last comparison, as added to the loss.

        Returns:
            The value, without the factor of `every`; 0 before the first comparison.
        """
        return 0.0 if self._divergence is None else self.weight * float(self._divergence)

    @property
    def _due(self) -> bool:
        """Whether outputs are to be compared on the inputs of the next step."""
        return self._source.on_new_inputs and self.count % self.every == 0

    def _parameters(self) -> list[tuple[nn.Parameter, dict[str, Any]]]:
        """Return the parameters that the optimizer trains, with their groups."""
        groups = self.optimizer.param_groups
        return [(parameter, group) for group in groups for parameter in group["params"] if parameter.requires_grad]

    def _before_step(self) -> None:
        """Add the gradient of the divergence to the gradients of the loss."""
        self._added.restore()
        self._applied = False
        if self.count % self.every or skips_step(self.optimizer):
            return
        trained = self._parameters()
        gradients, total, counted = self._gradients([parameter for parameter, _ in trained])
        if not counted:
            return
        scale = getattr(self.optimizer, "grad_scale", None)  # a fused optimizer divides by it inside the step
        with torch.no_grad(), full_precision():
            gradients = [None if g is None else g.to_dense() for g in gradients]
            finite = _all_finite([total, *(g for g in gradients if g is not None)])
            self._overflows = self._overflows + (~finite).long()
            for (parameter, group), gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    # without waiting for the device; GradScaler looks at the gradients of the loss alone
                    gradient = torch.where(finite.to(gradient.device), gradient, 0)
                    weight = self.weight * self.every / counted
                    signed = -weight if group.get("maximize") else weight
                    self._added.add(parameter, gradient, weight=signed, scale=scale, create=True)
            self._divergence = total / counted
        self._applied = True

    def _after_step(self) -> None:
        self._added.restore()
        if skips_step(self.optimizer):
            self.skipped += 1
        else:
            self.steps += 1
            self.count += 1
            self.penalised += self._applied
        self._inputs.clear()
        self._inputs.keep = self._due

    def _gradients(self, parameters: Sequence[nn.Parameter]) -> tuple[list[Tensor | None], Tensor, float]:
        """Compute the gradient of the summed divergence, the sum itself and the number of positions, of all ranks."""
        gradients: list[Tensor | None] = [None] * len(parameters)
        total, counted = torch.zeros((), device=parameters[0].device if parameters else None), 0.0
        with self._own_pass(parameters):
            for one in self._source.compared(self.count // self.every, self._inputs.batches):
                values, counts = divergence(
                    self._source.model, one.batch, one.summary, self._source.likelihood, one.forward
                )
                counted += float(counts.sum())
                value = values.sum()
                total = total + value.detach().to(total)
                if value.requires_grad:
                    found = torch.autograd.grad(value, parameters, allow_unused=True)
                    gradients = [_sum(a, b) for a, b in zip(gradients, found, strict=True)]
        return self._of_all_ranks(parameters, gradients, total, counted)

    @staticmethod
    def _of_all_ranks(
        parameters: Sequence[nn.Parameter], gradients: list[Tensor | None], total: Tensor, counted: float
    ) -> tuple[list[Tensor | None], Tensor, float]:
        ranks = current()
        if ranks is None:
            return gradients, total, counted
        with torch.no_grad():
            filled = [
                torch.zeros_like(p) if gradient is None else gradient
                for p, gradient in zip(parameters, gradients, strict=True)
            ]
            *summed, total, count = ranks.totals([*filled, total, torch.tensor(counted, dtype=torch.float64)])
            # the same parameters are unused on every rank, as DistributedDataParallel expects too
            found = [None if own is None else new for own, new in zip(gradients, summed, strict=True)]
        return found, total, float(count)

    @contextmanager
    def _own_pass(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Run forward and backward passes that leave no trace in the model or the random states."""
        model, state = self._source.model, self._inputs.autocast or autocast_state()
        with ExitStack() as stack:
            for context in (
                preserve_state(model),
                trainable(parameters),
                eager(),
                plain_recurrence(model),
                autocast_as(state),
                torch.enable_grad(),
            ):
                stack.enter_context(context)
            yield


def _all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether all numbers are finite, without waiting for the device."""
    found = [torch.isfinite(tensor).all() for tensor in tensors]
    return torch.stack([one.to(found[0].device) for one in found]).all()


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Add two gradients of which each may be missing."""
    return other if one is None else one if other is None else one + other

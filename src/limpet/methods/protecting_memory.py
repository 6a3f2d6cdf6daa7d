"""How a memory protects its tasks while the model trains on another one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from limpet.errors import LimpetError, LimpetWarning, UnsupportedError, finite_number, warn
from limpet.methods.agreement import sharing
from limpet.methods.stored_memory import StoredMemory
from limpet.model import Block
from limpet.precision import Kronecker

if TYPE_CHECKING:  # imported lazily at run time, to keep `import limpet` fast
    from limpet.forgetting.budget import Budget
    from limpet.forgetting.forecast import Forecast
    from limpet.protection.protection import Protection, StepObserver
    from limpet.protection.repair_step import Repairer

FAR_OFF = 1.5
"""Factor between two counts of the same task from which they contradict each other."""


class ProtectingMemory(StoredMemory):
    """The part of `Memory` that protects."""

    model: nn.Module
    _measures_curves: ClassVar[bool] = False  # whether forecasts are in nats, as strength="auto" and budget= require
    _protection: Protection | None
    _trained_with: int | None

    @property
    def structure(self) -> str:
        """Structure of the precision: "kronecker", "kronecker-sum", "diagonal" or "dense"."""
        return self.posterior.structure.name

    @abstractmethod
    def _planned(self, also: Collection[str] = ()) -> list[Block]:
        """Return the blocks of the model in its current state."""

    @abstractmethod
    def _forecast(self) -> Forecast:
        """Forecast without a warning."""

    def protect(
        self,
        optimizer: Any,
        *,
        examples: int,
        every: int = 1,
        mode: str = "auto",
        reduction: str = "mean",
        batch_size: int | None = None,
        budget: float | None = None,
        batches: Iterable[Any] | None = None,
        repair: Mapping[str, Any] | None = None,
    ) -> Protection:
        """Protect the consolidated tasks while the model trains: `with memory.protect(optimizer, examples=N): ...`.

        Inside the `with` block every `optimizer.step()` also applies the penalty 1/2 (w - mean)^T L (w - mean) / N,
        or (mode "repair") the steps are left alone and the model is repaired when the block ends. The training loop
        needs no other change. When the block is left although weights moved without the penalty, a warning says why;
        `protection.summary()` has the counts of steps and the forecasts before and after.

        For pretrained networks trained with Adam, use repair: `strength="auto"` does. A penalty in the gradient of Adam
        preserves little of what such a network knew, because Adam normalizes the sum of both gradients, and because
        training against an approximate curvature finds what the approximation misses.

        Clipping acts on the gradient of the loss alone, so it strengthens the penalty relative to the loss (see
        `docs/options.md`).

        Args:
            optimizer: The optimizer that trains the model.
            examples: N, the number of examples in the new task (predicted tokens for a language model), not
                multiplied by the number of epochs. `memory.count(loader)` counts them.
            every: Apply the proximal step, or recompute the penalty's gradient, only every this many steps. In
                between, proximal mode uses the control variate of ProxSkip, and gradient mode reuses the last
                gradient.
            mode: "proximal" (a proximal step after each step of SGD; with `every=1` no penalty makes it diverge),
                "gradient" (adds the penalty's gradient; works with any optimizer), "repair" (plain steps, and
                `limpet.repair` when the block ends without an error; the strengths of the memory are not used), or
                "auto": proximal for SGD on a model without adapters, otherwise repair if `strength` is "auto" or a
                budget is given, otherwise gradient. Where a repair is not possible (no consolidated task, a budget
                but no probe), it is gradient too.
            reduction: "mean" if the training loss is a mean over examples, "sum" if it is a sum over the batch.
            batch_size: Number of examples that the loss of one step sums over. Required with `reduction="sum"`.
            budget: Largest allowed forecast, in nats per example. It replaces the strengths of all tasks: the penalty
                is just strong enough to keep the forecast within the budget, and zero as long as it is. In mode
                "repair" it is the largest allowed drift, measured on the memory's probe.
            batches: The new data, for mode "repair". By default a sample of the inputs that the model is trained on is
                recorded.
            repair: Options of `limpet.repair` for mode "repair". Defaults to `{"budget": "auto", "tolerance":
                "auto"}`: repair until the drift on the probe, 1.64 standard errors included, is 0.04 nats per example
                and a tenth of what its outputs say about their inputs, or as far as the loss on a held-out part of the
                sample allows. Without a probe, as far as the loss allows.

        Returns:
            A context manager that adds hooks to the optimizer on entry and removes them on exit.

        Raises:
            LimpetError: If called inside another `with memory.protect(...)`.
            UnsupportedError: If the optimizer, mode or budget is not supported for this memory, or (when the block is
                entered) if another memory protects the same weights in proximal or repair mode.
            ValueError: If an argument has an invalid value.

        Examples:
            >>> import limpet
            >>> import torch
            >>> _ = torch.manual_seed(0)
            >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(20, 3), torch.randint(0, 2, (20,))
            >>> memory = limpet.OnlineLaplace(model)
            >>> memory.consolidate([(x, y)])
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> with memory.protect(optimizer, examples=20) as protection:
            ...     torch.nn.functional.cross_entropy(model(-x), y).backward()
            ...     optimizer.step()
            >>> print(protection.summary())
            1 steps, 1 with the penalty (mode proximal, every 1, N = 20); forecast 0 -> 0.000...
        """
        from limpet.protection.protection import Protection

        self._reject_inside_protect()
        with sharing(self.posterior, "protect"):
            self.posterior.arrange(self._planned())
            self.probes = tuple(probe.before_training(self.model) for probe in self.probes)
        return Protection(
            self.posterior,
            optimizer,
            examples=examples,
            forecast=self._forecast,
            every=every,
            mode=mode,
            reduction=reduction,
            batch_size=batch_size,
            state=self._resume,
            budget=self._budget(budget),
            repairer=self._repairer(examples, budget, repair),
            batches=batches,
            prefer_repair=self._automatic or budget is not None,
            old_examples=self.examples,
            observer=self._observer(examples),
            on_enter=self._entered,
            on_exit=self._left,
        )

    def _budget(self, budget: float | None) -> Budget | None:
        if budget is None:
            return None
        from limpet.forgetting.budget import Budget

        if not finite_number("budget", budget):
            raise ValueError("budget must be > 0: pass the increase of the old loss to allow, in nats per example")
        if not self._measures_curves or self.structure == "kronecker-sum":
            raise UnsupportedError(
                "budget= needs forecasts in nats and a closed-form proximal step: use a Laplace method with "
                "structure='kronecker', 'diagonal' or 'dense'"
            )
        precisions = [held.precision for held in self.posterior.held.values()]
        if any(isinstance(precision, Kronecker) and precision.rounded for precision in precisions):
            raise UnsupportedError(
                "budget= needs orthonormal eigenbases, but those that are stored in fewer digits and not truncated "
                "(of small layers too) are not: omit storage_dtype=, or compress with storage_dtype=None"
            )
        return Budget(self.history, float(budget))

    def _entered(self, protection: Protection) -> None:
        self._reject_inside_protect()
        # Only a loaded state is resumed. One left behind by an error may belong to weights that have been reset since,
        # and a fresh state is valid for any weights.
        self._protection, self._resume = protection, None
        self._proximal_state = None if protection.mode == "repair" else protection.state

    def _left(self, finished: bool) -> None:
        if finished and self._protection is not None:
            self._trained_with = self._protection.examples
            self._proximal_state = None
        self._protection = None

    def _check_protected_count(self, count: int) -> None:
        """Warn if the new task was trained with another N than the pass over its data has counted."""
        stated, self._trained_with = self._trained_with, None
        if stated is not None and not count / FAR_OFF < stated < count * FAR_OFF:
            factor, how = (count / stated, "strong") if stated < count else (stated / count, "weak")
            warn(
                f"this task was trained with protect(examples={int(stated):,}), but has {count}: the penalty was "
                f"{factor:.3g} times too {how}; N is counted in the unit that the mean loss averages over, "
                "memory.count(loader) counts it",
                LimpetWarning,
            )

    def _reject_inside_protect(self) -> None:
        if self._protection is not None:
            raise LimpetError(
                "this memory is already protecting: call this after the `with memory.protect(...)` block, not inside it"
            )

    def _repairer(self, examples: int, budget: float | None, options: Mapping[str, Any] | None) -> Repairer | str:
        """Return the function that repairs the model after training, or why there is none."""
        return f"{type(self).__name__} measures no curvature: use limpet.OnlineLaplace"

    def _observer(self, examples: int) -> StepObserver | None:
        """Return the observer of the optimizer steps, if the method needs one."""
        return None

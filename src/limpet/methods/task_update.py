"""The update of a memory with the measured Fishers of a task: of all blocks, on all ranks, or not at all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from limpet.curvature import Fisher
from limpet.distributed import current, together
from limpet.errors import FallbackWarning, LimpetWarning, NotProtectedWarning, warn
from limpet.forgetting.loss_curve import Curve
from limpet.methods.agreement import consolidating
from limpet.methods.limits import check_strength
from limpet.methods.private import warn_of_exposed_inputs
from limpet.methods.probed_memory import ProbedMemory
from limpet.model import PER_SAMPLE, Forward, full_precision
from limpet.posterior import BlockPosterior, Posterior
from limpet.precision import Precision

if TYPE_CHECKING:
    from limpet.curvature.privacy import Privacy
    from limpet.forgetting.measurement import Curves


class TaskUpdate(ProbedMemory):
    """The part of `Laplace` that updates mean and precision. A method says how it updates a block."""

    _off_center: frozenset[str] | None

    def _settle(self, fishers: list[Fisher], forward: Forward | None, privacy: Privacy | None = None) -> None:
        """Update the memory with the measured Fishers, of which the last is that of the newest task.

        After a first task, whose Fisher is in the memory as it is, its terms are dropped from the list.
        """
        with full_precision(), torch.inference_mode(False):
            with self._all_or_nothing():
                self._add_task(fishers, forward)
                self.privacy = (*self.privacy, privacy)
            if privacy is None:
                warn_of_exposed_inputs(fishers)
                # in a sharded model the terms are freed while the blocks are updated, so that both need not fit
                if not self._automatic and self.posterior.sharding is None:
                    if self.tasks == 1:
                        fishers[-1] = fishers[-1].without_terms()
                    self._measure_curve(fishers[-1], forward)

    @contextmanager
    def _on_all_ranks(self, batches: Iterable[Any], arguments: Mapping[str, Any]) -> Iterator[None]:
        """Guard a consolidation: if it fails on a rank, the memory is restored on all of them."""
        restoring = self._all_or_nothing() if current() is not None else nullcontext()
        with restoring, consolidating(self.posterior, self._settings, batches, arguments):
            yield
        self._recenter()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Restore the memory if the body raises."""
        held, constant, sharding = dict(self.posterior.held), self.posterior.constant, self.posterior.sharding
        quantized = self.posterior.quantized
        sharded = None if sharding is None else (sharding.blocks, sharding.owners)
        names = (
            "_strength",
            "_direct",
            "history",
            "unused",
            "examples",
            "tasks",
            "probes",
            "privacy",
            "_proximal_state",
            "repair_mark",
            "_doubted",
            "_off_center",
        )
        before = {name: getattr(self, name) for name in (*names, "_trained_with")}
        try:
            yield
        except BaseException:
            self.posterior.held, self.posterior.constant, self.posterior.quantized = held, constant, quantized
            if sharding is not None and sharded is not None:
                sharding.blocks, sharding.owners = sharded
            for name, value in before.items():
                setattr(self, name, value)
            raise

    def _add_task(self, fishers: list[Fisher], forward: Forward | None) -> None:
        from limpet.posterior.perturbation import with_task

        newest = fishers[-1]
        self._warn_of_fallback(newest)
        self._direct = self._direct | {name for b in newest.blocks if b.kind == PER_SAMPLE for name in b.parameters}
        self.posterior.arrange(newest.blocks)
        moved = self._forecast().quadratic
        curve, coherent = Curve(), None
        if self._automatic:
            curve, coherent = self._curves(self.tasks, with_task(self.posterior, newest, 1.0), newest, forward)
            self._strength = curve.strength
        self._update(fishers)
        self.history = self.history.learned(int(newest.examples), curve, moved, coherent)
        self.repair_mark, self._doubted = None, False
        self._check_protected_count(newest.examples)
        self.unused = newest.unused
        self.examples += int(newest.examples)
        self.tasks += 1
        self._proximal_state = None
        if newest.unused:
            first = sorted(newest.unused)[0]
            warn(
                f"{len(newest.unused)} parameters had no gradient in this task (such as {first}), so this task "
                "adds no information about them; leave them out with exclude=[...] if they belong to other tasks",
                NotProtectedWarning,
            )

    def _update(self, fishers: list[Fisher]) -> None:
        """Update every block for which the newest task has curvature.

        In a sharded model its sums are then freed, and it keeps its mean from before: see `_recenter`.
        """
        sharded, after = self.posterior.sharding is not None, dict[str, BlockPosterior]()

        def update(held: BlockPosterior, weights: Mapping[str, Tensor]) -> BlockPosterior:
            mean = held.matrix(weights).detach()
            mean = mean if sharded else mean.clone()
            found = self._updated(held, fishers, mean)
            check_strength(found, self._strength)
            for fisher in fishers if sharded else ():
                fisher.terms.pop(held.block.name, None)
            return replace(found, mean=held.mean) if sharded else found

        for blocks, weights in self.posterior.rounds():
            for held in blocks:
                if fishers[-1].speaks_of(held.block):
                    after[held.block.name] = update(held, weights)
        self.posterior.held = {**self.posterior.held, **after}
        self._off_center = frozenset(after) if sharded else None

    def _recenter(self) -> None:
        """Replace the means of a sharded memory by the weights, once the update has succeeded on all ranks.

        The means of before and the new ones are each as large as the weights: only one of them fits.
        """
        blocks, self._off_center = self._off_center, None
        if blocks is None:
            return
        try:
            with together("consolidate", current()), full_precision(), torch.inference_mode(False):
                self.posterior.recenter(blocks)
        except BaseException:
            self.posterior.inconsistent = True
            raise

    def _curves(self, number: int, posterior: Posterior, newest: Fisher, forward: Forward | None) -> Curves:
        """Measure how the loss of the newest task, task `number`, increases around a posterior that includes it."""
        from limpet.forgetting.measurement import measure

        return measure(posterior, newest, self.likelihood, forward, self.seed + number)

    def _measure_curve(self, newest: Fisher, forward: Forward | None) -> None:
        """Measure the loss curve of the newest task; if that fails, the task stays consolidated without one."""
        try:
            self.history = self.history.with_curves(*self._curves(self.tasks - 1, self.posterior, newest, forward))
        except Exception as error:
            if current() is not None:
                raise  # the other ranks would wait in a collective
            warn(
                f"the loss curve of this task could not be measured ({type(error).__name__}: {error}); the task is "
                "consolidated, but its forecasts use only the quadratic approximation, which underestimates forgetting",
                LimpetWarning,
            )

    def _warn_of_fallback(self, newest: Fisher) -> None:
        planned = {name for block in self._planned() if block.kind != PER_SAMPLE for name in block.parameters}
        fallen = [b.name for b in newest.blocks if b.kind == PER_SAMPLE and b.name in planned]
        if fallen:
            warn(
                f"{len(fallen)} parameters (such as {fallen[0]}) are used in a way that forward hooks on their "
                "layers do not capture; they fall back to an exact diagonal computed from per-sample gradients, which "
                "is slow",
                FallbackWarning,
            )

    @abstractmethod
    def _updated(self, held: BlockPosterior, fishers: list[Fisher], mean: Tensor) -> BlockPosterior:
        """Return the block's posterior after the task, whose trained weights are `mean`."""

    def _added(self, held: BlockPosterior, fishers: list[Fisher]) -> Precision:
        """Return the block's precision plus strength times each Fisher."""
        precision = held.precision
        for fisher in fishers:
            for term in fisher.terms.get(held.block.name, ()):
                precision = precision.add(term, self._strength)
        return precision

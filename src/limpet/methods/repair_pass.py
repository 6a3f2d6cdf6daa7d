"""The repair of a memory's model: one Fisher pass over the new data, the closed-form path, and the point on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn

from limpet.curvature import Fisher
from limpet.distributed import ReplicatedBatches, current, together
from limpet.errors import CurvatureError, LimpetError, finite_number, positive_whole
from limpet.forgetting.displacement import displacements_from_memory
from limpet.forgetting.drift import Drift, information, measured_drift
from limpet.forgetting.loss_probe import LossProbe
from limpet.forgetting.output_layer import OutputLayer, new_output_layer, warn_of_covered_head
from limpet.forgetting.probe import Probe
from limpet.forgetting.repair import Measures, Repair, RepairMark
from limpet.forgetting.repair_paths import solve
from limpet.likelihoods import Likelihood, resolve
from limpet.methods.memory import NO_PROBE
from limpet.model import Block, Forward, full_precision, part, preserve_state
from limpet.model.batch import batch_size, check_batches, counted_examples
from limpet.posterior import Posterior
from limpet.posterior.sharding import fisher_pass

if TYPE_CHECKING:
    from limpet.curvature.batch_step import StepOptions

HELD_OUT = 5
"""With `tolerance`, one batch in this many is held out."""

MOST_HELD_OUT = 1000
"""Maximum number of held-out rows."""

MOST_REFITTED = 1000
"""Maximum number of rows that a new output layer is fitted to."""

DRIFT, LEAST_DRIFT = 0.04, 0.004
"""Largest and smallest drift on the probe, in nats per example, that `budget="auto"` allows (decisions 24, 25, 32)."""

DRIFT_SHARE = 0.1
"""Share of what the probe's outputs say about their inputs that it allows to drift."""

TOO_FEW = "tolerance= holds out part of the batches, but there is only one small batch: pass more data, or strength="


@dataclass(frozen=True)
class RepairOptions:
    """The options of `limpet.repair`, which documents them.

    Raises:
        LimpetError: If a strength is given together with a tolerance or a budget.
        ValueError: If a number is negative or not finite, or the rank is not a positive integer.
    """

    strength: float | None = None
    scale: float = 1.0
    tolerance: float | Literal["auto"] | None = None
    budget: float | Literal["auto"] | None = None
    rank: int | None = None
    refit: bool = True
    examples: int | None = None
    limit: int | None = None
    forward: Forward | None = None
    probe_forward: Forward | None = None
    likelihood: str | Likelihood | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        if self.strength is not None and (self.tolerance is not None or self.budget is not None):
            raise LimpetError("tolerance= and budget= find the strength: pass either them or strength=")
        for name in ("strength", "scale", "tolerance", "budget"):
            value = getattr(self, name)
            if value is not None and not (name in ("tolerance", "budget") and value == "auto"):
                finite_number(name, value)
        if self.rank is not None:
            positive_whole("rank", self.rank)


class Repairable(Protocol):
    """The parts of a memory that a repair uses."""

    model: nn.Module
    posterior: Posterior
    seed: int
    repair_mark: RepairMark | None

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the old data."""

    @property
    def probes(self) -> Sequence[Probe]:
        """Inputs with the outputs of the model before."""

    def _forecast(self) -> float:
        """Forecast the increase of the old loss."""

    def drift(self, *, forward: Forward | None = None) -> Drift:
        """Measure the drift on the probes."""

    def _planned(self, also: Any = ()) -> list[Block]:
        """Return the blocks of the model."""

    def _step_options(self, forward: Forward | None) -> StepOptions:
        """Return the options of a Fisher pass."""


def repaired(memory: Repairable, batches: Iterable[Any], options: RepairOptions) -> Repair:
    """Repair the model of a memory in place.

    Args:
        memory: The memory, with at least one consolidated task.
        batches: The new data.
        options: The options of `limpet.repair`.

    Returns:
        The repair. If an error is raised, the model keeps its tuned weights.
    """
    with ExitStack() as undo:
        sharded = memory.posterior.sharding is not None
        with together("repair", current(), runs_model=sharded), full_precision(), torch.inference_mode(False):
            found = _solved(memory, batches, options)
            undo.callback(found.undo)
            if options.budget is not None:
                budget = default_budget(memory) if options.budget == "auto" else options.budget
                found.within_budget(budget, options.scale, options.tolerance)
            elif options.tolerance is not None:
                found.within_tolerance(options.tolerance, options.scale)
            else:
                found.at(1.0 if options.strength is None else options.strength, options.scale)
        undo.pop_all()  # it has succeeded, on all ranks
    memory.repair_mark = found.mark
    return found


def default_budget(memory: Repairable) -> float:
    """Return the budget that "auto" stands for.

    Args:
        memory: A memory with a probe.

    Returns:
        A tenth of the drift of a model that gives the same answer to every input, at least 0.004 and at most 0.04 nats.
    """
    return min(DRIFT, max(LEAST_DRIFT, DRIFT_SHARE * probe_information(memory)))


def check_drift(memory: Repairable, forward: Forward | None) -> None:
    """Raise if drift cannot be measured, before a training that ends with a repair within a budget.

    Args:
        memory: A memory with a probe.
        forward: The forward function that the probe was recorded with.
    """
    probe = memory.probes[0]
    first = replace(probe, batches=probe.batches[:1], summaries=probe.summaries[:1])
    try:
        measured_drift(memory.model, [first], memory.likelihood, forward)
    except Exception as error:
        raise LimpetError(
            f"drift cannot be measured on the memory's probe ({type(error).__name__}: {error}), so the model could not "
            "be repaired after training: pass the forward function that the probe was recorded with, "
            "memory.protect(..., repair={'probe_forward': ...})"
        ) from error


def probe_information(memory: Repairable) -> float:
    """Compute what the outputs of the probes say about their inputs, over the examples of all ranks.

    Args:
        memory: A memory with a probe.

    Returns:
        The mean over examples, in nats; infinity if it is not known.
    """
    found, ranks = information(memory.probes, memory.likelihood), current()
    if ranks is None:
        return found
    own = [Probe([], probe.summaries, probe.scale) for probe in memory.probes] if math.isfinite(found) else []
    told = [probes for probes in ranks.gather(own, "the outputs of probes") if probes]
    pooled = [
        Probe([], [summary for probe in same for summary in probe.summaries], same[0].scale)
        for same in zip(*told, strict=True)
    ]
    return information(pooled, memory.likelihood)


def _solved(memory: Repairable, batches: Iterable[Any], options: RepairOptions) -> Repair:
    """Measure the curvature of the new data and compute the path, with the model at its tuned weights."""
    if options.budget is not None and not memory.probes:
        raise LimpetError(NO_PROBE)
    shared, hold_out = isinstance(batches, ReplicatedBatches), options.tolerance is not None
    split = HeldOutSplit(batches.batches if isinstance(batches, ReplicatedBatches) else batches, hold_out=hold_out)
    counted = options.examples is not None or options.limit is not None
    fisher = new_fisher(memory, ReplicatedBatches(split) if shared else split, options)
    if hold_out and not memory.posterior.on_any_rank(bool(split.held)):
        raise LimpetError(TOO_FEW)
    look = split.held if hold_out else fisher.first.take(MOST_HELD_OUT // HELD_OUT)
    measures = path_measures(memory, look, fisher, options)
    weight = 1.0 if counted else split.share
    return solve(
        memory.posterior,
        fisher,
        measures,
        weight=weight,
        rank=options.rank,
        head=_output_layer(memory, fisher, options),
        progress=options.progress,
    )


def path_measures(memory: Repairable, held_out: list[Any], fisher: Fisher, options: RepairOptions) -> Measures:
    """Return functions that measure the model along the path."""
    look = LossProbe(memory.model, held_out, _likelihood(memory, options), options.forward, memory.seed)

    def loss() -> float:
        with preserve_state(memory.model):
            return fisher.loss_scale * look.loss({})

    def drift() -> Drift:
        found, ranks = memory.drift(forward=options.probe_forward), current()
        if ranks is None:
            return found
        told = ranks.gather((float(found), found.standard_error, found.examples), "drift")
        if len(set(map(repr, told))) == 1:  # all ranks have loaded the same probe
            return found
        examples = sum(n for _, _, n in told)
        errors = [error * n for _, error, n in told if not math.isnan(error)]  # unknown for a single example
        mean = sum(drift * n for drift, _, n in told) / examples
        return Drift.pooled(mean, math.hypot(*errors) / examples if errors else math.nan, examples)

    if not math.isfinite(loss()):  # before any weight moves, so that sampled targets come from the tuned model
        raise LimpetError("the loss on the new data is not finite: check the data for inf, nan or missing targets")
    return Measures(forecast=lambda: float(memory._forecast()), loss=loss, drift=drift if memory.probes else None)


def _output_layer(memory: Repairable, fisher: Fisher, options: RepairOptions) -> OutputLayer | None:
    """Return the new output layer to fit again, on rows that the curvature was measured on."""
    if not options.refit or memory.posterior.sharding is not None:
        return None
    ranks = current()
    rows = fisher.first.take(MOST_REFITTED // (1 if ranks is None else ranks.size))
    if ranks is not None and not all(ranks.gather(bool(rows))):
        return None
    held = [one for one in memory.posterior.held.values() if one.tasks]
    means = {name: mean for one in held for name, mean in one.block.scatter(one.mean).items()}
    warn_of_covered_head(memory.model, means, rows, options.forward)
    covered = {name for held in memory.posterior.held.values() for name in held.block.parameters}
    return new_output_layer(memory.model, memory.probes, covered, rows, options.forward)


def new_fisher(memory: Repairable, batches: Iterable[Any], options: RepairOptions) -> Fisher:
    """Measure the Fisher of the new data for the blocks that training has moved."""
    posterior, sharding = memory.posterior, memory.posterior.sharding
    moved = {name for one in displacements_from_memory(posterior) for name in one.block.parameters}
    if sharding is not None:
        moved = moved.union(*sharding.ranks.gather(moved))
    if not moved:
        raise LimpetError(
            "the model's weights equal the memory's mean, so there is nothing to repair: pass the tuned model"
        )
    blocks = [block for block in memory._planned(also=moved) if moved.issuperset(block.parameters)]
    structure, step = posterior.structure.complete(blocks), memory._step_options(options.forward)
    one_pass = fisher_pass(memory.model, blocks, _likelihood(memory, options), structure, sharding, **step)
    return one_pass.run(batches, examples=options.examples, limit=options.limit, progress=options.progress)


def _likelihood(memory: Repairable, options: RepairOptions) -> Likelihood:
    """Return the likelihood of the new data: the given one, or that of the memory."""
    return memory.likelihood if options.likelihood is None else resolve(options.likelihood)


class HeldOutSplit:
    """Iterable over batches that holds out a fifth of the first batch and every fifth batch, about 1000 rows at most.

    Args:
        batches: The batches.
        hold_out: Whether to hold any out. Otherwise all batches are passed on.
    """

    def __init__(self, batches: Iterable[Any], *, hold_out: bool) -> None:
        check_batches(batches)
        self.batches, self.hold_out = batches, hold_out
        # the pass looks these up, to restore the random state of the loader and to count the rows of packed batches
        self.sampler, self.batch_sampler, self.generator, self.batch_size = (
            getattr(batches, name, None) for name in ("sampler", "batch_sampler", "generator", "batch_size")
        )
        self._read = False
        self.held: list[Any] = []
        self._rows = {"held": 0, "passed": 0}
        total = counted_examples(batches)
        if total is not None:
            self.examples = total  # read by the pass, which scales up to it with `limit`

    def __iter__(self) -> Iterator[Any]:
        if self._read and isinstance(self.batches, Iterator):
            raise CurvatureError(
                "the batches must be read a second time, but an iterator can be read only once: pass a loader or a list"
            )
        self._read = True
        self.held, self._rows = [], {"held": 0, "passed": 0}
        for number, batch in enumerate(self.batches):
            size = batch_size(batch) or 1
            if not self.hold_out or self._rows["held"] >= MOST_HELD_OUT:
                yield self._passed(batch, size)
            elif number % HELD_OUT == HELD_OUT - 1 or (number == 1 and not self.held):
                self._hold(batch, size)
            elif number == 0 and size >= HELD_OUT:  # so that a single batch also has a held-out part
                cut = size - size // HELD_OUT
                self._hold(part(batch, slice(cut, None)), size - cut)
                yield self._passed(part(batch, slice(0, cut)), cut)
            else:
                yield self._passed(batch, size)

    def _hold(self, batch: Any, rows: int) -> None:
        self.held.append(batch)
        self._rows["held"] += rows

    def _passed(self, batch: Any, rows: int) -> Any:
        self._rows["passed"] += rows
        return batch

    @property
    def share(self) -> float:
        """Fraction of the rows, over all ranks, that were passed on rather than held out."""
        passed, held = self._rows["passed"], self._rows["held"]
        ranks = current()
        if ranks is not None:
            passed, held = map(round, ranks.numbers(passed, held))
        return passed / max(passed + held, 1)

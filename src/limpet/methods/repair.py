"""`limpet.repair`: undo forgetting after fine-tuning, without the old data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from limpet.curvature import Fisher, FisherPass
from limpet.distributed import ReplicatedBatches, current, together
from limpet.errors import (
    CurvatureError,
    LimpetError,
    LimpetWarning,
    UnsupportedError,
    finite_number,
    positive_whole,
    warn,
)
from limpet.forgetting.displacement import displacements
from limpet.forgetting.measurement import LossProbe
from limpet.forgetting.repair import Measures, Repair, solve
from limpet.likelihoods import Likelihood, resolve
from limpet.methods.laplace import Laplace
from limpet.methods.memory import NO_PROBE, Memory
from limpet.methods.restore import restored
from limpet.model import Forward, full_precision, part, preserve_state, unwrapped
from limpet.model.batch import batch_size, check_batches, counted_examples

HELD_OUT = 5
"""With `tolerance`, one batch in this many is held out."""

MOST_HELD_OUT = 1000
"""Maximum number of held-out rows."""

TOO_FEW = "tolerance= holds out part of the batches, but there is only one small batch: pass more data, or strength="


def repair(
    model: nn.Module,
    memory: Memory,
    batches: Iterable[Any],
    *,
    strength: float | None = None,
    scale: float = 1.0,
    tolerance: float | None = None,
    budget: float | None = None,
    rank: int | None = None,
    examples: int | None = None,
    limit: int | None = None,
    forward: Forward | None = None,
    probe_forward: Forward | None = None,
    likelihood: str | Likelihood | None = None,
    progress: bool = True,
) -> Repair:
    """Repair a fine-tuned model in place: undo its forgetting, and keep what the new data need.

    The memory has the weights before fine-tuning and the curvature of the old loss there. One pass over the new data
    measures their curvature at the tuned weights. Every block then moves to the minimizer of the sum of the two
    quadratics (`limpet.forgetting.repair` has the formula and references). Train as usual, with any optimizer, and
    call this once at the end.

    In layers with LoRA adapters the adapters are repaired, at their own rank. Parameters that the memory does not
    protect (a new head, excluded parameters) and buffers (running statistics of batch norm) keep their tuned values.
    If an error is raised, the model keeps its tuned weights.

    Args:
        model: The tuned model.
        memory: A memory of the model before fine-tuning, made by one of the Laplace methods. It is not modified.
        batches: The new data, in any form that `memory.consolidate` accepts.
        strength: Factor of the old curvature. Defaults to 1, the Laplace approximation of training on both datasets.
        scale: Factor of the repaired update.
        tolerance: Instead of `strength`: use the largest strength at which the loss on a held-out part of the batches
            increases by at most this many nats per example.
        budget: Instead of `strength`: use the smallest strength at which the measured drift is at most this many nats
            per example. Requires a memory with a probe.
        rank: Truncate adapters to this rank if it is lower than their own.
        examples: Number of examples in the new data, if `batches` contains only some of them.
        limit: Use at most this many examples to measure the curvature.
        forward: `forward(model, batch)` returns `(outputs, targets)`. Needed for batches that are neither pairs nor
            dictionaries.
        probe_forward: The `forward` of the memory's probe, as for `memory.drift`.
        likelihood: Likelihood of the new data. Defaults to that of the memory.
        progress: Show progress bars.

    Returns:
        The repair, which can move the model along the path of strengths, or undo it.

    Raises:
        LimpetError: If memory, model, batches and options do not fit together.
        UnsupportedError: If the memory has no curvature (Synaptic Intelligence), or is sharded.

    Examples:
        >>> import limpet
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(4, 3)
        >>> old, new = ([(torch.randn(60, 4), torch.randint(0, 3, (60,)))] for _ in range(2))
        >>> memory = limpet.OnlineLaplace(model)
        >>> memory.consolidate(old)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        >>> for x, y in new * 20:
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.cross_entropy(model(x), y).backward()
        ...     optimizer.step()
        >>> before = float(memory.forecast())
        >>> repaired = limpet.repair(model, memory, new, strength=1.0)
        >>> repaired
        <Repair strength=1 scale=1 blocks=1>
        >>> memory.forecast() < before / 2
        True
        >>> _ = repaired.undo()
    """
    if sum(choice is not None for choice in (strength, tolerance, budget)) > 1:
        raise LimpetError("strength=, tolerance= and budget= are alternatives: pass only one of them")
    rank = None if rank is None else positive_whole("rank", rank)
    scale = finite_number("scale", scale)
    for name, value in (("strength", strength), ("tolerance", tolerance), ("budget", budget)):
        if value is not None:
            finite_number(name, value)
    with ExitStack() as undo:
        with together("repair", current()), full_precision(), torch.inference_mode(False):
            own = _usable(memory, model)
            if budget is not None and not own.probes:
                raise LimpetError(NO_PROBE)
            shared = isinstance(batches, ReplicatedBatches)
            split = HeldOutSplit(
                batches.batches if isinstance(batches, ReplicatedBatches) else batches, hold_out=tolerance is not None
            )
            counted = examples is not None or limit is not None
            given = ReplicatedBatches(split) if shared else split
            fisher = _new_fisher(own, given, examples, limit, forward, likelihood, progress)
            if tolerance is not None and not split.held:
                raise LimpetError(TOO_FEW)
            held_out = split.held or fisher.first.take(MOST_HELD_OUT // HELD_OUT)
            look = LossProbe(own.model, held_out, fisher_likelihood(own, likelihood), forward, own.seed)

            def loss() -> float:
                with preserve_state(own.model):
                    return fisher.loss_scale * look.loss({})

            if not math.isfinite(loss()):  # before any weight moves, so that sampled targets come from the tuned model
                raise LimpetError(
                    "the loss on the new data is not finite: check the data for inf, nan or missing targets"
                )

            def drift() -> float:
                found, ranks = own.drift(forward=probe_forward), current()
                if ranks is None:
                    return float(found)
                total, examples = ranks.numbers(
                    float(found) * found.examples, found.examples
                )  # every rank has its own probe
                return total / examples

            measures = Measures(forecast=lambda: float(own.forecast()), loss=loss, drift=drift if own.probes else None)
            found = solve(
                own.posterior,
                fisher,
                measures,
                weight=1.0 if counted else split.share,
                rank=rank,
                progress=progress,
            )
            undo.callback(found.undo)
            if tolerance is not None:
                found.within_tolerance(tolerance, scale)
            elif budget is not None:
                found.within_budget(budget, scale)
            else:
                found.at(1.0 if strength is None else strength, scale)
        undo.pop_all()  # it has succeeded, on all ranks
    return found


def _usable(memory: Memory, model: nn.Module) -> Laplace:
    """Check that the memory can be used for a repair, and bind it to `model` if it was made for another copy."""
    if not isinstance(memory, Laplace):
        raise UnsupportedError(
            f"{type(memory).__name__} measures no curvature, which repair requires: use limpet.OnlineLaplace"
        )
    if not memory.tasks:
        raise LimpetError(
            "this memory has no consolidated task: call memory.consolidate(old_batches) before fine-tuning"
        )
    memory._reject_inside_protect()
    memory._reject_sharded("repair")
    _warn_of_merged(model)
    if memory.model is unwrapped(model):
        memory.posterior.follow_devices()
        return memory
    own = restored(memory._state(), model, memory.likelihood)
    assert isinstance(own, Laplace)
    return own


def _warn_of_merged(model: nn.Module) -> None:
    if any(getattr(module, "merged_adapters", None) for module in model.modules()):
        warn(
            "adapters are merged, so the repair changes the merged base weights: keep the merged model "
            "(merge_and_unload), or call unmerge_adapter() before the repair",
            LimpetWarning,
        )


def _new_fisher(
    memory: Laplace,
    batches: Iterable[Any],
    examples: int | None,
    limit: int | None,
    forward: Forward | None,
    likelihood: str | Likelihood | None,
    progress: bool,
) -> Fisher:
    """Measure the Fisher of the new data for the blocks that training has moved."""
    known = {name: held for name, held in memory.posterior.held.items() if held.tasks}
    moved = {name for one in displacements(memory.model, known) for name in one.block.parameters}
    if not moved:
        raise LimpetError(
            "the model's weights equal the memory's mean, so there is nothing to repair: pass the tuned model"
        )
    blocks = [block for block in memory._planned(also=moved) if moved.issuperset(block.parameters)]
    one_pass = FisherPass(
        memory.model,
        blocks,
        fisher_likelihood(memory, likelihood),
        memory.posterior.structure,
        **memory._step_options(forward),
    )
    return one_pass.run(batches, examples=examples, limit=limit, progress=progress)


def fisher_likelihood(memory: Memory, likelihood: str | Likelihood | None) -> Likelihood:
    """Return the likelihood of the new data: the given one, or that of the memory."""
    return memory.likelihood if likelihood is None else resolve(likelihood)


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

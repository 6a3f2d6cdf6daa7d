"""`limpet.repair`: undo what a fine-tune has forgotten, after training, without old data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from limpet.curvature import Fisher, FisherPass
from limpet.distributed import ReplicatedBatches, current
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
"""One batch in so many is held out, where a tolerance asks for it."""

MOST_HELD_OUT = 1000
"""Rows that are held out at most."""

TOO_FEW = "tolerance= holds a part of the batches out, and there is only one small batch: give more, or strength="


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
    """Give a fine-tuned model back what it has forgotten, and keep what the new data need.

    The memory knows the weights before and the curvature of the old loss there; one pass over the new data gives
    their curvature at the tuned weights. Every block then moves to the minimum of the two quadratics
    (`limpet.forgetting.repair` has the formula and its sources). Train as usual, with any optimizer, and call this
    once at the end. Weights of layers with LoRA adapters are repaired in the adapters, at their own rank. Parameters
    that the memory does not know (a new head, what was excluded) and buffers (running statistics of batch norm) stay
    as tuned. Where anything goes wrong, all of them do.

    Args:
        model: The tuned model.
        memory: The memory of the model before, one of the Laplace methods. It is not changed.
        batches: The new data, as `memory.consolidate` takes them.
        strength: What the old curvature is multiplied by; 1 is the Laplace approximation's answer.
        scale: What the repaired update is multiplied by.
        tolerance: Instead of a strength: take the largest one at which the loss on a held-out part of the batches
            rises by at most so many nats per example.
        budget: Instead of a strength: take the smallest one at which the measured drift is at most so many nats per
            example. The memory needs a probe for it.
        rank: Cut adapters to this rank, where it is less than their own.
        examples: How many examples the new data have, where only some of them are given.
        limit: Use at most so many examples for the curvature.
        forward: forward(model, batch) gives (outputs, targets) for batches that are not pairs or dictionaries.
        probe_forward: The same for the memory's probe, as for `memory.drift`.
        likelihood: What the new outputs mean, where that is not what the memory's likelihood says.
        progress: Whether long work shows a bar.

    Returns:
        The repair, which can move the model along the path or undo it.

    Raises:
        LimpetError: Where memory, model and batches do not fit together.

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
        raise LimpetError("strength=, tolerance= and budget= each say how far to go: give one of them")
    rank = None if rank is None else positive_whole("rank", rank)
    scale = finite_number("scale", scale)
    for name, value in (("strength", strength), ("tolerance", tolerance), ("budget", budget)):
        if value is not None:
            finite_number(name, value)
    own = _usable(memory, model)
    if budget is not None and not own.probes:
        raise LimpetError(NO_PROBE)
    shared = isinstance(batches, ReplicatedBatches)
    split = HeldOutSplit(
        batches.batches if isinstance(batches, ReplicatedBatches) else batches, hold_out=tolerance is not None
    )
    counted = examples is not None or limit is not None
    with full_precision(), torch.inference_mode(False):
        given = ReplicatedBatches(split) if shared else split
        fisher = _new_fisher(own, given, examples, limit, forward, likelihood, progress)
        if tolerance is not None and not split.held:
            raise LimpetError(TOO_FEW)
        held_out = split.held or fisher.first.take(MOST_HELD_OUT // HELD_OUT)
        look = LossProbe(own.model, held_out, fisher_likelihood(own, likelihood), forward, own.seed)

        def loss() -> float:
            with preserve_state(own.model):
                return fisher.loss_scale * look.loss({})

        if not math.isfinite(loss()):  # measured before anything moves, so that targets are drawn from the tuned model
            raise LimpetError("the loss on the new data is not finite: look for inf or nan, or for missing targets")

        def drift() -> float:
            found, ranks = own.drift(forward=probe_forward), current()
            if ranks is None:
                return float(found)
            total, examples = ranks.numbers(float(found) * found.examples, found.examples)  # each rank has its probe
            return total / examples

        measures = Measures(forecast=lambda: float(own.forecast()), loss=loss, drift=drift if own.probes else None)
        found = solve(
            own.posterior, fisher, measures, weight=1.0 if counted else split.share, rank=rank, progress=progress
        )
        try:
            if tolerance is not None:
                return found.within_tolerance(tolerance, scale)
            if budget is not None:
                return found.within_budget(budget, scale)
            return found.at(1.0 if strength is None else strength, scale)
        except BaseException:
            found.undo()
            raise


def _usable(memory: Memory, model: nn.Module) -> Laplace:
    """The memory, for this very model."""
    if not isinstance(memory, Laplace):
        raise UnsupportedError(
            f"{type(memory).__name__} measures no curvature, which repair needs: use limpet.OnlineLaplace"
        )
    if not memory.tasks:
        raise LimpetError("this memory knows no task yet: call memory.consolidate(old_batches) before the fine-tune")
    memory._refuse_inside_protect()
    memory._reject_sharded("repair")
    _warn_of_merged(model)
    if memory.model is unwrapped(model):
        memory.posterior.follow_devices()
        return memory
    own = restored(memory.state_dict(), model, memory.likelihood)
    assert isinstance(own, Laplace)
    return own


def _warn_of_merged(model: nn.Module) -> None:
    if any(getattr(module, "merged_adapters", None) for module in model.modules()):
        warn(
            "adapters are merged, so what is repaired is the weight that they are merged into: keep the merged model "
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
    """The Fisher of the new data, of the blocks that training has moved."""
    known = {name: held for name, held in memory.posterior.held.items() if held.tasks}
    moved = {name for one in displacements(memory.model, known) for name in one.block.parameters}
    if not moved:
        raise LimpetError(
            "the model's weights equal the memory's mean, so there is nothing to repair: give the tuned model"
        )
    blocks = [block for block in memory._planned(also=moved) if moved.issuperset(block.parameters)]
    one_pass = FisherPass(
        memory.model,
        blocks,
        fisher_likelihood(memory, likelihood),
        memory.posterior.structure,
        fisher=memory.fisher,
        draws=memory.draws,
        seed=memory.seed + memory.tasks,
        forward=forward,
    )
    return one_pass.run(batches, examples=examples, limit=limit, progress=progress)


def fisher_likelihood(memory: Memory, likelihood: str | Likelihood | None) -> Likelihood:
    """What the new outputs mean."""
    return memory.likelihood if likelihood is None else resolve(likelihood)


class HeldOutSplit:
    """Batches, of which one in five is held out (or, where there is one alone, a fifth of its rows)."""

    def __init__(self, batches: Iterable[Any], *, hold_out: bool) -> None:
        check_batches(batches)
        self.batches, self.hold_out = batches, hold_out
        # by these, loaders are found to be random, and are left as they were
        self.sampler, self.batch_sampler, self.generator = (
            getattr(batches, name, None) for name in ("sampler", "batch_sampler", "generator")
        )
        self._read = False
        self.held: list[Any] = []
        self._rows = {"held": 0, "passed": 0}
        total = counted_examples(batches)
        if total is not None:
            self.examples = total  # what `limit` scales up to

    def __iter__(self) -> Iterator[Any]:
        if self._read and isinstance(self.batches, Iterator):
            raise CurvatureError(
                "these batches have to be read a second time, and can be read only once: give a loader or a list"
            )
        self._read = True
        self.held, self._rows = [], {"held": 0, "passed": 0}
        for number, batch in enumerate(self.batches):
            size = batch_size(batch) or 1
            if not self.hold_out or self._rows["held"] >= MOST_HELD_OUT:
                yield self._passed(batch, size)
            elif number % HELD_OUT == HELD_OUT - 1 or (number == 1 and not self.held):
                self._hold(batch, size)
            elif number == 0 and size >= HELD_OUT:  # so that even a single batch leaves something to look at
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
        """The share of the rows that went into the pass, on all ranks."""
        passed, held = self._rows["passed"], self._rows["held"]
        ranks = current()
        if ranks is not None:
            passed, held = map(round, ranks.numbers(passed, held))
        return passed / max(passed + held, 1)

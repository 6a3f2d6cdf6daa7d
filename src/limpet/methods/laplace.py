"""What the three Laplace methods share: one pass over the task's data, then a method's own update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from limpet.curvature import FISHERS, Displacement, Fisher, FisherPass
from limpet.deprecation import renamed_arguments
from limpet.distributed import current
from limpet.errors import (
    FallbackWarning,
    LimpetError,
    LimpetWarning,
    NotProtectedWarning,
    finite_number,
    positive_whole,
    warn,
    whole_number,
)
from limpet.forgetting.loss_curve import Curve
from limpet.likelihoods import Likelihood
from limpet.methods.memory import MAX_FACTOR_SIZE, Memory
from limpet.model import PER_SAMPLE, Forward, counted_examples, full_precision
from limpet.model.batch import FirstBatches
from limpet.posterior import BlockPosterior, Posterior
from limpet.posterior.sharding import reject_sharded
from limpet.precision import Precision

if TYPE_CHECKING:
    from limpet.curvature.checkpoint import Checkpoint
    from limpet.forgetting.forecast import Forecast
    from limpet.forgetting.probe import Probe
    from limpet.methods import state_dict

MOVED = 1e-4
"""How far, relatively, weights may be from the mean by rounding alone."""

LOOK = 2000
"""Examples that are enough to see the shape of a task's Fisher."""


def probe_rows(probe: int | None) -> int | None:
    """How many examples a probe takes."""
    if probe is not None and positive_whole("probe", probe) > FirstBatches.LIMIT:
        raise ValueError(f"probe= takes at most {FirstBatches.LIMIT} examples: for more, memory.add_probe(batches)")
    return probe


class Laplace(Memory):
    """A memory whose precision is a Fisher, measured at the end of each task.

    With `smoothing` it is measured not at the mode but at weights around it, another draw for every batch, so far away
    that the loss is predicted to rise by so many nats per example (or, if nothing does, as far as weights are large).
    Its mean is the curvature of the smoothed loss E[loss(w + z)], which knows what a point does not: the loss rises
    faster than the quadratic at its mode. It costs one more pass, a short one where the loader knows how many examples
    it has.

    A side of a block longer than `max_side` keeps its factor in even pieces, up to seven, and a still longer one (a
    vocabulary) the diagonal of it. With at_rest="float16" the bases of the Kronecker structure are kept in half the
    bytes, with offload=True in the memory of the host; each is made ready when its block is used.
    """

    _measures_curves = True

    @renamed_arguments(max_side="max_factor_size", at_rest="storage_dtype")
    def __init__(
        self,
        model: nn.Module,
        *,
        likelihood: str | Likelihood = "categorical",
        structure: str = "kronecker",
        strength: float | str = 1.0,
        prior_precision: float = 1.0,
        fisher: str = "auto",
        prior_mean: str = "zero",
        exclude: Iterable[str | nn.Module | nn.Parameter] = (),
        smoothing: float = 0.0,
        draws: int = 1,
        seed: int = 0,
        max_factor_size: int = MAX_FACTOR_SIZE,
        storage_dtype: str | None = None,
        offload: bool = False,
    ) -> None:
        if fisher not in FISHERS:
            raise ValueError(f"fisher must be one of {', '.join(FISHERS)}, not {fisher!r}")
        self.smoothing = finite_number("smoothing", smoothing)
        self.fisher, self.draws, self.seed = fisher, positive_whole("draws", draws), whole_number("seed", seed)
        super().__init__(
            model,
            likelihood=likelihood,
            structure=structure,
            strength=strength,
            prior_precision=prior_precision,
            prior_mean=prior_mean,
            exclude=exclude,
            max_factor_size=max_factor_size,
            storage_dtype=storage_dtype,
            offload=offload,
        )

    def consolidate(
        self,
        batches: Iterable[Any],
        *,
        examples: int | None = None,
        limit: int | None = None,
        forward: Forward | None = None,
        progress: bool = True,
        checkpoint: str | Path | None = None,
        probe: int | None = None,
    ) -> None:
        """Take the task in: one pass over its data, after which mean and precision know it.

        `examples` is N (counted where the batches are finite), `limit` uses at most so many of them and scales up.
        `forward(model, batch)` gives (outputs, targets) for batches that are not pairs or dictionaries. `checkpoint`
        names a file to which a long pass is written once a minute: called again after a crash, with batches in the
        same order, it goes on from there; the file is gone once the task is taken in. On many ranks the batches are
        each rank's own, or all of them, `limpet.distributed.ReplicatedBatches(batches)`; then another number of ranks
        may go on.
        With `probe` the memory keeps so many of the inputs, with the outputs that the model gives now, for `drift` to
        be measured on (`add_probe`): the file then holds these inputs.
        """
        saved = self._checkpoint(checkpoint)
        rows = probe_rows(probe)
        fisher = self._measure(batches, examples, limit, forward, progress, saved)
        probes = () if rows is None else (self._recorded(fisher.first.take(rows), forward),)
        self._settle([fisher], forward)
        self.probes += probes
        if saved is not None:
            saved.remove()

    def forecast(
        self, batches: Iterable[Any] | None = None, *, curvature: str = "kept", forward: Forward | None = None
    ) -> Forecast:
        """As for every memory; with old data in hand, `forecast(batches, curvature="fresh")` looks at them instead.

        The rise is then that of their loss since the last consolidation, and each block's share that of a Fisher
        measured on them. A few hundred examples are enough.
        """
        from limpet.forgetting.forecast import fresh_forecast

        if curvature not in ("kept", "fresh"):
            raise ValueError(f"curvature must be 'kept' or 'fresh', not {curvature!r}")
        if (curvature == "fresh") != (batches is not None):
            raise LimpetError("forecast(batches, curvature='fresh') takes old data, and forecast() none")
        if batches is None:
            return super().forecast()
        return fresh_forecast(self.posterior, self._pass(forward, None), batches)

    @staticmethod
    def _checkpoint(path: str | Path | None) -> Checkpoint | None:
        from limpet.curvature.checkpoint import Checkpoint

        return None if path is None else Checkpoint(path)

    def _measure(
        self,
        batches: Iterable[Any],
        examples: int | None,
        limit: int | None,
        forward: Forward | None,
        progress: bool,
        checkpoint: Checkpoint | None = None,
    ) -> Fisher:
        self._refuse_inside_protect()
        if self.smoothing or self._automatic:
            what = "smoothing" if self.smoothing else "strength='auto'"
            reject_sharded(self.posterior.sharding, what, "give a number as strength, and leave out smoothing=")
        with torch.inference_mode(False):
            around = self._surroundings(batches, examples, limit, forward) if self.smoothing else None
            return self._pass(forward, around).run(
                batches, examples=examples, limit=limit, progress=progress, checkpoint=checkpoint
            )

    def add_probe(self, batches: Iterable[Any], *, forward: Forward | None = None) -> None:
        """Keep these inputs, with the outputs that the model gives now, for `drift` to be measured on.

        Inputs that were not among those that were consolidated say most: repair removes just what these can see.

        Args:
            batches: The data. Their inputs will be in the memory's file, their targets not (but with `forward`).
            forward: As for `consolidate`.

        Raises:
            LimpetError: Where the model has moved since the last consolidation.
        """
        self._refuse_inside_protect()
        weights = self.posterior.weights()
        for held in self.posterior.held.values():
            moved = held.displacement(weights).norm() if held.tasks else 0.0
            if moved > MOVED * held.mean.norm():
                raise LimpetError(
                    f"{held.block.name} has moved since it was consolidated, and a probe keeps the outputs of the "
                    "model before: add it right after memory.consolidate(...)"
                )
        self.probes = (*self.probes, self._recorded(batches, forward))

    def _recorded(self, batches: Iterable[Any], forward: Forward | None) -> Probe:
        """A probe of these batches, with the outputs of now."""
        from limpet.forgetting.probe import Probe

        self._reject_sharded("probe=")
        held = {name for one in self.posterior.held.values() for name in one.block.parameters}
        seed = self.seed + self.tasks
        return Probe.record(self.model, list(batches), self.likelihood, forward, held=held, seed=seed)

    def _surroundings(
        self, batches: Iterable[Any], examples: int | None, limit: int | None, forward: Forward | None
    ) -> Displacement | None:
        """A short look at the mode, and from it where around the mode to measure."""
        from limpet.posterior.perturbation import surroundings

        if isinstance(batches, Iterator):
            raise LimpetError("smoothing reads the data twice: give a loader or a list of batches, not an iterator")
        sized = examples is not None or counted_examples(batches) is not None
        short = min(limit or LOOK, LOOK) if sized or limit is not None else None
        look = self._pass(forward, None).run(batches, examples=examples, limit=short, progress=False)
        strength = 1.0 if self._automatic else self._strength
        return surroundings(self.posterior, look, strength, self.smoothing, self.seed + self.tasks)

    def _pass(self, forward: Forward | None, displacement: Displacement | None) -> FisherPass:
        blocks, sharding, seed = self._planned(), self.posterior.sharding, self.seed + self.tasks
        measured = self.model, blocks, self.likelihood, self.posterior.structure
        if sharding is None:
            return FisherPass(
                *measured, fisher=self.fisher, draws=self.draws, seed=seed, forward=forward, displacement=displacement
            )
        from limpet.curvature.fsdp import ShardedPass

        sharding.settle(blocks, self.posterior.structure)
        return ShardedPass(
            *measured, ranks=sharding.ranks, owners=sharding.owners,
            fisher=self.fisher, draws=self.draws, seed=seed, forward=forward, displacement=displacement,
        )  # fmt: skip

    def _settle(self, fishers: list[Fisher], forward: Forward | None) -> None:
        """Let what the passes found become the memory: the newest task is the last of them."""
        with full_precision(), torch.inference_mode(False):
            with self._all_or_nothing():
                self._take_in(fishers, forward)
            if not self._automatic:
                self._measure_curve(fishers[-1], forward)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Whatever goes wrong in the body leaves the memory as it was."""
        held, constant = dict(self.posterior.held), self.posterior.constant
        names = ("_strength", "_direct", "history", "unused", "examples", "tasks", "_proximal_state")
        before = {name: getattr(self, name) for name in names}
        try:
            yield
        except BaseException:
            self.posterior.held, self.posterior.constant = held, constant
            for name, value in before.items():
                setattr(self, name, value)
            raise

    def _take_in(self, fishers: list[Fisher], forward: Forward | None) -> None:
        from limpet.posterior.perturbation import with_task

        newest = fishers[-1]
        self._warn_of_fallback(newest)
        self._direct = self._direct | {name for b in newest.blocks if b.kind == PER_SAMPLE for name in b.parameters}
        self.posterior.arrange(newest.blocks)
        moved = self.forecast().quadratic
        curve = Curve()
        if self._automatic:
            curve = self._curve(self.tasks, with_task(self.posterior, newest, 1.0), newest, forward)
            self._strength = curve.strength
        self._update(fishers)
        self.history = self.history.learned(newest.examples, curve, moved)
        self.unused = newest.unused
        self.examples += newest.examples
        self.tasks += 1
        self._proximal_state = None
        if newest.unused:
            first = sorted(newest.unused)[0]
            warn(
                f"{len(newest.unused)} parameters had no gradient in this task (such as {first}), so nothing new is "
                "known of them; leave them out with exclude=[...] if they belong to other tasks",
                NotProtectedWarning,
            )

    def _update(self, fishers: list[Fisher]) -> None:
        """Every block of which the newest task says something, after the task."""
        weights = dict(self.posterior.weights())

        def updated(held: BlockPosterior) -> BlockPosterior:
            if not fishers[-1].speaks_of(held.block):
                return held
            after = self._updated(held, fishers, held.matrix(weights).detach().clone())
            if self.posterior.sharding is not None:  # nobody else asks for them, and a rank has room for its own blocks
                for name in held.block.parameters:
                    del weights[name]
                for fisher in fishers:
                    fisher.terms.pop(held.block.name, None)
            return after

        self.posterior.replace_all(updated)

    def _curve(self, number: int, posterior: Posterior, newest: Fisher, forward: Forward | None) -> Curve:
        """How the loss of the newest task, the one of this number, rises around a posterior that knows it."""
        from limpet.forgetting.measurement import measure

        if posterior.sharding is not None:
            return Curve()
        return measure(posterior, newest, self.likelihood, forward, self.seed + number)

    def _measure_curve(self, newest: Fisher, forward: Forward | None) -> None:
        """Add its curve to what is known of the newest task, which is taken in whether or not this succeeds."""
        try:
            self.history = self.history.with_curve(self._curve(self.tasks - 1, self.posterior, newest, forward))
        except Exception as error:
            if current() is not None:
                raise  # the other ranks wait
            warn(
                f"how fast the loss of this task rises could not be measured ({type(error).__name__}: {error}); the "
                "task is taken in, and forecasts take its quadratic as it is, which says too little",
                LimpetWarning,
            )

    def _warn_of_fallback(self, newest: Fisher) -> None:
        planned = {name for block in self._planned() if block.kind != PER_SAMPLE for name in block.parameters}
        fallen = [b.name for b in newest.blocks if b.kind == PER_SAMPLE and b.name in planned]
        if fallen:
            warn(
                f"{len(fallen)} parameters (such as {fallen[0]}) are used in a way that hooks on their layers do not "
                "see; they get an exact diagonal, measured example by example, which is slow",
                FallbackWarning,
            )

    @abstractmethod
    def _updated(self, held: BlockPosterior, fishers: list[Fisher], mean: Tensor) -> BlockPosterior:
        """The block after the task, whose weights are now `mean`."""

    def _added(self, held: BlockPosterior, fishers: list[Fisher]) -> Precision:
        """The block's precision with these Fishers added, each times the strength."""
        precision = held.precision
        for fisher in fishers:
            for term in fisher.terms.get(held.block.name, ()):
                precision = precision.add(term, self._strength)
        return precision

    def _settings(self) -> dict[str, Any]:
        own = {"fisher": self.fisher, "smoothing": self.smoothing, "draws": self.draws, "seed": self.seed}
        return {**super()._settings(), **own}

    def _read_settings(self, settings: state_dict.Settings) -> dict[str, Any]:
        return {
            **super()._read_settings(settings),
            "fisher": settings.choice("fisher", FISHERS),
            "smoothing": settings.number("smoothing", 0.0),
            "draws": max(settings.whole("draws"), 1),
            "seed": settings.whole("seed"),
        }

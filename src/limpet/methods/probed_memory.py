"""Recording probes: inputs with the outputs that the model has for them, right after a task was consolidated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from limpet.distributed import current, together
from limpet.errors import LimpetError, UnsupportedError, positive_whole
from limpet.methods.memory import Memory
from limpet.model import Forward
from limpet.model.batch import FirstBatches
from limpet.model.context import random_state

if TYPE_CHECKING:
    from limpet.curvature.privacy import Privacy
    from limpet.forgetting.probe import Probe

MOVED = 1e-4
"""Largest relative distance between weights and mean that rounding alone can explain."""


def probe_rows(probe: int | None) -> int | None:
    """Check the `probe` argument of `consolidate`, and return it."""
    if probe is not None and positive_whole("probe", probe) > FirstBatches.LIMIT:
        raise ValueError(
            f"probe= must be at most {FirstBatches.LIMIT}: for more examples call memory.add_probe(batches), or "
            "limpet.Distillation.consolidate(batches) without probe="
        )
    return probe


class ProbedMemory(Memory):
    """The part of `Laplace` that records probes."""

    privacy: tuple[Privacy | None, ...]
    seed: int

    def add_probe(self, batches: Iterable[Any], *, forward: Forward | None = None) -> None:
        """Store inputs with the model's current outputs, for `drift` to be measured on.

        Inputs that were not consolidated are the most informative, because a repair removes exactly the forgetting
        that is visible on the consolidated ones.

        If the model is sharded, every rank passes its share of the data, and all ranks store all of it.

        Args:
            batches: The data. The memory's file will contain their inputs, but not their targets unless `forward` is
                given.
            forward: As for `consolidate`.

        Raises:
            LimpetError: If the weights have changed since the last consolidation.
            UnsupportedError: If a task was consolidated with `privacy`.
        """
        self._reject_inside_protect()
        if any(self.privacy):
            raise UnsupportedError(
                "this memory has private tasks, but a probe would store inputs as they are: keep the inputs elsewhere"
            )
        sharded = self.posterior.sharding is not None
        with together("add_probe", current() if sharded else None, runs_model=sharded):
            self._reject_moved()
            self.probes = (*self.probes, self._record_probe(batches, forward))

    def _reject_moved(self) -> None:
        """Raise LimpetError if the weights are not those of the last consolidation."""
        for blocks, weights in self.posterior.rounds():
            for held in blocks:
                moved = held.displacement(weights).norm() if held.tasks else 0.0
                if moved > MOVED * held.mean.norm():
                    raise LimpetError(
                        f"{held.block.name} has moved since it was consolidated, but a probe must record the outputs "
                        "from before: call add_probe right after memory.consolidate(...)"
                    )

    def _share(self, rows: int) -> int:
        """The number of rows that this rank contributes to a probe."""
        sharding = self.posterior.sharding
        return rows if sharding is None else -(-rows // sharding.ranks.size)

    def _record_probe(self, batches: Iterable[Any], forward: Forward | None) -> Probe:
        """Record a probe of these batches with the model's current outputs."""
        from limpet.forgetting.probe import Probe

        sharding, seed = self.posterior.sharding, self.seed + self.tasks
        with random_state(batches):
            batches = list(batches)
        blocks = [held.block for held in self.posterior.held.values()]
        if sharding is not None:  # all ranks run the model together, and store the same probe
            blocks = list(sharding.blocks.values())
            batches = [batch for some in sharding.ranks.gather(batches) for batch in some]
        held = {name for block in blocks for name in block.parameters}
        return Probe.record(self.model, batches, self.likelihood, forward, held=held, seed=seed)

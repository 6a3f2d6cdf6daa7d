"""Approximate Laplace: re-measure the curvature of all tasks at the newest mode. Needs the old data again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from limpet.curvature import Fisher
from limpet.curvature.privacy import Privacy
from limpet.errors import LimpetError, UnsupportedError
from limpet.methods.laplace import Laplace
from limpet.methods.probed_memory import probe_rows
from limpet.model import PER_SAMPLE, Forward
from limpet.posterior import BlockPosterior


class ApproximateLaplace(Laplace):
    """Laplace approximation with the Fisher of every task measured at the newest mode.

        L_{t+1} = prior + strength sum_i F_i(mean_{t+1}), over all tasks so far

    The baseline of Ritter et al. (2018) that shows the cost of keeping curvature measured at older weights. The
    constructor arguments are those of `limpet.methods.laplace.Laplace`.

    Examples:
        >>> import torch, limpet
        >>> model = torch.nn.Linear(3, 2)
        >>> first, second = ([(torch.randn(20, 3), torch.randint(0, 2, (20,)))] for _ in range(2))
        >>> memory = limpet.ApproximateLaplace(model)
        >>> memory.consolidate(first)
        >>> memory.consolidate(second, earlier=[first])
        >>> memory.tasks, memory.examples
        (2, 40)
    """

    method = "approximate-laplace"

    def consolidate(
        self,
        batches: Iterable[Any],
        *,
        earlier: Sequence[Iterable[Any]] = (),
        examples: int | None = None,
        limit: int | None = None,
        forward: Forward | None = None,
        progress: bool = True,
        checkpoint: str | Path | None = None,
        probe: int | None = None,
        privacy: Privacy | None = None,
    ) -> None:
        """Consolidate a task, and measure the curvature of all earlier tasks again at the new weights.

        Except for `earlier`, the arguments are those of `Memory.consolidate`.

        Args:
            batches: Batches of the new task.
            earlier: Batches of every earlier task, oldest first.
            examples: Number of examples in the new task. Those of the earlier tasks are counted.
            limit: Use at most this many examples of each task, and scale the Fisher up.
            forward: `forward(model, batch)` returns `(outputs, targets)`.
            progress: Show a progress bar.
            checkpoint: Path prefix; the pass over task i is checkpointed to `{checkpoint}.{i}`.
            probe: Number of inputs of the new task to store for `drift`.
            privacy: Not supported: measuring all tasks again would spend their budgets again.

        Raises:
            UnsupportedError: If `privacy` is given.
            LimpetError: If `earlier` does not have the batches of every earlier task.
        """
        if privacy is not None:
            raise UnsupportedError(
                "ApproximateLaplace measures the data of a task again after every later one, which would spend the "
                "budget of privacy= each time: use limpet.OnlineLaplace"
            )
        arguments = {"examples": examples, "limit": limit, "checkpoint": checkpoint, "probe": probe}
        with self._on_all_ranks(batches, {**arguments, "earlier": len(earlier)}):
            if len(earlier) != self.tasks:
                raise LimpetError(
                    f"ApproximateLaplace measures all {self.tasks} earlier tasks again: pass the batches of each as "
                    f"earlier=[...], not of {len(earlier)}"
                )
            rows = probe_rows(probe)
            passes = [(old, None) for old in earlier] + [(batches, examples)]
            saved = [self._checkpoint(checkpoint and f"{checkpoint}.{i}") for i in range(len(passes))]

            def measure(number: int) -> Fisher:
                data, count = passes[number]
                return self._measure(data, count, limit, forward, progress, saved[number])

            fishers = [measure(number) for number in range(len(passes))]
            while other := self._measured_otherwise(fishers):
                for number in other:
                    file = saved[number]
                    if file is not None:
                        file.remove()
                    fishers[number] = measure(number)
            probes = () if rows is None else (self._record_probe(fishers[-1].first.take(self._share(rows)), forward),)
            self._settle(fishers, forward)
            self.probes += probes
            self.history = self.history.measured_again()
            for file in saved:
                if file is not None:
                    file.remove()

    def _measured_otherwise(self, fishers: Sequence[Fisher]) -> list[int]:
        """Return the passes to repeat: they used a layer whose parameters another pass had to measure per sample.

        From now on all passes measure those parameters per sample.
        """
        direct = {name for fisher in fishers for b in fisher.blocks if b.kind == PER_SAMPLE for name in b.parameters}
        self._direct = self._direct | direct
        return [
            number
            for number, fisher in enumerate(fishers)
            if any(b.kind != PER_SAMPLE and direct & set(b.parameters) for b in fisher.blocks)
        ]

    def _updated(self, held: BlockPosterior, fishers: list[Fisher], mean: Tensor) -> BlockPosterior:
        fresh = self.posterior.without_tasks(held)
        return replace(fresh, mean=mean, precision=self._added(fresh, fishers), tasks=held.tasks + 1)

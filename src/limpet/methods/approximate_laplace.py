"""Approximate Laplace: all curvature measured anew at the newest mode. It needs the old data again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from limpet.curvature import Fisher
from limpet.errors import LimpetError
from limpet.methods.laplace import Laplace, probe_rows
from limpet.model import PER_SAMPLE, Forward
from limpet.posterior import BlockPosterior


class ApproximateLaplace(Laplace):
    """L_{t+1} = prior + strength sum_i F_i(mean_{t+1}), over all tasks so far.

    The baseline of Ritter et al. (2018) that shows what is lost by keeping curvature measured at older weights.

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
    ) -> None:
        """As for the other methods, and with the batches of all earlier tasks, oldest first, in `earlier`.

        `examples` is the number of the new task; that of the earlier ones is counted.
        """
        if len(earlier) != self.tasks:
            raise LimpetError(
                f"this memory holds {self.tasks} tasks and measures them all anew: give earlier=[...] with the batches "
                f"of each, not of {len(earlier)}"
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
        probes = () if rows is None else (self._recorded(fishers[-1].first.take(rows), forward),)
        self._settle(fishers, forward)
        self.probes += probes
        self.history = self.history.measured_again()
        for file in saved:
            if file is not None:
                file.remove()

    def _measured_otherwise(self, fishers: Sequence[Fisher]) -> list[int]:
        """The passes that saw a layer where another one has to measure its parameters directly; from now on all do."""
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

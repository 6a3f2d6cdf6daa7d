"""Hold on to a model that lies on many ranks in pieces: each block is pulled by the rank that keeps it.

In every step the pieces of the weights go to their blocks' owners and what the penalty makes of them comes back, each
in one all-to-all (`limpet.parallel.Exchange`). All ranks take the same steps, as `fully_shard` wants anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from limpet.parallel import local, piece_like
from limpet.posterior import Posterior
from limpet.protect import Protection
from limpet.pull import Bound, Part, Pull, Stepped
from limpet.spread import Spread, refuse_spread


class ShardedProtection(Protection):
    """A `Protection` of which every rank has its part."""

    def __init__(self, posterior: Posterior, optimizer: Any, **settings: Any) -> None:
        assert posterior.spread is not None
        if settings.get("budget") is not None:
            refuse_spread(posterior.spread, "budget=", "hold with a strength, and watch memory.forecast()")
        self._spread: Spread = posterior.spread
        self._all: list[Stepped] = []
        super().__init__(posterior, optimizer, **settings)

    @property
    def _reached(self) -> Sequence[Stepped]:
        return self._all

    def _blocks(self) -> Iterator[Bound]:
        self._parameters = self.posterior.parameters()
        self._exchange = self._spread.exchange(self._parameters)
        found = []
        for block in self._spread.blocks.values():
            parameters = [self._parameters[name] for name in block.parameters]
            groups = [self._group_of.get(parameter) for parameter in parameters]
            if any(group is not None for group in groups):
                found.append(Stepped(block, parameters, groups))
        self._all = found
        return super()._blocks()

    def _fresh_parts(self, without: Collection[nn.Parameter] = ()) -> Iterator[Part]:
        stepped = [reached for reached in self._all if reached.stepped and set(reached.parameters).isdisjoint(without)]
        if not stepped:
            return
        names = {name for reached in stepped for name in reached.block.parameters}
        whole = self._exchange.bring({name: self._parameters[name] for name in names})
        parts: dict[str, Tensor] = {}
        for bound in self._bound:
            if names.issuperset(bound.block.parameters):
                d = bound.held.displacement(whole)
                parts.update(bound.block.scatter(bound.gradient(d)))
        given = self._exchange.give(parts, names)
        for reached in stepped:
            for name, parameter, group in zip(
                reached.block.parameters, reached.parameters, reached.groups, strict=True
            ):
                if group is not None:
                    yield parameter, group, piece_like(parameter, given[name])

    @torch.no_grad()
    def _pull(self) -> None:
        forces, pending = self.state.force, self.state.pending
        totals = {r.block.name: total for r in self._all if (total := pending.pop(r.block.name, 0.0))}
        start: dict[str, Tensor] = {}  # where the weights would be without the penalty
        for reached in self._all:
            total = totals.get(reached.block.name, 0.0)
            for name, parameter in reached.weights().items() if total else ():
                held_back = self.every > 1 and name in forces
                start[name] = local(parameter) - total * local(forces[name]) if held_back else local(parameter)
        whole = self._exchange.bring(start)
        after: dict[str, Tensor] = {}
        pushed: dict[str, Tensor] = {}
        for bound in self._bound:
            total = totals.get(bound.block.name, 0.0)
            if total:
                pull = Pull(bound, total, bound.held.displacement(whole), total * self.weight)
                pulled = pull.pulled(None)
                after.update(bound.block.scatter(bound.held.mean + pulled))
                if self.every > 1:
                    pushed.update(bound.block.scatter((pulled - pull.d) / total))
        for name, piece in self._exchange.give(after, start).items():
            local(self._parameters[name]).copy_(piece)
        if self.every > 1:
            for name, piece in self._exchange.give(pushed, start).items():
                forces[name] = piece_like(self._parameters[name], piece)

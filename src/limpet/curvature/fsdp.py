"""One pass through a model that lies on the ranks in pieces: all go through it together, and each keeps its own blocks.

Under `fully_shard` a forward pass is a collective, so every rank takes as many batches as the one that has the most;
one that has run out goes along with a batch that is not counted. What a batch says of a block is reduced to the
block's owner at once, so that no rank ever holds more sums than those of its own blocks and one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from limpet.curvature.accumulators import Accumulator
from limpet.curvature.audit import gradients_at
from limpet.curvature.ddp import reduce_counts
from limpet.curvature.fisher_pass import NOTHING, Displacement, FisherPass
from limpet.curvature.structure import Structure
from limpet.distributed import Ranks
from limpet.errors import CurvatureError
from limpet.likelihoods import Likelihood, as_tensors
from limpet.model.batch import Forward, batch_size, call, part
from limpet.model.blocks import Block


class ShardedPass(FisherPass):
    """A pass of ranks that share one model. `owners` has the rank that keeps each parameter's block."""

    in_step = True

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        likelihood: Likelihood,
        structure: Structure,
        *,
        ranks: Ranks,
        owners: Mapping[str, int],
        fisher: str = "auto",
        draws: int = 1,
        seed: int = 0,
        forward: Forward | None = None,
        displacement: Displacement | None = None,
    ) -> None:
        self.ranks, self.owners = ranks, owners
        self.idle = False  # this rank has no data left, and goes along
        self.rounds = 0  # batches that all ranks have taken together
        super().__init__(
            model, blocks, likelihood, structure,
            fisher=fisher, draws=draws, seed=seed, forward=forward, displacement=displacement,
        )  # fmt: skip

    def owner(self, block: Block) -> int:
        """The rank that keeps a block."""
        return self.owners[block.parameters[0]]

    def _read_together(self, ranks: Ranks, read: Callable[[], None]) -> None:
        read()
        reduce_counts(self, ranks)

    def _wanted(self, batches: Iterable[Any], limit: int | None) -> Iterator[tuple[int, Any]]:
        own, filler = super()._wanted(batches, limit), None
        self.rounds = 0
        while True:
            found = next((some for some in own if batch_size(some[1]) != 0), None)
            self.idle = found is None
            having = [rank for rank, some in enumerate(self.ranks.gather(not self.idle)) if some]
            if not having:
                return
            if filler is None:
                filler = self._from(having[0], found)
            yield (NOTHING, filler) if found is None else found
            self.rounds += 1

    def _from(self, rank: int, found: tuple[int, Any] | None) -> Any:
        """The first example of a rank's batch, on all of them."""
        sent = [None]
        if rank == self.ranks.rank and found is not None:
            sent = [part(found[1], slice(0, 1)) if batch_size(found[1]) else found[1]]
        dist.broadcast_object_list(sent, rank)
        return sent[0]

    def _positions(self, batch: Any, size: int) -> float:
        if self.rounds:
            return max(self.seen / max(self.rows, 1), 1.0)
        return super()._positions(batch, size)  # a forward pass, which all take in the first round

    def _refuse_infinite(self, outputs: tuple[Tensor, ...]) -> None:
        error: CurvatureError | None = None
        try:
            super()._refuse_infinite(outputs)
        except CurvatureError as told:
            error = told
        self.ranks.raise_together(error)

    def _count(self, outputs: Any, targets: Any) -> None:
        if not self.idle:
            super()._count(outputs, targets)

    def _on_any_rank(self, told: bool) -> bool:
        return any(self.ranks.gather(told))

    def _of_all_ranks(self, names: set[str]) -> set[str]:
        return set().union(*self.ranks.gather(names))

    def make_sums(self) -> None:
        self.begun = True
        for block in self.blocks:
            if self.owner(block) == self.ranks.rank:
                self.sums[block.name] = self._zeros(block)

    def _zeros(self, block: Block) -> Accumulator:
        return self.structure.accumulator(block, self.parameters[block.parameters[0]])

    def _add(self, block: Block, *, data: bool) -> None:
        kept = self.sums
        self.sums = {block.name: self._zeros(block)}
        try:
            super()._add(block, data=data)
            told = self.sums[block.name]
        finally:
            self.sums = kept
        self._hand_over(block, told)

    def _hand_over(self, block: Block, told: Accumulator) -> None:
        """Let what this batch says of a block be in its owner's sums."""
        sums = told.sums()
        if self.idle:
            sums = {name: torch.zeros_like(tensor) for name, tensor in sums.items()}
        if not sums:
            return
        summed = self.ranks.reduce(sums, self.owner(block))
        if summed is not None:
            mine = self.sums[block.name]
            before = mine.sums()
            mine.load({name: before[name] + t if name in before else t for name, t in summed.items()})

    def _accumulate_direct(
        self, direct: Sequence[Block], batch: Any, tensors: tuple[Tensor, ...], roots: Sequence[tuple[Tensor, ...]]
    ) -> None:
        count = tensors[0].shape[0]
        if batch_size(batch) != count:
            raise CurvatureError(
                f"{', '.join(block.name for block in direct)}: no layer class covers these parameters, and the batch "
                "cannot be cut into examples: leave these parameters out with exclude=[...]"
            )
        found = {block.name: self._zeros(block) for block in direct}
        for n in range(max(self.ranks.gather(count))):
            mine = n if n < count else 0
            outputs, _ = call(self.model, part(batch, slice(mine, mine + 1)), self.forward)
            parameters = [self.live[block.parameters[0]] for block in direct]
            for k, root in enumerate(roots):
                cotangents = [tensor[mine : mine + 1] for tensor in root]
                gradients = gradients_at(as_tensors(outputs), parameters, cotangents, keep=k + 1 < len(roots))
                for block, gradient in zip(direct, gradients, strict=True):
                    if gradient is not None and n < count:
                        self.used.update(block.parameters)
                        found[block.name].add_example(block.matrix([gradient.to_dense()]))
        for block in direct:
            self._hand_over(block, found[block.name])

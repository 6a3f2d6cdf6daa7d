"""Pass over a sharded model (FSDP2): all ranks run the model together, and each stores the sums of the blocks it owns.

Under `fully_shard` a forward pass is a collective, so every rank runs as many batches as the rank with the most; a rank
that has run out of data takes part with a filler batch that is not counted. The contribution of a batch to a block is
reduced to the block's owner immediately, so no rank ever holds more than the sums of its own blocks plus one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from limpet.curvature.accumulators import Accumulator
from limpet.curvature.audit import gradients_at
from limpet.curvature.batch_step import StepOptions
from limpet.curvature.ddp import reduce_counts
from limpet.curvature.fisher_pass import NOTHING, Displacement, FisherPass
from limpet.curvature.structure import Structure
from limpet.distributed import Ranks, reshard
from limpet.errors import CurvatureError
from limpet.likelihoods import Likelihood, as_tensors
from limpet.model.batch import batch_size, call, first_example, part
from limpet.model.blocks import Block
from limpet.model.own_loss import check_own_loss, has_own_loss

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ShardedPass(FisherPass):
    """A pass of ranks that share one sharded model.

    Args:
        model: The sharded model.
        blocks: The blocks of parameters to measure.
        likelihood: The likelihood that defines the Fisher.
        structure: The structure of each block's Fisher.
        ranks: The process group.
        owners: The rank that owns the block of each parameter, by parameter name.
        displacement: Displacement of the weights at which each batch is measured. None measures at the weights.
        **options: `fisher`, `draws`, `seed` and `forward` of `BatchStep`.
    """

    in_step = True
    expands = False  # the ranks would have to agree on every attempt

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        likelihood: Likelihood,
        structure: Structure,
        *,
        ranks: Ranks,
        owners: Mapping[str, int],
        displacement: Displacement | None = None,
        **options: Unpack[StepOptions],
    ) -> None:
        self.ranks, self.owners = ranks, owners
        self.idle = False  # whether this rank has run out of data
        self.rounds = 0  # batches that all ranks have run together
        super().__init__(model, blocks, likelihood, structure, displacement=displacement, **options)

    def owner(self, block: Block) -> int:
        """The rank that owns a block."""
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

    def _displaced(self, number: int) -> Mapping[str, Tensor]:
        """Displacement of a round: all ranks run the model at the same weights."""
        if self.displacement is None:
            return {}
        reshard(self.model)  # what it gathered has the displacement of the round before
        return self.displacement(self.rounds)

    def _from(self, rank: int, found: tuple[int, Any] | None) -> Any:
        """Broadcast the first example of one rank's batch to all ranks."""
        sent = None
        if rank == self.ranks.rank and found is not None:
            sent = first_example(found[1])
        return self.ranks.broadcast(sent, rank)

    def _positions(self, batch: Any, size: int) -> float:
        if self.rounds:
            return max(self.seen / max(self.rows, 1), 1.0)
        return super()._positions(batch, size)  # a forward pass, which all ranks run in the first round

    def _check_loss(self, batch: Any) -> None:
        error: CurvatureError | None = None
        try:
            if not self._on_any_rank(not has_own_loss(self.model, batch, self.likelihood)):
                check_own_loss(self.model, batch, self.likelihood)  # forward passes, which all ranks run
        except CurvatureError as raised:
            error = raised
        self.ranks.raise_together(error)

    def _reject_nonfinite(self, outputs: tuple[Tensor, ...]) -> None:
        error: CurvatureError | None = None
        try:
            super()._reject_nonfinite(outputs)
        except CurvatureError as raised:
            error = raised
        self.ranks.raise_together(error)

    def _count(self, rows: int, outputs: Any, targets: Any) -> None:
        if not self.idle:
            super()._count(rows, outputs, targets)

    def _on_any_rank(self, flag: bool) -> bool:
        return any(self.ranks.gather(flag))

    def _of_all_ranks(self, names: set[str]) -> set[str]:
        return set().union(*self.ranks.gather(names))

    def make_sums(self) -> None:
        """Allocate zero sums for the blocks that this rank owns."""
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
            contribution = self.sums[block.name]
        finally:
            self.sums = kept
        self._reduce_to_owner(block, contribution)

    def _reduce_to_owner(self, block: Block, contribution: Accumulator) -> None:
        """Add the contribution of this batch on all ranks to the sums of the block's owner."""
        sums = contribution.sums()
        if self.idle:
            for tensor in sums.values():
                tensor.zero_()
        if not sums:
            return
        summed = self.ranks.reduce(sums, self.owner(block))
        if summed is not None:
            mine = self.sums[block.name]
            before = mine.sums()
            mine.load({name: before[name].add_(t) if name in before else t for name, t in summed.items()})

    def _accumulate_direct(
        self, direct: Sequence[Block], batch: Any, tensors: tuple[Tensor, ...], roots: Sequence[tuple[Tensor, ...]]
    ) -> None:
        count = tensors[0].shape[0]
        if batch_size(batch) != count:
            raise CurvatureError(
                f"{', '.join(block.name for block in direct)}: no layer class supports these parameters, so they are "
                "measured per sample, but the batch cannot be split into examples: leave these parameters out with "
                "exclude=[...]"
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
            self._reduce_to_owner(block, found[block.name])

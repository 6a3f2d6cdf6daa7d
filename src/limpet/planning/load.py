"""The load of a rank that keeps a memory: what it holds, sends and computes.

Costs of blocks are summed for two ways to distribute a memory over N ranks:

- replicated, as with DistributedDataParallel: every rank has the whole memory and does all of the work. A protected
  step sends nothing; a consolidation all-reduces the accumulated sums once, for which each rank sends 2 (N - 1) / N of
  their size.
- sharded, under fully_shard: every block is owned by one rank (`limpet.distributed.assignment`). In a protected step,
  the owner receives the missing shards of the block's weights and sends back the results: with w bytes of weights in
  its own blocks out of W in total, a rank sends w (N - 1) / N and its shards of the other blocks, (W - w) / N; on
  average 2 W (N - 1) / N^2. With every batch of a curvature pass, the sums of each block are sent to its owner, and in
  a consolidation the weights are sent three times.

The peak of a consolidation is the maximum over its phases, not counting the forward and backward passes of the network.
Replicated:

    update      the memory before the task, the sums of all blocks, the updated part of the blocks so far, and the
                workspace for the current block
    loss curve  the memory after the task, the sums (except of a first task, which are in the memory), two times the
                weights (displacements, and displaced weights) and two times the largest block, or the weights and six
                times that block while displacements are drawn (seven times if it is truncated); with auto_strength, a
                trial memory is evaluated next to the previous one

Sharded, where a rank has the sums and the memory of its own blocks only, and no loss curve is measured (with
auto_strength one is, which is not counted, as a note says):

    pass        the memory before the task, the sums, and the sums of one block for one batch, in transit to its owner
    forecast    the memory before the task, the sums, and what the forecast of one block takes, with its weights
    update      as above, except that the weights of one block are gathered, its sums are freed after its update, and
                the new means are left out: they replace those of before, block by block, once all ranks have succeeded

During protection, gradient mode keeps the gradients including the penalty, and proximal mode the displacements of all
blocks; if sharded, both also hold what is sent and received. The workspace of one block is added in all cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from limpet.planning.block_cost import BlockCost


class Load(NamedTuple):
    """The load of one rank, in bytes and operations. `a | b` is the elementwise maximum.

    Attributes:
        memory: Bytes of the memory.
        peak: Peak bytes during a consolidation.
        ready: Additional bytes during protection.
        sent_step: Bytes sent in a protected step.
        sent_task: Bytes sent once in a consolidation.
        sent_batch: Bytes sent with every batch of its curvature pass.
        step: Operations that protection adds to a step.
        update: Operations of the update with a task, after its curvature pass.
    """

    memory: int = 0
    peak: int = 0
    ready: int = 0
    sent_step: int = 0
    sent_task: int = 0
    sent_batch: int = 0
    step: int = 0
    update: int = 0

    def __or__(self, other: Load) -> Load:
        return Load(*map(max, self, other))


def replicated_load(rows: Sequence[BlockCost], ranks: int, mode: str, *, auto_strength: bool) -> Load:
    """Return the load of every rank if the memory is replicated.

    Args:
        rows: The cost of every block.
        ranks: The number of ranks.
        mode: The mode of protection, "gradient" or "proximal".
        auto_strength: Whether the tasks have different strengths.

    Returns:
        The load.
    """
    sums, room = total(rows, "sums"), max(row.room for row in rows)
    more = total(rows, "ready") + total(rows, "trained") if mode == "gradient" else total(rows, "weights")
    peak, sent = _while_the_curve_is_measured(rows, auto_strength), 2 * sums * (ranks - 1) // ranks
    return _load(rows) | Load(peak=peak, ready=more + room, sent_task=sent)


def sharded_load(rows: Sequence[BlockCost], ranks: int, mode: str) -> Load:
    """Return the maximum load of any rank if the memory is sharded.

    Args:
        rows: The cost of every block, with its owner.
        ranks: The number of ranks.
        mode: The mode of protection, "gradient" or "proximal".

    Returns:
        The load.
    """
    own: list[list[BlockCost]] = [[] for _ in range(ranks)]
    for row in rows:
        own[row.owner].append(row)
    most = Load()
    for some in own:
        most |= _load(some, sharded=True) | _exchange(some, rows, ranks, mode)
    return most


def _while_the_curve_is_measured(rows: Sequence[BlockCost], auto_strength: bool) -> int:
    """Bytes held while the loss curve of a task is measured."""
    weights = total(rows, "weights")
    beside = total(rows, "before") - weights if auto_strength else total(rows, "lasting")
    first = all(row.before == row.weights for row in rows) and not auto_strength
    known = beside + sum(row.fresh + row.eigenvectors for row in rows) + (0 if first else total(rows, "sums"))
    most = max((6 + row.truncated) * row.weights for row in rows)
    pushed = max(2 * weights + 2 * max(row.weights for row in rows), weights + most)
    return known + max(pushed, 7 * max(row.eigenvectors for row in rows))


def _exchange(rows: Sequence[BlockCost], every: Sequence[BlockCost], ranks: int, mode: str) -> Load:
    """The communication of a rank that owns some of the blocks, and the bytes held during it."""
    sums, trained, whole = (total(every, name) for name in ("sums", "trained", "whole"))
    own_sums, own_trained, own_whole = (total(rows, name) for name in ("sums", "trained", "whole"))
    in_transit = max(row.sums for row in every)
    gathered = max((row.whole * 3 for row in rows), default=0)  # received, put together, and the shards for others
    forecast = max((row.whole + row.forecast for row in rows), default=0)
    given_back = own_whole + total(rows, "laid_out") + trained // ranks
    room = max((row.room for row in rows), default=0)
    ready = total(rows, "ready") if mode == "gradient" else 0
    return Load(
        peak=total(rows, "before") + own_sums + max(in_transit, gathered, forecast),
        ready=ready + own_whole + total(rows, "weights") + max(room, given_back),
        sent_step=(own_trained * (ranks - 2) + trained) // ranks,
        sent_task=3 * (whole - own_whole) // ranks,
        sent_batch=sums - own_sums,
    )


def _load(rows: Sequence[BlockCost], sharded: bool = False) -> Load:
    """The load of these blocks on one rank; if `sharded`, one block's weights are gathered, and its sums freed."""
    held = peak = total(rows, "before") + total(rows, "sums")
    for row in rows:
        peak = max(peak, held + row.weights + row.work + sharded * row.whole)
        held += row.fresh - sharded * (row.mean + row.sums - row.term)
    peak = max(peak, held + sharded * max((3 * row.whole for row in rows), default=0))
    memory, step, update = (total(rows, name) for name in ("bytes", "step", "update"))
    return Load(memory=memory, peak=peak, step=step, update=update)


def total(rows: Iterable[BlockCost], name: str) -> int:
    """Return the sum of one cost over blocks."""
    return sum(getattr(row, name) for row in rows)

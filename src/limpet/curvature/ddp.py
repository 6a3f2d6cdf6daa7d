"""Data-parallel pass: each rank reads its share of the data, and the sums are all-reduced at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from limpet.curvature.batch_step import BatchStep
from limpet.distributed import Ranks
from limpet.errors import RankError


def read_on_all_ranks(one_pass: BatchStep, ranks: Ranks, read: Callable[[], None]) -> None:
    """Read on every rank until all ranks measure the same blocks in the same way, then all-reduce the sums.

    A block that must be measured per sample on one rank is measured so on all, which costs the other ranks a second
    pass over their data.

    Args:
        one_pass: This rank's pass.
        ranks: The process group.
        read: Reads this rank's data into the sums of `one_pass`.
    """
    while True:
        read()
        direct = ranks.gather({block.name for block in one_pass.blocks if not block.layers}, "per-sample blocks")
        everywhere = set().union(*direct)
        if all(found == everywhere for found in direct):
            break
        missing = {block.name for block in one_pass.blocks if block.layers and everywhere & set(block.parameters)}
        if missing:
            one_pass.restart(missing)
    reduce_sums(one_pass, ranks)


def compare_batches(ranks: Ranks, hashes: Sequence[int]) -> None:
    """Raise an error on all ranks if replicated batches differ, as far as all ranks have read them.

    Args:
        ranks: The process group.
        hashes: The hashes of the batches that this rank has read, its own and those of others, in order.

    Raises:
        RankError: If a batch is another one than on rank 0, as with a loader that every rank shuffles by itself.
    """
    found = ranks.gather(list(hashes), "the hashes of the batches")
    for rank, other in enumerate(found):
        number = next((i for i, pair in enumerate(zip(found[0], other, strict=False)) if pair[0] != pair[1]), None)
        if number is not None:
            raise RankError(
                f"the ranks differ in ReplicatedBatches: batch {number} of rank {rank} is not that of rank 0; pass the "
                "same batches in the same order on all ranks (shuffle=False, or a generator with the same seed)",
                rank,
            )


def reduce_sums(one_pass: BatchStep, ranks: Ranks) -> None:
    """All-reduce the sums and the counters of a pass."""
    if not one_pass.begun:
        one_pass.make_sums()  # this rank had no data
    one_pass.load_sums(ranks.sum(one_pass.named_sums()))
    reduce_counts(one_pass, ranks)


def reduce_counts(one_pass: BatchStep, ranks: Ranks) -> None:
    """All-reduce the counters of a pass, and share the kind of Fisher with ranks that had no data."""
    one_pass.tally = torch.tensor(ranks.numbers(*one_pass.tally.tolist()), dtype=one_pass.tally.dtype)
    one_pass.seen, one_pass.rows = (round(total) for total in ranks.numbers(one_pass.seen, one_pass.rows))
    one_pass.used = set().union(*ranks.gather(one_pass.used))
    resolved = [found for found in ranks.gather((one_pass.roots, one_pass.fisher)) if found[0]]
    if resolved:
        one_pass.roots, one_pass.fisher = resolved[0]

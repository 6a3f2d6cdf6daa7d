"""One pass on many ranks: each reads its share of the data, and the sums are added up at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch

from limpet.curvature.batch_step import BatchStep
from limpet.distributed import Ranks
from limpet.errors import LimpetError


def read_on_all_ranks(one_pass: BatchStep, ranks: Ranks, read: Callable[[], None]) -> None:
    """Read on every rank until all of them measure the same blocks in the same way; then add up.

    What one rank's data show to be used directly is measured so by all, which costs the others a second reading.
    """
    while True:
        error: LimpetError | None = None
        try:
            read()
        except LimpetError as told:
            error = told
        ranks.raise_together(error)
        direct = ranks.gather({block.name for block in one_pass.blocks if not block.layers})
        everywhere = set().union(*direct)
        if all(found == everywhere for found in direct):
            break
        missing = {block.name for block in one_pass.blocks if block.layers and everywhere & set(block.parameters)}
        if missing:
            one_pass.restart(missing)
    reduce_sums(one_pass, ranks)


def reduce_sums(one_pass: BatchStep, ranks: Ranks) -> None:
    """Let the sums of every rank be those of all."""
    if not one_pass.begun:
        one_pass.make_sums()  # a rank without data
    one_pass.load_sums(ranks.sum(one_pass.named_sums()))
    reduce_counts(one_pass, ranks)


def reduce_counts(one_pass: BatchStep, ranks: Ranks) -> None:
    """Let what every rank saw be what all of them saw."""
    one_pass.tally = torch.tensor(ranks.numbers(*one_pass.tally.tolist()), dtype=one_pass.tally.dtype)
    one_pass.seen, one_pass.rows = (round(total) for total in ranks.numbers(one_pass.seen, one_pass.rows))
    one_pass.used = set().union(*ranks.gather(one_pass.used))
    told = [found for found in ranks.gather((one_pass.roots, one_pass.fisher)) if found[0]]
    if told:
        one_pass.roots, one_pass.fisher = told[0]

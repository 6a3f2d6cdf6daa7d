"""Distributed computation of a memory with torch.distributed.

Under torchrun, with the process group that the training script has initialized, every rank calls the same methods with
its own share of the data:

    torch.distributed.init_process_group()
    memory = limpet.OnlineLaplace(DistributedDataParallel(model))
    memory.consolidate(loader)  # with a DistributedSampler, or any other shards

Afterwards, every rank has the memory of all the data. A single process needs no process group, and none is created.
"""

from limpet.distributed.assignment import share
from limpet.distributed.channel import set_timeout
from limpet.distributed.dtensor import Exchange, Layout, is_fsdp_unit, is_sharded, local, reshard, shard_like, whole
from limpet.distributed.failure import compare, together
from limpet.distributed.process_group import Ranks, alone, current, launched, members, rank_and_size
from limpet.distributed.replicated_batches import ReplicatedBatches

__all__ = [
    "Exchange",
    "Layout",
    "Ranks",
    "ReplicatedBatches",
    "alone",
    "compare",
    "current",
    "is_fsdp_unit",
    "is_sharded",
    "launched",
    "local",
    "members",
    "rank_and_size",
    "reshard",
    "set_timeout",
    "shard_like",
    "share",
    "together",
    "whole",
]

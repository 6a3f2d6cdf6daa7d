"""Many processes: who they are, and what they add up. One process alone never makes a process group.

Under torchrun, with the process group that the training has made anyway, every rank calls the same methods with its own
share of the data:

    torch.distributed.init_process_group()
    memory = limpet.OnlineLaplace(DistributedDataParallel(model))
    memory.consolidate(loader)  # with a DistributedSampler, or any other shards

and every rank has the memory of all of them.
"""

from limpet.distributed.assignment import share
from limpet.distributed.dtensor import Exchange, is_sharded, local, shard_like
from limpet.distributed.process_group import Ranks, alone, current, launched
from limpet.distributed.replicated_batches import ReplicatedBatches

__all__ = [
    "Exchange",
    "Ranks",
    "ReplicatedBatches",
    "alone",
    "current",
    "is_sharded",
    "launched",
    "local",
    "shard_like",
    "share",
]

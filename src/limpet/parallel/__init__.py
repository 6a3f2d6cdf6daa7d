"""Many processes: who they are, and what they add up. One process alone never makes a process group.

Under torchrun, with the process group that the training has made anyway, every rank calls the same methods with its own
share of the data:

    torch.distributed.init_process_group()
    memory = limpet.OnlineLaplace(DistributedDataParallel(model))
    memory.consolidate(loader)  # with a DistributedSampler, or any other shards

and every rank has the memory of all of them.
"""

from limpet.parallel.owners import share
from limpet.parallel.pieces import Exchange, in_pieces, local, piece_like
from limpet.parallel.ranks import Ranks, alone, current, launched
from limpet.parallel.shared import Shared

__all__ = ["Exchange", "Ranks", "Shared", "alone", "current", "in_pieces", "launched", "local", "piece_like", "share"]

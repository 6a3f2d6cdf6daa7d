"""Assignment of blocks to ranks in a sharded memory, where every block is owned by one rank."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from limpet.errors import positive_whole


def share(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Assign blocks to ranks such that the load is balanced.

    Uses the greedy longest-processing-time rule: blocks are assigned from the largest to the smallest (ties by name),
    each to the rank with the smallest load so far (ties to the lowest rank). The largest load is then at most
    4/3 - 1/(3 ranks) times that of an optimal assignment (Graham 1969, "Bounds on multiprocessing timing anomalies").
    The result does not depend on the order of the blocks, so all ranks compute the same assignment without
    communication.

    Args:
        sizes: The size of every block, by name.
        ranks: The number of ranks.

    Returns:
        The owning rank of every block, by name.

    Raises:
        ValueError: If `ranks` is not a positive integer.

    Examples:
        >>> share({"embedding": 50, "first": 30, "second": 30, "head": 10}, ranks=2)
        {'embedding': 0, 'first': 1, 'second': 1, 'head': 0}
    """
    loads = [(0, rank) for rank in range(positive_whole("ranks", ranks))]
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + sizes[name], rank))
    return owners

"""Which rank owns which block, where a memory is spread over several: every block whole, by one rank."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from limpet.errors import positive_whole


def share(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The rank of every block, by its name, so that no rank has much more than another.

    Greedy: the blocks from the largest to the smallest (equal ones by name), each to the rank that has the least so
    far (of equal ones the first). The fullest rank then has at most 4/3 - 1/(3 ranks) of what it would have in the best
    sharing there is (Graham 1969, "Bounds on multiprocessing timing anomalies"). The same on every rank, in whatever
    order the blocks are given, and nothing has to be sent for it.

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

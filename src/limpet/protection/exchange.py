"""Where the blocks of a protected model are kept: all of them here, or each on one rank.

This is all that sharding changes in a protected step. Weights are brought to where their block is kept, the penalty is
applied there, and the results are given back to where the weights are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from limpet.distributed import shard_like
from limpet.posterior import Posterior
from limpet.posterior.sharding import BlockSharding
from limpet.protection.bound_block import BoundBlock, Group, SteppedBlock

Results = Iterable[tuple[str, tuple[Tensor, ...]]]
"""One or several tensors for every parameter, by its name."""


class BlockExchange(Protocol):
    """How weights reach the place where their block is kept."""

    def stepped(self, bound: Sequence[BoundBlock], groups: Mapping[nn.Parameter, Group]) -> Sequence[SteppedBlock]:
        """The blocks that the optimizer steps, wherever they are kept; `bound` are those that are kept here."""

    def bring(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The whole weights of the blocks that are kept here."""

    def give(self, results: Results, names: Iterable[str], count: int) -> Results:
        """What is here of the results for all these parameters, `count` tensors each."""


class LocalExchange:
    """Everything is here. Results pass through one by one, so that only one block's are held at a time."""

    def stepped(self, bound: Sequence[BoundBlock], groups: Mapping[nn.Parameter, Group]) -> Sequence[SteppedBlock]:
        """The blocks themselves."""
        return bound

    def bring(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights themselves."""
        return weights

    def give(self, results: Results, names: Iterable[str], count: int) -> Results:
        """The results themselves."""
        return results


class ShardedExchange:
    """Every block is kept by one rank (FSDP2). `bring` and `give` are collectives: one all-to-all for all blocks."""

    def __init__(self, sharding: BlockSharding, parameters: Mapping[str, nn.Parameter]) -> None:
        self._sharding, self._parameters = sharding, parameters
        self._exchange = sharding.exchange(parameters)

    def stepped(self, bound: Sequence[BoundBlock], groups: Mapping[nn.Parameter, Group]) -> Sequence[SteppedBlock]:
        """The blocks of all ranks that have a parameter in one of the groups."""
        found = []
        for block in self._sharding.blocks.values():
            parameters = [self._parameters[name] for name in block.parameters]
            own = [groups.get(parameter) for parameter in parameters]
            if any(group is not None for group in own):
                found.append(SteppedBlock(block, parameters, own))
        return found

    def bring(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The whole weights of the blocks that this rank keeps."""
        return self._exchange.bring(weights)

    def give(self, results: Results, names: Iterable[str], count: int) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """This rank's shards of the results of all ranks."""
        own, names = dict(results), sorted(names)
        columns = [
            self._exchange.give({name: tensors[i] for name, tensors in own.items()}, names) for i in range(count)
        ]
        for name in names:
            yield name, tuple(shard_like(self._parameters[name], column[name]) for column in columns)


def exchange_for(posterior: Posterior) -> BlockExchange:
    """The exchange that a memory needs."""
    sharding = posterior.sharding
    return LocalExchange() if sharding is None else ShardedExchange(sharding, posterior.parameters())

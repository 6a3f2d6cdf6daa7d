"""Communication between the weights and the posteriors of their blocks: none, or an all-to-all between ranks (FSDP2).

This is all that differs between local and sharded protection. Weights are gathered on the rank that owns their block,
the penalty is applied there, and the results are scattered back to the shards of the weights.
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
"""Pairs of a parameter name and one or several tensors in the shape of the parameter."""


class BlockExchange(Protocol):
    """Interface for moving weights to the ranks that own their blocks, and results back."""

    def stepped(self, bound: Sequence[BoundBlock], groups: Mapping[nn.Parameter, Group]) -> Sequence[SteppedBlock]:
        """Return the blocks that the optimizer steps, on all ranks.

        Args:
            bound: The blocks that this rank owns.
            groups: The parameter group of every parameter that the optimizer steps.

        Returns:
            The blocks with a parameter in one of the groups.
        """

    def bring(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gather the full weights of the blocks that this rank owns.

        Args:
            weights: The weights, by name; sharded if the model is.

        Returns:
            The full weights, by name.
        """

    def give(self, results: Results, names: Iterable[str], count: int) -> Results:
        """Scatter results to the ranks that hold the weights.

        Args:
            results: The results for the blocks that this rank owns.
            names: Names of the parameters that have results on any rank.
            count: Number of result tensors per parameter.

        Returns:
            The results for the weights, or shards of weights, on this rank.
        """


class LocalExchange:
    """Exchange without communication. Results are passed on lazily, so only those of one block exist at a time."""

    def stepped(self, bound: Sequence[BoundBlock], groups: Mapping[nn.Parameter, Group]) -> Sequence[SteppedBlock]:
        """Return the blocks unchanged."""
        return bound

    def bring(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights unchanged."""
        return weights

    def give(self, results: Results, names: Iterable[str], count: int) -> Results:
        """Return the results unchanged."""
        return results


class ShardedExchange:
    """Exchange for FSDP2, where every block is owned by one rank.

    `bring` and `give` are collectives: one all-to-all for all blocks (`give`: one per tensor of a parameter).

    Args:
        sharding: Which rank owns which block.
        parameters: The sharded parameters, by name.
    """

    def __init__(self, sharding: BlockSharding, parameters: Mapping[str, nn.Parameter]) -> None:
        self._sharding, self._parameters = sharding, parameters
        self._exchange = sharding.exchange(parameters)

    def stepped(self, bound: Sequence[BoundBlock], groups: Mapping[nn.Parameter, Group]) -> Sequence[SteppedBlock]:
        """Return the blocks of all ranks that have a parameter in one of the groups."""
        found = []
        for block in self._sharding.blocks.values():
            parameters = [self._parameters[name] for name in block.parameters]
            own = [groups.get(parameter) for parameter in parameters]
            if any(group is not None for group in own):
                found.append(SteppedBlock(block, parameters, own))
        return found

    def bring(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gather the full weights of the blocks that this rank owns."""
        return self._exchange.bring(weights)

    def give(self, results: Results, names: Iterable[str], count: int) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Yield this rank's shards of the results of all ranks."""
        own, names = dict(results), sorted(names)
        columns = [
            self._exchange.give({name: tensors[i] for name, tensors in own.items()}, names) for i in range(count)
        ]
        for name in names:
            yield name, tuple(shard_like(self._parameters[name], column[name]) for column in columns)


def exchange_for(posterior: Posterior) -> BlockExchange:
    """Return the exchange for a posterior: sharded if the posterior is, else local."""
    sharding = posterior.sharding
    return LocalExchange() if sharding is None else ShardedExchange(sharding, posterior.parameters())

"""Communication between the weights and the posteriors of their blocks: none, or an all-to-all between ranks (FSDP2).

This is all that differs between local and sharded protection. Weights are gathered on the rank that owns their block,
the penalty is applied there, and the results are scattered back to the shards of the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from limpet.distributed import shard_like
from limpet.posterior import Posterior
from limpet.posterior.gathered_adapters import GatheredAdapters
from limpet.posterior.sharding import BlockSharding
from limpet.protection.bound_block import BoundBlock, Group, Part, SteppedBlock

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

    def refresh(self, blocks: Collection[str]) -> None:
        """Gather the factors of the adapters of these blocks, which are named on all ranks."""

    def scatter(self, parts: Iterable[Part], reached: Sequence[SteppedBlock]) -> Iterable[Part]:
        """Scatter gradients of the penalty to the ranks that hold the parameters.

        Args:
            parts: The gradients for the blocks that this rank owns.
            reached: The blocks that have gradients on any rank.

        Returns:
            The gradients for the parameters, or shards of parameters, on this rank.
        """

    def total(self, value: float) -> float:
        """Sum a number over all ranks."""

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

    def refresh(self, blocks: Collection[str]) -> None:
        """Do nothing: the factors of adapters are those of the model."""

    def scatter(self, parts: Iterable[Part], reached: Sequence[SteppedBlock]) -> Iterable[Part]:
        """Return the gradients unchanged."""
        return parts

    def total(self, value: float) -> float:
        """Return the number unchanged."""
        return value

    def give(self, results: Results, names: Iterable[str], count: int) -> Results:
        """Return the results unchanged."""
        return results


class ShardedExchange:
    """Exchange for FSDP2, where every block is owned by one rank.

    `bring` and `give` are collectives: one all-to-all for all blocks (`give`: one per tensor of a parameter).

    Args:
        sharding: Which rank owns which block.
        parameters: The sharded parameters, by name.
        adapters: The adapters of the model; None if it has none.
    """

    def __init__(
        self,
        sharding: BlockSharding,
        parameters: Mapping[str, nn.Parameter],
        adapters: GatheredAdapters | None = None,
    ) -> None:
        self._sharding, self._parameters, self._adapters = sharding, parameters, adapters
        self._exchange = sharding.exchange(parameters, {} if adapters is None else adapters.owners)
        self._names = {parameter: name for name, parameter in parameters.items()}
        if adapters is not None:
            self._names |= adapters.names

    def stepped(self, bound: Sequence[BoundBlock], groups: Mapping[nn.Parameter, Group]) -> Sequence[SteppedBlock]:
        """Return the blocks of all ranks that have a parameter in one of the groups."""
        found = []
        for block in self._sharding.blocks.values():
            parameters = [self._parameters[name] for name in block.parameters]
            own = [groups.get(parameter) for parameter in parameters]
            factors = [] if self._adapters is None else self._adapters.factors(block.name)
            adapted = {factor: groups[factor] for factor in factors if factor in groups}
            if adapted or any(group is not None for group in own):
                found.append(SteppedBlock(block, parameters, own, adapter_groups=adapted))
        return found

    def refresh(self, blocks: Collection[str]) -> None:
        """Gather the factors of the adapters of these blocks. This is a collective."""
        if self._adapters is not None:
            self._adapters.refresh(blocks)

    def scatter(self, parts: Iterable[Part], reached: Sequence[SteppedBlock]) -> Iterator[Part]:
        """Yield this rank's shards of the gradients of all ranks."""
        groups = {p: group for one in reached for p, group in zip(one.parameters, one.groups, strict=True)}
        groups |= {p: group for one in reached for p, group in one.adapter_groups.items()}
        stepped = {self._names[p]: group for p, group in groups.items() if group is not None}
        found = ((self._names[p], (part,)) for p, _, part in parts)
        for name, (part,) in self.give(found, stepped, 1):
            yield self._parameters[name], stepped[name], part

    def total(self, value: float) -> float:
        """Sum a number over all ranks. This is a collective."""
        return self._sharding.ranks.numbers(value)[0]

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


def exchange_for(posterior: Posterior, adapters: GatheredAdapters | None = None) -> BlockExchange:
    """Return the exchange for a posterior: sharded if the posterior is, else local."""
    sharding = posterior.sharding
    return LocalExchange() if sharding is None else ShardedExchange(sharding, posterior.parameters(), adapters)

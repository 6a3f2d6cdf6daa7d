"""Sharding of a memory over ranks, for sharded models: every block is owned, as a whole, by one rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor, nn

from limpet.curvature import FisherPass, Structure
from limpet.distributed import Exchange, Ranks, is_sharded, members, share
from limpet.errors import UnsupportedError
from limpet.model import Block
from limpet.model.quantized import is_quantized

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from limpet.curvature.batch_step import StepOptions
    from limpet.curvature.fisher_pass import Displacement
    from limpet.likelihoods import Likelihood

NOTHING_ELSE: Mapping[str, int] = MappingProxyType({})


class BlockSharding:
    """Assignment of blocks to ranks, identical on every rank.

    Args:
        ranks: The process group.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.owners: dict[str, int] = {}  # by parameter, so that a block that is split differently keeps its owner
        self.blocks: dict[str, Block] = {}  # the blocks of all ranks

    @classmethod
    def of(cls, model: nn.Module) -> BlockSharding | None:
        """Create the sharding for a model; None if the model is not sharded."""
        ranks = members()
        pieces = any(is_sharded(parameter) for parameter in model.parameters())
        return None if ranks is None or not pieces else cls(ranks)

    def settle(self, blocks: Sequence[Block], structure: Structure, parameters: Collection[str]) -> list[Block]:
        """Assign every new block to a rank, balanced by size. Blocks that are frozen now keep theirs.

        Args:
            blocks: The blocks of all ranks that are measured now.
            structure: The structure of the blocks, which determines their sizes.
            parameters: Names of the parameters that the model has.

        Returns:
            The blocks that this rank owns.
        """
        frozen = self._others(blocks, parameters)
        new = {b.name: structure.size(b) for b in blocks if self.owners.keys().isdisjoint(b.parameters)}
        owners = share(new, self.ranks.size)
        self.owners = dict(self.owners)
        for block in blocks:
            known = [self.owners[name] for name in block.parameters if name in self.owners]
            owner = known[0] if known else owners[block.name]
            self.owners.update(dict.fromkeys(block.parameters, owner))
        self.blocks = {**{block.name: block for block in blocks}, **frozen}
        return [block for block in blocks if self.owner(block) == self.ranks.rank]

    def _others(self, blocks: Sequence[Block], parameters: Collection[str]) -> dict[str, Block]:
        """Return the blocks so far whose parameters are in none of these, because they are frozen now.

        Args:
            blocks: The new blocks of all ranks.
            parameters: Names of the parameters that the model has.

        Returns:
            The blocks, by name.
        """
        covered = {name for block in blocks for name in block.parameters}
        return {
            name: block
            for name, block in self.blocks.items()
            if covered.isdisjoint(block.parameters) and all(one in parameters for one in block.parameters)
        }

    def owner(self, block: Block) -> int:
        """The rank that owns a block."""
        return self.owners[block.parameters[0]]

    def rounds(self) -> list[list[Block]]:
        """Divide the blocks of all ranks into groups that are gathered one after the other.

        Returns:
            The groups, the same on all ranks. In each of them a rank owns one block, or several that together are no
            larger than the largest block.
        """
        most = max((block.shape.numel() for block in self.blocks.values()), default=0)
        groups: list[list[Block]] = []
        last, filled = [-1] * self.ranks.size, [0] * self.ranks.size  # the group that a rank is at, and its numbers
        for block in self.blocks.values():
            owner, size = self.owner(block), block.shape.numel()
            if last[owner] < 0 or filled[owner] + size > most:
                last[owner], filled[owner] = last[owner] + 1, 0
            if last[owner] == len(groups):
                groups.append([])
            groups[last[owner]].append(block)
            filled[owner] += size
        return groups

    def gathered(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[list[Block], dict[str, Tensor]]]:
        """Gather the parameters of all blocks on their owners, a group of `rounds` at a time. This is a collective.

        Args:
            parameters: The parameters, by name.

        Yields:
            The blocks of the group, of all ranks, and the whole parameters of those that this rank owns. The mapping is
            empty from the next iteration on.
        """
        exchange = self.exchange(parameters)
        for blocks in self.rounds():
            weights = exchange.bring({name: parameters[name] for block in blocks for name in block.parameters})
            yield blocks, weights
            weights.clear()

    def exchange(self, parameters: Mapping[str, Tensor], also: Mapping[str, int] = NOTHING_ELSE) -> Exchange:
        """Create the exchange that moves all blocks' parameters to their owners and back.

        Args:
            parameters: The parameters, by name.
            also: The owners of further parameters, by name.

        Returns:
            The exchange.
        """
        names = {name for block in self.blocks.values() for name in block.parameters}
        return Exchange(self.ranks, parameters, {**{name: self.owners[name] for name in sorted(names)}, **also})


def fisher_pass(
    model: nn.Module,
    blocks: Sequence[Block],
    likelihood: Likelihood,
    structure: Structure,
    sharding: BlockSharding | None,
    *,
    displacement: Displacement | None = None,
    **options: Unpack[StepOptions],
) -> FisherPass:
    """Create the Fisher pass for a model: a `ShardedPass` if the model is sharded.

    Args:
        model: The model.
        blocks: The blocks of parameters to measure, of all ranks.
        likelihood: The likelihood that defines the Fisher.
        structure: The structure of each block's Fisher.
        sharding: Which rank owns which block; None if the model is not sharded.
        displacement: Displacement of the weights at which each batch is measured. None measures at the weights.
        **options: `fisher`, `draws`, `seed` and `forward` of the pass.

    Returns:
        The pass.
    """
    measured = model, blocks, likelihood, structure
    if sharding is None:
        return FisherPass(*measured, displacement=displacement, **options)
    from limpet.curvature.fsdp import ShardedPass

    return ShardedPass(*measured, ranks=sharding.ranks, owners=sharding.owners, displacement=displacement, **options)


def reject_sharded(sharding: BlockSharding | None, what: str, fix: str) -> None:
    """Raise an error for operations that need the whole model, or the whole memory, in one process.

    Args:
        sharding: The sharding of the memory. None, for an unsharded model, never raises.
        what: The operation, for the message.
        fix: What to do instead, for the message.

    Raises:
        UnsupportedError: If the model is sharded.
    """
    if sharding is not None:
        raise UnsupportedError(f"{what} does not support sharded models (fully_shard): {fix}")


def reject_quantized_and_sharded(model: nn.Module) -> None:
    """Raise UnsupportedError if a sharded model has quantized layers."""
    if any(map(is_quantized, model.modules())):
        raise UnsupportedError(
            "quantized layers in a sharded model (fully_shard) are not supported: replicate the model "
            "(DistributedDataParallel), or shard it without quantization"
        )

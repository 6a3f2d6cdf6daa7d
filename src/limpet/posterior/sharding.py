"""A memory that is spread over ranks, because the model is: every block is kept whole by one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from limpet.curvature import Structure
from limpet.distributed import Exchange, Ranks, current, is_sharded, share
from limpet.errors import UnsupportedError
from limpet.model import Block


class BlockSharding:
    """Who keeps which block. The same on every rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.owners: dict[str, int] = {}  # by parameter, so that a block that is cut up otherwise stays where it was
        self.blocks: dict[str, Block] = {}  # those of all ranks

    @classmethod
    def of(cls, model: nn.Module) -> BlockSharding | None:
        """How the memory of a model is spread; None where the model is in one piece."""
        ranks = current()
        pieces = any(is_sharded(parameter) for parameter in model.parameters())
        return None if ranks is None or not pieces else cls(ranks)

    def settle(self, blocks: Sequence[Block], structure: Structure) -> list[Block]:
        """Give every block that is new to an owner, and return those of this rank."""
        new = {b.name: structure.size(b) for b in blocks if self.owners.keys().isdisjoint(b.parameters)}
        owners = share(new, self.ranks.size)
        for block in blocks:
            known = [self.owners[name] for name in block.parameters if name in self.owners]
            owner = known[0] if known else owners[block.name]
            self.owners.update(dict.fromkeys(block.parameters, owner))
        self.blocks = {block.name: block for block in blocks}
        return [block for block in blocks if self.owner(block) == self.ranks.rank]

    def owner(self, block: Block) -> int:
        """The rank that keeps a block."""
        return self.owners[block.parameters[0]]

    def exchange(self, parameters: Mapping[str, Tensor]) -> Exchange:
        """The way of all blocks' parameters to their owners and back."""
        names = {name for block in self.blocks.values() for name in block.parameters}
        return Exchange(self.ranks, parameters, {name: self.owners[name] for name in sorted(names)})


def reject_sharded(sharding: BlockSharding | None, what: str, mend: str) -> None:
    """Say no to what needs the whole model, or the whole memory, in one process."""
    if sharding is not None:
        raise UnsupportedError(f"{what} is not for a model in pieces (fully_shard): {mend}")

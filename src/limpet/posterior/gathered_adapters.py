"""Low-rank adapters of a sharded model (FSDP2): whole copies of their factors on the ranks that own the blocks.

Under `fully_shard` every rank has a shard of A and of B, and the memory of a block lives on one rank, its owner. The
owner needs both factors whole to compute the penalty and its gradients. They are small, so they are gathered before
every step, in one all-to-all for all blocks, and the gradients are scattered back to the shards. The frozen base weight
is gathered once, for its difference from the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from limpet.distributed import Exchange
from limpet.errors import UnsupportedError
from limpet.model.low_rank import LowRank
from limpet.posterior.sharding import BlockSharding


class GatheredAdapters:
    """The adapters of the blocks of all ranks, and whole copies of those of the blocks that this rank owns.

    Args:
        sharding: Which rank owns which block.
        parameters: The parameters of the model, by name.
        adapted: The active adapters of every adapted weight.

    Raises:
        UnsupportedError: If the base weight of an adapter is trained as well.
    """

    def __init__(
        self,
        sharding: BlockSharding,
        parameters: Mapping[str, nn.Parameter],
        adapted: Mapping[nn.Parameter, Sequence[LowRank]],
    ) -> None:
        names = {parameter: name for name, parameter in parameters.items()}
        self.parameters = parameters
        self.blocks: dict[str, list[str]] = {}  # names of the factors of every adapted block
        self.owners: dict[str, int] = {}  # of the factors
        self._adapters: dict[str, list[LowRank]] = {}
        for block in sharding.blocks.values():
            own = [parameters[name] for name in block.parameters]
            found = [one for parameter in own for one in adapted.get(parameter, ())]
            if not found:
                continue
            if any(parameter.requires_grad for parameter in own):
                raise UnsupportedError(
                    f"{block.name} trains its own parameters and has an adapter, which is not supported in sharded "
                    "models (fully_shard): freeze the layer below its adapter"
                )
            self._adapters[block.name] = found
            self.blocks[block.name] = [names[factor] for one in found for factor in (one.a, one.b)]
            self.owners.update(dict.fromkeys(self.blocks[block.name], sharding.owner(block)))
        self._exchange = Exchange(sharding.ranks, parameters, self.owners)
        self.copies: dict[str, nn.Parameter] = {}
        self.refresh()
        self.names = {copy: name for name, copy in self.copies.items()}

    @torch.no_grad()
    def refresh(self, blocks: Iterable[str] | None = None) -> None:
        """Gather the current factors. This is a collective.

        Args:
            blocks: Names of the blocks whose factors are needed, the same on all ranks. Defaults to all.
        """
        wanted = [name for block in self.blocks for name in self.blocks[block] if blocks is None or block in blocks]
        for name, whole in self._exchange.bring({name: self.parameters[name] for name in wanted}).items():
            if name in self.copies:
                self.copies[name].copy_(whole)
            else:
                self.copies[name] = nn.Parameter(whole)

    @property
    def own(self) -> list[str]:
        """The adapted blocks that this rank owns."""
        return [block for block, names in self.blocks.items() if all(name in self.copies for name in names)]

    def adapters(self, block: str) -> list[LowRank]:
        """Return the adapters of a block that this rank owns, with whole factors."""
        factors = [self.copies[name] for name in self.blocks.get(block, ())]
        pairs = zip(factors[::2], factors[1::2], strict=True)
        return [replace(one, a=a, b=b) for one, (a, b) in zip(self._adapters.get(block, ()), pairs, strict=True)]

    def factors(self, block: str) -> list[nn.Parameter]:
        """Return the sharded factors of a block's adapters, whichever rank owns the block."""
        return [self.parameters[name] for name in self.blocks.get(block, ())]

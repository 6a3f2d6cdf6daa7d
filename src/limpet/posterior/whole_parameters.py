"""The parameters of the blocks of this process, each as a whole, and a way to write to them.

In most models these are the parameters themselves. In a sharded one (FSDP2) they are copies, gathered on the rank that
owns their block, and what is written is scattered to the shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from limpet.distributed import local
from limpet.model import named_parameters
from limpet.model.adapters import adapted_parameters
from limpet.model.low_rank import LowRank
from limpet.posterior.gathered_adapters import GatheredAdapters
from limpet.posterior.posterior import Posterior
from limpet.posterior.sharding import BlockSharding


class WholeParameters(Protocol):
    """Whole parameters by name, with their adapters.

    Attributes:
        parameters: The parameters of the blocks of this process, by name.
        adapted: The active adapters of every adapted one of them.
    """

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters."""

    @property
    def adapted(self) -> Mapping[nn.Parameter, Sequence[LowRank]]:
        """The adapters."""

    def on_any_rank(self, flag: bool) -> bool:
        """Whether a flag is set on any of the ranks that own these parameters."""

    def write(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Write new values of these parameters, or of the factors of their adapters, to the model.

        Args:
            values: The values of some of them. In a sharded model this is a collective, and every rank passes those of
                the blocks that it owns.
        """


@dataclass(frozen=True)
class OwnParameters:
    """The parameters of a model that is not sharded."""

    parameters: Mapping[str, nn.Parameter]
    adapted: Mapping[nn.Parameter, Sequence[LowRank]]

    def on_any_rank(self, flag: bool) -> bool:
        """Return the flag: this process has all parameters."""
        return flag

    @torch.no_grad()
    def write(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Write new values to the parameters."""
        for parameter, value in values.items():
            parameter.copy_(value)


class GatheredParameters:
    """Copies of the parameters of the blocks that this rank owns. Creating them and `write` are collectives.

    Args:
        posterior: The posterior of a sharded model.
        sharding: Which rank owns which block.
    """

    def __init__(self, posterior: Posterior, sharding: BlockSharding) -> None:
        self._posterior, self._sharding = posterior, sharding
        sharded, gathered = posterior.parameters(), posterior.gathered_adapters()
        self.parameters = {
            name: nn.Parameter(whole, requires_grad=sharded[name].requires_grad)
            for name, whole in posterior.base_weights(sharding).items()
        }
        self._names = {copy: name for name, copy in self.parameters.items()}
        self.adapted: dict[nn.Parameter, list[LowRank]] = {}
        self._owners: dict[str, int] = {}
        if gathered is not None:
            self._owners = gathered.owners
            self._names |= gathered.names
            self._add_adapters(gathered, {parameter: name for name, parameter in sharded.items()})

    def _add_adapters(self, gathered: GatheredAdapters, names: Mapping[nn.Parameter, str]) -> None:
        """Attach the adapters of the blocks that this rank owns to the copies of their weights."""
        for block in self._sharding.blocks.values():
            if self._sharding.owner(block) == self._sharding.ranks.rank:
                for one in gathered.adapters(block.name):
                    assert one.weight is not None
                    weight = self.parameters[names[one.weight]]
                    self.adapted.setdefault(weight, []).append(replace(one, weight=weight))

    def on_any_rank(self, flag: bool) -> bool:
        """Whether a flag is set on any rank. This is a collective."""
        return self._posterior.on_any_rank(flag)

    @torch.no_grad()
    def write(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Write new values to the shards of all ranks."""
        own = {self._names[copy]: value.to(copy) for copy, value in values.items()}
        parameters, ranks = self._posterior.parameters(), self._sharding.ranks
        names = {name for some in ranks.gather(sorted(own)) for name in some}
        exchange = self._sharding.exchange(parameters, self._owners)
        for name, piece in exchange.give(own, names).items():
            local(parameters[name]).copy_(piece)


def whole_parameters(posterior: Posterior) -> WholeParameters:
    """Return the whole parameters of the blocks of this process. For a sharded model this is a collective."""
    if posterior.sharding is not None:
        return GatheredParameters(posterior, posterior.sharding)
    return OwnParameters(named_parameters(posterior.model), adapted_parameters(posterior.model))

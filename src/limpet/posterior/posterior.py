"""Block-diagonal Gaussian posterior over a model's weights: a mean and a precision for every block."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from limpet.curvature import Structure
from limpet.errors import LimpetError
from limpet.model import full_precision
from limpet.model.adapters import adapted_parameters
from limpet.posterior.block_posterior import BlockPosterior
from limpet.posterior.effective_weights import EffectiveWeights, with_adapters
from limpet.posterior.gathered_adapters import GatheredAdapters
from limpet.posterior.held_blocks import HeldBlocks
from limpet.posterior.lora import LoRAPenalty
from limpet.posterior.sharding import BlockSharding, reject_sharded


class Posterior(HeldBlocks):
    """Posterior of all blocks of a model, by name, and the prior for new blocks.

    If the model is sharded, `held` has only the blocks that this rank owns.

    Args:
        model: The model.
        structure: The structure of each block's precision.
        prior_precision: Precision of the isotropic Gaussian prior.
        prior_mean: Mean of the prior, one of `PRIOR_MEANS`.
    """

    def __init__(self, model: nn.Module, structure: Structure, prior_precision: float, prior_mean: str) -> None:
        super().__init__(model, structure, prior_precision, prior_mean)
        self._lora_penalties: dict[str, LoRAPenalty] = {}

    def weights(self) -> Mapping[str, Tensor]:
        """Return the effective weights by name: base weights plus the updates of their adapters.

        For a sharded model this is a collective that gathers the parameters of the blocks that this rank owns.

        Raises:
            UnsupportedError: If the effective weight of a measured parameter is not known.
        """
        parameters, adapted = self.parameters(), adapted_parameters(self.model)
        self._check_sharing()
        if self.sharding is None:
            return EffectiveWeights(parameters, adapted) if adapted else parameters
        return with_adapters(self.base_weights(self.sharding), self.gathered_adapters())

    def rounds(self) -> Iterator[tuple[list[BlockPosterior], Mapping[str, Tensor]]]:
        """Iterate over all blocks, with the effective weights by name.

        For a sharded model this is a collective that gathers the parameters of few blocks at a time (those of one
        `BlockSharding.rounds`), so that no rank holds all that it owns. The weights are valid until the next iteration.

        Yields:
            The blocks that this rank owns, and their weights: all at once if the model is not sharded.
        """
        if self.sharding is None:
            yield list(self.held.values()), self.weights()
            return
        self._check_sharing()
        gathered = self.gathered_adapters()
        for blocks, weights in self.sharding.gathered(self.parameters()):
            held = [self.held[block.name] for block in blocks if block.name in self.held]
            yield held, with_adapters(weights, gathered)

    def base_weights(self, sharding: BlockSharding) -> dict[str, Tensor]:
        """Gather the parameters of the blocks that this rank owns. This is a collective."""
        parameters = self.parameters()
        exchange = sharding.exchange(parameters)
        return exchange.bring({name: parameters[name] for name in exchange.layouts})

    def gathered_adapters(self) -> GatheredAdapters | None:
        """Gather the adapters of a sharded model; None if it is not sharded or has none. This is a collective.

        Raises:
            UnsupportedError: If the base weight of an adapter is trained as well.
        """
        adapted = adapted_parameters(self.model)
        if self.sharding is None or not any(adapted.values()):
            return None
        return GatheredAdapters(self.sharding, self.parameters(), adapted)

    def adapted_blocks(self) -> list[str]:
        """Return the names of the blocks, of all ranks, that train through adapters."""
        parameters, adapted = self.parameters(), adapted_parameters(self.model)
        blocks = [held.block for held in self.held.values()] if self.sharding is None else self.sharding.blocks.values()
        return [block.name for block in blocks if any(adapted.get(parameters[name]) for name in block.parameters)]

    def lora_penalties(self) -> dict[str, LoRAPenalty]:
        """Return the penalties of the blocks that train through adapters, by name.

        For a sharded model this is a collective, and the adapters are copies (`GatheredAdapters`).
        """
        if self.sharding is not None:
            gathered = self.gathered_adapters()
            return {} if gathered is None else self.sharded_lora_penalties(self.sharding, gathered)
        parameters, adapted = self.parameters(), adapted_parameters(self.model)
        found = {}
        for name, held in self.held.items() if adapted else ():
            own = [parameters[parameter] for parameter in held.block.parameters]
            adapters = [one for parameter in own for one in adapted.get(parameter, ())]
            if adapters:
                known = self._lora_penalties.get(name)
                fits = known is not None and known.fits(held, own, adapters)
                found[name] = known if known is not None and fits else LoRAPenalty(held, own, adapters)
        self._lora_penalties = found
        return found

    def sharded_lora_penalties(self, sharding: BlockSharding, gathered: GatheredAdapters) -> dict[str, LoRAPenalty]:
        """Return the penalties of the blocks that this rank owns and that train through adapters, by name.

        Args:
            sharding: Which rank owns which block.
            gathered: The adapters.

        Returns:
            The penalties, which have computed the difference of the base from the mean and let go of the base.
        """
        found = {}
        for blocks, weights in sharding.gathered(self.parameters()):
            for name in (block.name for block in blocks if block.name in self.held and block.name in gathered.blocks):
                held = self.held[name]
                own = [nn.Parameter(weights[p], requires_grad=False) for p in held.block.parameters]
                found[name] = LoRAPenalty(held, own, gathered.adapters(name)).without_base()
        return found

    def way_to_the_mean(self) -> dict[str, Tensor]:
        """Return mean - w, by parameter."""
        weights, way = self.weights(), {}
        for held in self.held.values():
            way.update(held.block.scatter(-held.displacement(weights)))
        return way

    @full_precision()
    def penalty(self) -> Tensor:
        """Compute the total penalty, differentiable, and not divided by the number of examples.

        Returns:
            The penalty, a scalar.

        Raises:
            LimpetError: If there are no blocks.
            UnsupportedError: If the model is sharded.
        """
        reject_sharded(self.sharding, "memory.penalty()", "use memory.protect(optimizer, examples=N)")
        weights, lora_penalties = self.weights(), self.lora_penalties()
        values = [
            lora_penalties[name].value() if name in lora_penalties else held.value(weights)
            for name, held in self.held.items()
        ]
        if not values:
            raise LimpetError(
                "the memory has no blocks because every parameter is frozen or excluded: "
                "set requires_grad=True, or remove entries from exclude=[...]"
            )
        return torch.stack([value.to(values[0].device) for value in values]).sum() + self.constant

    @full_precision()
    def rises(self, without: Collection[str] = ()) -> dict[str, float]:
        """Compute the predicted increase of the old loss, 1/2 (w - mean)^T F (w - mean), for every block with tasks.

        Args:
            without: Names of blocks to leave out.

        Returns:
            The increase by block name, over all ranks.
        """
        # the penalties of a sharded model gather the base weights of all blocks of a rank
        lora_penalties = {} if self.sharding is not None else self.lora_penalties()
        rises: dict[str, float] = {}
        for some, weights in self.rounds():
            for held in some:
                name = held.block.name
                if not held.tasks or name in without:
                    continue
                if name in lora_penalties:
                    rises[name] = lora_penalties[name].rise()
                else:
                    rises[name] = float(held.precision.fisher().quadratic(held.displacement(weights))) / 2
        if self.sharding is None:
            return rises
        return {name: rise for some in self.sharding.ranks.gather(rises) for name, rise in some.items()}

    def recenter(self, blocks: Collection[str]) -> None:
        """Replace the means of blocks of a sharded model by its weights, few at a time. This is a collective.

        Args:
            blocks: Names of the blocks.
        """
        for some, weights in self.rounds():
            for held in some:
                if held.block.name in blocks:
                    mean = held.matrix(weights).detach()
                    own = mean.untyped_storage().nbytes() == mean.nbytes  # not a part of what was received
                    self.held[held.block.name] = replace(held, mean=mean if own else mean.clone())

"""Displacements of the weights, computed block by block where a block's memory is.

In a sharded model (FSDP2) every rank computes those of the blocks that it owns, and they are scattered to the shards of
the weights. What is summed over blocks is then summed over ranks, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from limpet.distributed import shard_like
from limpet.posterior.posterior import Posterior


class Displacer:
    """Brings displacements to the weights. For a sharded model, creating it and all of its methods are collectives.

    Args:
        posterior: The posterior.
        names: Names of the parameters that this process displaces; in a sharded model, of blocks that it owns.
    """

    def __init__(self, posterior: Posterior, names: Iterable[str]) -> None:
        self._posterior, self._names = posterior, set(names)
        if posterior.sharding is not None:
            self._names = self._names.union(*posterior.sharding.ranks.gather(self._names))

    def __bool__(self) -> bool:
        """Whether any parameter is displaced, on any rank."""
        return bool(self._names)

    def total(self, value: float) -> float:
        """Sum a number over the ranks that own blocks."""
        sharding = self._posterior.sharding
        return value if sharding is None else sharding.ranks.numbers(value)[0]

    def largest(self, value: float) -> float:
        """Return the largest of a number over the ranks that own blocks."""
        sharding = self._posterior.sharding
        return value if sharding is None else max(sharding.ranks.gather(value))

    def scattered(self, displacement: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what to add to the parameters of the model, for `limpet.model.perturbed`.

        Args:
            displacement: The displacement of every parameter that this process displaces, by name.

        Returns:
            The displacement of every parameter that any rank displaces, sharded like the parameter.
        """
        sharding = self._posterior.sharding
        if sharding is None:
            return dict(displacement)
        parameters = self._posterior.parameters()
        pieces = sharding.exchange(parameters).give(displacement, self._names)
        return {name: shard_like(parameters[name], piece) for name, piece in pieces.items()}

    def gathered(self, gradient: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the whole gradients of the parameters that this process displaces.

        Args:
            gradient: The gradient of every parameter that any rank displaces, sharded like the parameter.

        Returns:
            The gradients, by name.
        """
        sharding = self._posterior.sharding
        return gradient if sharding is None else sharding.exchange(self._posterior.parameters()).bring(gradient)

    @property
    def names(self) -> list[str]:
        """Names of the parameters that any rank displaces, in an order that is the same on all of them."""
        return sorted(self._names)

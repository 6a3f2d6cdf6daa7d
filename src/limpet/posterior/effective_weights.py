"""Effective weights of a model with adapters: what the posterior is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from limpet.model.low_rank import LowRank
from limpet.posterior.gathered_adapters import GatheredAdapters


class EffectiveWeights(Mapping[str, Tensor]):
    """Effective weights by name: each parameter plus the update of its adapters, computed on access.

    Args:
        parameters: The parameters by name.
        adapted: The adapters of every adapted parameter.
    """

    def __init__(self, parameters: Mapping[str, Tensor], adapted: Mapping[Any, Sequence[LowRank]]) -> None:
        self._parameters, self._adapted = parameters, adapted

    def __getitem__(self, name: str) -> Tensor:
        weight: Tensor = self._parameters[name]
        for adapter in self._adapted.get(self._parameters[name], ()):
            added = adapter.added(weight.shape)
            # in float32 or wider, so that a half-precision weight does not round the update away
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + added.to(weight.device)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def with_adapters(weights: Mapping[str, Tensor], gathered: GatheredAdapters | None) -> Mapping[str, Tensor]:
    """Return gathered base weights plus the updates of their adapters.

    Args:
        weights: The base weights by name, of some of the blocks that this rank owns.
        gathered: The adapters of a sharded model, if it has any.

    Returns:
        The effective weights by name.
    """
    if gathered is None:
        return weights
    names = {parameter: name for name, parameter in gathered.parameters.items()}
    added: dict[Tensor, list[LowRank]] = {}
    for block in gathered.own:
        for one in gathered.adapters(block):
            assert one.weight is not None
            if names[one.weight] in weights:
                added.setdefault(weights[names[one.weight]], []).append(one)
    return EffectiveWeights(weights, added)

"""Say how sure the network is: predictions averaged over weights drawn from the memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from limpet.curvature import plain, untouched
from limpet.errors import positive_whole
from limpet.likelihoods import Likelihood
from limpet.posterior import Posterior


@torch.no_grad()
def sample_weights(posterior: Posterior, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """The protected parameters drawn from N(mean, L^-1)."""
    weights = posterior.weights()
    drawn = {}
    for held in posterior.held.values():
        matrix = held.mean + held.precision.sample(generator)
        for name, part in zip(held.block.parameters, held.block.split(matrix), strict=True):
            drawn[name] = part.to(weights[name].device, weights[name].dtype)
    return drawn


@torch.no_grad()
def predictive(
    posterior: Posterior,
    likelihood: Likelihood,
    inputs: Any,
    *,
    draws: int = 20,
    generator: torch.Generator | None = None,
) -> Any:
    """The mean over drawn weights of E[targets | inputs, weights], in eval mode; the model itself stays as it is."""
    draws, total = positive_whole("draws", draws), None
    with untouched(posterior.model):
        for _ in range(draws):
            drawn = sample_weights(posterior, generator)
            names = (name for name, _ in posterior.model.named_parameters())
            weights = {name: drawn[plain(name)] for name in names if plain(name) in drawn}
            args, options = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
            outputs = functional_call(posterior.model, weights, args, options)
            mean = likelihood.mean(getattr(outputs, "logits", outputs))
            total = mean if total is None else torch.utils._pytree.tree_map(torch.add, total, mean)
    return torch.utils._pytree.tree_map(lambda tensor: tensor / draws, total)

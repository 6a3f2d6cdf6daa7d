"""Say link_approximation sure the network is: predictions averaged over what the weights might be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from limpet.errors import finite_number, positive_whole
from limpet.likelihoods import Likelihood
from limpet.model import Forward, call, named_parameters, perturbed, prepared, preserve_state
from limpet.posterior import Posterior
from limpet.precision import Precision
from limpet.precision.base import inverse_root, noise
from limpet.predictive.linearized import output_distribution

LINK_APPROXIMATIONS = ("probit", "linearised", "sampled")


@torch.no_grad()
def sample_weights(
    posterior: Posterior, generator: torch.Generator | None = None, prior_precision: float | None = None
) -> dict[str, Tensor]:
    """The protected parameters drawn from N(mean, L^-1), with another prior in L if one is given."""
    weights = posterior.weights()
    drawn = {}
    for held in posterior.held.values():
        matrix = held.mean + _drawn(held.precision, generator, prior_precision)
        for name, part in held.block.scatter(matrix).items():
            drawn[name] = part.to(weights[name].device, weights[name].dtype)
    return drawn


def _drawn(precision: Precision, generator: torch.Generator | None, prior_precision: float | None) -> Tensor:
    if prior_precision is None:
        return precision.sample(generator)
    spectrum = precision.spectrum()
    full = spectrum.total + finite_number("prior_precision", prior_precision)
    return spectrum.back(noise(full.shape, full, generator) * inverse_root(full))


def predictive(
    posterior: Posterior,
    likelihood: Likelihood,
    inputs: Any,
    *,
    link_approximation: str = "probit",
    draws: int = 20,
    forward: Forward | None = None,
    prior_precision: float | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    """E[targets | inputs], over the weights of the memory, in eval mode; the model itself stays as it is.

    "sampled": the mean over drawn weights. "linearised": the mean over outputs drawn from those of the network
    linearised at the mean. "probit": the same without drawing, nearly. The last two are for few outputs.
    """
    if link_approximation not in LINK_APPROXIMATIONS:
        raise ValueError(
            f"link_approximation must be one of {', '.join(LINK_APPROXIMATIONS)}, not {link_approximation!r}"
        )
    draws = positive_whole("draws", draws)
    if link_approximation == "sampled":
        return _sampled(posterior, likelihood, inputs, draws, forward, prior_precision, generator)
    found = output_distribution(posterior, inputs, forward=forward, prior_precision=prior_precision)
    if link_approximation == "probit":
        return likelihood.probit(found.mean, found.variance)
    return torch.stack([likelihood.mean(outputs) for outputs in found.sample(draws, generator)]).mean(0)


@torch.no_grad()
def _sampled(
    posterior: Posterior,
    likelihood: Likelihood,
    inputs: Any,
    draws: int,
    forward: Forward | None,
    prior_precision: float | None,
    generator: torch.Generator | None,
) -> Any:
    parameters = named_parameters(posterior.model)
    batch, total = prepared(inputs, next(iter(parameters.values())).device), None
    with preserve_state(posterior.model):
        for _ in range(draws):
            drawn = sample_weights(posterior, generator, prior_precision)
            now = posterior.weights()
            with perturbed(parameters, {name: weight - now[name] for name, weight in drawn.items()}):
                outputs, _ = call(posterior.model, batch, forward)
            mean = likelihood.mean(outputs)
            total = mean if total is None else tree_map(torch.add, total, mean)
    return tree_map(lambda tensor: tensor / draws, total)

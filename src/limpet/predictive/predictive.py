"""Posterior predictive: predictions averaged over the posterior of the weights."""

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
    """Sample the protected parameters from N(mean, L^-1).

    Args:
        posterior: The posterior.
        generator: Random generator. Default: the global one.
        prior_precision: Prior precision to use in L instead of that of the posterior.

    Returns:
        The sampled parameters, by name.
    """
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
    """Compute E[targets | inputs] under the posterior, in eval mode. The model is left unchanged.

    Args:
        posterior: The posterior.
        likelihood: The likelihood, which maps outputs to expected targets.
        inputs: The batch of inputs.
        link_approximation: How the expectation is approximated. "sampled" averages over weight samples. "linearised"
            averages over outputs sampled from the network linearized at the mean. "probit" approximates the latter in
            closed form. The last two support only few outputs.
        draws: Number of samples for "sampled" and "linearised".
        forward: A function (model, batch) -> outputs. None calls the model on the inputs.
        prior_precision: Prior precision to use instead of that of the posterior.
        generator: Random generator. Default: the global one.

    Returns:
        The expected targets, for example class probabilities.

    Raises:
        ValueError: If `link_approximation` is unknown or `draws` is not a positive integer.
        UnsupportedError: If the model has too many outputs for a linearized prediction.
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

"""Likelihoods of the network outputs: the negative log likelihood and square roots of its Hessian in the outputs.

The Fisher (GGN) of a task is sum_n J_n^T (sum_k r_nk r_nk^T) J_n, where J_n is the Jacobian of the outputs with respect
to the weights. The curvature pass only needs the square roots r, as tensors with the shape of the outputs. There are
three kinds:

- exact: sum_k r_k r_k^T is the Hessian of the negative log likelihood with respect to the outputs;
- sampled: r is the gradient at a label drawn from the model, so that E[r r^T] is that Hessian;
- empirical: r is the gradient at the true label.

A custom likelihood is a small subclass of `Likelihood` with two methods; it supports the sampled and the empirical
Fisher:

>>> import torch
>>> class Poisson(Likelihood):
...     name = "poisson"
...     def negative_log_likelihood(self, outputs, targets):
...         return torch.nn.functional.poisson_nll_loss(outputs, targets, reduction="sum")
...     def sample(self, outputs, generator):
...         return torch.poisson(outputs.exp(), generator=generator)
>>> Poisson().loss(torch.zeros(4, 1), torch.ones(4, 1))
tensor(1.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limpet.errors import MemoryFileError
from limpet.likelihoods.base import Likelihood, Outputs, as_tensors
from limpet.likelihoods.categorical import Categorical
from limpet.likelihoods.count import Count
from limpet.likelihoods.elementwise import Bernoulli, Gaussian
from limpet.likelihoods.multi_output import MultiOutput

NAMES: dict[str, type[Categorical] | type[Bernoulli] | type[Gaussian]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
}


def resolve(likelihood: str | Likelihood) -> Likelihood:
    """Return the likelihood for a name, or the likelihood itself.

    Args:
        likelihood: `"categorical"`, `"bernoulli"`, `"gaussian"`, or a `Likelihood`.

    Returns:
        The likelihood; one given by name has its default options.

    Raises:
        ValueError: If the name is unknown.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if likelihood not in NAMES:
        raise ValueError(f"likelihood must be one of {', '.join(NAMES)} or a Likelihood, not {likelihood!r}")
    return NAMES[likelihood]()


def from_description(description: Mapping[str, Any]) -> Likelihood:
    """Rebuild one of limpet's own likelihoods from its description: the inverse of `Likelihood.describe`.

    Args:
        description: Name and options, as returned by `Likelihood.describe`.

    Returns:
        The likelihood.

    Raises:
        MemoryFileError: If the description is not of one of limpet's own likelihoods.
    """
    try:
        options = dict(description)
        name = options.pop("name")
        if name == MultiOutput.name:
            return MultiOutput(*map(from_description, options["parts"]))
        return NAMES[name](**options)
    except (KeyError, TypeError, ValueError) as error:
        raise MemoryFileError(
            f"the file was saved with the likelihood {description!r}, which is not one of limpet's own: pass it as "
            "limpet.load(path, model, likelihood=...)"
        ) from error


__all__ = [
    "Bernoulli",
    "Categorical",
    "Count",
    "Gaussian",
    "Likelihood",
    "MultiOutput",
    "Outputs",
    "as_tensors",
    "from_description",
    "resolve",
]

"""Laplace approximation of the log marginal likelihood (evidence) as a function of the prior precision.

    log p(data) = log p(data | mean) - 1/2 prior |mean|^2 - 1/2 sum log((D + prior) / prior)

(MacKay 1992.) D are the eigenvalues of the sum of the tasks' Fishers F_t, available in closed form here.
"""

from __future__ import annotations

import torch

from limpet.errors import LimpetError
from limpet.posterior import Posterior
from limpet.precision.linalg import widened


@torch.no_grad()
def log_evidence(posterior: Posterior, prior: float) -> float:
    """Compute the part of the log marginal likelihood that depends on the prior precision.

    Args:
        posterior: The posterior.
        prior: The prior precision.

    Returns:
        The log marginal likelihood, up to a constant.
    """
    value = 0.0
    for held in posterior.held.values():
        values = widened(held.precision.spectrum().total)
        value -= float((values / prior).log1p().sum()) / 2 + prior * float(widened(held.mean).square().sum()) / 2
    return value


@torch.no_grad()
def evidence_prior(posterior: Posterior) -> float:
    """Find the prior precision that maximizes the log marginal likelihood.

    Uses MacKay's fixed-point iteration, with the effective number of parameters sum D / (D + prior):

        prior = (sum D / (D + prior)) / |mean|^2

    Args:
        posterior: A posterior with at least one task.

    Returns:
        The prior precision.

    Raises:
        LimpetError: If the posterior has no task yet.
    """
    spectra = [widened(held.precision.spectrum().total) for held in posterior.held.values()]
    square = sum(float(widened(held.mean).square().sum()) for held in posterior.held.values())
    if not square > 0 or not any(bool((values > 0).any()) for values in spectra):
        raise LimpetError(
            "the log marginal likelihood is undefined before the first task: call memory.consolidate(...) first"
        )
    prior = posterior.prior_precision or 1.0
    for _ in range(200):
        before, prior = prior, sum(float((values / (values + prior)).sum()) for values in spectra) / square
        if abs(prior - before) < 1e-6 * prior:
            break
    return prior

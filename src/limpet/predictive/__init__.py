"""Posterior predictive distributions: weight samples and the linearized model."""

from limpet.predictive.predictive import predictive, sample_weights

__all__ = ["predictive", "sample_weights"]

"""Gaussian posterior over the weights: mean and precision of every block, and quantities derived from them."""

from limpet.posterior.block_posterior import BlockPosterior
from limpet.posterior.held_blocks import PRIOR_MEANS
from limpet.posterior.posterior import Posterior

__all__ = ["PRIOR_MEANS", "BlockPosterior", "Posterior"]

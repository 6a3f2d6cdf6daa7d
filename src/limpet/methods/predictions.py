"""What a memory predicts: weights drawn from its posterior, and outputs averaged over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from limpet.deprecation import renamed_arguments
from limpet.likelihoods import Likelihood
from limpet.methods.checks import reject_sharded_memory
from limpet.model import Forward
from limpet.model.quantized import with_quantized_part
from limpet.posterior import Posterior

if TYPE_CHECKING:  # imported lazily at run time, to keep `import limpet` fast
    from limpet.predictive.linearized import OutputDistribution


class Predictions:
    """The part of `Memory` that predicts."""

    likelihood: Likelihood
    posterior: Posterior

    def sample_weights(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Sample the protected parameters from the posterior N(mean, L^-1).

        Args:
            generator: Random number generator. Defaults to PyTorch's global one.

        Returns:
            The sampled values by parameter name. The model is not changed.

        Raises:
            UnsupportedError: If the memory is sharded.
        """
        from limpet.predictive import sample_weights

        reject_sharded_memory(self.posterior, "sample_weights")
        parameters = self.posterior.parameters()
        drawn = sample_weights(self.posterior, generator)
        return {name: with_quantized_part(parameters[name], weight) for name, weight in drawn.items()}

    @renamed_arguments(how="link_approximation")
    def predictive(
        self,
        inputs: Any,
        *,
        link_approximation: str = "probit",
        draws: int = 20,
        forward: Forward | None = None,
        prior_precision: float | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Predict with the posterior predictive distribution, averaged over the weights.

        Args:
            inputs: A batch of inputs.
            link_approximation: "probit" (closed form, for the network linearized at the mean, whose outputs are
                Gaussian), "linearised" (the mean over `draws` samples of those outputs) or "sampled" (the mean over
                `draws` samples of the weights; supports outputs per position, which the other two do not). Formerly
                `how`.
            draws: Number of samples to average over.
            forward: `forward(model, inputs)` returns the outputs, if `model(inputs)` does not.
            prior_precision: Overrides the prior precision of the memory. "evidence" selects the one that maximizes
                the log marginal likelihood.
            generator: Random number generator. Defaults to PyTorch's global one.

        Returns:
            Class probabilities for a categorical likelihood, means for others.

        Raises:
            UnsupportedError: If the memory is sharded.
            ValueError: If an argument has an invalid value.

        Examples:
            >>> import limpet
            >>> model = torch.nn.Linear(3, 2)
            >>> memory = limpet.OnlineLaplace(model)
            >>> memory.consolidate([(torch.randn(20, 3), torch.randint(0, 2, (20,)))])
            >>> memory.predictive(torch.zeros(5, 3)).sum(1).round(decimals=4)
            tensor([1., 1., 1., 1., 1.])
        """
        from limpet.predictive import predictive

        reject_sharded_memory(self.posterior, "predictive")
        return predictive(
            self.posterior,
            self.likelihood,
            inputs,
            link_approximation=link_approximation,
            draws=draws,
            forward=forward,
            prior_precision=self._prior(prior_precision),
            generator=generator,
        )

    def output_distribution(
        self, inputs: Any, *, forward: Forward | None = None, prior_precision: float | str | None = None
    ) -> OutputDistribution:
        """Compute the Gaussian N(mean, covariance) of each example's outputs, for the network linearized at the mean.

        Args:
            inputs: A batch of inputs.
            forward: `forward(model, inputs)` returns the outputs, if `model(inputs)` does not.
            prior_precision: Overrides the prior precision of the memory. "evidence" selects the one that maximizes
                the log marginal likelihood.

        Returns:
            Mean of shape (examples, outputs) and covariance of shape (examples, outputs, outputs).

        Raises:
            UnsupportedError: If the memory is sharded.
            ValueError: If `prior_precision` is invalid.

        Examples:
            >>> import limpet
            >>> model = torch.nn.Linear(3, 1)
            >>> memory = limpet.OnlineLaplace(model, likelihood="gaussian")
            >>> memory.consolidate([(torch.randn(20, 3), torch.randn(20, 1))])
            >>> found = memory.output_distribution(torch.zeros(5, 3))
            >>> found.mean.shape, found.covariance.shape
            (torch.Size([5, 1]), torch.Size([5, 1, 1]))
        """
        from limpet.predictive.linearized import output_distribution

        reject_sharded_memory(self.posterior, "output_distribution")
        prior = self._prior(prior_precision)
        return output_distribution(self.posterior, inputs, forward=forward, prior_precision=prior)

    def _prior(self, prior_precision: float | str | None) -> float | None:
        if isinstance(prior_precision, str):
            from limpet.posterior.marginal_likelihood import evidence_prior

            if prior_precision != "evidence":
                raise ValueError(f"prior_precision must be a number or 'evidence', not {prior_precision!r}")
            return evidence_prior(self.posterior)
        return prior_precision

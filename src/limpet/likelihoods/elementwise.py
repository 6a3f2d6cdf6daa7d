"""Likelihoods whose outputs are independent of each other: Bernoulli and Gaussian."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from limpet.errors import UnsupportedError
from limpet.likelihoods.base import Likelihood, Outputs, one_tensor, widened
from limpet.likelihoods.random import Random, normal, uniform


class Bernoulli(Likelihood):
    """Bernoulli likelihood with a sigmoid over independent logits.

    Outputs have the shape (examples, ...), targets have the same shape and are 0 or 1, or probabilities in between.

    Examples:
        >>> Bernoulli().loss(torch.zeros(4, 1), torch.ones(4, 1))
        tensor(0.6931)
    """

    name = "bernoulli"
    by_example = True

    def count(self, outputs: Outputs, targets: Any) -> int:
        """Count the examples, after checking that the targets are between 0 and 1."""
        if targets is not None:
            _, labels = _paired(outputs, targets)
            if bool(((labels < 0) | (labels > 1)).any()):
                raise UnsupportedError("Bernoulli targets must be between 0 and 1: for class indices use 'categorical'")
        return super().count(outputs, targets)

    def negative_log_likelihood(self, outputs: Outputs, targets: Any) -> Tensor:
        """Compute the summed binary cross-entropy with logits."""
        return F.binary_cross_entropy_with_logits(*_paired(outputs, targets), reduction="sum")

    def sample(self, outputs: Outputs, generator: Random) -> Tensor:
        """Draw zeros and ones with the probabilities of the outputs."""
        p = self.mean(outputs)
        return (uniform(p.shape, p, generator) < p).to(p.dtype)

    def gradient(self, outputs: Outputs, targets: Any) -> Tensor:
        """Compute sigmoid(logits) - targets."""
        logits, labels = _paired(outputs, targets)
        return (logits.sigmoid() - labels).to(one_tensor(outputs))

    def root_count(self, outputs: Outputs) -> int | None:
        """Return the number of outputs per example, or None if there is one output per position."""
        return _outputs_per_example(outputs)

    def roots(self, outputs: Outputs, targets: Any) -> Iterator[Tensor]:
        """Yield the columns of diag(sqrt(p (1 - p)))."""
        logits = widened(outputs)
        yield from _diagonal_roots((logits.sigmoid() * (-logits).sigmoid()).sqrt().to(one_tensor(outputs)))

    def mean(self, outputs: Outputs) -> Tensor:
        """Compute the probabilities of a one."""
        return widened(outputs).sigmoid()

    def summary(self, outputs: Outputs, targets: Any, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the logits."""
        return {"outputs": widened(outputs)}

    def divergence(self, summary: Mapping[str, Tensor], outputs: Outputs) -> Tensor:
        """Compute KL(before || now) in nats, summed over the outputs of every example."""
        now = widened(outputs)
        before = summary["outputs"].to(now)
        found = before.sigmoid() * (F.logsigmoid(before) - F.logsigmoid(now))
        found = found + (-before).sigmoid() * (F.logsigmoid(-before) - F.logsigmoid(-now))
        return found.reshape(len(found), -1).sum(1)

    def probit(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Compute sigmoid(mean / sqrt(1 + pi / 8 variance)): MacKay (1992)."""
        return (mean / (1 + math.pi / 8 * variance).sqrt()).sigmoid()


class Gaussian(Likelihood):
    """Gaussian likelihood whose means are the outputs, of shape (examples, ...).

    The negative log likelihood is sum (y - f)^2 / (2 variance) + const. A plain mean squared error is a different
    multiple of it; `Gaussian(variance).loss` is the matching training loss.

    Args:
        variance: Variance of the observation noise, or `"estimate"` to estimate it from the residuals.

    Raises:
        ValueError: If the variance is neither positive nor `"estimate"`.

    Examples:
        >>> Gaussian(0.5).loss(torch.zeros(4, 1), torch.ones(4, 1))
        tensor(1.5724)
    """

    name = "gaussian"
    by_example = True

    def __init__(self, variance: float | str = 1.0) -> None:
        if variance != "estimate" and not (isinstance(variance, int | float) and variance > 0):
            raise ValueError(f"variance must be a number > 0 or 'estimate', not {variance!r}")
        self.variance = variance

    def describe(self) -> dict[str, Any]:
        """Return the name and the variance as plain JSON values."""
        return {"name": self.name, "variance": self.variance}

    @property
    def _assumed_variance(self) -> float:
        """Return the variance used during the pass: 1 if it is estimated, corrected by `fisher_scale` afterwards."""
        return 1.0 if isinstance(self.variance, str) else float(self.variance)

    def negative_log_likelihood(self, outputs: Outputs, targets: Any) -> Tensor:
        """Compute sum (y - f)^2 / (2 variance) plus the normalizing constant."""
        means, values = _paired(outputs, targets)
        constant = 0.5 * means.numel() * math.log(2 * math.pi * self._assumed_variance)
        return (means - values).square().sum() / (2 * self._assumed_variance) + constant

    def sample(self, outputs: Outputs, generator: Random) -> Tensor:
        """Draw targets from N(outputs, variance)."""
        means = one_tensor(outputs)
        return means + math.sqrt(self._assumed_variance) * normal(means.shape, means, generator)

    def gradient(self, outputs: Outputs, targets: Any) -> Tensor:
        """Compute (outputs - targets) / variance."""
        means, values = _paired(outputs, targets)
        return ((means - values) / self._assumed_variance).to(one_tensor(outputs))

    def root_count(self, outputs: Outputs) -> int | None:
        """Return the number of outputs per example, or None if there is one output per position."""
        return _outputs_per_example(outputs)

    def roots(self, outputs: Outputs, targets: Any) -> Iterator[Tensor]:
        """Yield the columns of the identity divided by the standard deviation."""
        yield from _diagonal_roots(torch.full_like(outputs, self._assumed_variance**-0.5))

    def tally(self, outputs: Outputs, targets: Any) -> Tensor:
        """Return the sum of the squared residuals and their number if the variance is estimated."""
        if self.variance != "estimate":
            return super().tally(outputs, targets)
        means, values = _paired(outputs, targets)
        squares = (means - values).square().sum()
        return torch.tensor([float(squares), means.numel()], dtype=torch.float64)

    def fisher_scale(self, tally: Tensor, *, empirical: bool) -> float:
        """Return the factor that replaces a variance of 1 with the estimated one."""
        if self.variance != "estimate":
            return 1.0
        variance = float(tally[0] / tally[1])
        if not variance > 0:
            raise UnsupportedError(
                "the noise variance cannot be estimated because all residuals are zero: pass it as Gaussian(variance)"
            )
        return float(variance ** (-2 if empirical else -1))

    def mean(self, outputs: Outputs) -> Tensor:
        """Return the outputs."""
        return one_tensor(outputs)

    def summary(self, outputs: Outputs, targets: Any, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the outputs."""
        return {"outputs": widened(outputs)}

    def divergence(self, summary: Mapping[str, Tensor], outputs: Outputs) -> Tensor:
        """Compute KL(before || now) in nats, summed over the outputs of every example."""
        now = widened(outputs)
        found = (now - summary["outputs"].to(now)).square() / (2 * self._assumed_variance)
        return found.reshape(len(found), -1).sum(1)

    def probit(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the mean, which does not depend on the variance."""
        return mean


def _paired(outputs: Outputs, targets: Any) -> tuple[Tensor, Tensor]:
    """Return outputs and targets of matching shape, in at least float32."""
    tensor = widened(outputs)
    if targets is None:
        raise UnsupportedError("targets are required here: pass batches of (inputs, targets)")
    if tensor.shape != targets.shape:
        raise UnsupportedError(
            f"targets of shape {tuple(targets.shape)} do not match outputs of shape {tuple(tensor.shape)}: "
            "make the shapes equal, for instance with targets.unsqueeze(-1)"
        )
    return tensor, targets.to(tensor)


def _outputs_per_example(outputs: Outputs) -> int | None:
    """Return the number of outputs per example, or None if there is one output per position."""
    tensor = one_tensor(outputs)
    return None if tensor.dim() > 2 else tensor[0].numel()


def _diagonal_roots(scale: Tensor) -> Iterator[Tensor]:
    """Yield the columns of a diagonal square root, each for all examples at once."""
    if scale.dim() > 2:
        raise UnsupportedError("fisher='exact' supports only one output per example: use fisher='sampled'")
    flat = scale.reshape(scale.shape[0], -1)
    for k in range(flat.shape[1]):
        root = torch.zeros_like(flat)
        root[:, k] = flat[:, k]
        yield root.reshape(scale.shape)

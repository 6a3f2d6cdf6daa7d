"""Outputs that are independent of each other: Bernoulli and Gaussian."""

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
    """Independent logits -> sigmoid: outputs (examples, ...) and targets 0 or 1 of the same shape.

    >>> Bernoulli().loss(torch.zeros(4, 1), torch.ones(4, 1))
    tensor(0.6931)
    """

    name = "bernoulli"
    by_example = True

    def count(self, outputs: Outputs, targets: Any) -> int:
        if targets is not None:
            _, labels = _paired(outputs, targets)
            if bool(((labels < 0) | (labels > 1)).any()):
                raise UnsupportedError("Bernoulli targets lie between 0 and 1: for class numbers use 'categorical'")
        return super().count(outputs, targets)

    def negative_log_likelihood(self, outputs: Outputs, targets: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(*_paired(outputs, targets), reduction="sum")

    def sample(self, outputs: Outputs, generator: Random) -> Tensor:
        p = self.mean(outputs)
        return (uniform(p.shape, p, generator) < p).to(p.dtype)

    def gradient(self, outputs: Outputs, targets: Any) -> Tensor:
        logits, labels = _paired(outputs, targets)
        return (logits.sigmoid() - labels).to(one_tensor(outputs))

    def root_count(self, outputs: Outputs) -> int | None:
        return _per_example(outputs)

    def roots(self, outputs: Outputs, targets: Any) -> Iterator[Tensor]:
        logits = widened(outputs)
        yield from _diagonal_roots((logits.sigmoid() * (-logits).sigmoid()).sqrt().to(one_tensor(outputs)))

    def mean(self, outputs: Outputs) -> Tensor:
        return widened(outputs).sigmoid()

    def summary(self, outputs: Outputs, targets: Any, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        return {"outputs": widened(outputs)}

    def divergence(self, summary: Mapping[str, Tensor], outputs: Outputs) -> Tensor:
        now = widened(outputs)
        before = summary["outputs"].to(now)
        found = before.sigmoid() * (F.logsigmoid(before) - F.logsigmoid(now))
        found = found + (-before).sigmoid() * (F.logsigmoid(-before) - F.logsigmoid(-now))
        return found.reshape(len(found), -1).sum(1)

    def probit(self, mean: Tensor, variance: Tensor) -> Tensor:
        """sigmoid(mean / sqrt(1 + pi / 8 variance)): MacKay (1992)."""
        return (mean / (1 + math.pi / 8 * variance).sqrt()).sigmoid()


class Gaussian(Likelihood):
    """Outputs (examples, ...) are means; the noise variance is given, or `"estimate"`d from the residuals.

    The negative log likelihood is sum (y - f)^2 / (2 variance) + const: a plain mean squared error is another
    multiple of it, `Gaussian(v).loss` is the loss itself.

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
        return {"name": self.name, "variance": self.variance}

    @property
    def _known(self) -> float:
        """The variance while the pass runs: 1 where it is estimated, and mended by `fisher_scale`."""
        return 1.0 if isinstance(self.variance, str) else float(self.variance)

    def negative_log_likelihood(self, outputs: Outputs, targets: Any) -> Tensor:
        means, values = _paired(outputs, targets)
        constant = 0.5 * means.numel() * math.log(2 * math.pi * self._known)
        return (means - values).square().sum() / (2 * self._known) + constant

    def sample(self, outputs: Outputs, generator: Random) -> Tensor:
        means = one_tensor(outputs)
        return means + math.sqrt(self._known) * normal(means.shape, means, generator)

    def gradient(self, outputs: Outputs, targets: Any) -> Tensor:
        means, values = _paired(outputs, targets)
        return ((means - values) / self._known).to(one_tensor(outputs))

    def root_count(self, outputs: Outputs) -> int | None:
        return _per_example(outputs)

    def roots(self, outputs: Outputs, targets: Any) -> Iterator[Tensor]:
        yield from _diagonal_roots(torch.full_like(outputs, self._known**-0.5))

    def tally(self, outputs: Outputs, targets: Any) -> Tensor:
        if self.variance != "estimate":
            return super().tally(outputs, targets)
        means, values = _paired(outputs, targets)
        squares = (means - values).square().sum()
        return torch.tensor([float(squares), means.numel()], dtype=torch.float64)

    def fisher_scale(self, tally: Tensor, *, empirical: bool) -> float:
        if self.variance != "estimate":
            return 1.0
        variance = float(tally[0] / tally[1])
        if not variance > 0:
            raise UnsupportedError("the residuals are all zero, so no noise variance can be estimated: give one")
        return float(variance ** (-2 if empirical else -1))

    def mean(self, outputs: Outputs) -> Tensor:
        return one_tensor(outputs)

    def summary(self, outputs: Outputs, targets: Any, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        return {"outputs": widened(outputs)}

    def divergence(self, summary: Mapping[str, Tensor], outputs: Outputs) -> Tensor:
        now = widened(outputs)
        found = (now - summary["outputs"].to(now)).square() / (2 * self._known)
        return found.reshape(len(found), -1).sum(1)

    def probit(self, mean: Tensor, variance: Tensor) -> Tensor:
        """The mean itself, whatever the variance."""
        return mean


def _paired(outputs: Outputs, targets: Any) -> tuple[Tensor, Tensor]:
    """Outputs, and targets that fit them, in at least float32."""
    tensor = widened(outputs)
    if targets is None:
        raise UnsupportedError("this needs targets: give batches of (inputs, targets)")
    if tensor.shape != targets.shape:
        raise UnsupportedError(
            f"targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(tensor.shape)}: "
            "give them the same shape, for instance targets.unsqueeze(-1)"
        )
    return tensor, targets.to(tensor)


def _per_example(outputs: Outputs) -> int | None:
    tensor = one_tensor(outputs)
    return None if tensor.dim() > 2 else tensor[0].numel()


def _diagonal_roots(scale: Tensor) -> Iterator[Tensor]:
    """The columns of a diagonal root, for every example at once."""
    if scale.dim() > 2:
        raise UnsupportedError("fisher='exact' is for one output per example: use fisher='sampled'")
    flat = scale.reshape(scale.shape[0], -1)
    for k in range(flat.shape[1]):
        root = torch.zeros_like(flat)
        root[:, k] = flat[:, k]
        yield root.reshape(scale.shape)

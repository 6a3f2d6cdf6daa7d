"""Likelihoods whose outputs are independent of each other: Bernoulli and Gaussian."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from limpet.errors import UnsupportedError
from limpet.likelihoods.base import Likelihood, Outputs, check_comparable, one_tensor, widened
from limpet.likelihoods.random import Random, normal, uniform

REDUCTIONS = ("sum", "mean")


class Elementwise(Likelihood):
    """A likelihood of independent outputs, of shape (examples, ...).

    The negative log likelihood of an example is the sum over its D outputs. The default losses of torch are means over
    examples and outputs instead: D times smaller. `reduction="mean"` divides loss, Fisher, forecasts and drift by D.

    Args:
        reduction: "sum" or "mean" over the outputs of an example. None is "sum", with a warning if D > 1.

    Raises:
        ValueError: If the reduction is unknown.
    """

    by_example = True
    torch_loss: ClassVar[str]
    """The loss of torch whose default reduction is a mean over examples and outputs."""

    def __init__(self, *, reduction: str | None = None) -> None:
        if reduction is not None and reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, not {reduction!r}")
        self.reduction = reduction

    def describe(self) -> dict[str, Any]:
        """Return the name and the options as plain JSON values."""
        return {"name": self.name} | ({} if self.reduction is None else {"reduction": self.reduction})

    def loss(self, outputs: Outputs, targets: Any) -> Tensor:
        """Compute the mean negative log likelihood per example, reduced over the outputs as `reduction` says."""
        value = super().loss(outputs, targets)
        return value / one_tensor(outputs)[0].numel() if self.reduction == "mean" else value

    def count_targets(self, targets: Any) -> int | None:
        """Count the examples."""
        return len(targets) if isinstance(targets, Tensor) and targets.dim() else None

    def advice(self, outputs: Outputs) -> str | None:
        """Return a warning if examples have several outputs and no reduction was chosen."""
        width = one_tensor(outputs)[0].numel()
        if self.reduction is not None or width == 1:
            return None
        return (
            f"the {self.name} likelihood sums over the {width} outputs of an example, but {self.torch_loss} takes "
            f"their mean by default, and the penalty would be {width} times too strong for it: pass likelihood="
            f"limpet.{type(self).__name__}(reduction='mean'), or reduction='sum' if your loss is a sum over outputs"
        )

    def tally(self, outputs: Outputs, targets: Any) -> Tensor:
        """Return the sum of the squared residuals if it is needed, and the numbers of outputs and of examples."""
        means = one_tensor(outputs)
        return torch.tensor([0.0, means.numel(), len(means)], dtype=torch.float64)

    def fisher_scale(self, tally: Tensor, *, empirical: bool) -> float:
        """Return 1 / D for the mean over D outputs."""
        return float(tally[2] / tally[1]) if self.reduction == "mean" else 1.0


class Bernoulli(Elementwise):
    """Bernoulli likelihood with a sigmoid over independent logits.

    Outputs have the shape (examples, ...), targets have the same shape and are 0 or 1, or probabilities in between.

    Args:
        reduction: "sum" or "mean" over the outputs of an example, as your loss reduces them: "mean" for
            `F.binary_cross_entropy_with_logits` with its defaults. None is "sum", with a warning if there are several.

    Examples:
        >>> Bernoulli().loss(torch.zeros(4, 1), torch.ones(4, 1))
        tensor(0.6931)
    """

    name = "bernoulli"
    torch_loss = "F.binary_cross_entropy_with_logits"

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
        check_comparable(before.shape, now.shape)
        found = before.sigmoid() * (F.logsigmoid(before) - F.logsigmoid(now))
        found = found + (-before).sigmoid() * (F.logsigmoid(-before) - F.logsigmoid(-now))
        return found.reshape(len(found), -1).sum(1)

    def information(self, summaries: Sequence[Mapping[str, Tensor]]) -> float:
        """Compute H(mean of p) - mean of H(p), summed over the outputs."""
        p = torch.cat([summary["outputs"] for summary in summaries]).double().sigmoid()
        both = torch.stack([p, 1 - p])
        return float(torch.special.entr(both.mean(1)).sum() - torch.special.entr(both).sum() / len(p))

    def probit(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Compute sigmoid(mean / sqrt(1 + pi / 8 variance)): MacKay (1992)."""
        return (mean / (1 + math.pi / 8 * variance).sqrt()).sigmoid()


class Gaussian(Elementwise):
    """Gaussian likelihood whose means are the outputs, of shape (examples, ...).

    The negative log likelihood is sum (y - f)^2 / (2 variance) + const. A plain mean squared error is a different
    multiple of it; `Gaussian(variance).loss` is the matching training loss.

    Args:
        variance: Variance of the observation noise, or `"estimate"` to estimate it from the residuals.
        reduction: "sum" or "mean" over the outputs of an example, as your loss reduces them. `Gaussian(0.5,
            reduction="mean")` corresponds to `F.mse_loss` with its defaults. None is "sum", with a warning if there are
            several outputs.

    Raises:
        ValueError: If the variance is neither positive nor `"estimate"`, or the reduction is unknown.

    Examples:
        >>> Gaussian(0.5).loss(torch.zeros(4, 1), torch.ones(4, 1))
        tensor(1.5724)
    """

    name = "gaussian"
    torch_loss = "F.mse_loss"

    def __init__(self, variance: float | str = 1.0, *, reduction: str | None = None) -> None:
        super().__init__(reduction=reduction)
        if variance != "estimate" and not (isinstance(variance, int | float) and variance > 0):
            raise ValueError(f"variance must be a number > 0 or 'estimate', not {variance!r}")
        self.variance = variance

    def describe(self) -> dict[str, Any]:
        """Return the name and the options as plain JSON values."""
        return {**super().describe(), "variance": self.variance}

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
        """Return the sum of the squared residuals if the variance is estimated, and the numbers to divide by."""
        counts = super().tally(outputs, targets)
        if self.variance == "estimate":
            means, values = _paired(outputs, targets)
            counts[0] = float((means - values).square().sum())
        return counts

    def fisher_scale(self, tally: Tensor, *, empirical: bool) -> float:
        """Return the factor that replaces a variance of 1 with the estimated one, times that of the reduction."""
        scale = super().fisher_scale(tally, empirical=empirical)
        if self.variance != "estimate":
            return scale
        variance = float(tally[0] / tally[1])
        if not variance > 0:
            raise UnsupportedError(
                "the noise variance cannot be estimated because all residuals are zero: pass it as Gaussian(variance)"
            )
        return scale * float(variance ** (-2 if empirical else -1))

    def mean(self, outputs: Outputs) -> Tensor:
        """Return the outputs."""
        return one_tensor(outputs)

    def summary(self, outputs: Outputs, targets: Any, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the outputs."""
        return {"outputs": widened(outputs)}

    def divergence(self, summary: Mapping[str, Tensor], outputs: Outputs) -> Tensor:
        """Compute KL(before || now) in nats, summed over the outputs of every example."""
        now = widened(outputs)
        check_comparable(summary["outputs"].shape, now.shape)
        found = (now - summary["outputs"].to(now)).square() / (2 * self._assumed_variance)
        return found.reshape(len(found), -1).sum(1)

    def information(self, summaries: Sequence[Mapping[str, Tensor]]) -> float:
        """Compute the variance of the outputs over the examples, divided by twice that of the noise."""
        outputs = torch.cat([summary["outputs"] for summary in summaries]).double()
        spread = (outputs - outputs.mean(0)).square().sum() / len(outputs)
        return float(spread) / (2 * self._assumed_variance)

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

"""Base class of the likelihoods, and helpers for model outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from limpet.errors import UnsupportedError
from limpet.likelihoods.random import Random

Outputs = Any
"""A tensor whose first dimension is the examples, or a tuple of such tensors for models with several outputs."""

TALLY = 3
"""Number of statistics of a batch that `Likelihood.tally` returns."""


class Likelihood(ABC):
    """Base class of all likelihoods.

    A subclass must implement `negative_log_likelihood` and `sample`, which is enough for the sampled and the empirical
    Fisher. The other methods are optional:

    - `root_count` and `roots` add the exact Fisher;
    - `summary` and `divergence` add drift measurements;
    - `mean` and `probit` add predictions.
    """

    name: ClassVar[str]
    """Name of the likelihood in reports and files."""
    by_example: bool = False
    """Whether `sample` supports per-example random streams (draws through `limpet.likelihoods.random`)."""

    @abstractmethod
    def negative_log_likelihood(self, outputs: Outputs, targets: Any) -> Tensor:
        """Compute -log p(targets | outputs), summed over the examples.

        Args:
            outputs: Outputs of the model.
            targets: Targets in the form this likelihood expects.

        Returns:
            A scalar tensor, differentiable with respect to the outputs.
        """

    @abstractmethod
    def sample(self, outputs: Outputs, generator: Random) -> Any:
        """Draw targets from p(. | outputs), independently for every example and position.

        Args:
            outputs: Outputs of the model.
            generator: Source of random numbers: a `torch.Generator`, None for the global generator or, if `by_example`
                is set, possibly a `PerExampleRNG`.

        Returns:
            Targets in the form that `negative_log_likelihood` takes.
        """

    def loss(self, outputs: Outputs, targets: Any) -> Tensor:
        """Compute the mean negative log likelihood per example, the loss that corresponds to the Fisher.

        Args:
            outputs: Outputs of the model.
            targets: Targets in the form this likelihood expects.

        Returns:
            A scalar tensor, differentiable with respect to the outputs.
        """
        return self.negative_log_likelihood(outputs, targets) / self.count(outputs, targets)

    def count(self, outputs: Outputs, targets: Any) -> int:
        """Count the examples, or the predicted positions for models with one output per position.

        Args:
            outputs: Outputs of the model.
            targets: Targets, or None; they only determine which positions are ignored.

        Returns:
            The number of terms that `loss` averages over.
        """
        return int(as_tensors(outputs)[0].shape[0])

    def count_targets(self, targets: Any) -> int | None:
        """Count as `count` does, from the targets alone.

        Args:
            targets: Targets in the form this likelihood expects.

        Returns:
            The number of terms that `loss` averages over, or None if it is not known without the outputs.
        """
        return None

    def advice(self, outputs: Outputs) -> str | None:
        """Return a warning if the usual training loss of such outputs is likely to be a multiple of this likelihood's.

        Args:
            outputs: Outputs of the model.

        Returns:
            The text of the warning, or None.
        """
        return None

    def root_count(self, outputs: Outputs) -> int | None:
        """Return the number of square roots `roots` yields.

        Args:
            outputs: Outputs of the model.

        Returns:
            The number of roots, or None if the exact Fisher is not available for these outputs.
        """
        return None

    def roots(self, outputs: Outputs, targets: Any) -> Iterator[Outputs]:
        """Yield r_1, r_2, ... such that sum_k r_k r_k^T is the Hessian of every example in the outputs.

        Args:
            outputs: Outputs of the model.
            targets: Targets, or None; they only determine which positions are ignored.

        Yields:
            Square roots with the shape of the outputs.

        Raises:
            UnsupportedError: If the exact Fisher is not available.
        """
        raise UnsupportedError(f"the {self.name} likelihood does not support the exact Fisher: use fisher='sampled'")

    def sampled_root(self, outputs: Outputs, targets: Any, generator: Random) -> Outputs:
        """Compute the gradient of the negative log likelihood in the outputs, at targets drawn from the model.

        Args:
            outputs: Outputs of the model.
            targets: Targets, or None; they only determine which positions are ignored.
            generator: Source of random numbers, see `sample`.

        Returns:
            The gradient of every example, with the shape of the outputs.
        """
        return self.gradient(outputs, self.sample(outputs, generator))

    def gradient(self, outputs: Outputs, targets: Any) -> Outputs:
        """Compute the gradient of the negative log likelihood in the outputs, at the given targets.

        Args:
            outputs: Outputs of the model.
            targets: Targets in the form this likelihood expects.

        Returns:
            The gradient of every example, with the shape of the outputs.
        """
        leaves = [tensor.detach().requires_grad_() for tensor in as_tensors(outputs)]
        with torch.enable_grad():
            value = self.negative_log_likelihood(_like(outputs, leaves), targets)
            gradients = torch.autograd.grad(value, leaves)
        return _like(outputs, gradients)

    def tally(self, outputs: Outputs, targets: Any) -> Tensor:
        """Compute the batch statistics from which `fisher_scale` estimates parameters of the likelihood.

        Args:
            outputs: Outputs of the model.
            targets: Targets in the form this likelihood expects.

        Returns:
            `TALLY` float64 numbers that are summed over the batches; zeros if nothing is estimated.
        """
        return torch.zeros(TALLY, dtype=torch.float64)

    def fisher_scale(self, tally: Tensor, *, empirical: bool) -> float:
        """Return the factor that the accumulated Fisher is multiplied by at the end of the pass.

        Args:
            tally: Sum of `tally` over all batches.
            empirical: Whether the Fisher is the empirical one.

        Returns:
            The factor; 1 if the likelihood estimates no parameters.
        """
        return 1.0

    def label_counts(self, outputs: Outputs, targets: Any) -> Tensor | None:
        """Count how often each label occurs among the targets.

        Args:
            outputs: Outputs of the model.
            targets: Targets in the form this likelihood expects.

        Returns:
            One count per label, or None if the targets are not labels.
        """
        return None

    def relabelled(self, targets: Any, labels: Tensor, generator: torch.Generator | None) -> Any:
        """Replace the targets with labels drawn uniformly from a given set.

        Args:
            targets: Targets that give the shape and the ignored positions.
            labels: Labels to draw from, as a vector.
            generator: Source of random numbers, or None for the global generator.

        Returns:
            Targets with the shape of `targets`.

        Raises:
            UnsupportedError: If the targets of this likelihood are not labels.
        """
        raise UnsupportedError(f"the {self.name} likelihood does not support `relabelled`: its targets are not labels")

    def summary(self, outputs: Outputs, targets: Any, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Summarize outputs so that `divergence` can compare later outputs with them.

        Args:
            outputs: Outputs of the model.
            targets: Targets, or None; they only determine which positions are ignored.
            generator: If given, a distribution over many labels may be summarized by a sample of them.

        Returns:
            Tensors by name; the first dimension of each is the examples.

        Raises:
            UnsupportedError: If the likelihood does not implement it.
        """
        raise UnsupportedError(
            f"the {self.name} likelihood does not define a divergence between outputs, so drift cannot be measured: "
            "implement `summary` and `divergence`"
        )

    def divergence(self, summary: Mapping[str, Tensor], outputs: Outputs) -> Tensor:
        """Compute KL(before || now) in nats, differentiable with respect to the outputs.

        Args:
            summary: `summary` of the earlier outputs.
            outputs: Current outputs for the same inputs.

        Returns:
            One value per example, or per position of every example; zero at ignored positions.

        Raises:
            UnsupportedError: If the likelihood does not implement it.
        """
        raise UnsupportedError(f"the {self.name} likelihood does not define a divergence: implement `divergence`")

    def information(self, summaries: Sequence[Mapping[str, Tensor]]) -> float | None:
        """Compute how much outputs say about their inputs: the mean of KL(outputs || mean of the outputs).

        It is the drift of a model that gives the same answer to every input, the best such one.

        Args:
            summaries: `summary` of the outputs, one per batch.

        Returns:
            The mean over examples, or over their positions, in nats; None if it is not known.
        """
        return None

    def describe(self) -> dict[str, Any]:
        """Return the name and the options as plain JSON values, for saving.

        Returns:
            A dictionary with the key `name` and one key per option.
        """
        return {"name": self.name}

    def mean(self, outputs: Outputs) -> Outputs:
        """Compute E[targets | outputs], for instance class probabilities.

        Args:
            outputs: Outputs of the model.

        Returns:
            The mean, with the shape of the outputs.

        Raises:
            UnsupportedError: If the likelihood does not implement it.
        """
        raise UnsupportedError(f"the {self.name} likelihood does not define its mean: implement `mean`")

    def probit(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Approximate E[targets] in closed form for independent Gaussian outputs N(mean, variance).

        Args:
            mean: Mean of the outputs.
            variance: Variance of the outputs, with the same shape.

        Returns:
            The approximate mean of the targets.

        Raises:
            UnsupportedError: If the likelihood has no closed-form approximation.
        """
        raise UnsupportedError(
            f"the {self.name} likelihood has no closed-form predictive: use link_approximation='linearised'"
        )


def as_tensors(outputs: Outputs) -> tuple[Tensor, ...]:
    """Return one or several outputs as a tuple of tensors."""
    if isinstance(outputs, Tensor):
        return (outputs,)
    if isinstance(outputs, tuple | list) and outputs and all(isinstance(o, Tensor) for o in outputs):
        return tuple(outputs)
    raise UnsupportedError(
        f"the model returned {type(outputs).__name__}, not a tensor or a tuple of tensors: pass "
        "forward=lambda model, batch: (outputs, targets) that selects the outputs for the likelihood"
    )


def one_tensor(outputs: Outputs) -> Tensor:
    """Return the output of a model with a single output."""
    tensors = as_tensors(outputs)
    if len(tensors) > 1:
        raise UnsupportedError(
            f"the model returned {len(tensors)} outputs: pass forward=lambda model, batch: (model(...)[0], targets) to "
            "select one, or likelihood=limpet.MultiOutput(...) with one likelihood per output"
        )
    return tensors[0]


def check_comparable(before: torch.Size, now: torch.Size) -> None:
    """Raise an error if outputs have another shape than those of the model before, which may have had another head.

    Args:
        before: The shape of the outputs before.
        now: The shape of the outputs now.

    Raises:
        UnsupportedError: If the shapes differ.
    """
    if before != now:
        raise UnsupportedError(
            f"the outputs now have the shape {tuple(now)}, but those of the model before {tuple(before)}: if the model "
            "has a new head, compare through the old one, with memory.drift(forward=...), limpet.repair(..., "
            "probe_forward=...) or memory.protect(..., repair={'probe_forward': ...})"
        )


def widened(outputs: Outputs) -> Tensor:
    """Return the single output in at least float32: in half precision p (1 - p) of a confident p is zero."""
    tensor = one_tensor(outputs)
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _like(outputs: Outputs, tensors: Sequence[Tensor]) -> Outputs:
    """Return the tensors as a single tensor or a tuple, like the outputs."""
    return tensors[0] if isinstance(outputs, Tensor) else tuple(tensors)

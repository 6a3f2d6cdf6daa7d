"""What every likelihood has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from limpet.errors import UnsupportedError
from limpet.likelihoods.random import Random

Outputs = Any
"""A tensor, examples first, or (for several outputs) a tuple of such tensors."""


class Likelihood(ABC):
    """The base of every likelihood. `name` stands in reports and files."""

    name: ClassVar[str]
    by_example: bool = False
    """Whether `sample` takes its random numbers from `limpet.likelihoods.random`, where each example has its own."""

    @abstractmethod
    def negative_log_likelihood(self, outputs: Outputs, targets: Any) -> Tensor:
        """-log p(targets | outputs), summed over the examples."""

    @abstractmethod
    def sample(self, outputs: Outputs, generator: Random) -> Any:
        """Targets drawn from p(. | outputs), independent for every example and position."""

    def loss(self, outputs: Outputs, targets: Any) -> Tensor:
        """The mean negative log likelihood per example: the loss that this likelihood's Fisher belongs to."""
        return self.negative_log_likelihood(outputs, targets) / self.count(outputs, targets)

    def count(self, outputs: Outputs, targets: Any) -> int:
        """How many examples (predicted positions, for outputs per position) there are."""
        return int(as_tensors(outputs)[0].shape[0])

    def root_count(self, outputs: Outputs) -> int | None:
        """How many roots the exact Fisher takes; None where there is no exact one."""
        return None

    def roots(self, outputs: Outputs, targets: Any) -> Iterator[Outputs]:
        """The exact roots. `targets` only say which positions are ignored, and may be None."""
        raise UnsupportedError(f"the {self.name} likelihood has no exact Fisher here: use fisher='sampled'")

    def sampled_root(self, outputs: Outputs, targets: Any, generator: Random) -> Outputs:
        """The gradient of the negative log likelihood in the outputs, at labels drawn from the model."""
        return self.gradient(outputs, self.sample(outputs, generator))

    def gradient(self, outputs: Outputs, targets: Any) -> Outputs:
        """The gradient of the negative log likelihood in the outputs, at `targets`."""
        leaves = [tensor.detach().requires_grad_() for tensor in as_tensors(outputs)]
        with torch.enable_grad():
            value = self.negative_log_likelihood(_like(outputs, leaves), targets)
            gradients = torch.autograd.grad(value, leaves)
        return _like(outputs, gradients)

    def tally(self, outputs: Outputs, targets: Any) -> Tensor:
        """Sums over a batch from which `fisher_scale` finds what the likelihood estimates itself."""
        return torch.zeros(2, dtype=torch.float64)

    def fisher_scale(self, tally: Tensor, *, empirical: bool) -> float:
        """What the Fisher is multiplied by in the end."""
        return 1.0

    def label_counts(self, outputs: Outputs, targets: Any) -> Tensor | None:
        """How often each label is among the targets; None where targets are no labels."""
        return None

    def relabelled(self, targets: Any, labels: Tensor, generator: torch.Generator | None) -> Any:
        """Targets of the same form, drawn from some labels alike."""
        raise UnsupportedError(f"the {self.name} likelihood has no labels")

    def summary(self, outputs: Outputs, targets: Any, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """What `divergence` has to know of outputs, examples first.

        Args:
            outputs: What the model gave.
            targets: They only say which positions are ignored, and may be None.
            generator: Where it is given, a large distribution may be summarised by some of its labels.

        Returns:
            Tensors by name.
        """
        raise UnsupportedError(
            f"the {self.name} likelihood does not say how far two outputs are apart, so drift cannot be measured: give "
            "it `summary` and `divergence`"
        )

    def divergence(self, summary: Mapping[str, Tensor], outputs: Outputs) -> Tensor:
        """KL(before || now) in nats, differentiable in the outputs.

        Args:
            summary: Of the outputs before.
            outputs: Those of now, for the same inputs.

        Returns:
            A number for every example, or for every position of every example; zero where positions are ignored.
        """
        raise UnsupportedError(f"the {self.name} likelihood has no divergence")

    def describe(self) -> dict[str, Any]:
        """Name and options as plain JSON values, for a memory's file."""
        return {"name": self.name}

    def mean(self, outputs: Outputs) -> Outputs:
        """E[targets | outputs]: class probabilities for a categorical."""
        raise UnsupportedError(f"the {self.name} likelihood does not say what its mean is: give it `mean`")

    def probit(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Nearly E[targets] where the outputs are N(mean, variance), each by itself."""
        raise UnsupportedError(
            f"the {self.name} likelihood has no closed prediction: use link_approximation='linearised'"
        )


def as_tensors(outputs: Outputs) -> tuple[Tensor, ...]:
    """One or several outputs as a tuple of tensors."""
    if isinstance(outputs, Tensor):
        return (outputs,)
    if isinstance(outputs, tuple | list) and outputs and all(isinstance(o, Tensor) for o in outputs):
        return tuple(outputs)
    raise UnsupportedError(
        f"the model gave {type(outputs).__name__}, not a tensor or a tuple of tensors: pass "
        "forward=lambda model, batch: (outputs, targets) that picks the outputs the likelihood is about"
    )


def one_tensor(outputs: Outputs) -> Tensor:
    """The one output of a likelihood that is about one."""
    tensors = as_tensors(outputs)
    if len(tensors) > 1:
        raise UnsupportedError(
            f"the model gave {len(tensors)} outputs: pass forward=lambda model, batch: (model(...)[0], targets) to "
            "pick one, or likelihood=limpet.MultiOutput(...) with a likelihood for each"
        )
    return tensors[0]


def widened(outputs: Outputs) -> Tensor:
    """That output in at least float32: in half precision a confident p (1 - p) is zero."""
    tensor = one_tensor(outputs)
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _like(outputs: Outputs, tensors: Sequence[Tensor]) -> Outputs:
    return tensors[0] if isinstance(outputs, Tensor) else tuple(tensors)

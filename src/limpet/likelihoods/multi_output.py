"""Likelihood of models with several outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from limpet.errors import UnsupportedError
from limpet.likelihoods.base import Likelihood, Outputs, as_tensors
from limpet.likelihoods.elementwise import Elementwise, Gaussian
from limpet.likelihoods.random import Random


class MultiOutput(Likelihood):
    """Likelihood of a model with several outputs: one likelihood per output, independent given the outputs.

    Outputs and targets are tuples with one entry per likelihood.

    Args:
        *parts: The likelihoods, in the order of the outputs.

    Raises:
        ValueError: If no likelihood is given, or if one of them is `Gaussian("estimate")` or has
            `reduction="mean"`.

    Examples:
        >>> from limpet import Categorical
        >>> both = MultiOutput(Categorical(), Gaussian())
        >>> both.loss((torch.zeros(2, 4), torch.zeros(2, 1)), (torch.tensor([0, 1]), torch.zeros(2, 1)))
        tensor(2.3052)
    """

    name = "several"

    def __init__(self, *parts: Likelihood) -> None:
        if not parts:
            raise ValueError("MultiOutput needs one likelihood per output")
        if any(isinstance(part, Gaussian) and part.variance == "estimate" for part in parts):
            raise ValueError("MultiOutput does not support Gaussian('estimate'): pass the variance, Gaussian(variance)")
        if any(isinstance(part, Elementwise) and part.reduction == "mean" for part in parts):
            raise ValueError("MultiOutput adds up the losses of its parts: pass reduction='sum' for each of them")
        self.parts = parts
        self.by_example = all(part.by_example for part in parts)

    def describe(self) -> dict[str, Any]:
        """Return the name and the descriptions of the parts as plain JSON values."""
        return {"name": self.name, "parts": [part.describe() for part in self.parts]}

    def _each(self, outputs: Outputs, targets: Any) -> Iterator[tuple[Likelihood, Tensor, Any]]:
        """Pair every likelihood with its output and its targets."""
        tensors = as_tensors(outputs)
        if len(tensors) != len(self.parts):
            raise UnsupportedError(
                f"the model returned {len(tensors)} outputs but there are {len(self.parts)} likelihoods: pass one per "
                "output"
            )
        return zip(self.parts, tensors, [None] * len(tensors) if targets is None else targets, strict=True)

    def negative_log_likelihood(self, outputs: Outputs, targets: Any) -> Tensor:
        """Compute the sum of the parts' negative log likelihoods."""
        values = [part.negative_log_likelihood(o, t) for part, o, t in self._each(outputs, targets)]
        return torch.stack(values).sum()

    def sample(self, outputs: Outputs, generator: Random) -> tuple[Any, ...]:
        """Draw targets for every output."""
        return tuple(part.sample(o, generator) for part, o, _ in self._each(outputs, None))

    def gradient(self, outputs: Outputs, targets: Any) -> tuple[Tensor, ...]:
        """Compute the gradient in every output."""
        return tuple(part.gradient(o, t) for part, o, t in self._each(outputs, targets))

    def sampled_root(self, outputs: Outputs, targets: Any, generator: Random) -> tuple[Tensor, ...]:
        """Compute the gradient in every output, at targets drawn from the model."""
        return tuple(part.sampled_root(o, t, generator) for part, o, t in self._each(outputs, targets))

    def count(self, outputs: Outputs, targets: Any) -> int:
        """Return the largest count of the parts."""
        return max(part.count(o, t) for part, o, t in self._each(outputs, targets))

    def count_targets(self, targets: Any) -> int | None:
        """Return the largest count of the parts, or None if one of them needs the outputs."""
        if not isinstance(targets, tuple | list) or len(targets) != len(self.parts):
            return None
        counts = [part.count_targets(t) for part, t in zip(self.parts, targets, strict=True)]
        return None if None in counts else max(c for c in counts if c is not None)

    def advice(self, outputs: Outputs) -> str | None:
        """Return the warnings of all parts."""
        found = [part.advice(o) for part, o, _ in self._each(outputs, None)]
        return "; ".join(text for text in found if text is not None) or None

    def root_count(self, outputs: Outputs) -> int | None:
        """Return the total number of roots, or None if one of the parts has no exact Fisher."""
        counts = [part.root_count(o) for part, o, _ in self._each(outputs, None)]
        return None if None in counts else sum(c for c in counts if c is not None)

    def roots(self, outputs: Outputs, targets: Any) -> Iterator[tuple[Tensor, ...]]:
        """Yield the roots of every part, with zeros for all other outputs."""
        zeros = [torch.zeros_like(o) for o in as_tensors(outputs)]
        for i, (part, o, t) in enumerate(self._each(outputs, targets)):
            for root in part.roots(o, t):
                yield (*zeros[:i], root, *zeros[i + 1 :])

    def summary(self, outputs: Outputs, targets: Any, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the summaries of all parts, their names prefixed with the index of the output."""
        found = [part.summary(o, t, generator) for part, o, t in self._each(outputs, targets)]
        return {f"{i}.{name}": tensor for i, one in enumerate(found) for name, tensor in one.items()}

    @staticmethod
    def _part_of(summary: Mapping[str, Tensor], i: int) -> dict[str, Tensor]:
        prefix = f"{i}."
        return {name.removeprefix(prefix): tensor for name, tensor in summary.items() if name.startswith(prefix)}

    def divergence(self, summary: Mapping[str, Tensor], outputs: Outputs) -> Tensor:
        """Compute KL(before || now) in nats, summed over the outputs of every example."""
        total = None
        for i, (part, output, _) in enumerate(self._each(outputs, None)):
            found = part.divergence(self._part_of(summary, i), output)
            found = found.reshape(len(found), -1).sum(1)
            total = found if total is None else total + found
        assert total is not None
        return total

    def information(self, summaries: Sequence[Mapping[str, Tensor]]) -> float | None:
        """Compute the sum of the parts, or None if that of one of them is not known."""
        found = [part.information([self._part_of(one, i) for one in summaries]) for i, part in enumerate(self.parts)]
        return None if None in found else sum(one for one in found if one is not None)

    def mean(self, outputs: Outputs) -> tuple[Tensor, ...]:
        """Compute the mean of every output."""
        return tuple(part.mean(o) for part, o, _ in self._each(outputs, None))

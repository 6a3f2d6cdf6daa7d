"""Several outputs at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from limpet.errors import UnsupportedError
from limpet.likelihoods.base import Likelihood, Outputs, as_tensors
from limpet.likelihoods.elementwise import Gaussian
from limpet.likelihoods.random import Random


class MultiOutput(Likelihood):
    """Several outputs, each with a likelihood of its own, independent given the outputs.

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
            raise ValueError("one of several outputs cannot have its variance estimated: give Gaussian(variance)")
        self.parts = parts
        self.by_example = all(part.by_example for part in parts)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "parts": [part.describe() for part in self.parts]}

    def _each(self, outputs: Outputs, targets: Any) -> Iterator[tuple[Likelihood, Tensor, Any]]:
        tensors = as_tensors(outputs)
        if len(tensors) != len(self.parts):
            raise UnsupportedError(
                f"the model gave {len(tensors)} outputs and there are {len(self.parts)} likelihoods: give one for each"
            )
        return zip(self.parts, tensors, [None] * len(tensors) if targets is None else targets, strict=True)

    def negative_log_likelihood(self, outputs: Outputs, targets: Any) -> Tensor:
        values = [part.negative_log_likelihood(o, t) for part, o, t in self._each(outputs, targets)]
        return torch.stack(values).sum()

    def sample(self, outputs: Outputs, generator: Random) -> tuple[Any, ...]:
        return tuple(part.sample(o, generator) for part, o, _ in self._each(outputs, None))

    def gradient(self, outputs: Outputs, targets: Any) -> tuple[Tensor, ...]:
        return tuple(part.gradient(o, t) for part, o, t in self._each(outputs, targets))

    def sampled_root(self, outputs: Outputs, targets: Any, generator: Random) -> tuple[Tensor, ...]:
        return tuple(part.sampled_root(o, t, generator) for part, o, t in self._each(outputs, targets))

    def count(self, outputs: Outputs, targets: Any) -> int:
        return max(part.count(o, t) for part, o, t in self._each(outputs, targets))

    def root_count(self, outputs: Outputs) -> int | None:
        counts = [part.root_count(o) for part, o, _ in self._each(outputs, None)]
        return None if None in counts else sum(c for c in counts if c is not None)

    def roots(self, outputs: Outputs, targets: Any) -> Iterator[tuple[Tensor, ...]]:
        zeros = [torch.zeros_like(o) for o in as_tensors(outputs)]
        for i, (part, o, t) in enumerate(self._each(outputs, targets)):
            for root in part.roots(o, t):
                yield (*zeros[:i], root, *zeros[i + 1 :])

    def summary(self, outputs: Outputs, targets: Any, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        found = [part.summary(o, t, generator) for part, o, t in self._each(outputs, targets)]
        return {f"{i}.{name}": tensor for i, one in enumerate(found) for name, tensor in one.items()}

    def divergence(self, summary: Mapping[str, Tensor], outputs: Outputs) -> Tensor:
        total = None
        for i, (part, output, _) in enumerate(self._each(outputs, None)):
            prefix = f"{i}."
            own = {name.removeprefix(prefix): t for name, t in summary.items() if name.startswith(prefix)}
            found = part.divergence(own, output)
            found = found.reshape(len(found), -1).sum(1)
            total = found if total is None else total + found
        assert total is not None
        return total

    def mean(self, outputs: Outputs) -> tuple[Tensor, ...]:
        return tuple(part.mean(o) for part, o, _ in self._each(outputs, None))

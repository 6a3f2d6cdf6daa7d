"""How a module's weights are seen as a matrix block.

A block is a matrix W of shape (..., out, in), its bias as one more column, in the orientation the weight is stored
in. The gradient of one example is always sum_r left_r^T right_r over the positions r at which the example uses the
weights: for a linear layer `left` is the gradient in the output and `right` the input; for an embedding `left` is
one-hot and `right` the gradient. One of the two is known after the forward pass (the data), the other after the
backward pass (the gradient).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from limpet.errors import CurvatureError

CHUNK = 1 << 24
"""Numbers that the per-example gradients of one chunk may take."""


@dataclass
class Call:
    """One use of a module in a forward pass: its data, and the gradient in its output once known."""

    layer: Layer
    data: Tensor
    gradient: Tensor | None = None
    dtype: torch.dtype = torch.float32  # that the gradient came in
    real: Tensor | None = None  # (examples, positions) that are no padding; None: all
    same_input: Any = None  # what other calls that read the same tensor have made of it


class Layer(ABC):
    """One module and those of its parameters (`names`, of "weight" and "bias") that the block covers."""

    kind: ClassVar[str]
    modules: ClassVar[tuple[type[nn.Module], ...]]
    factored: ClassVar[bool] = True
    """Whether the Fisher has Kronecker factors (else the block keeps a diagonal)."""
    data_left: ClassVar[bool] = False
    """Whether the data are the left rows (embedding) rather than the right ones."""
    data_one_hot: ClassVar[bool] = False
    """Whether the data are positions of ones, so that their factor is diagonal by nature."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.module: Any = module
        self.names = tuple(names)

    @classmethod
    def refuse(cls, module: nn.Module) -> str | None:
        """Why this very module cannot be measured at all, with the mend; None where it can."""
        return None

    @property
    @abstractmethod
    def rows(self) -> tuple[int, ...]:
        """The leading dimensions (..., out) of the block."""

    @abstractmethod
    def read(self, x: Tensor) -> Tensor:
        """The module's input as data: (..., examples, positions, side), or what the layer makes of it."""

    @abstractmethod
    def read_gradient(self, g: Tensor) -> Tensor:
        """The gradient in the module's output as (..., examples, positions, side)."""

    @abstractmethod
    def example_gradients(self, call: Call, examples: slice) -> Tensor:
        """The gradient of every example in the block: (examples, *block)."""

    @abstractmethod
    def example_count(self, call: Call) -> int:
        """How many examples the call had."""

    def row_count(self, call: Call) -> int:
        """How many rows the call had: examples times positions."""
        return call.data.shape[-3] * call.data.shape[-2]

    def gradient_rows(self, call: Call) -> Tensor:
        """The gradients that belong to the weights: (..., examples, positions, side)."""
        return _known(call)

    def squares(self, call: Call) -> Tensor | None:
        """The sum over examples of the squared gradients, where there is a way without the gradients."""
        return None

    def total_gradient(self, call: Call) -> Tensor:
        """The gradient of all examples together."""
        count, step = self.example_count(call), max(1, CHUNK // _known(call)[0].numel())
        return torch.stack(
            [self.example_gradients(call, slice(i, i + step)).sum(0) for i in range(0, count, step)]
        ).sum(0)


class MatrixLayer(Layer):
    """A layer with left rows = output gradients, right rows = inputs, and the bias as a column of ones."""

    @property
    def has_bias(self) -> bool:
        """Whether the block has the bias column."""
        return "bias" in self.names

    def _weight_columns(self, data: Tensor) -> Tensor:
        return data if "weight" in self.names else data[..., :0]

    def example_count(self, call: Call) -> int:
        return call.data.shape[-3]

    def example_gradients(self, call: Call, examples: slice) -> Tensor:
        g, a = _known(call)[..., examples, :, :], call.data[..., examples, :, :]
        product = g.mT @ a.to(g.dtype)
        if self.has_bias:
            product = torch.cat([product, g.sum(-2).unsqueeze(-1)], -1)
        return product.movedim(-3, 0)

    def total_gradient(self, call: Call) -> Tensor:
        g = _known(call).flatten(-3, -2)
        product = g.mT @ call.data.flatten(-3, -2).to(g.dtype)
        return torch.cat([product, g.sum(-2).unsqueeze(-1)], -1) if self.has_bias else product

    def squares(self, call: Call) -> Tensor | None:
        g, a = _known(call), call.data
        if g.shape[-2] != 1:
            return None
        squared = g.squeeze(-2).square()
        product = squared.mT @ a.squeeze(-2).to(g.dtype).square()
        if self.has_bias:
            product = torch.cat([product, squared.sum(-2).unsqueeze(-1)], -1)
        return product


def _known(call: Call) -> Tensor:
    if call.gradient is None:
        raise CurvatureError("the backward pass has not reached this layer")
    return call.gradient


def example_gradients(calls: Sequence[Call], examples: slice) -> Tensor:
    """The gradients of some examples, summed over all uses of the weights."""
    parts = [call.layer.example_gradients(call, examples) for call in calls]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def squared_gradients(calls: Sequence[Call], size: int) -> Tensor:
    """The sum over examples of the squared gradients of a block with `size` weights."""
    if len(calls) == 1:
        fast = calls[0].layer.squares(calls[0])
        if fast is not None:
            return fast
    count = calls[0].layer.example_count(calls[0])
    step = max(1, CHUNK // size)
    chunks = (example_gradients(calls, slice(start, start + step)).square().sum(0) for start in range(0, count, step))
    return torch.stack(list(chunks)).sum(0)

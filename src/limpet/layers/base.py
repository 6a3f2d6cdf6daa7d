"""Base classes of the layers, which view the weights of a module as a matrix block.

A block is a matrix W of shape (..., out, in) in the orientation in which the weight is stored, with the bias as one
additional column. The per-sample gradient is always sum_r left_r^T right_r over the positions r at which the example
uses the weights: for a linear layer `left` is the output gradient and `right` the input; for an embedding `left` is
one-hot and `right` the output gradient. One of the two is known after the forward pass (the data), the other after the
backward pass (the gradient).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from limpet.errors import CurvatureError

CHUNK = 1 << 24
"""Maximum number of elements of the per-sample gradients that are computed at once."""

ROWS_AT_ONCE = {"cpu": 1 << 19}
"""Maximum number of elements of rows that are copied at once, by type of device; `CHUNK` if it is not listed.

On a CPU the copy then stays in the cache until the product with it is computed.
"""


@dataclass
class Call:
    """One call of a module in a forward pass.

    Attributes:
        layer: The layer of the module.
        x: The input of the module.
        gradient: The output gradient, as returned by `Layer.read_gradient`; None before the backward pass.
        dtype: Dtype in which the output gradient arrived.
        real: Mask of shape (examples, positions) that is False at padding; None if there is no padding.
        same_input: Input factor shared with other calls that read the same tensor.
        shape: Shape of the data.
    """

    layer: Layer
    x: Tensor
    gradient: Tensor | None = None
    dtype: torch.dtype = torch.float32
    real: Tensor | None = None
    same_input: Any = None
    shape: torch.Size = field(init=False)
    _data: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.layer.in_parts:
            self.shape = self.layer.shape(self.x)
        else:
            self._data = self.layer.read(self.x)
            self.shape = self._data.shape

    @property
    def data(self) -> Tensor:
        """The input of the module, as returned by `Layer.read`."""
        return self.layer.read(self.x) if self._data is None else self._data


class Layer(ABC):
    """A module together with those of its parameters that a block covers.

    Args:
        module: The module.
        names: The parameters that the block covers: `"weight"`, `"bias"` or both.
    """

    kind: ClassVar[str]
    """Name of the layer type in reports and files."""
    modules: ClassVar[tuple[type[nn.Module], ...]]
    """Module types that the layer class supports."""
    factored: ClassVar[bool] = True
    """Whether the Fisher of the block has Kronecker factors; otherwise it is diagonal."""
    data_left: ClassVar[bool] = False
    """Whether the data are the left rows (embedding) rather than the right ones."""
    data_one_hot: ClassVar[bool] = False
    """Whether the data are indices of one-hot vectors, so that their Kronecker factor is diagonal."""
    in_parts: ClassVar[bool] = False
    """Whether the data are much larger than the input, so that they are read in parts and never kept."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.module: Any = module
        self.names = tuple(names)

    @classmethod
    def refuse(cls, module: nn.Module) -> str | None:
        """Explain why the curvature of a particular module cannot be measured.

        Args:
            module: A module of one of the types in `modules`.

        Returns:
            The reason and how to fix it, or None if the module is supported.
        """
        return None

    @property
    @abstractmethod
    def rows(self) -> tuple[int, ...]:
        """Leading dimensions (..., out) of the block."""

    @abstractmethod
    def read(self, x: Tensor) -> Tensor:
        """Convert the input of the module to the data of a call.

        Args:
            x: Input of the module.

        Returns:
            A tensor of shape (..., examples, positions, features), or another form that the layer uses.
        """

    def shape(self, x: Tensor) -> torch.Size:
        """Return the shape of the data for an input of the module, without reading them if the layer is `in_parts`."""
        return self.read(x).shape

    def input_key(self, call: Call) -> tuple[object, ...]:
        """Return a key that two calls have in common only if they have the same data, in the same memory."""
        data = call.data
        return data.data_ptr(), data.shape, data.stride(), data.dtype

    @abstractmethod
    def read_gradient(self, g: Tensor) -> Tensor:
        """Convert the output gradient of the module to rows.

        Args:
            g: Gradient of the loss with respect to the output of the module.

        Returns:
            A tensor of shape (..., examples, positions, features).
        """

    @abstractmethod
    def example_gradients(self, call: Call, examples: slice) -> Tensor:
        """Compute per-sample gradients of the block.

        Args:
            call: A call whose output gradient is known.
            examples: The examples to compute gradients for.

        Returns:
            A tensor of shape (examples, *block).
        """

    @abstractmethod
    def example_count(self, call: Call) -> int:
        """Return the number of examples of the call."""

    def row_count(self, call: Call) -> int:
        """Return the number of rows of the call: examples times positions."""
        return call.shape[-3] * call.shape[-2]

    def gradient_rows(self, call: Call) -> Tensor:
        """Return the output gradients that reach the weights, of shape (..., examples, positions, features)."""
        return _output_gradient(call)

    def squares(self, call: Call) -> Tensor | None:
        """Compute the sum of the squared per-sample gradients without forming the gradients.

        Args:
            call: A call whose output gradient is known.

        Returns:
            A tensor with the shape of the block, or None if the gradients have to be formed.
        """
        return None

    def total_gradient(self, call: Call) -> Tensor:
        """Compute the gradient summed over all examples of the call.

        Args:
            call: A call whose output gradient is known.

        Returns:
            A tensor with the shape of the block.
        """
        count, step = self.example_count(call), max(1, CHUNK // _output_gradient(call)[0].numel())
        return torch.stack(
            [self.example_gradients(call, slice(i, i + step)).sum(0) for i in range(0, count, step)]
        ).sum(0)


class MatrixLayer(Layer):
    """Base class of layers that multiply their input by a matrix.

    The left rows are the output gradients, the right rows the inputs, with a column of ones for the bias. A subclass
    implements `rows`, `read` and `read_gradient`.

    Args:
        module: The module.
        names: The parameters that the block covers: `"weight"`, `"bias"` or both.
    """

    @property
    def has_bias(self) -> bool:
        """Whether the block has a bias column."""
        return "bias" in self.names

    def _weight_columns(self, data: Tensor) -> Tensor:
        """Return the inputs, or no columns of them if the block covers only the bias."""
        return data if "weight" in self.names else data[..., :0]

    def example_count(self, call: Call) -> int:
        """Return the number of examples of the call."""
        return call.shape[-3]

    def read_examples(self, call: Call, examples: slice) -> Tensor:
        """Return the data of some examples of a call."""
        return call.data[..., examples, :, :]

    def parts(self, call: Call) -> Iterator[tuple[slice, Tensor]]:
        """Yield the data of a call, in parts if the layer is read `in_parts`.

        Args:
            call: A call.

        Yields:
            The examples of each part, and their data.
        """
        if not self.in_parts:
            yield slice(None), call.data
            return
        for examples in slices(call.shape[-3], call.shape.numel(), call.x.device):
            yield examples, self.read_examples(call, examples)

    def example_gradients(self, call: Call, examples: slice) -> Tensor:
        """Compute per-sample gradients of shape (examples, *block)."""
        g, a = _output_gradient(call)[..., examples, :, :], self.read_examples(call, examples)
        product = g.mT @ a.to(g.dtype)
        if self.has_bias:
            product = torch.cat([product, g.sum(-2).unsqueeze(-1)], -1)
        return product.movedim(-3, 0)

    def total_gradient(self, call: Call) -> Tensor:
        """Compute the gradient summed over all examples, in one matrix product for each part of the data."""
        g = _output_gradient(call)
        products = (
            g[..., examples, :, :].flatten(-3, -2).mT @ data.flatten(-3, -2).to(g.dtype)
            for examples, data in self.parts(call)
        )
        product = reduce(Tensor.add_, products)
        return torch.cat([product, g.sum((-3, -2)).unsqueeze(-1)], -1) if self.has_bias else product

    def squares(self, call: Call) -> Tensor | None:
        """Compute the sum of the squared per-sample gradients if every example has a single position."""
        g = _output_gradient(call)
        if g.shape[-2] != 1:
            return None
        squared = g.squeeze(-2).square()
        product = squared.mT @ call.data.squeeze(-2).to(g.dtype).square()
        if self.has_bias:
            product = torch.cat([product, squared.sum(-2).unsqueeze(-1)], -1)
        return product


def _output_gradient(call: Call) -> Tensor:
    """Return the output gradient of a call."""
    if call.gradient is None:
        raise CurvatureError("this layer has no output gradient yet: run the backward pass first")
    return call.gradient


def slices(examples: int, elements: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of the examples of a tensor that may be copied at once.

    Args:
        examples: Number of examples of the tensor.
        elements: Number of elements of the whole tensor.
        device: Device of the tensor.

    Yields:
        The slices; a single one if the tensor is small or empty.
    """
    step = max(1, examples * ROWS_AT_ONCE.get(device.type, CHUNK) // max(elements, 1))
    for start in range(0, max(examples, 1), step):
        yield slice(start, start + step)


def flat_parts(rows: Tensor) -> Iterator[Tensor]:
    """Merge the examples and positions of rows, in parts if the rows have to be copied for that.

    Args:
        rows: Tensor of shape (..., examples, positions, width).

    Yields:
        Tensors of shape (..., rows, width).
    """
    *_, examples, positions, _ = rows.shape
    if positions == 1 or examples == 1 or rows.stride(-3) == positions * rows.stride(-2):
        yield rows.flatten(-3, -2)
        return
    for some in slices(examples, rows.numel(), rows.device):
        yield rows[..., some, :, :].flatten(-3, -2)


def example_gradients(calls: Sequence[Call], examples: slice) -> Tensor:
    """Compute per-sample gradients of a block, summed over all calls that use its weights.

    Args:
        calls: Calls whose output gradients are known.
        examples: The examples to compute gradients for.

    Returns:
        A tensor of shape (examples, *block).
    """
    parts = [call.layer.example_gradients(call, examples) for call in calls]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def squared_gradients(calls: Sequence[Call], size: int) -> Tensor:
    """Compute the sum over examples of the squared per-sample gradients of a block.

    Args:
        calls: All calls that use the weights of the block, with known output gradients.
        size: Number of weights in the block, which determines how many examples are processed at once.

    Returns:
        A tensor with the shape of the block.
    """
    if len(calls) == 1:
        fast = calls[0].layer.squares(calls[0])
        if fast is not None:
            return fast
    count = calls[0].layer.example_count(calls[0])
    step = max(1, CHUNK // size)
    chunks = (example_gradients(calls, slice(start, start + step)).square().sum(0) for start in range(0, count, step))
    return torch.stack(list(chunks)).sum(0)

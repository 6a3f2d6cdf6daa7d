"""A parameter that is broadcast over the examples, such as the class token of a vision transformer."""

from __future__ import annotations

from torch import Tensor

from limpet.layers.base import Call, Layer, _output_gradient


class Broadcast(Layer):
    """A parameter of shape (1, ...) that all examples use; the block is a matrix with one row.

    While gradients are recorded, the parameter is replaced with a view of itself with one copy per example, whose
    gradient is the per-sample gradient. There are no data.

    Args:
        module: The module that has the parameter.
        names: The name of the parameter in that module.
    """

    kind = "broadcast"
    modules = ()
    factored = False

    @property
    def rows(self) -> tuple[int, ...]:
        """Leading dimensions (1,) of the block."""
        return (1,)

    def read(self, x: Tensor) -> Tensor:
        """Return the parameter of every example, of shape (examples, 1, weights)."""
        return x.reshape(x.shape[0], 1, -1)

    def read_gradient(self, g: Tensor) -> Tensor:
        """Return the gradient of every example, of shape (examples, 1, weights)."""
        return g.reshape(g.shape[0], 1, -1)

    def example_count(self, call: Call) -> int:
        """Return the number of examples of the call."""
        return call.data.shape[0]

    def example_gradients(self, call: Call, examples: slice) -> Tensor:
        """Return the per-sample gradients of shape (examples, 1, weights)."""
        return _output_gradient(call)[examples]

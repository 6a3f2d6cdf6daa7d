"""nn.Linear with any number of leading dimensions."""

from __future__ import annotations

from torch import Tensor, nn

from limpet.layers.base import MatrixLayer


class Linear(MatrixLayer):
    """nn.Linear: y = W a + b at every position; W has the shape (out, in).

    Args:
        module: The linear layer.
        names: The parameters that the block covers: `"weight"`, `"bias"` or both.
    """

    kind = "linear"
    modules = (nn.Linear,)

    @property
    def rows(self) -> tuple[int, ...]:
        """Leading dimensions (out,) of the block."""
        return (self.module.out_features,)

    def read(self, x: Tensor) -> Tensor:
        """Return the input of shape (examples, positions, in)."""
        return self._weight_columns(_positions(x))

    def read_gradient(self, g: Tensor) -> Tensor:
        """Return the output gradient of shape (examples, positions, out)."""
        return _positions(g)


def _positions(x: Tensor) -> Tensor:
    """Reshape a vector, or a batch with any number of further dimensions, to (examples, positions, features)."""
    if x.dim() == 1:
        return x.reshape(1, 1, -1)
    return x.reshape(x.shape[0], -1, x.shape[-1]) if x.numel() else x.reshape(x.shape[0], 0, x.shape[-1])

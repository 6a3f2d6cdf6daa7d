"""nn.Linear, with any leading dimensions."""

from __future__ import annotations

from torch import Tensor, nn

from limpet.layers.base import MatrixLayer


class Linear(MatrixLayer):
    """y = W a + b at every position; W is (out, in)."""

    kind = "linear"
    modules = (nn.Linear,)

    @property
    def rows(self) -> tuple[int, ...]:
        return (self.module.out_features,)

    def read(self, x: Tensor) -> Tensor:
        return self._weight_columns(_positions(x))

    def read_gradient(self, g: Tensor) -> Tensor:
        return _positions(g)


def _positions(x: Tensor) -> Tensor:
    """(examples, positions, features) of a vector, a batch of vectors, or a batch with more dimensions."""
    if x.dim() == 1:
        return x.reshape(1, 1, -1)
    return x.reshape(x.shape[0], -1, x.shape[-1]) if x.numel() else x.reshape(x.shape[0], 0, x.shape[-1])

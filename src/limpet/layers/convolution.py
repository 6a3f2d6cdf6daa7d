"""Convolutions in one, two and three dimensions: a linear layer applied to the patch of every output position.

This is the "expand" form of K-FAC by Grosse and Martens (2016), "A Kronecker-factored approximate Fisher matrix for
convolution layers". Every group is a sub-block.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from limpet.layers.base import MatrixLayer


class Convolution(MatrixLayer):
    """Conv1d, Conv2d and Conv3d with any groups, stride, dilation and padding.

    W has the shape ([groups,] out, in * kernel).

    Args:
        module: The convolution.
        names: The parameters that the block covers: `"weight"`, `"bias"` or both.
    """

    kind = "convolution"
    modules = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

    @property
    def rows(self) -> tuple[int, ...]:
        """Leading dimensions ([groups,] out) of the block."""
        out, groups = self.module.out_channels, self.module.groups
        return (out,) if groups == 1 else (groups, out // groups)

    def read(self, x: Tensor) -> Tensor:
        """Return the input patches of shape ([groups,] examples, positions, in / groups * kernel)."""
        patches = unfold(self._batched(x), self.module)
        return self._weight_columns(patches)

    def read_gradient(self, g: Tensor) -> Tensor:
        """Return the output gradient of shape ([groups,] examples, positions, out)."""
        g = self._batched(g).flatten(2)
        groups: int = self.module.groups
        if groups == 1:
            return g.mT
        examples, out, positions = g.shape
        return g.reshape(examples, groups, out // groups, positions).movedim(1, 0).mT

    def _batched(self, x: Tensor) -> Tensor:
        """Add a batch dimension of size 1 if there is none."""
        return x.unsqueeze(0) if x.dim() == len(self.module.kernel_size) + 1 else x


def unfold(x: Tensor, module: nn.Module) -> Tensor:
    """Extract the input patch of every output position.

    Args:
        x: Input of shape (examples, channels, *spatial).
        module: The convolution.

    Returns:
        A tensor of shape ([groups,] examples, positions, in / groups * kernel).
    """
    conv: nn.Conv2d = module  # type: ignore[assignment]
    if any(conv._reversed_padding_repeated_twice):
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
    spatial = len(conv.kernel_size)
    for i, (size, stride, dilation) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)):
        x = x.unfold(2 + i, dilation * (size - 1) + 1, stride)[..., ::dilation]
    # x is now (examples, channels, positions..., kernel...)
    x = x.reshape(x.shape[0], conv.groups, x.shape[1] // conv.groups, *x.shape[2:])
    positions = range(3, 3 + spatial)
    kernel = range(3 + spatial, 3 + 2 * spatial)
    x = x.permute(1, 0, *positions, 2, *kernel)
    x = x.flatten(2 + spatial).flatten(2, 1 + spatial)
    return x.squeeze(0) if conv.groups == 1 else x

"""Convolutions in one, two and three dimensions: a linear layer applied to the patch of every output position.

This is the "expand" form of K-FAC by Grosse and Martens (2016), "A Kronecker-factored approximate Fisher matrix for
convolution layers". Every group is a sub-block.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.layers.base import Call, MatrixLayer


class Convolution(MatrixLayer):
    """Conv1d, Conv2d and Conv3d with any groups, stride, dilation and padding.

    W has the shape ([groups,] out, in * kernel).

    Args:
        module: The convolution.
        names: The parameters that the block covers: `"weight"`, `"bias"` or both.
    """

    kind = "convolution"
    in_parts = True
    modules = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

    @property
    def rows(self) -> tuple[int, ...]:
        """Leading dimensions ([groups,] out) of the block."""
        out, groups = self.module.out_channels, self.module.groups
        return (out,) if groups == 1 else (groups, out // groups)

    def read(self, x: Tensor) -> Tensor:
        """Return the input patches of shape ([groups,] examples, positions, in / groups * kernel)."""
        return self._weight_columns(unfold(self._batched(x), self.module))

    def read_examples(self, call: Call, examples: slice) -> Tensor:
        """Return the patches of some examples of a call."""
        return self.read(self._batched(call.x)[examples])

    def shape(self, x: Tensor) -> torch.Size:
        """Return the shape of the patches, without extracting them."""
        x, conv = self._batched(x), self.module
        if x.dim() != len(conv.kernel_size) + 2 or x.shape[1] != conv.in_channels:
            raise ValueError(f"a convolution of {conv.in_channels} channels cannot read the shape {tuple(x.shape)}")
        added = conv._reversed_padding_repeated_twice[::-1]
        sizes = zip(x.shape[2:], added[::2], added[1::2], conv.kernel_size, conv.stride, conv.dilation, strict=True)
        positions = math.prod((size + a + b - d * (k - 1) - 1) // s + 1 for size, a, b, k, s, d in sizes)
        width = conv.in_channels // conv.groups * math.prod(conv.kernel_size) if "weight" in self.names else 0
        return torch.Size((*self.rows[:-1], x.shape[0], positions, width))

    def input_key(self, call: Call) -> tuple[object, ...]:
        """Return what determines the patches of a call: its input and the geometry of the convolution."""
        x, conv = call.x, self.module
        geometry = (conv.kernel_size, conv.stride, conv.dilation, conv.padding, conv.padding_mode, conv.groups)
        return x.data_ptr(), x.shape, x.stride(), x.dtype, geometry, "weight" in self.names

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
    # features first in memory: whole rows of the image are copied at once, and products over all rows need no copy
    x = x.permute(1, 2, *kernel, 0, *positions)
    x = x.flatten(1, 1 + spatial).flatten(3).permute(0, 2, 3, 1)
    return x.squeeze(0) if conv.groups == 1 else x

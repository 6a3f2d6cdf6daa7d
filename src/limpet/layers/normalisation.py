"""Normalization layers: one gain and one shift per feature, protected by the exact diagonal of the Fisher.

y = gain * n(x) + shift, so the per-sample gradient is sum_r g_r n(x)_r for the gain and sum_r g_r for the shift. The
block has the shape (features, 2); its columns are gain and shift.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.layers.base import Call, Layer, _output_gradient


class Normalisation(Layer):
    """Base class of the normalization layers.

    A subclass implements `normalised` and `spread`.

    Args:
        module: The normalization layer.
        names: The parameters that the block covers: `"weight"` (gain), `"bias"` (shift) or both.
    """

    factored = False

    @property
    def rows(self) -> tuple[int, ...]:
        """Leading dimensions (features,) of the block."""
        return (getattr(self.module, self.names[0]).numel(),)

    @abstractmethod
    def normalised(self, x: Tensor) -> Tensor:
        """Compute n(x), the normalized input before gain and shift.

        Args:
            x: Input of the module.

        Returns:
            A tensor with the shape of `x`.
        """

    @abstractmethod
    def spread(self, x: Tensor) -> Tensor:
        """Reshape a tensor that has the shape of the module's input.

        Args:
            x: Input, normalized input or output gradient of the module.

        Returns:
            A tensor of shape (examples, positions, features).
        """

    def read(self, x: Tensor) -> Tensor:
        """Return n(x) of shape (examples, positions, features)."""
        return self.spread(self.normalised(x))

    def read_gradient(self, g: Tensor) -> Tensor:
        """Return the output gradient of shape (examples, positions, features)."""
        return self.spread(g)

    def example_count(self, call: Call) -> int:
        """Return the number of examples of the call."""
        return call.data.shape[0]

    def example_gradients(self, call: Call, examples: slice) -> Tensor:
        """Compute per-sample gradients of shape (examples, *block)."""
        g = _output_gradient(call)[examples]
        columns = {"weight": lambda: (g * call.data[examples]).sum(1), "bias": lambda: g.sum(1)}
        return torch.stack([columns[name]() for name in self.names], -1)


class OverFeatures(Normalisation):
    """LayerNorm and RMSNorm: the features are the last dimensions.

    Custom layers with one gain, and optionally one shift, per feature can be supported by a subclass.

    Args:
        module: The normalization layer.
        names: The parameters that the block covers: `"weight"` (gain), `"bias"` (shift) or both.
    """

    kind = "layer norm"
    modules: ClassVar[tuple[type[nn.Module], ...]] = (nn.LayerNorm, nn.RMSNorm)

    def normalised(self, x: Tensor) -> Tensor:
        """Normalize over the last dimensions."""
        function = F.rms_norm if isinstance(self.module, nn.RMSNorm) else F.layer_norm
        return function(x, tuple(self.module.normalized_shape), eps=self.module.eps)

    def spread(self, x: Tensor) -> Tensor:
        """Merge the normalized dimensions into one, and the dimensions between them and the first into positions."""
        features = self.rows[0]
        leading = x.dim() - len(self.module.normalized_shape)
        return x.reshape(x.shape[0] if leading else 1, -1, features)


class OtherRMSNorm(OverFeatures):
    """RMSNorm as implemented by model libraries: recognized by its class name, and verified by the audit."""

    modules: ClassVar[tuple[type[nn.Module], ...]] = ()

    def normalised(self, x: Tensor) -> Tensor:
        """Divide by the root mean square over the last dimension, computed in at least float32."""
        eps = getattr(self.module, "variance_epsilon", getattr(self.module, "eps", 1e-6))
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)

    def spread(self, x: Tensor) -> Tensor:
        """Merge the dimensions between the first and the last into positions."""
        return x.reshape(x.shape[0] if x.dim() > 1 else 1, -1, x.shape[-1])


class OverChannels(Normalisation):
    """Base class of GroupNorm and BatchNorm: the features are dimension 1."""

    def spread(self, x: Tensor) -> Tensor:
        """Merge the dimensions after the channels into positions, and move the channels last."""
        return x.flatten(2).mT if x.dim() > 2 else x.unsqueeze(1)


class GroupNorm(OverChannels):
    """GroupNorm, which normalizes every example by its own statistics."""

    kind = "group norm"
    modules = (nn.GroupNorm,)

    def normalised(self, x: Tensor) -> Tensor:
        """Normalize every group of channels of an example."""
        return F.group_norm(x, self.module.num_groups, eps=self.module.eps)


class BatchNorm(OverChannels):
    """BatchNorm in eval mode: normalizes by the running statistics, which are not updated."""

    kind = "batch norm"
    modules = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

    @classmethod
    def refuse(cls, module: nn.Module) -> str | None:
        """Reject batch norm without running statistics."""
        if getattr(module, "running_mean", None) is None:
            return (
                "without running statistics, batch norm mixes the examples of a batch, so there are no per-sample "
                "gradients: set track_running_stats=True, or use GroupNorm"
            )
        return None

    def normalised(self, x: Tensor) -> Tensor:
        """Normalize by the running statistics."""
        return F.batch_norm(x, self.module.running_mean, self.module.running_var, eps=self.module.eps)

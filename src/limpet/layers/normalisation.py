"""Normalisation layers: a gain and a shift per feature, with an exact diagonal.

y = gain * n(x) + shift, so an example's gradient is sum_r g_r n(x)_r for the gain and sum_r g_r for the shift. The
block is (features, 2): the columns are gain and shift.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.layers.base import Call, Layer, _known


class Normalisation(Layer):
    """What all normalisation layers share. `normalised` gives n(x) as (examples, positions, features)."""

    factored = False

    @property
    def rows(self) -> tuple[int, ...]:
        return (getattr(self.module, self.names[0]).numel(),)

    @abstractmethod
    def normalised(self, x: Tensor) -> Tensor:
        """n(x), before gain and shift, in the shape of x."""

    @abstractmethod
    def spread(self, x: Tensor) -> Tensor:
        """Any tensor in the shape of the input as (examples, positions, features)."""

    def read(self, x: Tensor) -> Tensor:
        return self.spread(self.normalised(x))

    def read_gradient(self, g: Tensor) -> Tensor:
        return self.spread(g)

    def example_count(self, call: Call) -> int:
        return call.data.shape[0]

    def example_gradients(self, call: Call, examples: slice) -> Tensor:
        g = _known(call)[examples]
        columns = {"weight": lambda: (g * call.data[examples]).sum(1), "bias": lambda: g.sum(1)}
        return torch.stack([columns[name]() for name in self.names], -1)


class OverFeatures(Normalisation):
    """LayerNorm and RMSNorm: the features are the last dimensions."""

    kind = "layer norm"
    modules: ClassVar[tuple[type[nn.Module], ...]] = (nn.LayerNorm, nn.RMSNorm)

    def normalised(self, x: Tensor) -> Tensor:
        function = F.rms_norm if isinstance(self.module, nn.RMSNorm) else F.layer_norm
        return function(x, tuple(self.module.normalized_shape), eps=self.module.eps)

    def spread(self, x: Tensor) -> Tensor:
        features = self.rows[0]
        leading = x.dim() - len(self.module.normalized_shape)
        return x.reshape(x.shape[0] if leading else 1, -1, features)


class OtherRMSNorm(OverFeatures):
    """RMSNorm as model libraries write it: known by its name, and by the audit to be one."""

    modules: ClassVar[tuple[type[nn.Module], ...]] = ()

    def normalised(self, x: Tensor) -> Tensor:
        eps = getattr(self.module, "variance_epsilon", getattr(self.module, "eps", 1e-6))
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)

    def spread(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] if x.dim() > 1 else 1, -1, x.shape[-1])


class OverChannels(Normalisation):
    """GroupNorm and BatchNorm: the features are dimension 1."""

    def spread(self, x: Tensor) -> Tensor:
        return x.flatten(2).mT if x.dim() > 2 else x.unsqueeze(1)


class GroupNorm(OverChannels):
    """GroupNorm: statistics of the example itself."""

    kind = "group norm"
    modules = (nn.GroupNorm,)

    def normalised(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.module.num_groups, eps=self.module.eps)


class BatchNorm(OverChannels):
    """BatchNorm as it is in eval mode: by its running statistics, which are not touched."""

    kind = "batch norm"
    modules = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

    @classmethod
    def refuse(cls, module: nn.Module) -> str | None:
        if getattr(module, "running_mean", None) is None:
            return (
                "without running statistics a batch norm mixes the examples of a batch, so no example has a "
                "gradient of its own: set track_running_stats=True, or use GroupNorm"
            )
        return None

    def normalised(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.module.running_mean, self.module.running_var, eps=self.module.eps)

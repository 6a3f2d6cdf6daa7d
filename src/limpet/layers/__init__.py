"""Layer classes, which view the weights of a module as a matrix block.

Support for a new type of module is one new class, for instance for a layer with one gain per feature:

>>> import torch
>>> class Gain(torch.nn.Module):
...     def __init__(self, features):
...         super().__init__()
...         self.weight = torch.nn.Parameter(torch.ones(features))
...     def forward(self, x):
...         return self.weight * x
>>> @register
... class GainLayer(OverFeatures):
...     kind = "gain"
...     modules = (Gain,)
...     def normalised(self, x):
...         return x
...     def spread(self, x):
...         return x.reshape(len(x), -1, x.shape[-1])
>>> layer_type(Gain(3)).kind
'gain'
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from limpet.layers.base import Call, Layer, MatrixLayer, example_gradients, squared_gradients
from limpet.layers.broadcast import Broadcast
from limpet.layers.convolution import Convolution
from limpet.layers.embedding import Embedding
from limpet.layers.linear import Linear
from limpet.layers.normalisation import BatchNorm, GroupNorm, OtherRMSNorm, OverFeatures

LayerType = TypeVar("LayerType", bound=type[Layer])
_REGISTRY: dict[type[nn.Module], type[Layer]] = {}


def register(layer: LayerType) -> LayerType:
    """Class decorator that registers a layer class for the module types in its `modules`.

    If several layer classes are registered for the same module type, the last one is used.

    Args:
        layer: The layer class.

    Returns:
        The layer class, unchanged.
    """
    for module_type in layer.modules:
        _REGISTRY[module_type] = layer
    return layer


for _layer in (Linear, Convolution, Embedding, OverFeatures, GroupNorm, BatchNorm):
    register(_layer)


def layer_type(module: nn.Module) -> type[Layer] | None:
    """Return the layer class registered for the type of a module, or for its nearest base class.

    Modules of other libraries whose class name ends in `RMSNorm` are treated as RMSNorm.

    Args:
        module: The module.

    Returns:
        The layer class, or None if the module is not supported.
    """
    for base in type(module).__mro__:
        if base in _REGISTRY:
            return _REGISTRY[base]
    weight = module._parameters.get("weight")
    if type(module).__name__.endswith("RMSNorm") and weight is not None and weight.dim() == 1:
        return OtherRMSNorm
    return None


__all__ = [
    "BatchNorm",
    "Broadcast",
    "Call",
    "Convolution",
    "Embedding",
    "GroupNorm",
    "Layer",
    "Linear",
    "MatrixLayer",
    "OtherRMSNorm",
    "OverFeatures",
    "example_gradients",
    "layer_type",
    "register",
    "squared_gradients",
]

"""L2-SP (Li et al. 2018): half a factor times the squared distance of the weights from where they were."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retention.after.adapters import layers
from retention.method import Bench, During, Extra


def displaced(model: Any) -> Tensor:
    """The squared distance of the weights from where they were, for a model with LoRA adapters.

    Of an adapter it is s^2 |B A|^2 = s^2 <B'B, A A'>.
    """
    total = torch.zeros(())
    for _, layer in layers(model):
        for name in layer.active_adapters:
            a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
            total = total + layer.scaling[name] ** 2 * ((b.T @ b) * (a @ a.T)).sum()
    return total


def extra(_: Bench, model: Any, value: float) -> Extra:
    """The penalty."""
    return lambda *_: 0.5 * value * displaced(model)


METHOD = During("L2-SP", "nothing", candidates=(1e-3, 1e-2, 1e-1), extra=extra)

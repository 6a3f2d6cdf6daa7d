"""Low-rank adapters: a frozen weight W that is trained as W + scaling B A (LoRA, Hu et al. 2022).

Adapted layers are recognized by their attributes, a `base_layer` next to `lora_A` and `lora_B`, not by the library that
created them. A memory treats such a layer as its base layer with the effective weight: the base weight plus the updates
of the active adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.errors import UnsupportedError


@dataclass(frozen=True)
class LowRank:
    """The update scaling * left @ right that an adapter adds to a weight matrix.

    Attributes:
        a: The parameter A of shape (rank, in, ...).
        b: The parameter B of shape (out, rank, ...).
        scaling: Factor of the update.
        transposed: Whether the weight is stored as (in, out), so that (B A)^T is added.
        weight: The weight that the update is added to.
    """

    a: nn.Parameter
    b: nn.Parameter
    scaling: float
    transposed: bool
    weight: nn.Parameter | None = None

    @property
    def left(self) -> Tensor:
        """Left factor of shape (rows of the weight, rank)."""
        return self.a.flatten(1).mT if self.transposed else self.b.flatten(1)

    @property
    def right(self) -> Tensor:
        """Right factor of shape (rank, columns of the weight)."""
        return self.b.flatten(1).mT if self.transposed else self.a.flatten(1)

    def gradients(self, left: Tensor, right: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Convert gradients with respect to the factors to gradients with respect to the parameters A and B.

        Args:
            left: Gradient with respect to `left`, of the same shape.
            right: Gradient with respect to `right`, of the same shape.

        Yields:
            Each parameter with its gradient, in the shape of the parameter.
        """
        of_a, of_b = (left.mT, right.mT) if self.transposed else (right, left)
        yield self.a, of_a.reshape(self.a.shape)
        yield self.b, of_b.reshape(self.b.shape)

    def written(self, left: Tensor, right: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Compute parameter values with which the adapter adds left @ right to the weight.

        If the product has a lower rank than the adapter, the unused ranks keep their A and get a B of zero, so that
        they can still be trained.

        Args:
            left: Left factor of the update, of shape (rows of the weight, at most rank).
            right: Right factor of the update, of shape (at most rank, columns of the weight).

        Yields:
            Each parameter with its new value.
        """
        missing = self.left.shape[1] - left.shape[1]
        left, right = F.pad(left, (0, missing)), F.pad(right, (0, 0, 0, missing))
        (a, of_a), (b, of_b) = self.gradients(left, right / self.scaling)
        if missing:
            of_a = of_a.clone()
            of_a[-missing:] = a.detach()[-missing:].to(of_a)
        yield from ((a, of_a), (b, of_b))

    def added(self, shape: torch.Size) -> Tensor:
        """Return the update in the shape of the weight, differentiable with respect to the parameters."""
        return (self.scaling * (self.left @ self.right)).reshape(shape)


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a layer wrapped with low-rank adapters."""
    # `_modules` is read directly because this runs for every module in every training step
    return module._modules.get("base_layer") is not None and _pairs(module) is not None


def _pairs(module: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Return A and B of every adapter by adapter name; None if the module has no adapters."""
    for names in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
        found = tuple(getattr(module, name, None) for name in names)
        if all(isinstance(one, nn.ModuleDict | nn.ParameterDict) and len(one) for one in found):
            return found  # type: ignore[return-value]
    return None


def adapted_parameters(model: nn.Module) -> dict[nn.Parameter, list[LowRank]]:
    """Return the active adapters of every adapted weight of the model.

    Args:
        model: The model.

    Returns:
        The active adapters by base weight; the list is empty for weights whose adapters are inactive or merged.

    Raises:
        UnsupportedError: If a base weight is shared, quantized or missing, or if an adapter is not plain LoRA.
    """
    found: dict[nn.Parameter, list[LowRank]] = {}
    for name, module in model.named_modules():
        if is_adapted(module):
            weight = _base_weight(module, name)
            if found.setdefault(weight, added := list(_active(module, name))) is not added:
                raise UnsupportedError(
                    f"{name}: the base weight is shared with another layer that has its own adapters, so the two "
                    "effective weights differ: adapt only one of the two layers"
                )
    return found


def adapter_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of all low-rank adapters of the model."""
    found: set[nn.Parameter] = set()
    for module in model.modules():
        pairs = _pairs(module) if is_adapted(module) else None
        for part in pairs or ():
            found.update(part.parameters())  # type: ignore[attr-defined]
    return found


def _base_weight(module: Any, name: str) -> nn.Parameter:
    """Return the weight of the base layer."""
    weight = getattr(module.base_layer, "weight", None)
    if not isinstance(weight, nn.Parameter):
        raise UnsupportedError(
            f"{name}: adapters of a {type(module.base_layer).__name__}, which has no parameter `weight`, are not "
            "supported: adapt its linear layers instead, or remove it from target_modules"
        )
    if not weight.is_floating_point() or type(module.base_layer).__name__ in ("Linear4bit", "Linear8bitLt"):
        raise UnsupportedError(
            f"{name}: the base weight is quantized, but only unquantized weights can be protected: load the "
            "base model in bfloat16 or float32"
        )
    return weight


def _active(module: Any, name: str) -> Iterator[LowRank]:
    """Yield the adapters that the forward pass applies: active, not disabled and not merged into the base weight."""
    pairs = _pairs(module)
    if pairs is None or getattr(module, "disable_adapters", False):
        return
    variants = {**getattr(module, "use_dora", {}), **getattr(module, "lora_variant", {})}
    transposed = bool(getattr(module, "fan_in_fan_out", False)) or isinstance(pairs[0], nn.ParameterDict)
    for adapter in getattr(module, "active_adapters", list(pairs[0])):
        if adapter not in pairs[0] or adapter in getattr(module, "merged_adapters", ()):
            continue
        a, b = (getattr(part[adapter], "weight", part[adapter]) for part in pairs)
        if variants.get(adapter) or getattr(pairs[1][adapter], "bias", None) is not None:
            raise UnsupportedError(
                f"{name}: adapter {adapter!r} is not plain LoRA (it is DoRA or another variant, or has a bias), so its "
                "update of the weight is not a product of two matrices: use LoraConfig without use_dora, lora_bias and "
                "similar options"
            )
        if getattr(module.base_layer, "groups", 1) != 1:
            raise UnsupportedError(f"{name}: adapters of grouped convolutions are not supported: remove them")
        yield LowRank(a, b, float(module.scaling[adapter]), transposed, module.base_layer.weight)

"""Low-rank adapters: a frozen weight that trains as W + scaling B A (Hu et al. 2022, LoRA).

They are known by what they have, a `base_layer` beside `lora_A` and `lora_B`, not by the library that made them. To a
memory such a layer is its base layer, and its weight what it acts as: the base weight with what active adapters add.
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
    """scaling * left @ right, what an adapter adds to a weight seen as a matrix."""

    a: nn.Parameter  # (rank, in, ...)
    b: nn.Parameter  # (out, rank, ...)
    scaling: float
    transposed: bool  # the weight is kept as (in, out), so it is (B A)^T that is added
    weight: nn.Parameter | None = None  # what it is added to

    @property
    def left(self) -> Tensor:
        """(rows of the weight, rank)."""
        return self.a.flatten(1).mT if self.transposed else self.b.flatten(1)

    @property
    def right(self) -> Tensor:
        """(rank, columns of the weight)."""
        return self.b.flatten(1).mT if self.transposed else self.a.flatten(1)

    def gradients(self, left: Tensor, right: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The parameters, each with its part of gradients in `left` and `right`."""
        of_a, of_b = (left.mT, right.mT) if self.transposed else (right, left)
        yield self.a, of_a.reshape(self.a.shape)
        yield self.b, of_b.reshape(self.b.shape)

    def written(self, left: Tensor, right: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The parameters, each with the value by which the adapter adds left @ right.

        Ranks that are not needed keep their A and get a B of zero, so that they can still be trained.
        """
        missing = self.left.shape[1] - left.shape[1]
        left, right = F.pad(left, (0, missing)), F.pad(right, (0, 0, 0, missing))
        (a, of_a), (b, of_b) = self.gradients(left, right / self.scaling)
        if missing:
            of_a = of_a.clone()
            of_a[-missing:] = a.detach()[-missing:].to(of_a)
        yield from ((a, of_a), (b, of_b))

    def added(self, shape: torch.Size) -> Tensor:
        """What is added to the weight, differentiable."""
        return (self.scaling * (self.left @ self.right)).reshape(shape)


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer with low-rank adapters around it."""
    # looked up where modules are kept, because every step asks every module
    return module._modules.get("base_layer") is not None and _pairs(module) is not None


def _pairs(module: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """A and B of every adapter, by its name."""
    for names in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
        found = tuple(getattr(module, name, None) for name in names)
        if all(isinstance(one, nn.ModuleDict | nn.ParameterDict) and len(one) for one in found):
            return found  # type: ignore[return-value]
    return None


def adapted_parameters(model: nn.Module) -> dict[nn.Parameter, list[LowRank]]:
    """What is added to weights of the model, by the weight; also those to which nothing is added now."""
    found: dict[nn.Parameter, list[LowRank]] = {}
    for name, module in model.named_modules():
        if is_adapted(module):
            weight = _base_weight(module, name)
            if found.setdefault(weight, added := list(_active(module, name))) is not added:
                raise UnsupportedError(
                    f"{name}: its base weight is shared with another layer that has adapters of its own, so it is no "
                    "longer one weight: adapt one of the two"
                )
    return found


def adapter_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of all low-rank adapters of the model."""
    found: set[nn.Parameter] = set()
    for module in model.modules():
        pairs = _pairs(module) if is_adapted(module) else None
        for part in pairs or ():
            found.update(part.parameters())  # type: ignore[attr-defined]
    return found


def _base_weight(module: Any, name: str) -> nn.Parameter:
    weight = getattr(module.base_layer, "weight", None)
    if not isinstance(weight, nn.Parameter):
        raise UnsupportedError(
            f"{name}: adapters around a {type(module.base_layer).__name__}, which has no weight of its own, cannot be "
            "held: adapt its linear layers instead, or leave it out of target_modules"
        )
    if not weight.is_floating_point() or type(module.base_layer).__name__ in ("Linear4bit", "Linear8bitLt"):
        raise UnsupportedError(
            f"{name}: the base weight is quantised, and what is held is the change of a full weight: load the base "
            "model in bfloat16 or float32"
        )
    return weight


def _active(module: Any, name: str) -> Iterator[LowRank]:
    """The adapters that are added in the forward pass: active, not disabled, and not merged into the base weight."""
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
                f"{name}: adapter {adapter!r} is not plain LoRA (DoRA, or another variant, or a bias of its own), and "
                "its change of the weight is no product of two matrices: use LoraConfig without use_dora, lora_bias "
                "and the like"
            )
        if getattr(module.base_layer, "groups", 1) != 1:
            raise UnsupportedError(f"{name}: adapters of grouped convolutions are not supported: leave them out")
        yield LowRank(a, b, float(module.scaling[adapter]), transposed, module.base_layer.weight)

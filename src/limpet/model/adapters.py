"""Low-rank adapters: a frozen weight W that is trained as W + scaling B A (LoRA, Hu et al. 2022).

A module with a `base_layer` next to `lora_A` and `lora_B` is assumed to be an adapted layer, whichever library created
it, and what it computes is compared with that assumption once (`limpet.model.adapter_check`). A memory treats such a
layer as its base layer with the effective weight: the base weight plus the updates of the active adapters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from limpet.errors import UnsupportedError
from limpet.model.adapter_check import INSTEAD, check_update, described
from limpet.model.low_rank import LowRank
from limpet.model.quantized import is_quantized, own_parameters, quantized_weight

_CHECKED: WeakKeyDictionary[nn.Module, tuple[Any, ...]] = WeakKeyDictionary()
"""The state in which every adapted layer was last checked, so that training steps do not check it again."""


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
        UnsupportedError: If a base weight is shared or missing, or if a layer computes anything else than
            its base layer with the weight plus these updates.
    """
    found: dict[nn.Parameter, list[LowRank]] = {}
    unchecked: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if is_adapted(module):
            weight = _base_weight(module, name)
            if found.setdefault(weight, added := list(_active(module, name, weight))) is not added:
                raise UnsupportedError(
                    f"{name}: the base weight is shared with another layer that has its own adapters, so the two "
                    "effective weights differ: adapt only one of the two layers"
                )
            if not _same(_CHECKED.get(module, ()), _state(module, added)):
                unchecked[module] = name
    if unchecked:
        _check(model, unchecked, found)
    return found


def _check(
    model: nn.Module, modules: Mapping[nn.Module, str], adapted: Mapping[nn.Parameter, Collection[LowRank]]
) -> None:
    """Check that these layers compute what is assumed, and that no layer without the adapter has the same weight."""
    users: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for _, parameter in own_parameters(module):
            if adapted.get(parameter):
                users.setdefault(parameter, []).append(name)
    for module, name in modules.items():
        weight = _base_weight(module, name)
        added = list(adapted[weight])
        if len(users.get(weight, ())) > 1:
            raise UnsupportedError(
                f"{name}: the base weight is shared by {' and '.join(users[weight])}, but only this layer has the "
                "adapter, so their effective weights differ: remove the layer from target_modules"
            )
        check_update(module, name, added)
        _CHECKED[module] = _state(module, added)


def _state(module: Any, added: Collection[LowRank]) -> tuple[Any, ...]:
    """What the computation of an adapted layer depends on: its type, its own `forward` if one was patched in, etc."""
    patched, disabled = id(vars(module).get("forward")), getattr(module, "disable_adapters", False)
    layer = type(module), patched, module.base_layer, disabled
    return (*layer, *(part for one in added for part in (one.weight, one.a, one.b, one.scaling, one.transposed)))


def _same(known: tuple[Any, ...], state: tuple[Any, ...]) -> bool:
    """Compare two states, tensors and modules by identity."""
    return len(known) == len(state) and all(
        a is b or (isinstance(a, int | float) and a == b) for a, b in zip(known, state, strict=True)
    )


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
    base = module.base_layer
    weight = quantized_weight(base) if is_quantized(base) else base._parameters.get("weight")
    if not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
        raise UnsupportedError(
            f"{name}: adapters of a {described(base)}, which has no floating-point parameter `weight`, are not "
            "supported: adapt its linear layers instead, or remove it from target_modules. Quantized linear layers "
            "are supported if they are derived from torch.nn.Linear, as those of bitsandbytes and torchao are"
        )
    return weight


def _active(module: Any, name: str, weight: nn.Parameter) -> Iterator[LowRank]:
    """Yield the adapters that the forward pass applies: active, not disabled and not merged into the base weight."""
    pairs = _pairs(module)
    if pairs is None or getattr(module, "disable_adapters", False):
        return
    variants = {**getattr(module, "use_dora", {}), **getattr(module, "lora_variant", {})}
    transposed = bool(getattr(module, "fan_in_fan_out", False)) or isinstance(pairs[0], nn.ParameterDict)
    if getattr(module, "merged_adapters", ()) and is_quantized(module.base_layer):
        raise UnsupportedError(
            f"{name}: an adapter is merged into a quantized weight, which hides its update: call unmerge_adapter()"
        )
    for adapter in getattr(module, "active_adapters", list(pairs[0])):
        if adapter not in pairs[0] or adapter in getattr(module, "merged_adapters", ()):
            continue
        a, b = (getattr(part[adapter], "weight", part[adapter]) for part in pairs)
        if variants.get(adapter) or getattr(pairs[1][adapter], "bias", None) is not None:
            raise UnsupportedError(
                f"{name}: adapter {adapter!r} of this {described(module)} is not plain LoRA (it is DoRA or another "
                f"variant, or has a bias), so its update of the weight is not a product of two matrices. {INSTEAD}"
            )
        if getattr(module.base_layer, "groups", 1) != 1:
            raise UnsupportedError(f"{name}: adapters of grouped convolutions are not supported: remove them")
        yield LowRank(a, b, float(module.scaling[adapter]), transposed, weight)

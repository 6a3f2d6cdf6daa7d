"""Linear layers with quantized weights (bitsandbytes in 4 and 8 bits, torchao), the bases of QLoRA.

Training does not change a quantized weight W, and its numbers are not laid out as a matrix. A memory therefore sees,
in place of W, a `QuantizedWeight`: a parameter in the shape of W that represents the *difference* from W and is zero.
The mean of the memory is zero there too, which makes the quantized base the mean, and with adapters the displacement is
scaling B A alone. Nothing of the size of W is stored.

Whatever the format, the values of W are what the layer returns for unit vectors, W e_i. The input is exact in 8 bits
too, so this also holds for layers that quantize their inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from limpet.distributed import is_sharded
from limpet.errors import UnsupportedError

CHUNK = 512
"""Unit vectors that a layer is given at a time."""

REPACKS = "support_avx512bf16_for_cpu"
"""The attribute of a layer of bitsandbytes that says whether it repacks its weight for inference."""

_STAND_INS: WeakKeyDictionary[nn.Module, QuantizedWeight] = WeakKeyDictionary()


class QuantizedWeight(nn.Parameter):
    """The difference of a layer's weight from its quantized weight: zeros, which take no memory.

    Attributes:
        layer: A weak reference to the layer.
        sketch: Random sums of the quantized weight, once they have been computed.
    """

    layer: weakref.ref[nn.Module]
    sketch: list[float] | None = None

    @property
    def is_zero(self) -> bool:
        """Whether it has its usual value, rather than one put in place by `limpet.model.context.replaced`."""
        return not any(self.stride())

    @torch.no_grad()
    def values(self) -> Tensor:
        """Compute the quantized weight in float32."""
        layer: Any = self.layer()
        found = torch.empty(self.shape, device=self.device)
        like = next((p for p in layer.parameters() if p.is_floating_point()), found)
        dtype = getattr(layer, "compute_dtype", None) or like.dtype
        with unchanged(layer):
            bias = 0.0 if layer.bias is None else layer.bias.float()
            for start in range(0, self.shape[1], CHUNK):
                width = min(CHUNK, self.shape[1] - start)
                units = torch.zeros(width, self.shape[1], dtype=dtype, device=self.device)
                units[range(width), range(start, start + width)] = 1
                found[:, start : start + width] = (layer.forward(units).float() - bias).mT
        return found


@contextmanager
def not_repacked(model: nn.Module) -> Iterator[None]:
    """Run the body without the repacking of quantized weights for inference.

    On CPUs with AVX512-BF16, a 4-bit layer of bitsandbytes repacks its weight in its first forward pass in eval mode.
    That rounds the scales to bfloat16, and the layer has no gradients any more.

    Args:
        model: The model.
    """
    layers = [vars(module) for module in model.modules() if vars(module).get(REPACKS)]
    try:
        for layer in layers:
            layer[REPACKS] = False
        yield
    finally:
        for layer in layers:
            layer[REPACKS] = True


@contextmanager
def unchanged(layer: Any) -> Iterator[None]:
    """Restore what the forward pass of a quantized layer adapts to its input: compute dtype, and dtype of the bias.

    Args:
        layer: The layer.
    """
    settings = {name: vars(layer)[name] for name in ("compute_dtype", "compute_type_is_set") if name in vars(layer)}
    bias = getattr(layer, "bias", None)
    data = None if bias is None else bias.data
    try:
        with not_repacked(layer):
            yield
    finally:
        vars(layer).update(settings)
        if bias is not None:
            bias.data = data


def is_quantized(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with a quantized weight."""
    weight: Any = module._parameters.get("weight")
    if weight is None or type(weight) is nn.Parameter or not isinstance(module, nn.Linear):
        return False
    if not weight.is_floating_point():
        return True
    if is_sharded(weight):
        return False
    # 4 bits may be packed into numbers of a floating dtype (quant_storage), and torchao has tensors of its own
    packed = tuple(weight.shape) != (module.out_features, module.in_features)
    return packed or is_traceable_wrapper_subclass(weight)


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module itself by name, with a `QuantizedWeight` in place of a quantized weight."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            if type(parameter) is not nn.Parameter and name == "weight" and is_quantized(module):
                yield name, quantized_weight(module)
            else:
                yield name, parameter


def quantized_weight(module: Any) -> QuantizedWeight:
    """Return what stands for the quantized weight of a layer, the same object in every call.

    Args:
        module: A layer for which `is_quantized` holds.

    Returns:
        The parameter, on the device of the weight.
    """
    found, device = _STAND_INS.get(module), module.weight.device
    if found is None or found.device != device:
        zeros = torch.zeros((), device=device).expand(module.out_features, module.in_features)
        found = QuantizedWeight(zeros, requires_grad=False)
        found.layer = weakref.ref(module)
        _STAND_INS[module] = found
    return found


def with_quantized_part(parameter: Tensor, weight: Tensor) -> Tensor:
    """Return a weight with its quantized part, for what needs to know its size and not only how it has changed.

    Args:
        parameter: The parameter.
        weight: Its effective value, which is a difference if the parameter is a `QuantizedWeight`.

    Returns:
        The weight as the layer applies it.
    """
    return parameter.values() + weight if isinstance(parameter, QuantizedWeight) else weight


@contextmanager
def differentiable_stand_ins(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Run the body with layers that compute W x + D x, with D the `QuantizedWeight`, and differentiate by D.

    Args:
        parameters: Parameters, of which only those that stand for quantized weights are affected.

    Raises:
        UnsupportedError: If a weight was repacked for inference; see `not_repacked`.
    """
    handles = []
    try:
        for weight in parameters:
            layer = weight.layer() if isinstance(weight, QuantizedWeight) else None
            _check_not_repacked(layer)
            if layer is not None and not any(isinstance(hook, _Added) for hook in layer._forward_hooks.values()):
                # before all other hooks, which then see an output that requires gradients
                handles.append(layer.register_forward_hook(_Added(weight), prepend=True, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_not_repacked(layer: Any) -> None:
    state = getattr(getattr(layer, "weight", None), "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        raise UnsupportedError(
            "bitsandbytes has repacked the 4-bit weights of this model for inference on this CPU, and such layers have "
            f"no gradients: load the model again, and set `{REPACKS} = False` on its 4-bit layers before it runs in "
            "eval mode"
        )


class _Added:
    """Forward hook that adds D x to the output of a layer."""

    def __init__(self, weight: Any) -> None:
        self.weight: QuantizedWeight = weight

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        if not self.weight.is_zero:
            return output + F.linear(x.to(self.weight.dtype), self.weight).to(output.dtype)
        if self.weight.requires_grad and torch.is_grad_enabled():
            zero: Tensor = _ZeroProduct.apply(x.detach(), self.weight, output.dtype)  # type: ignore[no-untyped-call]
            return output + zero
        return None


class _ZeroProduct(torch.autograd.Function):
    """weight x for a weight of zeros: the product is skipped, and its derivative by the weight is not.

    It is a node of its own, so that autograd skips it where that derivative is not needed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        ctx.dtype = weight.dtype
        return x.new_zeros((), dtype=dtype).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (x,) = ctx.saved_tensors
        rows, inputs = (one.reshape(-1, one.shape[-1]).to(ctx.dtype) for one in (gradient, x))
        return None, rows.mT @ inputs, None

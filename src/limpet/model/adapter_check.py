"""Check by computation that an adapted layer computes what a memory assumes: its base layer at W + sum of scaling B A.

Attributes alone do not tell LoRA from its relatives: AdaLoRA has the same ones, but adds B diag(E) A. The layer is
therefore run on a small random input and compared with its base layer at the assumed weight. Adapters usually start at
an update of zero, where every adapter would pass, so both are evaluated with random values in place of all parameters
that the adapters have. The user's parameters, buffers, modes, hooks and random states are left as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from limpet.distributed import is_sharded
from limpet.errors import UnsupportedError
from limpet.model.context import eager, full_precision, preserve_state, without_hooks
from limpet.model.low_rank import LowRank
from limpet.model.quantized import is_quantized, quantized_weight, unchanged

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2}
HALF_TOLERANCE = 5e-2
"""Largest relative difference of the outputs, by dtype of the weight; the last one for quantized weights as well. A
layer that computes something else is off by as much as the outputs themselves, because the random update is as large as
the weight."""

BASE = "base_layer."

INSTEAD = (
    "Instead, use LoRA (peft.LoraConfig) without options that change its computation, or merge the adapter into the "
    "model first (model.merge_and_unload())"
)


def described(module: nn.Module) -> str:
    """Return the full name of a module's type."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


@torch.no_grad()
def check_update(module: nn.Module, name: str, adapters: Sequence[LowRank]) -> None:
    """Raise unless an adapted layer computes its base layer with the sum of weight and low-rank updates.

    Args:
        module: The adapted layer.
        name: Its name, for the error message.
        adapters: The updates that the layer is assumed to apply.

    Raises:
        UnsupportedError: If it computes something else.
    """
    base: Any = module.base_layer
    if base.weight.is_meta:
        return  # there are no values to compute with
    if getattr(module, "disable_adapters", False) and getattr(module, "merged", False):
        return  # running the layer would unmerge the adapter
    wrong = f"{name}: this layer, a {described(module)}, is not plain LoRA: "
    runner = getattr(vars(module).get("forward"), "__self__", module)
    if runner is not module:  # another object that decides from call to call, such as X-LoRA
        kind = f"{type(runner).__module__}.{type(runner).__qualname__}"
        raise UnsupportedError(f"{wrong}its forward has been replaced with that of a {kind}. {INSTEAD}")
    quantized = is_quantized(base)
    weight: Tensor = quantized_weight(base).values() if quantized else base.weight
    sharded = is_sharded(weight)
    if sharded:  # other values will do, because all of them are given to the layer
        weight = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)).to(weight.device, weight.dtype)
    values = _random_values(module, weight, adapters, with_base=sharded)
    given = {name.removeprefix(BASE): value for name, value in values.items() if name.startswith(BASE)}
    values |= {f"{BASE}weight": weight} if sharded else {}
    x = _random_input(base, adapters, weight)
    try:
        with preserve_state(module), without_hooks(module), full_precision(), eager(), unchanged(base):
            found = functional_call(module, values, (x.clone(),))
            claimed = _claimed(module, weight, adapters, values)
            if quantized:  # the layer itself cannot be given another weight
                expected = F.linear(x, claimed, None if base.bias is None else base.bias.to(claimed))
            else:
                expected = functional_call(base, given | {"weight": claimed}, (x.clone(),))
            error, size = (float(one.double().norm()) for one in (found - expected, expected))
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as problem:
        raise UnsupportedError(
            f"{wrong}it cannot be run on a plain input to check what it computes ({problem}). {INSTEAD}"
        ) from problem
    if not error <= (HALF_TOLERANCE if quantized else TOLERANCE.get(weight.dtype, HALF_TOLERANCE)) * size:
        raise UnsupportedError(
            f"{wrong}it does not compute its base layer with the weight W + scaling B A, so a memory of W cannot tell "
            f"what the adapter changes. {INSTEAD}"
        )


def _random_values(
    module: nn.Module, weight: Tensor, adapters: Sequence[LowRank], *, with_base: bool
) -> dict[str, Tensor]:
    """Random values for all parameters outside the base layer, such that the updates are about as large as the weight.

    With entries of A and B of scale s, an update of rank r has entries of scale scaling sqrt(r) s^2.
    """
    generator = torch.Generator().manual_seed(0)
    scale = float(weight.square().mean(dtype=torch.float32).sqrt()) or 1.0
    factor = max((abs(one.scaling) * math.sqrt(one.left.shape[1]) for one in adapters), default=1.0) or 1.0
    own = set() if with_base else {id(p) for p in module.base_layer.parameters()}  # type: ignore[union-attr]
    return {
        name: (torch.randn(p.shape, generator=generator) * math.sqrt(scale / factor)).to(p.device, p.dtype)
        for name, p in module.named_parameters()
        if id(p) not in own and p.is_floating_point()
    }


def _claimed(module: nn.Module, weight: Tensor, adapters: Sequence[LowRank], values: dict[str, Tensor]) -> Tensor:
    """The weight plus the updates of the adapters, with these values for their parameters."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    for one in adapters:
        factors: Any = {"a": values[names[id(one.a)]], "b": values[names[id(one.b)]]}
        there = replace(one, **factors)
        wide = wide + there.added(weight.shape).to(wide)
    return wide.to(weight.dtype)


def _random_input(base: Any, adapters: Sequence[LowRank], weight: Tensor) -> Tensor:
    """A small input for the base layer: tokens, an image of the size of one patch, or vectors."""
    generator = torch.Generator().manual_seed(1)
    if isinstance(base, nn.Embedding):
        return torch.randint(base.num_embeddings, (2, 3), generator=generator).to(weight.device)
    if isinstance(base, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        sizes = [d * (k - 1) + 1 for d, k in zip(base.dilation, base.kernel_size, strict=True)]
        return torch.randn(2, base.in_channels, *sizes, generator=generator).to(weight)
    columns = adapters[0].a.shape[1] if adapters else getattr(base, "in_features", weight.shape[-1])
    return torch.randn(2, columns, generator=generator).to(weight)

"""Context managers that preserve or temporarily change the state of a model and the random number generators."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from limpet.distributed import Layout, is_sharded, local, members, reshard
from limpet.errors import UnsupportedError
from limpet.model.quantized import differentiable_stand_ins, not_repacked

_measuring: ContextVar[bool] = ContextVar("measuring", default=False)


def is_measuring() -> bool:
    """Whether the current forward pass is one of limpet's and not the user's: whether it is inside `preserve_state`."""
    return _measuring.get()


@contextmanager
def preserve_state(model: nn.Module, batches: Any = None) -> Iterator[None]:
    """Run the body in eval mode, and restore modes, buffers and random states bit for bit, even after an exception.

    Quantized weights are not repacked, which could not be undone. `nn.TransformerEncoder` does not take the path that
    torch has for it in eval mode, whose outputs at padded positions are not those of training. The random states are
    those of the global generators, and of the generators that shuffle a loader.

    The `training` flags are set directly rather than with `model.eval()`: a custom `train` method may do more than set
    the flag (merge adapters, raise an error), which could not be undone.

    Args:
        model: The model.
        batches: A loader whose generators are restored as well.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    with random_state(batches), not_repacked(model), _measurement():
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for module, name, buffer, copy in buffers:
                _restore_buffer(module, name, buffer, copy)
            reshard(model)


@contextmanager
def _measurement() -> Iterator[None]:
    """Run the body as a pass of limpet's own, without torch's fast path for transformer layers."""
    token, fast = _measuring.set(True), torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        _measuring.reset(token)


@contextmanager
def trainable(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Run the body with unmodified gradients for these parameters.

    Frozen parameters, such as base weights under adapters, get gradients too; gradient hooks of the user (clipping,
    noise) are disabled.

    Args:
        parameters: The parameters.
    """
    these = list(parameters)
    frozen = [parameter for parameter in these if not parameter.requires_grad]
    hooks = [(parameter, parameter._backward_hooks) for parameter in these if parameter._backward_hooks]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        for parameter, _ in hooks:
            parameter._backward_hooks = None
        with differentiable_stand_ins(these):
            yield
    finally:
        for parameter, own_hooks in hooks:
            parameter._backward_hooks = own_hooks
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Run the body without the gradients of the parameters and the hooks on them, and restore both afterwards.

    Args:
        model: The model.
    """
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    hooks = [(p, kind, found) for p in parameters for kind in kinds if (found := getattr(p, kind, None))]
    try:
        for parameter in parameters:
            parameter.grad = None
        for parameter, kind, _ in hooks:
            setattr(parameter, kind, None)
        yield
    finally:
        for parameter, kind, found in hooks:
            setattr(parameter, kind, found)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Run the body without the forward and backward hooks of a model's modules.

    Args:
        model: The model.
    """
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = [(module, kind, hooks) for module in model.modules() for kind in kinds if (hooks := vars(module).get(kind))]
    try:
        for module, kind, _ in found:
            vars(module)[kind] = OrderedDict()
        yield
    finally:
        for module, kind, hooks in found:
            vars(module)[kind] = hooks


@contextmanager
def full_precision() -> Iterator[None]:
    """Run the body in the precision of its tensors, even inside an autocast context."""
    with ExitStack() as stack:
        for device_type in _device_types():
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


AutocastState = dict[str, tuple[bool, torch.dtype]]
"""Whether autocast is enabled, and its dtype, by type of device."""


def autocast_state() -> AutocastState:
    """Return the current state of autocast."""
    return {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _device_types()}


@contextmanager
def autocast_as(state: AutocastState) -> Iterator[None]:
    """Run the body in a state of autocast.

    Weights are cast in every use: a cache filled without gradients would be used in a forward pass that needs them.

    Args:
        state: The state, as returned by `autocast_state`.
    """
    with ExitStack() as stack:
        for kind, (enabled, dtype) in state.items():
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield


@cache
def _device_types() -> tuple[str, ...]:
    """Return the types of the available devices."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if found is None else ("cpu", found.type)


@contextmanager
def perturbed(parameters: Mapping[str, nn.Parameter], displacement: Mapping[str, Tensor]) -> Iterator[None]:
    """Run the body at weights + displacement, and restore the original tensors afterwards, bit for bit.

    Args:
        parameters: The parameters by name.
        displacement: The displacement of some of the parameters, by name.
    """
    before = {name: parameters[name].data for name in displacement}
    with replaced(parameters, {name: w + displacement[name].to(w.device, w.dtype) for name, w in before.items()}):
        yield


@contextmanager
def replaced(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Run the body with other values of some parameters, and restore the original tensors afterwards, bit for bit.

    Args:
        parameters: The parameters by name.
        values: The values by name, which may have other shapes than the parameters.
    """
    sharded = [name for name in values if is_sharded(parameters[name])]
    pieces = {name: local(parameters[name]).clone() for name in sharded}
    originals = {name: parameters[name].data for name in values if name not in pieces}
    try:
        for name, original in originals.items():
            parameters[name].data = values[name].to(original.device, original.dtype)
        for name in sharded:  # in place, because `fully_shard` has references to the pieces
            _write_shard(name, parameters[name], values[name])
        with differentiable_stand_ins(parameters[name] for name in values):
            yield
    finally:
        for name, original in originals.items():
            parameters[name].data = original
        for name, piece in pieces.items():
            local(parameters[name]).copy_(piece)


def _write_shard(name: str, parameter: nn.Parameter, value: Tensor) -> None:
    """Write this rank's shard of a value, which may be whole or sharded itself, to a sharded parameter."""
    if is_sharded(value):
        local(parameter).copy_(local(value))
        return
    ranks = members()
    if ranks is None or value.shape != parameter.shape:
        raise UnsupportedError(
            f"{name} is sharded and has the shape {tuple(parameter.shape)}, so it cannot be replaced with a value of "
            f"shape {tuple(value.shape)}: measure in one process, or pass forward="
        )
    local(parameter).copy_(Layout.of(name, parameter, ranks.size).cut_out(value, ranks.rank))


def _restore_buffer(module: nn.Module, name: str, buffer: Tensor | None, copy: Tensor | None) -> None:
    """Restore a buffer, both the tensor object and its values."""
    module._buffers[name] = buffer
    if buffer is not None and copy is not None and not torch.equal(buffer, copy):
        with torch.no_grad():
            buffer.copy_(copy)


@contextmanager
def random_state(batches: Any = None) -> Iterator[None]:
    """Restore the random states of torch, numpy, Python and, if given, a loader after the body."""
    samplers = [getattr(batches, "sampler", None), getattr(getattr(batches, "batch_sampler", None), "sampler", None)]
    holders = [batches, *samplers]
    generators = {id(g): g for h in holders if isinstance(g := getattr(h, "generator", None), torch.Generator)}
    states = [(generator, generator.get_state()) for generator in generators.values()]
    python, numbers, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    accelerator: Any = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(cpu)
        for generator, state in states:
            generator.set_state(state)
        if accelerator is not None:
            torch.cuda.set_rng_state_all(accelerator)


def eager() -> Any:
    """Return a context that runs compiled modules in eager mode, because hooks do not fire in compiled code."""
    if "torch._dynamo" not in sys.modules:
        return ExitStack()
    return torch.compiler.set_stance("force_eager")


def plain_recurrence(model: nn.Module) -> Any:
    """Return a context without cuDNN if the model is recurrent: cuDNN's RNNs have no backward pass in eval mode."""
    if torch.cuda.is_available() and any(isinstance(m, nn.RNNBase) for m in model.modules()):
        return torch.backends.cudnn.flags(enabled=False)
    return ExitStack()

"""Leave the user's model, and the random state, as they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def preserve_state(model: nn.Module, batches: Any = None) -> Iterator[None]:
    """Run the body in eval mode; mode, buffers and random states are bit-equal afterwards, whatever happens.

    The random states are the global ones, and the generators that a loader shuffles by.

    The flags are set one by one rather than by `model.eval()`: a module's own `train` method may do more than
    set the flag (merge adapters, refuse), and undoing that would not be our business.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    with random_state(batches):
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for module, name, buffer, copy in buffers:
                _restore_buffer(module, name, buffer, copy)


@contextmanager
def trainable(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Run the body with gradients that reach these parameters, and as they are.

    Also those that are frozen under adapters; and past the hooks that somebody has put on gradients (clipping, noise).
    """
    these = list(parameters)
    frozen = [parameter for parameter in these if not parameter.requires_grad]
    hooks = [(parameter, parameter._backward_hooks) for parameter in these if parameter._backward_hooks]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        for parameter, _ in hooks:
            parameter._backward_hooks = None
        yield
    finally:
        for parameter, own in hooks:
            parameter._backward_hooks = own
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def full_precision() -> Iterator[None]:
    """Run the body in the precision of its tensors, also where somebody calls it under autocast."""
    with ExitStack() as stack:
        for kind in _kinds_of_devices():
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@cache
def _kinds_of_devices() -> tuple[str, ...]:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if found is None else ("cpu", found.type)


@contextmanager
def perturbed(parameters: Mapping[str, nn.Parameter], displacement: Mapping[str, Tensor]) -> Iterator[None]:
    """Run the body at weights + displacement. The weights' own tensors are put aside, so they come back bit for bit."""
    aside = {name: parameters[name].data for name in displacement}
    try:
        for name, own in aside.items():
            parameters[name].data = own + displacement[name].to(own.device, own.dtype)
        yield
    finally:
        for name, own in aside.items():
            parameters[name].data = own


def _restore_buffer(module: nn.Module, name: str, buffer: Tensor | None, copy: Tensor | None) -> None:
    module._buffers[name] = buffer
    if buffer is not None and copy is not None and not torch.equal(buffer, copy):
        with torch.no_grad():
            buffer.copy_(copy)


@contextmanager
def random_state(batches: Any = None) -> Iterator[None]:
    """Give the random states of torch, numpy and Python, and those of a loader, back as they were."""
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
    """Run compiled parts of the model as they are written: inside compiled code hooks do not fire."""
    if "torch._dynamo" not in sys.modules:
        return ExitStack()
    return torch.compiler.set_stance("force_eager")


def plain_recurrence(model: nn.Module) -> Any:
    """cuDNN's recurrent layers have no backward pass in eval mode; PyTorch's own have."""
    if torch.cuda.is_available() and any(isinstance(m, nn.RNNBase) for m in model.modules()):
        return torch.backends.cudnn.flags(enabled=False)
    return ExitStack()

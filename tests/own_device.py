"""A device of our own, on which mixing devices is an error and copies to the host are counted, for tests without a GPU.

Its tensors are real tensors of torch's PrivateUse1 backend whose storage is host memory. Every kernel runs on the CPU,
on tensors that share that memory (by DLPack, with the device rewritten), after the checks that CUDA makes: a CPU tensor
of a dimension above 0, or a generator of the CPU, among the arguments raises a RuntimeError.

    with own_device() as copies:
        model.to(DEVICE)
        ...
        copies.to_host   # number of copies from the device, or of values that the host waited for

The autograd engine counts devices once, at the first backward of a process, so the device is registered at import.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

NAME = "own"
SUPPORTED = hasattr(torch._C, "_acc") and hasattr(torch._C._acc, "register_python_privateuseone_device_guard")
"""Whether this version of torch lets Python register a backend."""
if SUPPORTED:
    torch.utils.rename_privateuse1_backend(NAME)
DEVICE = torch.device(NAME if SUPPORTED else "meta", 0)

DLPACK_CPU, DLPACK_OTHER = 1, 12
"""The device types of DLPack for the CPU and for a backend on PrivateUse1."""

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


@dataclass
class Copies:
    """Number of copies between the device and the host.

    Attributes:
        to_host: Copies of tensors to the CPU, and operations that the host waits for (item, equal, nonzero).
        to_device: Copies of CPU tensors to the device.
    """

    to_host: int = 0
    to_device: int = 0


_copies, _active = Copies(), False
_generators: weakref.WeakSet[torch.Generator] = weakref.WeakSet()


def shared(tensor: Tensor, device_type: int) -> Tensor:
    """Return a tensor with the same memory on another device."""
    capsule = torch._C._to_dlpack(tensor)  # type: ignore[attr-defined]
    address = _capsule_pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    device = (ctypes.c_int32 * 2).from_address(address)  # DLManagedTensor: void* data; int32 device_type, device_id
    device[0], device[1] = device_type, 0
    return torch._C._from_dlpack(capsule)  # type: ignore[attr-defined, no-any-return]


def is_own(value: Any) -> bool:
    """Return whether a value is a tensor on the device."""
    return isinstance(value, Tensor) and value.device.type == NAME


def on_host(value: Any) -> Any:
    """Return a tensor that shares memory on the CPU; an empty one is new, so that an `out` can be resized."""
    if not is_own(value):
        return value
    return (
        shared(value, DLPACK_CPU)
        if value.numel()
        else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    )


def on_device(tensor: Tensor) -> Tensor:
    """Return a tensor on the device that shares the memory of a CPU tensor."""
    return shared(tensor, DLPACK_OTHER)


def checked(op: Any, values: list[Any]) -> None:
    """Raise the error that CUDA raises for arguments on several devices."""
    for value in values:
        if isinstance(value, Tensor) and not is_own(value) and value.dim():
            raise RuntimeError(f"{op}: expected all tensors to be on the same device, but found {DEVICE} and cpu")
        if isinstance(value, torch._C.Generator) and address(value) not in map(address, _generators):
            raise RuntimeError(f"{op}: expected a '{NAME}' device type for generator but found 'cpu'")


def waits(op: Any, values: list[Any]) -> bool:
    """Return whether the host has to wait for the result of an operation, because it is a number or its shape is."""
    name = op.overloadpacket.__name__
    if "index_put" in name:  # a mask is an index of unknown length
        return any(is_own(value) and value.dtype in (torch.bool, torch.uint8) for value in values[1:])
    known = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return name != "index" and not known.isdisjoint(op.tags)  # index calls nonzero for a mask


def as_declared(argument: Any, value: Any) -> Any:
    """Return a number as a tensor where the operation takes a tensor: a boxed kernel is given the number alone."""
    number = isinstance(value, bool | int | float | complex) and str(argument.type) == "Tensor"
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None) if number else value


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation of the device on the CPU."""
    values = tree_flatten((args, kwargs))[0]
    checked(op, values)
    _copies.to_host += waits(op, values)
    created = kwargs.get("device")
    kwargs = kwargs if created is None else {**kwargs, "device": torch.device("cpu")}
    host_args, host_kwargs = tree_map_only(Tensor, on_host, (args, kwargs))
    found = op(*map(as_declared, op._schema.arguments, host_args), **host_kwargs)
    written: dict[int, Tensor] = {}
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        name = argument.name
        own, host = (kwargs.get(name), host_kwargs.get(name)) if i >= len(args) else (args[i], host_args[i])
        for one, other in zip(*(x if isinstance(x, list | tuple) else [x] for x in (own, host)), strict=True):
            if one is not None:
                if not is_own(one):
                    raise RuntimeError(f"{op}: expected the output on {DEVICE}, but found it on cpu")
                if one.shape != other.shape:
                    one.set_(on_device(other))
                written[id(other)] = one
    if created is not None and created.type == "cpu":
        return found
    return tree_map_only(Tensor, lambda t: written[id(t)] if id(t) in written else on_device(t), found)


def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between devices, or on the device."""
    _copies.to_host += not is_own(target)
    _copies.to_device += not is_own(source)
    host: Tensor = on_host(target)
    host.copy_(on_host(source))
    return target


def as_on_cpu(op: Any) -> Any:
    """Return a kernel for an operation on metadata and storage only: that of the CPU, which keeps the device."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return lambda *args, **kwargs: op.redispatch(keys, *args, **kwargs)


def address(generator: torch.Generator) -> int | None:
    """Return the address of the C++ generator, which a kernel is given in another Python object."""
    return ctypes.c_void_p.from_address(id(generator) + object.__basicsize__).value


class Generator(torch.Generator):
    """A torch.Generator that can also be one of the device, which cannot be registered from Python."""

    place: torch.device

    def __new__(cls, device: Any = "cpu") -> Generator:
        """Create a generator that draws as the CPU does."""
        found: Generator = super().__new__(cls)
        found.place = torch.device(device)
        if found.place.type == NAME:
            _generators.add(found)
        return found

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device whose tensors it fills."""
        return self.place


class Module:
    """What torch asks for as torch.<device>."""

    is_initialized = staticmethod(lambda: True)
    is_available = staticmethod(lambda: _active)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)


def register() -> list[Any]:
    """Register the device; return what has to stay alive."""
    acc: Any = torch._C._acc  # type: ignore[attr-defined]
    asked = {
        "is_available": lambda self: _active,
        "is_built": lambda self: True,
        "has_primary_context": lambda self, index: True,
    }
    hooks = type("Hooks", (acc.PrivateUse1Hooks,), asked)()
    kind = torch._C._autograd.DeviceType.PrivateUse1  # type: ignore[attr-defined]
    guard = type("Guard", (acc.DeviceGuard,), {"type_": lambda self: kind})()
    torch._register_device_module(NAME, Module())  # type: ignore[no-untyped-call]
    acc.register_python_privateuseone_hook(hooks)
    acc.register_python_privateuseone_device_guard(guard)
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(run, "PrivateUse1")
    aten.impl("copy_", copy, "PrivateUse1")
    ops = torch.ops.aten
    for op in (ops.as_strided.default, ops.view.default, ops._reshape_alias.default, ops.unfold.default,
               ops.set_.source_Tensor, ops.set_.source_Storage_storage_offset, ops.view_as_real.default):  # fmt: skip
        aten.impl(op.name(), as_on_cpu(op), "PrivateUse1")
    # torch decomposes these into a call of a C++ extension, and into a kernel that resizes its output
    for op in (ops.convolution.default, ops.convolution_backward.default, ops.mse_loss.default):
        aten.impl(op.name(), lambda *args, op=op, **kwargs: run(op, *args, **kwargs), "PrivateUse1")
    return [hooks, guard, everything, aten]


_registered = register() if SUPPORTED else []


@contextmanager
def own_device() -> Iterator[Copies]:
    """Supply generators of the device, count copies from 0, and let `nn.Module.to` keep parameters, as on CUDA."""
    _copies.to_host = _copies.to_device = 0
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with mock.patch.object(torch, "Generator", Generator), mock.patch(f"{__name__}._active", True):
            yield _copies
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)

"""The processes that measure together, by torch.distributed's own collectives."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from limpet.errors import CurvatureError

T = TypeVar("T")
_alone: ContextVar[bool] = ContextVar("alone", default=False)


@dataclass(frozen=True)
class Ranks:
    """All processes of the default group."""

    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in their order. For small things."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def sum(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum over all ranks of tensors by name; a rank that lacks one adds nothing to it."""
        shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for some in self.gather({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}):
            shapes.update(some)
        device = self._device(tensors)
        summed = {}
        for name in sorted(shapes):
            shape, dtype = shapes[name]
            own = tensors.get(name)
            total = torch.zeros(shape, dtype=dtype, device=device) if own is None else own.to(device, copy=True)
            dist.all_reduce(total)
            summed[name] = total
        return summed

    def reduce(self, tensors: Mapping[str, Tensor], to: int) -> dict[str, Tensor] | None:
        """The sum over all ranks of tensors that all of them have, on rank `to` alone; None on the others.

        One message for each dtype, so that whole numbers stay what they are.
        """
        device = self._device(tensors)
        summed: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
            some = {name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype}
            flat = torch.cat([tensor.to(device).reshape(-1) for tensor in some.values()])
            dist.reduce(flat, to)
            parts = torch.split(flat, [tensor.numel() for tensor in some.values()])
            summed |= {name: part.reshape(t.shape) for part, (name, t) in zip(parts, some.items(), strict=True)}
        return {name: summed[name].to(t.device) for name, t in tensors.items()} if self.rank == to else None

    def numbers(self, *values: float) -> list[float]:
        """The sum over all ranks of each number."""
        total = torch.tensor(values, dtype=torch.float64, device=self._device({}))
        dist.all_reduce(total)
        return [float(value) for value in total]

    def raise_together(self, error: Exception | None) -> None:
        """Raise on all ranks what went wrong on one, so that none waits for another for ever."""
        told = [(rank, text) for rank, text in enumerate(self.gather(None if error is None else str(error))) if text]
        if error is not None:
            raise error
        if told:
            raise CurvatureError(f"rank {told[0][0]}: {told[0][1]}")

    def _device(self, tensors: Mapping[str, Tensor]) -> torch.device:
        """Where this backend can add up."""
        if dist.get_backend() != "nccl":
            return torch.device("cpu")
        return next(
            (t.device for t in tensors.values() if t.is_cuda), torch.device("cuda", torch.cuda.current_device())
        )


def current() -> Ranks | None:
    """The ranks that measure together now; None for one process, and inside `alone`."""
    if _alone.get() or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return Ranks(dist.get_rank(), dist.get_world_size())


@contextmanager
def alone() -> Iterator[None]:
    """What is measured in the body is this rank's own business: the others need not take part.

    >>> from limpet import parallel
    >>> with parallel.alone():
    ...     parallel.current() is None
    True
    """
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


@contextmanager
def launched() -> Iterator[bool]:
    """Join the processes that torchrun started, if it did; True on the first of them, and where there is one alone."""
    several = dist.is_available() and dist.is_torchelastic_launched() and not dist.is_initialized()
    if several and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    elif several:
        dist.init_process_group("gloo")
    try:
        yield not several or dist.get_rank() == 0
    finally:
        if several:
            dist.destroy_process_group()

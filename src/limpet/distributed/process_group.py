"""Collectives over the ranks that compute a memory together, built on torch.distributed.

Every collective begins with a meeting (`limpet.distributed.failure`), at which the ranks compare where they are and
hear of failures.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from limpet.distributed import failure
from limpet.errors import RankError, set_rank

T = TypeVar("T")
_alone: ContextVar[bool] = ContextVar("alone", default=False)


@dataclass(frozen=True)
class Ranks:
    """The ranks of the default process group.

    Args:
        rank: The rank of this process.
        size: The number of ranks.
    """

    rank: int
    size: int

    def gather(self, value: T, what: str = "objects") -> list[T]:
        """Gather a small picklable object from all ranks.

        Args:
            value: The object of this rank.
            what: What is gathered, for error messages.

        Returns:
            The objects of all ranks, in rank order.
        """
        found = failure.meet(self, f"gather of {what}", payload=pickle.dumps(value))
        return [pickle.loads(content) for content in found]

    def sum(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All-reduce named tensors; a tensor that is missing on a rank counts as zero there.

        Args:
            tensors: The tensors of this rank, by name.

        Returns:
            The sums over all ranks, by name.

        Raises:
            RankError: If a tensor has different shapes or dtypes on two ranks.
        """
        shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        own_shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for rank, some in enumerate(self.gather(own_shapes, "the shapes of sums")):
            other = next((name for name in some if shapes.get(name, some[name]) != some[name]), None)
            if other is not None:
                raise RankError(
                    f"{other} has {_described(*some[other])} on rank {rank}, but {_described(*shapes[other])} on a "
                    "lower rank",
                    rank,
                )
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
        """Sum named tensors that all ranks have, on one of the ranks, in place.

        Sends one message per tensor: a message of all of them would be a copy.

        Args:
            tensors: The tensors of this rank, by name. On return their values are undefined.
            to: The rank that receives the sums.

        Returns:
            The sums over all ranks on rank `to`, and None on the others.
        """
        device = self._device(tensors)
        summed: dict[str, Tensor] = {}
        elements = sum(tensor.numel() for tensor in tensors.values())
        failure.meet(self, f"sum on rank {to}", f"{len(tensors)} tensors with {elements} elements")
        for name, tensor in tensors.items():
            sent = tensor.to(device).contiguous()
            dist.reduce(sent, to)
            if self.rank == to:
                summed[name] = sent.to(tensor.device)
        return summed if self.rank == to else None

    def totals(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sum tensors that all ranks have, in one message per dtype.

        Args:
            tensors: The tensors of this rank, in the same order and shapes on all ranks.

        Returns:
            The sums over all ranks, on the devices of the tensors.
        """
        device = self._device({str(i): tensor for i, tensor in enumerate(tensors)})
        found = list(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = torch.cat([tensors[i].to(device).reshape(-1) for i in places])
            dist.all_reduce(flat)
            parts = torch.split(flat, [tensors[i].numel() for i in places])
            for i, part in zip(places, parts, strict=True):
                found[i] = part.reshape(tensors[i].shape).to(tensors[i].device)
        return found

    def numbers(self, *values: float) -> list[float]:
        """Sum each of the numbers over all ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64, device=self._device({}))
        failure.meet(self, "sum of numbers", f"{len(values)} of them")
        dist.all_reduce(total)
        return [float(value) for value in total]

    def broadcast(self, value: T | None, source: int) -> T:
        """Send a picklable object from one rank to all others.

        Args:
            value: The object, on rank `source`.
            source: The rank that sends it.

        Returns:
            The object.
        """
        failure.meet(self, f"broadcast from rank {source}")
        sent: list[Any] = [value]
        dist.broadcast_object_list(sent, source)
        found: T = sent[0]
        return found

    def all_to_all(self, into: Tensor, out: Tensor, receive: Sequence[int], send: Sequence[int]) -> None:
        """Send a part of a tensor to every rank, and receive one from each.

        Args:
            into: Where the parts of all ranks are written, in rank order.
            out: The parts for all ranks, in rank order.
            receive: The number of elements from each rank.
            send: The number of elements for each rank.
        """
        failure.meet(self, "exchange of shards", str(out.dtype))
        dist.all_to_all_single(into, out, list(receive), list(send))

    def attempt(self, step: Callable[[], None] | None) -> None:
        """Run a step, and go on once all ranks have succeeded. A barrier.

        Args:
            step: The step of this rank, or None if it has nothing to do.

        Raises:
            RankError: As `raise_together`.
        """
        error: Exception | None = None
        try:
            if step is not None:
                step()
        except RankError:
            raise  # all ranks have it already
        except Exception as raised:
            error = raised
        self.raise_together(error)

    def raise_together(self, error: Exception | None) -> None:
        """Raise an error on all ranks if it occurred on any of them, so that no rank hangs in a later collective.

        Args:
            error: The error of this rank, or None.

        Raises:
            RankError: If a rank had an error. On that rank, the error is the cause. If all ranks had the same error,
                each raises its own.
        """
        own = None if error is None else (type(error).__name__, str(error))
        found = self.gather(own, "errors")
        first = next((rank for rank, told in enumerate(found) if told is not None), None)
        if first is None:
            return
        if error is not None and all(told == own for told in found):
            raise error
        raise RankError(f"rank {first}: {': '.join(found[first] or ())}", first) from error

    def _device(self, tensors: Mapping[str, Tensor]) -> torch.device:
        """A device that the backend can reduce tensors on."""
        if dist.get_backend() != "nccl":
            return torch.device("cpu")
        return next(
            (t.device for t in tensors.values() if t.is_cuda), torch.device("cuda", torch.cuda.current_device())
        )


def _described(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"shape {tuple(shape)} and dtype {str(dtype).removeprefix('torch.')}"


def current() -> Ranks | None:
    """The active ranks, or None in a single process and inside `alone`."""
    ranks = members()
    return None if ranks is None or ranks.size == 1 else ranks


def members() -> Ranks | None:
    """The ranks of the process group, even if there is only one; None without a group and inside `alone`."""
    if _alone.get() or not dist.is_available() or not dist.is_initialized():
        return None
    return Ranks(dist.get_rank(), dist.get_world_size())


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) in a single process and inside `alone`."""
    ranks = current()
    return (0, 1) if ranks is None else (ranks.rank, ranks.size)


set_rank(lambda: rank_and_size()[0])


@contextmanager
def alone() -> Iterator[None]:
    """Compute on this rank only: inside the body, no collectives are called and the other ranks need not take part.

    Examples:
        >>> from limpet import distributed
        >>> with distributed.alone():
        ...     distributed.current() is None
        True
    """
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


@contextmanager
def launched() -> Iterator[bool]:
    """Initialize the process group if the script was started by torchrun, and destroy it at the end.

    Uses NCCL if CUDA is available and Gloo otherwise. Does nothing in a single process, or if the process group exists
    already.

    Yields:
        True on rank 0, in a single process, and if the process group existed already; False on the other ranks.
    """
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

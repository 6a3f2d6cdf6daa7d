"""Operations that all ranks complete or that fail on all of them, with one message.

`together` guards an operation. Every collective in it starts with a meeting: a short message of all ranks with the
number and the name of the collective they are at. Ranks that are at different ones all raise an error that names them,
before any number is mixed. A rank that has raised an exception tells it at the next meeting, where the others are or
will be; all ranks are then in step, and their process group is as usable as before.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from limpet.distributed.channel import Channel, channel_for
from limpet.errors import RankError

MESSAGE = struct.Struct("<?II40s64s96s")
"""Layout of a meeting's message: failed, number of the collective, size of the payload, three texts of `Position`."""

LENGTH = 512
"""Bytes of a meeting's message. Payloads that fit in are sent with it, and others in a second one."""

TEXT = 2000
"""Bytes of an error's message that the other ranks hear."""

INTERRUPTED_SECONDS = 5.0
"""How long a rank that is interrupted (KeyboardInterrupt, SystemExit) waits for the others to hear of it."""

MODEL_COLLECTIVES = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
"""Collectives that a model under `fully_shard` calls in its forward and backward passes."""


class Members(Protocol):
    """The ranks of an operation: `limpet.distributed.Ranks`."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    @property
    def size(self) -> int:
        """The number of ranks."""


class Position(NamedTuple):
    """Where a rank is.

    Args:
        number: The number of the collective in the operation.
        operation: The name of the operation.
        collective: The name of the collective.
        detail: What else must be the same on all ranks, such as a number of elements.
    """

    number: int
    operation: str
    collective: str
    detail: str

    def __str__(self) -> str:
        detail = f", {self.detail}" if self.detail else ""
        return f"collective {self.number} of {self.operation} ({self.collective}{detail})"


class Operation:
    """An operation that all ranks carry out together.

    Args:
        name: The name of the operation.
        ranks: The ranks.
    """

    def __init__(self, name: str, ranks: Members) -> None:
        self.name, self.ranks = name, ranks
        self.number = 0  # meetings so far
        self.agreed: RankError | None = None  # the error that all ranks raise
        self._channel: Channel | None = None

    @property
    def channel(self) -> Channel:
        """The channel of the ranks."""
        if self._channel is None:
            self._channel = channel_for(self.ranks.rank, self.ranks.size, self.name)
        return self._channel

    @property
    def lost(self) -> bool:
        """Whether the ranks have lost each other."""
        return self._channel is not None and self._channel.broken is not None

    def meet(self, collective: str, detail: str = "", payload: bytes = b"") -> list[bytes]:
        """Make sure that all ranks are at the same collective, and exchange a payload.

        Args:
            collective: The name of the collective.
            detail: What must be the same on all ranks.
            payload: Bytes for the other ranks.

        Returns:
            The payloads of all ranks, in rank order.

        Raises:
            RankError: If a rank has failed, has ended, or is at another collective.
        """
        if self.agreed is not None:
            raise self.agreed
        try:
            return self._exchange(self._position(collective, detail), payload, failed=False)
        except RankError as error:
            self.agreed = error
            raise

    def report(self, error: BaseException) -> BaseException:
        """Tell the other ranks of an exception on this one.

        Args:
            error: The exception.

        Returns:
            What this rank has to raise: the exception itself if all ranks have the same one, or a `RankError`.
        """
        told = f"{type(error).__name__}\n{error}".encode()[:TEXT]
        seconds = None if isinstance(error, Exception) else INTERRUPTED_SECONDS
        try:
            self._exchange(self._position("the end", ""), told, failed=True, seconds=seconds)
        except _SameOnAllError:
            return error
        except RankError as agreed:
            return agreed
        raise AssertionError("a failure was exchanged, and nothing was raised")

    def _position(self, collective: str, detail: str) -> Position:
        self.number += 1
        return Position(self.number, self.name, collective, detail)

    def _exchange(self, at: Position, payload: bytes, *, failed: bool, seconds: float | None = None) -> list[bytes]:
        texts = (_cut(text, size) for text, size in zip(at[1:], (40, 64, 96), strict=True))
        header = MESSAGE.pack(failed, at.number, len(payload), *texts)
        room = LENGTH - MESSAGE.size
        where = f"{self.name}, {at.collective}" if not failed else self.name
        found = self.channel.all_gather(header + payload[:room], LENGTH, where, seconds)
        headers = [MESSAGE.unpack_from(message) for message in found]
        lengths = [header[2] for header in headers]
        payloads = [message[MESSAGE.size :] for message in found]
        if max(lengths) > room:
            payloads = self.channel.all_gather(payload, max(lengths), where, seconds)
        payloads = [content[:length] for content, length in zip(payloads, lengths, strict=True)]
        failures = {rank: payloads[rank] for rank, header in enumerate(headers) if header[0]}
        if failures:
            raise self._failure(failures)
        self._compare([Position(h[1], *(_text(text) for text in h[3:])) for h in headers])
        return payloads

    def _failure(self, failures: Mapping[int, bytes]) -> Exception:
        """The error for what went wrong on some ranks; all ranks make the same of it."""
        if len(failures) == self.ranks.size and len(set(failures.values())) == 1:
            return _SameOnAllError()
        first = min(failures)
        kind, _, text = failures[first].decode(errors="ignore").partition("\n")
        others = [str(rank) for rank in sorted(failures) if rank != first]
        also = f" (rank{'s' * (len(others) > 1)} {', '.join(others)} failed as well)" if others else ""
        return RankError(f"{self.name} failed on rank {first}: {kind}{': ' if text else ''}{text}{also}", first)

    def _compare(self, positions: Sequence[Position]) -> None:
        usual = _usual(positions)
        other = next((rank for rank, position in enumerate(positions) if position != usual), None)
        if other is None:
            return
        first = positions.index(usual)
        raise RankError(
            f"rank {other} is at {positions[other]}, but rank {first} at {usual}: all ranks have to call the same "
            "methods, with the same arguments and in the same order",
            other,
        )


class _SameOnAllError(Exception):
    """All ranks have the same exception, so each raises its own."""


_operation: Operation | None = None  # not a ContextVar, because a backward pass calls collectives in its own threads


def meet(ranks: Members, collective: str, detail: str = "", payload: bytes = b"") -> list[bytes]:
    """Make sure that all ranks are at the same collective of the current operation, and exchange a payload.

    Args:
        ranks: The ranks.
        collective: The name of the collective.
        detail: What must be the same on all ranks.
        payload: Bytes for the other ranks.

    Returns:
        The payloads of all ranks, in rank order.

    Raises:
        RankError: If a rank has failed, has ended, or is at another collective.
    """
    operation = _operation if _operation is not None else Operation(collective, ranks)
    return operation.meet(collective, detail, payload)


@contextmanager
def together(
    name: str,
    ranks: Members | None,
    alike: Callable[[], Mapping[str, Any]] | None = None,
    *,
    runs_model: bool = False,
) -> Iterator[None]:
    """Guard an operation: it succeeds on all ranks, or all raise the same error. A collective.

    Inside another guarded operation it does nothing, because that one guards the body already.

    Args:
        name: The name of the operation.
        ranks: The ranks that carry it out. None, for a single process, guards nothing.
        alike: Returns what must be the same on all ranks, by name. It is compared first.
        runs_model: Whether the body runs a sharded model, whose own collectives are then numbered, too.

    Yields:
        Nothing.

    Raises:
        RankError: On all ranks, if any of them failed, has ended or differs. If the same exception occurs on all
            ranks, each raises its own.
    """
    global _operation
    if ranks is None or _operation is not None:
        yield
        return
    operation = _operation = Operation(name, ranks)
    try:
        with ExitStack() as stack:
            if runs_model:
                stack.enter_context(_numbered_model_collectives(ranks))
            if alike is not None:
                compare(ranks, alike())
            yield
            meet(ranks, "the end")
    except BaseException as error:
        if operation.agreed is error:
            raise
        if operation.agreed is not None:
            raise operation.agreed from None
        raised = operation.report(error)
        if raised is error or not isinstance(error, Exception):
            raise
        # the text of a backend that has lost a peer says less than the error that names it
        raise raised from (None if operation.lost and isinstance(error, RuntimeError) else error)
    finally:
        _operation = None


def compare(ranks: Members, items: Mapping[str, Any]) -> None:
    """Raise an error on all ranks if an item differs between them.

    Args:
        ranks: The ranks.
        items: What must be the same on all ranks, by name. Compared, and shown, as `str`.

    Raises:
        RankError: If a rank has another value, or lacks the item.
    """
    texts = {name: str(value) for name, value in items.items()}
    own = hashlib.sha256(repr(sorted(texts.items())).encode()).digest()
    if len(set(meet(ranks, "comparison", payload=own))) == 1:
        return
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}
    lines = "\n".join(f"{name}\t{digests[name]}\t{_shown(text)}" for name, text in sorted(texts.items()))
    found = []
    for payload in meet(ranks, "comparison in detail", payload=lines.encode()):
        rows = (line.split("\t") for line in payload.decode().splitlines())
        found.append({name: (digest, text) for name, digest, text in rows})
    for name in sorted(set().union(*found)):
        values = [some.get(name, ("", "missing")) for some in found]
        usual = _usual(values)
        other = next((rank for rank, value in enumerate(values) if value != usual), None)
        if other is not None:
            first = values.index(usual)
            raise RankError(
                f"the ranks differ in {name}: {values[other][1]} on rank {other}, but {usual[1]} on rank {first}",
                other,
            )


@contextmanager
def _numbered_model_collectives(ranks: Members) -> Iterator[None]:
    """Let the collectives of a sharded model begin with a meeting, so that no rank waits in them for one that failed.

    `fully_shard` looks its collectives up in torch.distributed at every call; it has hooks for them, but not in all
    supported versions, and no way to remove them.
    """
    names = [name for name in MODEL_COLLECTIVES if hasattr(dist, name)]
    before = {name: getattr(dist, name) for name in names}

    def numbered(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(collective)
        def call(*args: Any, **options: Any) -> Any:
            meet(ranks, f"{name} of the model")
            return collective(*args, **options)

        return call

    try:
        for name, collective in before.items():
            setattr(dist, name, numbered(name, collective))
        yield
    finally:
        for name, collective in before.items():
            setattr(dist, name, collective)


def _usual(values: Sequence[Any]) -> Any:
    """The value that most ranks have; of equally many, that of the lowest rank."""
    counts = Counter(values)
    return max(values, key=lambda value: (counts[value], -values.index(value)))


def _shown(text: str) -> str:
    """A value in one line of an error message."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


def _cut(text: str, size: int) -> bytes:
    return text.encode()[:size]


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="ignore")

"""A channel on which the ranks tell each other where they are, beside the process group that carries the numbers.

It is a Gloo group of its own, whatever the backend of the default group is: its messages are a few hundred bytes on the
CPU, and the end of a process closes its connections, which the ranks that wait for it notice at once. The store of the
default group is used only to create the channel and, once a connection is lost or a wait is over, to find out which
ranks have ended and to agree on one message.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from limpet.errors import RankError, finite_number

ANSWER_SECONDS = 4.0
"""Time in which a rank that lives answers when a connection is lost."""

CONNECT_SECONDS, CONNECT_ATTEMPTS = 30.0, 4
"""Time in which Gloo connects the ranks, and how often it may try: it fails now and then, and then on one rank only."""

POLL_SECONDS = 1.0
"""Time between two looks into the store, for a rank that waits and for the thread that answers."""

_timeout = 600.0
_created = 0  # channels that this process has had, the same number on all ranks


def set_timeout(seconds: float) -> None:
    """Set how long a rank waits for the others, which may be slower, before it raises a `limpet.RankError`.

    Call it on all ranks, before the first operation of limpet in the process group. A rank that has ended is noticed
    within seconds whatever the timeout is.

    Args:
        seconds: The time in seconds. The default is 600.

    Raises:
        ValueError: If `seconds` is not a finite number > 0.
    """
    global _timeout
    if not finite_number("seconds", seconds):
        raise ValueError("seconds must be > 0")
    _timeout = float(seconds)


class Channel:
    """The channel of the ranks of one default process group. Creating it is a collective.

    Args:
        rank: The rank of this process.
        size: The number of ranks.
        operation: The operation for which it is created, for error messages.

    Attributes:
        broken: The error that every use raises, once the ranks have lost each other or did not all come in time.
    """

    def __init__(self, rank: int, size: int, operation: str) -> None:
        global _created
        _created += 1
        self.rank, self.size = rank, size
        self.broken: RankError | None = None
        self._world = weakref.ref(_world())
        self._store = _default_store()
        self._prefix = f"limpet/{_created}"
        self._heard: list[str] = []  # the verdict, which the answering thread keeps if the store ends later
        self._group: Callable[[], Any] = lambda: None
        self._stop = threading.Event()
        if self._all_here("hello", operation, operation):
            self._connect(operation)

    def _connect(self, operation: str) -> None:
        """Create the group, again on all ranks if that has failed on one."""
        group = None
        for attempt in range(CONNECT_ATTEMPTS):
            with suppress(RuntimeError):
                group = dist.new_group(backend="gloo", timeout=timedelta(seconds=CONNECT_SECONDS))
            if not self._all_here(f"connected/{attempt}", "no" if group is None else "yes", operation):
                return
            ranks = range(self.size)
            if all(self._store.get(self._key("connected", attempt, rank)) == b"yes" for rank in ranks):
                break
            group = None
        if group is None:
            text = f"{operation}: Gloo could not connect the ranks in {CONNECT_ATTEMPTS} attempts; start them again"
            self.broken = RankError(text, None)
            return
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=math.ceil(_timeout) + 10), group)
        self._group = weakref.ref(group)  # destroy_process_group has to close its connections
        thread = threading.Thread(target=self._answer, name="limpet-ranks", daemon=True)
        thread.start()
        weakref.finalize(group, self._stop.set)
        atexit.register(_end, weakref.ref(thread), self._stop)

    @property
    def usable(self) -> bool:
        """Whether the channel belongs to the default process group of now."""
        here = self._world() is not None and self._world() is _world()
        return here and (self.broken is not None or self._group() is not None)

    def all_gather(self, content: bytes, length: int, where: str, seconds: float | None = None) -> list[bytes]:
        """Exchange the same number of bytes between all ranks.

        Args:
            content: The bytes of this rank.
            length: The number of bytes of all ranks, to which `content` is filled up.
            where: The place in the operation, for error messages.
            seconds: How long to wait for the other ranks. Default: the timeout.

        Returns:
            The bytes of all ranks, in rank order.

        Raises:
            RankError: If a rank has ended, or does not take part in time. Then all later calls raise it as well.
        """
        if self.broken is not None:
            raise self.broken
        own = torch.frombuffer(bytearray(content.ljust(length, b"\0")), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.size)]
        try:
            work = dist.all_gather(found, own, group=self._group(), async_op=True)
        except RuntimeError:  # an earlier message has closed the connection
            raise self._lost(where) from None
        self._wait(work, where, _timeout if seconds is None else seconds)
        return [tensor.numpy().tobytes() for tensor in found]

    def _wait(self, work: Any, where: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            # short waits: a rank may wait for one that lives, and that has heard of a third one's end
            try:
                work.wait(timedelta(seconds=min(POLL_SECONDS, seconds)))
                return
            except RuntimeError:
                ended = work.is_completed()
            if ended:
                try:
                    work.wait()
                    return
                except RuntimeError:
                    raise self._lost(where) from None
            if self._others_have_lost():
                raise self._lost(where)
            if time.monotonic() >= deadline:
                raise self._late(where, seconds)

    # --- who has ended ---------------------------------------------------------------------------------------

    def _key(self, *words: object) -> str:
        return "/".join((self._prefix, *map(str, words)))

    def _others_have_lost(self) -> bool:
        try:
            return bool(self._store.check([self._key("lost")]))
        except RuntimeError:
            return True  # the store has ended with its rank

    def _lost(self, where: str) -> RankError:
        """The error of ranks that have lost connection: all that still live raise the same."""

        def text(missing: Sequence[int]) -> str:
            if not missing:
                return f"{where}: the connection between the ranks was lost; start all ranks again"
            return f"{where}: {_named(missing)} ended; start all ranks again"

        return self._agree(text, "here")

    def _late(self, where: str, seconds: float, absent: Sequence[int] | None = None) -> RankError:
        """The error of ranks that have waited too long, for `absent` or for those that do not wait themselves."""

        def text(missing: Sequence[int]) -> str:
            if not missing:
                return f"{where}: the ranks waited for each other for {seconds:g} s; start all ranks again"
            return (
                f"{where}: {_named(missing)} not come here within {seconds:g} s; all ranks have to call the same "
                "methods, and limpet.distributed.set_timeout sets a longer time"
            )

        return self._agree(text, "waited", absent)

    def _agree(self, text: Callable[[Sequence[int]], str], key: str, absent: Sequence[int] | None = None) -> RankError:
        """Agree on one message with all ranks that set `key`: the first one that is written is everybody's."""
        try:
            self._store.set(self._key("here", self.rank), "")
            self._store.set(self._key(key, self.rank), "")
            self._store.set(self._key("lost"), "")
            missing = self._missing(key, ANSWER_SECONDS, until="verdict") if absent is None else absent
            said = f"{missing[0] if missing else ''}\n{text(missing)}"
            verdict = self._store.compare_set(self._key("verdict"), "", said).decode()
            self._stay()
        except RuntimeError:  # the store has ended
            time.sleep(0 if self._heard else POLL_SECONDS)
            verdict = self._heard[0] if self._heard else "0\n" + text([0])
        rank, _, message = verdict.partition("\n")
        self.broken = RankError(message, int(rank) if rank else None)
        return self.broken

    def _stay(self) -> None:
        """Wait on rank 0, which usually hosts the store, until the others have the verdict from there."""
        with suppress(RuntimeError):
            self._store.set(self._key("heard", self.rank), "")
            if self.rank == 0:
                alive = [rank for rank in range(self.size) if self._store.check([self._key("here", rank)])]
                self._missing("heard", ANSWER_SECONDS, among=alive)

    def _missing(
        self, key: str, seconds: float, until: str | None = None, among: Iterable[int] | None = None
    ) -> list[int]:
        """The ranks that do not set their key in the store in this time, or before another key is set."""
        pause, deadline = 0.001, time.monotonic() + seconds
        missing = list(range(self.size) if among is None else among)
        while True:
            missing = [rank for rank in missing if not self._store.check([self._key(key, rank)])]
            over = time.monotonic() >= deadline or (until is not None and self._store.check([self._key(until)]))
            if not missing or over:
                return missing
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _answer(self) -> None:
        """Answer for a rank that computes, as long as it lives, when others ask in the store who does."""
        store = self._store.clone() if hasattr(self._store, "clone") else self._store
        with suppress(RuntimeError):  # the store has ended
            while not self._stop.wait(POLL_SECONDS):
                if store.check([self._key("lost")]):
                    store.set(self._key("here", self.rank), "")
                    break
            while not self._stop.wait(POLL_SECONDS / 10):
                if store.check([self._key("verdict")]):
                    self._heard.append(store.get(self._key("verdict")).decode())
                    store.set(self._key("heard", self.rank), "")
                    break

    def _all_here(self, place: str, value: str, operation: str) -> bool:
        """Wait until all ranks have set their key at a place on the way to the channel: new_group waits silently."""
        self._store.set(self._key(place, self.rank), value)
        absent = self._missing(place, _timeout)
        if absent:
            self._late(operation, _timeout, absent)
        elif self._store.check([self._key("lost")]):  # the others have waited too long for this rank
            self._lost(operation)
        return self.broken is None


_channel: Channel | None = None


def channel_for(rank: int, size: int, operation: str) -> Channel:
    """Return the channel of the default process group; the first call on all ranks creates it.

    Args:
        rank: The rank of this process.
        size: The number of ranks.
        operation: The operation that needs it, for error messages.

    Returns:
        The channel.
    """
    global _channel
    if _channel is None or not _channel.usable:
        _channel = Channel(rank, size, operation)
    return _channel


def _world() -> Any:
    return dist.group.WORLD


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _named(ranks: Iterable[int]) -> str:
    """Name ranks as the subject of a sentence in the perfect tense."""
    names = [str(rank) for rank in ranks]
    return f"rank {names[0]} has" if len(names) == 1 else f"ranks {', '.join(names)} have"


def _end(thread: weakref.ref[threading.Thread], stop: threading.Event) -> None:
    """End the answering thread before the interpreter does, which cannot end a thread inside the store's code."""
    stop.set()
    running = thread()
    if running is not None:
        running.join(timeout=2 * POLL_SECONDS)

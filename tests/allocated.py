"""What the allocator hands out, LAPACK's own room included, as PyTorch's profiler sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Allocated:
    """Bytes: the most at a time since the body began, and what is left of it at its end."""

    peak = 0
    left = 0


@contextmanager
def allocations() -> Iterator[Allocated]:
    """Known once the body has ended. What an earlier body allocated is seen when it is freed, other things are not."""
    found = Allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as watched:
        yield found
    assert watched.profiler is not None and watched.profiler.kineto_results is not None
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        found.left += event.nbytes()
        found.peak = max(found.peak, found.left)

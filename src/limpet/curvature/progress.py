"""A progress bar where tqdm is installed, and nothing where it is not."""

from __future__ import annotations

from typing import Any


class Progress:
    """Counts examples. A person at a terminal sees a bar after a second; a short pass shows nothing."""

    def __init__(self, total: int | None, *, show: bool) -> None:
        self._bar: Any = None
        if show:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc="limpet: curvature", unit=" examples", delay=1.0, leave=False)

    def update(self, count: int) -> None:
        """Count some more."""
        if self._bar is not None:
            self._bar.update(count)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()

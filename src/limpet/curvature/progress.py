"""Progress display of a long pass: a tqdm bar if tqdm is installed, a counter line otherwise."""

from __future__ import annotations

import sys
import time
from typing import Any

LABEL = "limpet: curvature"


class Progress:
    """Progress display that appears after one second, so that short passes show nothing.

    Args:
        total: Total count, if known.
        show: Whether to show anything.
        label: Text in front of the count.
        unit: Plural name of what is counted.
    """

    def __init__(self, total: int | None, *, show: bool, label: str = LABEL, unit: str = "examples") -> None:
        self._bar: Any = None
        if show:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                self._bar = CountingLine(total, label, unit)
            else:
                self._bar = tqdm(total=total, desc=label, unit=f" {unit}", delay=1.0, leave=False)

    def update(self, count: int) -> None:
        """Advance the display by `count` units."""
        if self._bar is not None:
            self._bar.update(count)

    def close(self) -> None:
        """Remove the display."""
        if self._bar is not None:
            self._bar.close()


class CountingLine:
    """Counter on one line of standard error, updated at most once per second, and only on a terminal.

    Args:
        total: Total count, if known.
        label: Text in front of the count.
        unit: Plural name of what is counted.
    """

    def __init__(self, total: int | None, label: str = LABEL, unit: str = "examples") -> None:
        self.label, self.unit = label, unit
        self.total = "" if total is None else f" of {total:,}"
        self.count = 0
        self._last = time.monotonic()
        self._shown = False

    def update(self, count: int) -> None:
        """Add `count` to the counter."""
        self.count += count
        now = time.monotonic()
        if now - self._last >= 1 and sys.stderr.isatty():
            self._last, self._shown = now, True
            sys.stderr.write(f"\r{self.label}: {self.count:,}{self.total} {self.unit}")
            sys.stderr.flush()

    def close(self) -> None:
        """Clear the line."""
        if self._shown:
            sys.stderr.write("\r" + " " * 79 + "\r")
            sys.stderr.flush()

"""Progress of a long pass: a bar by tqdm where it is installed, a counting line where it is not."""

from __future__ import annotations

import sys
import time
from typing import Any

LABEL = "limpet: curvature"


class Progress:
    """Counts examples, or something else. A person at a terminal sees it after a second; short work shows nothing."""

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
        """Count some more."""
        if self._bar is not None:
            self._bar.update(count)

    def close(self) -> None:
        """Take it away."""
        if self._bar is not None:
            self._bar.close()


class CountingLine:
    """One line on a terminal's standard error, written anew at most once a second."""

    def __init__(self, total: int | None, label: str = LABEL, unit: str = "examples") -> None:
        self.label, self.unit = label, unit
        self.total = "" if total is None else f" of {total:,}"
        self.count = 0
        self._last = time.monotonic()
        self._shown = False

    def update(self, count: int) -> None:
        """Count some more."""
        self.count += count
        now = time.monotonic()
        if now - self._last >= 1 and sys.stderr.isatty():
            self._last, self._shown = now, True
            sys.stderr.write(f"\r{self.label}: {self.count:,}{self.total} {self.unit}")
            sys.stderr.flush()

    def close(self) -> None:
        """Wipe the line."""
        if self._shown:
            sys.stderr.write("\r" + " " * 79 + "\r")
            sys.stderr.flush()

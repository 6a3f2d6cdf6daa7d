"""Progress display of a long pass, with and without tqdm."""

from __future__ import annotations

import io
import sys
import time

import pytest

from limpet.curvature import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("with_tqdm", [True, False])
def test_long_passes_are_shown_and_short_ones_are_not(with_tqdm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)  # as where it is not installed
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    short = progress.Progress(100, show=True)
    short.update(50)
    short.close()
    assert "examples" not in terminal.getvalue()
    long = progress.Progress(4000, show=True)
    time.sleep(1.1)
    long.update(1234)
    assert ("1,234 of 4,000 examples" if not with_tqdm else "1234/4000") in terminal.getvalue()
    long.close()
    silent = progress.Progress(4000, show=False)
    before = terminal.getvalue()
    silent.update(1)
    silent.close()
    assert terminal.getvalue() == before

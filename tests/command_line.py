"""The command line, run in the process of the test."""

from __future__ import annotations

import signal
import warnings

import pytest

from limpet import cli


def limpet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    monkeypatch.setattr("sys.argv", ["limpet", *words])
    monkeypatch.setattr(cli.console, "_width", 200)
    code, at_sigterm = 0, signal.getsignal(signal.SIGTERM)  # which a command changes for its process
    try:
        with warnings.catch_warnings():
            cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        signal.signal(signal.SIGTERM, at_sigterm)
    captured = capsys.readouterr()
    return code, captured.out, captured.err

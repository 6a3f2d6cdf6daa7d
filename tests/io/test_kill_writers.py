"""Processes that are killed while they write; `python tests/kill_writers.py --save 250 --pass 250` does it longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_killed_at_random_moments() -> None:
    script = Path(__file__).parents[1] / "kill_writers.py"
    command = [sys.executable, str(script), "--save", "30", "--pass", "20", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "kill_saves 30" in done.stdout and "passes bit-equal" in done.stdout

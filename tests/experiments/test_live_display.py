"""Test that the live display shows the state of the run."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
from rich.console import Console
from test_runner import recipe

from limpet.experiments import Recipe, run
from limpet.experiments.live_display import SHOWN, LiveDisplay
from limpet.experiments.methods import Method, Status


class Kept(LiveDisplay):
    """Every glance and every panel that was drawn."""

    def __init__(self, console: Console) -> None:
        super().__init__("a title", console)
        self.seen: list[tuple[Status, str]] = []

    def updated(self, task: int, epoch: int, done: int, total: int, method: Method) -> None:
        self._polled = self._drawn = -math.inf  # at every update, not once a second
        super().updated(task, epoch, done, total, method)
        self.seen.append((method.status(), shown(self)))


def shown(panel: LiveDisplay) -> str:
    text = io.StringIO()
    Console(file=text, width=120).print(panel.rendered())
    return text.getvalue()


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120)


@pytest.mark.parametrize("budget", [None, 0.02])
def test_the_panel_shows_accuracies_and_the_forecast_of_every_layer(tmp_path: Path, budget: float | None) -> None:
    chosen: Recipe = recipe(memory={"budget": budget})
    with Kept(terminal()) as panel:
        record = run(chosen, tmp_path / "run", watcher=panel)
    first, last = panel.seen[0], panel.seen[-1]
    assert first[0].forecast is None and "forecast" not in first[1]
    glance, text = last
    assert glance.forecast is not None and glance.penalty is not None and glance.forecast > 0
    assert sum(glance.blocks.values()) == pytest.approx(glance.forecast)
    for name, value in glance.blocks.items():
        assert re.search(rf"{re.escape(name)}.*{value:.4f} nats", text)
    for name, accuracy in zip(record.names, record.accuracy[1][:2], strict=False):  # task 3 is being learned
        assert re.search(rf"{re.escape(name)} .*{accuracy:.1f} %", text)
    assert f"rises by {glance.forecast:.4f} nats" in text and f"penalty {glance.penalty:.4f}" in text
    assert ("of the budget of 0.02" in text) is (budget is not None)
    if budget is not None:
        assert 0.5 * budget < glance.forecast <= 1.01 * budget


def test_of_many_tasks_the_oldest_and_the_newest_are_shown() -> None:
    panel = LiveDisplay("a title", terminal())
    panel._names = [f"task {i + 1}" for i in range(30)]
    panel._accuracy = [50.0 + i for i in range(30)]
    panel._status = Status(1.0, {f"layer {i}": i / 100 for i in range(30)}, None, 0.5)
    text = shown(panel)
    assert "task 6 " in text and "task 7 " not in text and "task 25 " in text and "79.0 %" in text
    assert "layer 29" in text and "layer 17 " not in text
    assert text.count(f"({30 - SHOWN} more)") == 2


def test_off_a_terminal_there_are_only_lines(tmp_path: Path) -> None:
    text = io.StringIO()
    with LiveDisplay("a title", Console(file=text, width=120)) as panel:
        record = run(recipe(), tmp_path / "run", watcher=panel)
    lines = text.getvalue().splitlines()
    assert lines[0] == "a title" and len(lines) == 1 + record.tasks
    assert all(f"mean of {i + 1}: {sum(record.accuracy[i][: i + 1]) / (i + 1):.1f} %" in lines[i + 1] for i in range(3))


def test_looking_on_changes_nothing(tmp_path: Path) -> None:
    with Kept(terminal()) as panel:
        watched = run(recipe(), tmp_path / "watched", watcher=panel)
    alone = run(recipe(), tmp_path / "alone")
    assert watched.accuracy == alone.accuracy and watched.nll == alone.nll
    files = [(tmp_path / name / "memory.safetensors").read_bytes() for name in ("watched", "alone")]
    assert files[0] == files[1]

"""The page of results/repair says what its records say."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import benchmark

README = Path(__file__).parents[2] / "README.md"
PAGE = README.parent / "results" / "repair" / "README.md"


def test_the_tables_are_those_of_the_records() -> None:
    found = benchmark("repair_figures").tables()
    assert len(found) >= 5
    text = PAGE.read_text()
    for table in found:
        assert table in text, "python -m benchmarks repair_figures prints the tables"


def test_mnist_comes_back_in_every_case() -> None:
    points = benchmark("repair_figures").points("mnist")
    assert {(p["case"], p["seed"]) for p in points} == {(c, s) for c in ("permuted", "fashion") for s in (0, 1, 2)}
    for p in points:
        best = p["best repair"]
        assert best["new"] <= 1.1 * p["tuned"]["new"] and best["old"] <= 0.2
        assert best["old"] <= 0.5 * p["best scale"]["old"]


def test_a_language_model_keeps_most_of_both() -> None:
    points = [
        p for p in benchmark("repair_figures").points("language") if p["kind"] == "lora" and p["source"] == "self"
    ]
    for seed in {p["seed"] for p in points}:
        own = [p for p in points if p["seed"] == seed]
        (tuned,) = (p for p in own if p["what"] == "tuned")
        (default,) = (p for p in own if p["what"] == "repair" and p["at"] == 1 and p["scale"] == 1)
        assert default["drift"] <= 0.16 and default["new"] <= tuned["new"] + 0.03
        further = [p for p in own if p["what"] == "scale" and p["drift"] >= default["drift"]]
        assert (
            min(p["new"] for p in own if p["what"] == "scale" and p["drift"] <= default["drift"]) > default["new"] + 0.1
        )
        assert further


def test_a_fine_tune_of_all_weights_keeps_most_of_both() -> None:
    """At strength 0.3; strength 1 costs 0.05 nats of the new text, and leaves half as much drift."""
    points = [p for p in benchmark("repair_figures").points("language") if p["kind"] == "full"]
    assert {p["seed"] for p in points} == {0, 1, 2}
    for seed in (0, 1, 2):
        own = [p for p in points if p["seed"] == seed]
        (tuned,) = (p for p in own if p["what"] == "tuned")
        (found,) = (p for p in own if p["what"] == "repair" and p["at"] == 0.3)
        assert found["drift"] <= 0.06 and found["new"] <= tuned["new"] + 0.03
        assert min(p["new"] for p in own if p["what"] == "scale" and p["drift"] <= found["drift"]) > found["new"] + 0.1


def test_an_encoder_has_its_old_task_back() -> None:
    points = benchmark("repair_figures").points("sentences")
    for seed, rate in {(p["seed"], p["rate"]) for p in points}:
        own = [p for p in points if (p["seed"], p["rate"]) == (seed, rate)]
        (tuned,) = (p for p in own if p["what"] == "tuned")
        default = [p for p in own if p["what"] == "repair" and p["at"] == 1]
        if not default:
            pytest.skip("not all points are there yet")
        assert default[0]["old"][0] > tuned["old"][0] + 10


def test_the_readme_has_the_means_of_the_records() -> None:
    figures = benchmark("repair_figures")
    sentences = [p for p in figures.points("sentences") if p["rate"] == "1e-4"]
    text = " ".join(README.read_text().split())

    def means(value: Callable[[Any], float]) -> tuple[str, ...]:
        found = [[value(p) for p in sentences if (p["what"], p["at"]) == one] for one in (("tuned", 0), ("repair", 1))]
        return tuple(f"{statistics.mean(some):.1f}" for some in found)

    before = f"{statistics.mean(p['before'][0] for p in sentences if p['what'] == 'tuned'):.1f}"
    (tuned, repaired), (alone, both) = means(lambda p: p["old"][0]), means(lambda p: p["new"][0])
    assert f"falls from {before} % to {tuned}, a repair with the defaults brings it back to {repaired}" in text
    assert f"the second task ends at {both} % instead of {alone}" in text


def test_what_exact_diagonals_gain_in_a_repair() -> None:
    ekfac = benchmark("repair_ekfac")
    records = ekfac.common.read_records(ekfac.RESULTS)
    text = (PAGE.parents[2] / "docs" / "decisions" / "0035-exact-diagonals.md").read_text()
    assert ekfac.table(records) in text, "python -m benchmarks repair_ekfac --draw"
    lines = [line.split("|") for line in ekfac.table(records).splitlines()[2:]]
    gains = [cells[-2].strip() for cells in lines if cells[1].strip() == "diagonal"]
    assert gains == ["0.91", "0.87", "0.62", "outside"] and "by 9 and 13 %" in text and "by 38 %" in text

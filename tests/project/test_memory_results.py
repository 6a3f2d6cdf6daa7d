"""The page of results/memory says what its records say."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from conftest import benchmark

PAGE = Path(__file__).parents[2] / "results" / "memory" / "README.md"


def test_the_tables_are_those_of_the_records() -> None:
    ranks, one_pass = benchmark("memory_ranks"), benchmark("memory_pass")
    text = PAGE.read_text()
    assert ranks.table(ranks.common.read_records(ranks.RESULTS / "ranks.jsonl")) in text
    records = one_pass.common.read_records(one_pass.RESULTS)
    assert one_pass.table(records) in text
    steps = ranks.common.read_records(ranks.RESULTS / "steps.jsonl")
    assert ranks.step_table(steps) in text
    assert [round(steps[1][name], 2) for name in ("every step", "every 4 steps")] == [1.14, 1.03]
    (former,) = (p for p in records if "former" in p)
    bare, complete, small = ({p["rank"]: p for p in records if p is not former}[rank] for rank in (-1, 0, 128))
    time, peak = (lambda p: p["seconds"]["total"]), (lambda p: p["peak_gb"])
    assert [round(time(p) / time(former), 2) for p in (small, complete, bare)] == [0.32, 0.44, 0.17]
    assert [round(peak(p) / peak(former), 2) for p in (small, bare)] == [0.45, 0.24]
    assert round(small["seconds"]["pass"] / bare["seconds"]["total"], 1) == 1.2
    assert small["seconds"]["update"] / complete["seconds"]["update"] == pytest.approx(0.25, abs=0.03)
    assert small["seconds"]["curve"] / complete["seconds"]["curve"] == pytest.approx(0.75, abs=0.03)


def test_what_the_page_says_about_sizes_and_drift() -> None:
    ranks = benchmark("memory_ranks")
    points = ranks.common.read_records(ranks.RESULTS / "ranks.jsonl")
    sizes = {p["memory"]: p["bytes"] / (2 * p["weights"]) for p in points}
    small, found = "59 MB of curvature, int8", ranks.ratios(points)
    assert sizes[small] <= 0.25
    assert len(found[small][1.0]) == 3
    for strength in ranks.COMPARED:
        assert mean(found[small][strength]) <= 1.03 and max(found[small][strength]) < 1.065
        assert found[small][strength][0] == pytest.approx(found["rank 256"][strength][0], abs=0.02)
    assert sizes["rank 8"] < 0.05
    assert [round(found["rank 8"][strength][0], 2) for strength in ranks.COMPARED] == [1.11, 1.25]
    assert all(found["rank 512"][strength][0] < 1 for strength in ranks.COMPARED)
    by_energy = found[ranks.FORMER[1]]  # decision 26
    assert [round(by_energy[strength][0], 1) for strength in ranks.COMPARED] == [1.7, 2.0]


def test_what_the_page_says_about_fifty_tasks() -> None:
    ranks = benchmark("memory_ranks")
    found = {p["energy"]: p for p in ranks.common.read_records(ranks.RESULTS / "permuted_mnist.jsonl")}
    assert {energy: round(p["mean_accuracy"], 1) for energy, p in found.items()} == {0.99: 90.7, 0.9: 90.6}
    assert {energy: round(p["file_bytes"] / 1e6, 1) for energy, p in found.items()} == {0.99: 3.2, 0.9: 2.3}
    runs = ranks.common.read_records(ranks.common.RESULTS / "permuted-mnist-50" / "runs.jsonl")
    (complete,) = (
        run["accuracy"][-1]
        for run in runs
        if (run["recipe"]["method"], run["recipe"]["structure"]) == ("online-laplace", "kronecker")
        and (run["recipe"]["memory"]["strength"], run["recipe"]["seed"]) == (2.0, 0)
    )
    gaps = [mean(complete) - found[energy]["mean_accuracy"] for energy in (0.99, 0.9)]
    assert [round(gap, 1) for gap in gaps] == [0.2, 0.3]


def test_an_encoder_protected_by_ranks_of_0_99_of_the_energy() -> None:
    experiment = benchmark("protect_sentences")
    points = [p for p in experiment.common.read_records(experiment.RESULTS) if p["rate"] == "1e-4"]
    small, complete = (
        [p for p in points if p["what"] == what] for what in ("protect, energy 0.99", "protect, 0.04 nats")
    )
    assert len(small) == len(complete) == 3
    for score in (lambda p: p["new"][0], lambda p: p["old"][0] - p["before"][0]):
        assert abs(mean(map(score, small)) - mean(map(score, complete))) <= 0.3
    assert [round(min(p["bytes"] for p in some) / 1e6) for some in (small, complete)] == [208, 334]
    assert "ends at 96.5 % on the new task and 0.1 points" in " ".join(PAGE.read_text().split())

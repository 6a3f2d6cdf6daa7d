"""The page of results/sentences says what its records say."""

from __future__ import annotations

from pathlib import Path

from conftest import benchmark

PAGE = Path(__file__).parents[2] / "results" / "sentences" / "README.md"


def test_the_tables_are_those_of_the_records() -> None:
    sentences = benchmark("sentences")
    runs = sentences.common.read_records(sentences.RESULTS)
    for rate in sentences.RATES:
        assert sentences.table(runs, rate) in PAGE.read_text(), "python -m benchmarks sentences --draw"


def test_the_earlier_tasks_are_retained_and_the_last_is_learned() -> None:
    sentences = benchmark("sentences")
    runs = {(r["what"], r["rate"], r["seed"]): r for r in sentences.common.read_records(sentences.RESULTS)}
    protected = {key[1:]: run for key, run in runs.items() if key[0] == "protect"}
    assert {rate for rate, _ in protected} == set(sentences.RATES)
    for key, run in protected.items():
        plain = runs[("plain", *key)]
        assert sentences.largest_loss(run) <= 3.8 < 20 < sentences.largest_loss(plain)
        assert plain["accuracy"][-1][-1] - run["accuracy"][-1][-1] <= 1.8
    before = {rate: runs["protect, refit off", rate, 0]["accuracy"][-1][-1] for rate in ("1e-4", "2e-4")}
    assert all(84 <= accuracy < 84.5 for accuracy in before.values())

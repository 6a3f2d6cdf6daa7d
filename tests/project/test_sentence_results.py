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
    protected = {key: run for key, run in runs.items() if key[0] in ("protect", "protect, 0.04 nats")}
    assert {key[1:] for key in protected} == {(rate, seed) for rate in sentences.RATES for seed in range(3)}
    for key, run in protected.items():
        plain = runs[("plain", *key[1:])]
        assert sentences.largest_loss(run) <= 3.8 < 20 < sentences.largest_loss(plain)
        assert plain["accuracy"][-1][-1] - run["accuracy"][-1][-1] <= 1.8
    before = {rate: runs["protect, refit off", rate, 0]["accuracy"][-1][-1] for rate in ("1e-4", "2e-4")}
    assert all(84 <= accuracy < 84.5 for accuracy in before.values())


def test_a_head_that_is_fitted_again_is_what_the_repair_was_missing() -> None:
    new_head = benchmark("new_head")
    records = new_head.common.read_records(new_head.RESULTS)
    page = PAGE.parents[2] / "docs" / "decisions" / "0031-new-output-layer.md"
    assert new_head.table(records) in page.read_text(), "python -m benchmarks new_head --draw"
    third = {record["what"]: record["accuracy"][2] for record in records}
    kept = third["head as trained"]
    assert all(abs(third[f"head as trained, {what}"] - kept) < 1 for what in ("Gaussian curvature", "all rows"))
    gains = [third[what] - kept for what in ("head as trained, curvature halfway", "tuned", "head fitted again")]
    assert [f"{gain:.2f}" for gain in gains] == ["5.00", "16.75", "13.75"]


def test_a_tenth_of_what_there_is_to_lose_is_a_budget_that_retains_a_weak_task() -> None:
    weak_task = benchmark("weak_task")
    records = weak_task.common.read_records(weak_task.RESULTS)
    page = (PAGE.parents[2] / "docs" / "decisions" / "0032-drift-and-information.md").read_text()
    assert weak_task.table(records) in page, "python -m benchmarks weak_task --draw"
    (known,) = {record["information"] for record in records}
    (before,) = {record["before"] for record in records}
    assert f"{known:.2f} nats on its probe" in page and f"{before:.1f} % of the reviews" in page
    lost = {budget: max(before - r["old"] for r in records if r["budget"] == budget) for budget in weak_task.BUDGETS}
    assert lost[0.01] < 2 < lost[0.005] < 4 < 9 < lost[0.04]  # a tenth is between the last two budgets

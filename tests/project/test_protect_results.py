"""The page of results/protect says what its records say."""

from __future__ import annotations

from pathlib import Path

from conftest import benchmark

PAGE = Path(__file__).parents[2] / "results" / "protect" / "README.md"


def test_the_tables_are_those_of_the_records() -> None:
    sentences = benchmark("protect_sentences")
    points = sentences.common.read_records(sentences.RESULTS)
    for rate in sentences.RATES:
        assert sentences.table(points, rate) in PAGE.read_text(), "python -m benchmarks protect_sentences --draw"


def test_protection_keeps_the_old_task_and_learns_the_new_one() -> None:
    sentences = benchmark("protect_sentences")
    points = sentences.common.read_records(sentences.RESULTS)
    protected = [p for p in points if p["what"] == "protect"]
    assert protected
    for p in protected:
        (plain,) = (q for q in points if (q["seed"], q["rate"], q["what"]) == (p["seed"], p["rate"], "plain"))
        assert p["old"][0] > p["before"][0] - 5  # one of six loses more than 4 points
        assert p["new"][0] > plain["new"][0] - 6


def test_budgets_are_kept_on_the_probe_and_nearly_on_other_texts() -> None:
    sentences = benchmark("protect_sentences")
    points = [p for p in sentences.common.read_records(sentences.RESULTS) if p["what"].startswith("budget")]
    for p in points:
        budget = float(p["what"].split()[1])
        assert p["end"]["drift"] <= budget and p["drift_test"][0] < 1.8 * budget


def test_no_forecast_of_a_transformer_is_trusted() -> None:
    sentences = benchmark("protect_sentences")
    moments = [m for p in sentences.common.read_records(sentences.RESULTS) for m in p.get("moments", ())]
    assert len(moments) > 30 and not any(moment["trusted"] for moment in moments)

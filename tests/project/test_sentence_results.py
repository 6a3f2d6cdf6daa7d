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
        ends = {run["what"]: run["accuracy"] for run in runs if run["rate"] == rate}
        assert ends["plain"][-1][-1] - ends["protect"][-1][-1] <= 1.5
        assert all(
            sentences.largest_loss(run) <= 3.5 for run in runs if (run["rate"], run["what"]) == (rate, "protect")
        )

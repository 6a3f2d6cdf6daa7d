"""The page of results/memory says what its records say."""

from __future__ import annotations

from pathlib import Path

from conftest import benchmark

PAGE = Path(__file__).parents[2] / "results" / "memory" / "README.md"


def test_the_tables_are_those_of_the_records() -> None:
    ranks, one_pass = benchmark("memory_ranks"), benchmark("memory_pass")
    text = PAGE.read_text()
    assert ranks.table(ranks.common.read_records(ranks.RESULTS / "ranks.jsonl")) in text
    assert one_pass.table(one_pass.common.read_records(one_pass.RESULTS)) in text


def test_what_the_page_says_about_sizes_and_drift() -> None:
    ranks = benchmark("memory_ranks")
    points = ranks.common.read_records(ranks.RESULTS / "ranks.jsonl")
    sizes = {p["memory"]: p["bytes"] / (2 * p["weights"]) for p in points}
    assert sizes["rank 96"] <= 0.25 < sizes["rank 128"]

    def ratio(name: str, strength: float) -> float:
        return ranks.at_equal_loss(points, 0, name, strength) - 1  # type: ignore[no-any-return]

    assert abs(ratio("rank 128", 1.0)) < 0.01 and round(ratio("rank 128", 3.0), 2) == 0.08
    assert (round(ratio("rank 96", 1.0), 2), round(ratio("rank 96", 3.0), 2)) in {(0.04, 0.12), (0.05, 0.12)}
    assert (round(ratio(ranks.FORMER[0], 1.0), 2), round(ratio(ranks.FORMER[0], 3.0), 2)) == (0.3, 0.61)

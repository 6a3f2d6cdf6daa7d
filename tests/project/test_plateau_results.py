"""Decision 36 says what the records of ideas against the plateau say."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from conftest import benchmark

PAGE = Path(__file__).parents[2] / "docs" / "decisions" / "0036-plateau.md"


def test_the_table_is_that_of_the_records() -> None:
    benchmark("common")  # puts the folder on the path
    plateau = import_module("plateau")

    def means(experiment: str) -> dict[str, Any]:
        records = plateau.common.read_records(plateau.common.RESULTS / experiment / "ideas.jsonl")
        return {r["idea"]: r["mean"] for r in records if r["seed"] == 0 and r.get("asked") is None}

    permuted, digits = means("permuted-mnist-50"), means("disjoint-mnist")
    assert set(digits) == set(plateau.IDEAS) and set(permuted) < set(digits)
    for idea, mean in digits.items():
        other = f"{permuted[idea]:.2f}" if idea in permuted else "not run"
        assert f"| {idea} | {other} | {mean:.2f} |" in PAGE.read_text()
    assert max(permuted.values()) < permuted["as it is"] + 0.5
    better = {idea for idea, mean in digits.items() if mean > digits["as it is"] + 0.5}
    assert better == {"distillation on Gaussian inputs", "distillation on Gaussian inputs, weight 0.1"}

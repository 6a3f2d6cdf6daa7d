"""Decision 36 says what the records of ideas against the plateau say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # as `python -m benchmarks` does

import common
import plateau

PAGE = Path(__file__).parents[2] / "docs" / "decisions" / "0036-plateau.md"


def test_the_table_is_that_of_the_records() -> None:
    def means(experiment: str) -> dict[str, Any]:
        records = common.read_records(common.RESULTS / experiment / "ideas.jsonl")
        return {r["idea"]: r["mean"] for r in records if r["seed"] == 0 and r.get("asked") is None}

    permuted, digits = means("permuted-mnist-50"), means("disjoint-mnist")
    assert set(digits) == set(plateau.IDEAS) and set(permuted) < set(digits)
    for idea, mean in digits.items():
        other = f"{permuted[idea]:.2f}" if idea in permuted else "not run"
        assert f"| {idea} | {other} | {mean:.2f} |" in PAGE.read_text()
    assert max(permuted.values()) < permuted["as it is"] + 0.5
    better = {idea for idea, mean in digits.items() if mean > digits["as it is"] + 0.5}
    assert better == {"distillation on Gaussian inputs", "distillation on Gaussian inputs, weight 0.1"}

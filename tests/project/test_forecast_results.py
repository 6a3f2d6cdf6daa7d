"""The page of results/forecast says what its records say."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import benchmark

PAGE = Path(__file__).parents[2] / "results" / "forecast" / "README.md"


def test_the_table_is_that_of_the_records() -> None:
    forecast = benchmark("forecast")
    records = [json.loads(path.read_text()) for path in sorted(PAGE.parent.glob("*.json"))]
    for line in forecast.table(records).splitlines():
        assert line in PAGE.read_text(), "python -m benchmarks forecast --draw"


def test_forecasts_hold_on_small_networks() -> None:
    forecast = benchmark("forecast")
    found = forecast.numbers(json.loads((PAGE.parent / "permuted-mnist.json").read_text()))
    assert found["trusted (%)"] > 95 and found["lost more than 2.5 times the forecast, trusted (%)"] < 5
    assert found["drift: median relative error"] < 0.35 and found["drift: within a factor of 2.5 (%)"] > 90

"""The page of results/protect says what its records say."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import benchmark

PAGE = Path(__file__).parents[2] / "results" / "protect" / "README.md"


@pytest.mark.parametrize("name", ["protect_sentences", "protect_vision"])
def test_the_tables_are_those_of_the_records(name: str) -> None:
    experiment, rivals = benchmark(name), benchmark("rivals")
    points = experiment.common.read_records(experiment.RESULTS)
    for rate in experiment.RATES:
        assert rivals.table(points, rate, experiment.COLUMNS) in PAGE.read_text(), f"python -m benchmarks {name} --draw"
    assert rivals.summary(points) in PAGE.read_text()


@pytest.mark.parametrize("name", ["protect_sentences", "protect_vision"])
def test_protection_keeps_the_old_task_and_learns_the_new_one(name: str) -> None:
    experiment = benchmark(name)
    points = experiment.common.read_records(experiment.RESULTS)
    plain = {(p["seed"], p["rate"]): p["new"][0] for p in points if p["what"] == "plain"}
    protected = [p for p in points if p["what"] == "protect"]
    lost = [plain[p["seed"], p["rate"]] - p["new"][0] for p in protected]
    assert len(protected) == 9 and all(p["old"][0] > p["before"][0] - 4 for p in protected)
    assert max(lost) <= (1 if name == "protect_vision" else 2)


@pytest.mark.parametrize("name", ["protect_sentences", "protect_vision"])
def test_budgets_are_kept_on_the_probe_and_nearly_on_other_examples(name: str) -> None:
    experiment = benchmark(name)
    points = [p for p in experiment.common.read_records(experiment.RESULTS) if p["what"].startswith("budget")]
    over = []
    for p in points:
        budget = float(p["what"].split()[1])
        assert p["end"]["drift"] <= budget
        if p["drift_test"][0] > 1.5 * budget:
            over.append((budget, p["drift_test"][0] / budget))
    assert len(points) == 27 and len(over) <= 3 * (name == "protect_sentences")
    assert all(budget == 0.01 and ratio < 2.15 for budget, ratio in over)


def test_a_small_budget_is_cheap_on_the_encoder() -> None:
    experiment = benchmark("protect_sentences")
    points = {(p["what"], p["rate"], p["seed"]): p for p in experiment.common.read_records(experiment.RESULTS)}
    small = {key[1:]: p for key, p in points.items() if key[0] == "budget 0.01"}
    lost = sorted(points[("plain", *key)]["new"][0] - p["new"][0] for key, p in small.items())
    assert len(small) == 9 and all(p["old"][0] >= p["before"][0] - 1 for p in small.values())
    assert lost[-1] == 3 and lost[-2] <= 1


def test_the_language_model_under_protection() -> None:
    experiment = benchmark("protect_language")
    points = experiment.common.read_records(experiment.RESULTS)
    for kind, cost in (("lora", 0.06), ("full", 0.04)):
        assert experiment.table(points, kind) in PAGE.read_text(), "python -m benchmarks protect_language --draw"
        ends = {p["what"]: p for p in points if p["kind"] == kind}
        assert ends["protect"]["drift"] < ends["plain"]["drift"] / 10
        assert ends["protect"]["new"] - ends["plain"]["new"] == pytest.approx(cost, abs=0.005)
        for budget in (0.01, 0.03, 0.1):
            assert ends[f"budget {budget}"]["drift"] <= budget
    rehearsed, protected = (
        next(p for p in points if (p["kind"], p["what"]) == ("lora", what)) for what in ("self-rehearsal", "protect")
    )
    assert rehearsed["drift"] < protected["drift"] and rehearsed["old"] - protected["old"] > 0.08
    assert protected["new"] - rehearsed["new"] == pytest.approx(0.04, abs=0.005)
    for kind, above, ratio in (("lora", 0.034, 2.6), ("full", 0.152, 3.3)):
        ends = {p["what"]: p for p in points if p["kind"] == kind}
        distilled, protected = ends["distillation"], ends["protect"]
        assert distilled["new"] - protected["new"] == pytest.approx(above, abs=0.001)
        assert distilled["drift"] / protected["drift"] == pytest.approx(ratio, abs=0.05)
    assert protected["new"] - ends["self-rehearsal"]["new"] == pytest.approx(0.02, abs=0.005)
    assert ends["replay"]["old"] < ends["plain"]["old"] - 0.1
    assert ends["replay"]["new"] - ends["plain"]["new"] == pytest.approx(0.12, abs=0.005)
    times = {p["kind"]: p["ratio"] for p in points if p["what"] == "time of a step"}
    assert {kind: round(ratio, 2) for kind, ratio in times.items()} == {"lora": 0.98, "full": 1.02}
    moments = [m for p in points for m in p.get("moments", ())]
    assert len(moments) == 9 and not any(m["trusted"] for m in moments)
    assert all(15 < m["forecast_drift"] / m["drift"] < 49 for m in moments)
    assert all(0.42 < m["quadratic"] / m["drift"] < 1.7 for m in moments)


@pytest.mark.parametrize("name", ["protect_sentences", "protect_vision"])
def test_no_forecast_under_adam_is_trusted(name: str) -> None:
    experiment = benchmark(name)
    moments = [m for p in experiment.common.read_records(experiment.RESULTS) for m in p.get("moments", ())]
    assert len(moments) > 80 and not any(moment["trusted"] for moment in moments)

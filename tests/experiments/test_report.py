"""Test that figures and tables reproduce the run records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from limpet.errors import LimpetError
from limpet.experiments import Recipe, Record
from limpet.experiments.figures import _statistic
from limpet.experiments.record import Curve, RunFolder, Seconds, load_record, summarised
from limpet.experiments.report import report, table
from limpet.experiments.results import gather
from limpet.experiments.settings import checked

ROWS = [[90.0, 20.0], [80.0, 92.0, 10.0], [70.0, 85.0, 94.0]]


def record(
    method: str, structure: str | None, strength: float | str, seed: int, shift: float = 0.0, **more: Any
) -> Record:
    recipe = checked(
        Recipe,
        {
            "experiment": more.pop("experiment", "permuted-mnist"),
            "tasks": 3,
            "method": method,
            "structure": structure,
            "seed": seed,
            "memory": {"strength": strength},
            "training": {"epochs": more.pop("epochs_asked", 5)},
        },
        "test",
    )
    rows = [[value + shift for value in row] for row in ROWS]
    made = Record(
        recipe=recipe,
        experiment=f"{recipe.experiment}-3",
        names=["a", "b", "c"],
        untrained=[10.0] * 3,
        accuracy=rows,
        nll=[[0.5] * len(row) for row in rows],
        calibration=[[1.0] * len(row) for row in rows],
        epochs=[1, 1, 1],
        seconds=Seconds(training=[1.0, 2.0, 3.0], curvature=[0.5] * 3, evaluation=[0.1] * 3),
        kept_bytes=0 if structure is None else 2_000_000,
        **more,
    )
    return made.model_copy(update={"metrics": summarised(made)})


def write(folder: Path, records: list[Record]) -> Path:
    for number, one in enumerate(records):
        place = RunFolder(folder / f"run{number}")
        place.begin(one.recipe)
        place.save_record(one)
    return folder


def some_records() -> list[Record]:
    made = [
        record("online-laplace", "kronecker", strength, seed, shift=shift + seed / 10)
        for strength, shift in ((1.0, -5.0), (3.0, 0.0), (10.0, -3.0))
        for seed in (0, 1)
    ]
    made.append(record("online-laplace", "kronecker", 30.0, 0, shift=4.0))  # better, but one seed only
    made += [record("online-laplace", "diagonal", s, 0, shift=-10 - s / 10) for s in (1.0, 10.0)]
    made += [record("online-laplace", "diagonal", 1.0, 0, shift=-9.0 - e, epochs_asked=e) for e in (2, 3)]
    return [*made, record("fine-tuning", None, 1.0, 0, shift=-30.0), record("joint", None, 1.0, 0, shift=2.0)]


def test_the_best_of_those_with_most_seeds_stands_for_a_method(tmp_path: Path) -> None:
    (experiment,) = gather([write(tmp_path / "runs", some_records())])
    assert experiment.key == "permuted-mnist-3"
    best = experiment.best("online-laplace/kronecker")
    assert best.strength == 3 and best.scores == pytest.approx([83.0, 83.1])
    assert best.mean == pytest.approx(83.05) and best.spread == pytest.approx(0.1 / 2**0.5)
    assert experiment.labels() == ["joint", "online-laplace/kronecker", "online-laplace/diagonal", "fine-tuning"]
    assert _statistic(best, min) == ([1, 2, 3], pytest.approx([90.05, 80.05, 70.05]))


def test_a_table_also_shows_strengths_that_the_memory_chose(tmp_path: Path) -> None:
    made = [*some_records(), record("online-laplace", "kronecker", "auto", 0, shift=1.0)]
    (experiment,) = gather([write(tmp_path / "runs", made)])
    shown = [(row.label, row.strength_text, round(row.mean, 2)) for row in experiment.rows()]
    assert shown[:3] == [
        ("joint", "1", 85.0),
        ("online-laplace/kronecker", "auto", 84.0),
        ("online-laplace/kronecker", "3", 83.05),  # which stands for the method
    ]
    assert [row.label for row in experiment.rows()[3:]] == experiment.labels()[2:]
    assert experiment.best("online-laplace/kronecker").strength == 3


def test_report_writes_everything_and_again_from_its_own_records(tmp_path: Path) -> None:
    runs, out = write(tmp_path / "runs", some_records()), tmp_path / "results"
    page = out / "permuted-mnist-3" / "README.md"
    page.parent.mkdir(parents=True)
    page.write_text("Before.\n\n<!-- table -->\nold\n<!-- /table -->\n\nAfter.\n")
    written = report([runs], out)
    assert len((page.parent / "runs.jsonl").read_text().splitlines()) == len(some_records())
    for name in ("runs.jsonl", "accuracy.png", "strength.png", "strengths.png", "table.md"):
        assert page.parent / name in written
    assert "old" not in page.read_text() and page.read_text().startswith("Before.") and "After." in page.read_text()
    summary = json.loads((out / "summary.json").read_text())["permuted-mnist-3"]
    assert summary["online-laplace/kronecker"] == {"mean": 83.05, "seeds": [83.0, 83.1]}
    assert summary["joint"] == {"mean": 85.0, "seeds": [85.0]}
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    report([out], out)
    after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert after == before


def test_results_of_the_older_form_are_read_and_become_one_file(tmp_path: Path) -> None:
    out, place = tmp_path / "results", tmp_path / "results" / "permuted-mnist-3"
    report([write(tmp_path / "runs", some_records())], out)
    lines = (place / "runs.jsonl").read_text().splitlines()
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    (place / "runs").mkdir()
    for number, line in enumerate(lines):
        (place / "runs" / f"{number}.json").write_text(line)
    (place / "runs.jsonl").unlink()
    report([out], out)
    assert not list((place / "runs").iterdir())
    assert {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()} == before
    (place / "runs.jsonl").write_text(lines[0] + "\n{broken\n")
    with pytest.raises(LimpetError, match=r"runs\.jsonl, line 2 is not a valid run record"):
        report([out], out)


def test_runs_are_added_to_results_and_newer_ones_replace_older(tmp_path: Path) -> None:
    out = tmp_path / "results"
    first, again = record("si", None, 1.0, 0), record("si", None, 1.0, 0, shift=-20.0)
    report([write(tmp_path / "first", [first])], out)
    report([write(tmp_path / "other", [record("joint", None, 1.0, 0)])], out)
    assert set(json.loads((out / "summary.json").read_text())["permuted-mnist-3"]) == {"si", "joint"}
    report([write(tmp_path / "again", [again])], out)
    summary = json.loads((out / "summary.json").read_text())["permuted-mnist-3"]
    assert summary["si"]["seeds"] == [63.0] and summary["joint"]["seeds"] == [83.0]
    assert len((out / "permuted-mnist-3" / "runs.jsonl").read_text().splitlines()) == 2


def test_table(tmp_path: Path) -> None:
    (experiment,) = gather([write(tmp_path / "runs", some_records())])
    lines = table(experiment).splitlines()
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    # forgetting: a fell from 90 to 70, b from 92 to 85
    expected = [
        "online-laplace/kronecker",
        "3",
        "1",
        "70.0",
        "85.0",
        "94.0",
        "83.05 ± 0.07",
        "2",
        "13.5",
        "0.500",
        "1.0",
    ]
    assert cells == [*expected, "2.0 MB", "8"]
    assert lines[2].startswith("| joint |  | 1 | 72.0 |")


def test_curves_of_the_vision_figure(tmp_path: Path) -> None:
    curve = [Curve(task=t, epoch=1, accuracy=[90.0 - t] * (t + 1)) for t in range(3)]
    made = [
        record(m, s, 1.0, 0, experiment="vision", curve=curve)
        for m, s in (("online-laplace", "kronecker"), ("si", None))
    ]
    made.append(record("one-network-per-task", None, 1.0, 0, experiment="vision"))
    written = report([write(tmp_path / "runs", made)], tmp_path / "results")
    assert tmp_path / "results" / "vision-3" / "training.png" in written


def test_what_is_not_a_record_is_said(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(LimpetError, match="recipe: Field required"):
        gather([tmp_path])
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(LimpetError, match="is not a valid run record"):
        load_record(tmp_path / "run.json")
    (tmp_path / "run.json").unlink()
    with pytest.raises(LimpetError, match="no finished runs found in"):
        gather([tmp_path])

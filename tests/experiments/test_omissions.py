"""Test that a report names every run that is not in its tables."""

from __future__ import annotations

from pathlib import Path

from test_report import record, some_records, write
from typer.testing import CliRunner

from limpet import cli
from limpet.experiments.omissions import omissions
from limpet.experiments.record import RunFolder
from limpet.experiments.results import gather


def test_settings_that_the_table_does_not_show_are_listed_with_their_scores(tmp_path: Path) -> None:
    runs = write(tmp_path / "runs", some_records())
    kronecker, diagonal = omissions(gather([runs]), [runs])
    start = "permuted-mnist-3, online-laplace/kronecker: the table shows 83.05 % from 2 seeds, the best mean of"
    assert kronecker.startswith(start)
    assert kronecker.endswith(
        "not memory.strength=1.0 (78.05 % from 2 seeds); memory.strength=10.0 (80.05 % from 2 seeds); "
        "memory.strength=30.0 (87.00 % from 1 seed)"
    )
    assert "online-laplace/diagonal" in diagonal and "training.epochs=3" in diagonal


def test_unfinished_and_replaced_runs_are_listed(tmp_path: Path) -> None:
    first = write(tmp_path / "first", [record("si", None, 1.0, 0), record("joint", None, 1.0, 0)])
    second = write(tmp_path / "second", [record("si", None, 1.0, 0, shift=-20.0), record("joint", None, 1.0, 0)])
    RunFolder(second / "run7").begin(record("si", None, 1.0, 3).recipe)
    assert omissions(gather([first, second]), [first, second]) == [
        f"{second / 'run7'}: not finished, continue it with --resume",
        f"{first / 'run0'}: has the same settings and seed as {second / 'run0'}, which is reported instead",
    ]
    assert omissions(gather([first]), [first, first]) == []


def test_the_command_prints_them(tmp_path: Path) -> None:
    runs = write(tmp_path / "runs", [record("si", None, strength, 0) for strength in (1.0, 2.0)])
    RunFolder(runs / "half").begin(record("si", None, 1.0, 3).recipe)
    done = CliRunner().invoke(cli.app, ["report", str(runs), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    told = [line for line in done.output.splitlines() if line.startswith("not in the tables: ")]
    assert len(told) == 2 and "half: not finished" in told[0] and "memory.strength=2.0" in told[1]

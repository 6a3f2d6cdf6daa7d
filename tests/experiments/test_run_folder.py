"""Test run folders: one process at a time, no leftovers, and one line for whatever is damaged in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from damaged_runs import Blobs, Stop
from limpet.errors import LimpetError
from limpet.experiments import SEQUENCES, Recipe, Record, Watcher, run, settings
from limpet.experiments import sweep as sweeps
from limpet.experiments.record import CHECKPOINT_FORMAT, RunFolder, load_record, load_records
from limpet.experiments.results import gather
from limpet.experiments.settings import checked, parse
from limpet.experiments.sweep import PASSED_ON, Outcome, SweepResult, plan, sweep
from limpet.io import tensor_file
from limpet.io.lock import LockedError, folder_lock
from limpet.methods import memory_file

FILES = ["memory.safetensors", "model.safetensors", "recipe.yaml", "run.json", "tensorboard"]
"""What a finished run leaves."""


SEQUENCES.register("test-folder")(Blobs)


def recipe(**changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "experiment": "test-folder",
        "tasks": 2,
        "threads": 1,
        "network": {"options": {"hidden": [4]}},
        "training": {"epochs": 2, "batch_size": 20},
        **changes,
    }
    return checked(Recipe, values, "test")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A finished run, and one that was stopped after its first task."""
    root = tmp_path_factory.mktemp("both")
    run(recipe(), root / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(recipe(), root / "stopped", watcher=Stop(), checkpoint_seconds=0)
    assert names(root / "stopped") == ["checkpoint.safetensors", "recipe.yaml", "tensorboard"]
    return root / "whole", root / "stopped"


@pytest.fixture
def whole(both: tuple[Path, Path], tmp_path: Path) -> RunFolder:
    """A finished run."""
    return RunFolder(shutil.copytree(both[0], tmp_path / "whole"))


@pytest.fixture
def stopped(both: tuple[Path, Path], tmp_path: Path) -> RunFolder:
    """A run with a checkpoint."""
    return RunFolder(shutil.copytree(both[1], tmp_path / "run"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- the lock ------------------------------------------------------------------------------------------------------


class RunAgain(Watcher):
    """Starts a run in the folder of the run that it watches."""

    def __init__(self, folder: Path, resume: bool) -> None:
        self.folder, self.resume, self.messages = folder, resume, list[str]()

    def learned(self, record: Record) -> None:
        with pytest.raises(LockedError) as error:
            run(recipe(seed=1), self.folder, resume=self.resume)
        self.messages.append(str(error.value))


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_the_same_folder_is_rejected(tmp_path: Path, resume: bool) -> None:
    watcher = RunAgain(tmp_path / "run", resume)
    record = run(recipe(), tmp_path / "run", watcher=watcher)
    assert len(watcher.messages) == 2
    assert f"{tmp_path / 'run'} is in use by process {os.getpid()} on" in watcher.messages[0]
    assert names(tmp_path / "run") == FILES
    place = RunFolder(tmp_path / "run")
    assert place.load_record() == record and place.load_recipe() == record.recipe and record.recipe.seed == 0


def test_a_sweep_in_a_folder_that_is_in_use_is_rejected(tmp_path: Path) -> None:
    trials = plan(recipe(), {"memory.strength": [1.0]}, [0], tmp_path)
    with folder_lock(tmp_path), pytest.raises(LockedError, match=f"in use by process {os.getpid()}"):
        sweep(trials, tmp_path, resume=True)
    assert not list(tmp_path.iterdir())


def test_what_a_worker_left_is_deleted_at_the_end_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = plan(recipe(), {"memory.strength": [1.0, 2.0]}, [0], tmp_path / "sweep")

    def tune(*_: Any) -> None:
        """The first trial finishes, the second one is stopped, and its worker has no time to clean up."""
        run(trials[0].recipe, trials[0].folder)
        with pytest.raises(KeyboardInterrupt):
            run(trials[1].recipe, trials[1].folder, watcher=Stop())
        for name in ("lock", ".checkpoint.safetensors.12"):
            (Path(trials[1].folder) / name).touch()

    monkeypatch.setattr(sweeps, "connect", lambda _: False)
    monkeypatch.setattr(sweeps, "_tune", tune)
    result = sweep(trials, tmp_path / "sweep")
    assert result.best == {"memory.strength": 1.0} and [len(one.scores) for one in result.outcomes] == [1, 0]
    assert names(tmp_path / "sweep") == ["plan.json", "strength=1.0", "strength=2.0", "sweep.json"]
    assert names(Path(trials[1].folder)) == ["recipe.yaml", "tensorboard"]


@pytest.mark.slow
def test_two_processes_at_once(tmp_path: Path, small_data: Path) -> None:
    """As two commands: one runs, the other one fails with one line, and the folder has the files of one run."""
    words = ["run", "permuted-mnist", "--tasks", "2", "--epochs", "4", "--threads", "1", "--out", "run"]
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        both = [
            subprocess.Popen(
                [sys.executable, "-m", "limpet", *words, "--strength", strength, *(["--resume"] * (attempt == 2))],
                cwd=folder,
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
            )
            for strength in ("1", "50")
        ]
        errors = [process.communicate(timeout=120)[1] for process in both]
        codes = [process.returncode for process in both]
        assert sorted(codes) == [0, 2], errors
        line = errors[codes.index(2)]
        assert line.startswith("limpet: run is in use by process ") and line.count("\n") == 1
        assert f"process {both[codes.index(0)].pid} on" in line
        place = RunFolder(folder / "run")
        record = place.load_record()
        assert record is not None and place.load_recipe() == record.recipe
        settings = json.loads(memory_file.read(place.memory)["metadata"])["settings"]
        assert settings["strength"] == record.recipe.memory.strength == (1, 50)[codes.index(0)]
        assert names(folder / "run") == FILES


def test_what_a_killed_process_left_is_deleted(whole: RunFolder, stopped: RunFolder) -> None:
    place, expected = stopped, whole.load_record()
    for name in (
        "checkpoint.safetensors.12",
        "run.json.34",
        "memory.safetensors.5",
        "recipe.yaml.6",
        "model.safetensors.7",
    ):
        (place.path / f".{name}").write_text("half of a file")
    (place.path / "lock").write_text('{"pid": 1, "host": "x"}')
    record = run(recipe(), place.path, resume=True)
    assert expected is not None and record.accuracy == expected.accuracy and names(place.path) == FILES
    place.checkpoint.write_bytes(b"of a process killed before it could delete its checkpoint")
    assert run(recipe(), place.path, resume=True) == record and names(place.path) == FILES


# --- damaged and foreign files ---------------------------------------------------------------------------------------


def test_a_run_whose_recipe_is_missing_is_not_overwritten(stopped: RunFolder) -> None:
    place = stopped
    place.recipe.unlink()
    for resume in (False, True):
        with pytest.raises(LimpetError, match=r"contains checkpoint.safetensors of a run whose recipe.yaml is missing"):
            run(recipe(), place.path, resume=resume)
    assert place.checkpoint.exists()


def test_files_of_another_run_are_rejected(stopped: RunFolder, tmp_path: Path) -> None:
    place, other = stopped, tmp_path / "other"
    run(recipe(seed=1), other)
    checkpoint = place.checkpoint.read_bytes()
    place.record.write_bytes((other / "run.json").read_bytes())
    with pytest.raises(LimpetError, match=r"a different recipe \(seed: 1, now 0\)"):
        run(recipe(), place.path, resume=True)
    place.record.unlink()
    place.recipe.write_text(place.recipe.read_text().replace("seed: 0", "seed: 1"))
    place.checkpoint.write_bytes(checkpoint)
    with pytest.raises(LimpetError, match=r"a different recipe \(seed: 0, now 1\)"):  # of the checkpoint
        run(recipe(seed=1), place.path, resume=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata, tensors: metadata.pop("record"),
        lambda metadata, tensors: metadata.update(record={}),
        lambda metadata, tensors: metadata.update(record=5),
        lambda metadata, tensors: metadata.update(seconds=[]),
        lambda metadata, tensors: metadata.update(training={"position": {"x": 1}, "optimizer": {}}),
        lambda metadata, tensors: metadata.update(training={"position": {}, "optimizer": {"x/y": 1}}),
        lambda metadata, tensors: metadata.update(method=None),
        lambda metadata, tensors: tensors.update({"x/y": torch.zeros(1)}),
        lambda metadata, tensors: tensors.update({"model/x": torch.zeros(1)}),
        lambda metadata, tensors: tensors.clear(),
    ],
)
def test_a_checkpoint_with_other_content(stopped: RunFolder, change: Any) -> None:
    """Its checksum is right, as that of a file of another version would be."""
    place = stopped
    metadata, tensors = tensor_file.read(place.checkpoint, CHECKPOINT_FORMAT)
    loaded = dict(tensors)
    change(metadata, loaded)
    tensor_file.write(place.checkpoint, CHECKPOINT_FORMAT, metadata, loaded)
    with pytest.raises(LimpetError, match=r"checkpoint.safetensors"):
        run(recipe(), place.path, resume=True)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "[",
        "a: 2026-13-45",
        "\x00",
        "? [1]\n: 2",
        "[" * 500,
        "a: &a [*a]",
        BOMB,
        BOMB + "tasks: *a11",
        BOMB + "network: {options: {x: *a11}}",
        "tasks: " + "9" * 5000,
        "!!python/object/apply:os.system ['touch x']",
        "network: {options: !!python/name:os.system }",
        "1: 2",
        "seed: .inf",
    ],
)
def test_a_recipe_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    place = RunFolder(tmp_path / "run")
    place.path.mkdir()
    place.recipe.write_text(text)
    with pytest.raises(LimpetError) as error:
        place.load_recipe()
    assert len(str(error.value)) < 1000 and "recipe.yaml" in str(error.value) and "\n" not in str(error.value)
    assert names(tmp_path) == ["run"]


def test_a_recipe_of_many_values_and_one_with_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("a: &a [1, 2]\nb: *a", "test") == {"a": [1, 2], "b": [1, 2]}
    monkeypatch.setattr(settings, "LARGEST", 8)
    assert parse("a: &a [1, 2]\nb: *a\nc: 1", "test") == {"a": [1, 2], "b": [1, 2], "c": 1}
    with pytest.raises(LimpetError, match="more than 8 values"):
        parse("a: &a [1, 2]\nb: *a\nc: [1]", "test")


def changed(values: dict[str, Any], path: str, value: Any) -> str:
    """The JSON of a record with one entry replaced, without its checksum."""
    copy = json.loads(json.dumps({key: value for key, value in values.items() if key != "sha256"}))
    place, *keys = copy, *path.split(".")
    for key in keys[:-1]:
        place = place[int(key) if key.isdigit() else key]
    place[int(keys[-1]) if keys[-1].isdigit() else keys[-1]] = value
    return json.dumps(copy)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("accuracy", []),
        ("accuracy.1", []),
        ("accuracy.1", [1.0]),
        ("accuracy.1.0", None),
        ("accuracy.0.0", 1e300),
        ("nll.0", []),
        ("names", ["a"]),
        ("names", []),
        ("epochs", []),
        ("untrained", [1.0]),
        ("seconds.training", [1.0]),
        ("curve", [{"task": 5, "epoch": 1, "accuracy": [1.0]}]),
        ("curve", [{"task": 0, "epoch": 1, "accuracy": []}]),
        ("kept_bytes", 10**400),
        ("experiment", "../elsewhere"),
        ("experiment", "/elsewhere"),
        ("experiment", ""),
        ("experiment", "a\0"),
        ("environment", {"x": float("nan")}),
        ("environment", {"x": "\ud800"}),
        ("recipe", {"tasks": -1}),
        ("recipe.x", 1),
    ],
)
def test_a_record_that_a_report_could_not_use(whole: RunFolder, tmp_path: Path, path: str, value: Any) -> None:
    values = json.loads(whole.record.read_text())
    lines = tmp_path / "runs.jsonl"
    lines.write_text(changed(values, path, value) + "\n")
    with pytest.raises(LimpetError, match=r"runs.jsonl, line 1") as error:
        load_records(lines)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    lines.write_text(changed(values, "environment", {}) + "\n")
    assert load_records(lines)[0].accuracy == values["accuracy"]  # older records have no checksum


def test_a_changed_number_is_noticed(whole: RunFolder) -> None:
    path = whole.record
    values = json.loads(path.read_text())
    values["accuracy"][1][0] += 1
    path.write_text(json.dumps(values))
    with pytest.raises(LimpetError, match="does not match its checksum"):
        run(recipe(), whole.path, resume=True)
    del values["sha256"]
    path.write_text(json.dumps(values))
    assert load_record(path).accuracy == values["accuracy"]


def test_the_checkpoint_outlives_a_damaged_record(stopped: RunFolder, whole: RunFolder) -> None:
    stopped.record.write_text("{")
    with pytest.raises(LimpetError, match=r"run\.json is not a valid run record"):
        run(recipe(), stopped.path, resume=True)
    stopped.record.unlink()
    expected = whole.load_record()
    assert expected is not None and run(recipe(), stopped.path, resume=True).accuracy == expected.accuracy


def test_a_sequence_whose_name_is_a_path(tmp_path: Path) -> None:
    SEQUENCES.register("test/folder")(Blobs)
    try:
        with pytest.raises(LimpetError, match="'test/folder-2' cannot be the name of an experiment"):
            run(recipe(experiment="test/folder"), tmp_path / "run")
    finally:
        del SEQUENCES._items["test/folder"]
    assert not (tmp_path / "run").exists()


def test_records_with_different_numbers_of_tasks_in_one_experiment(tmp_path: Path) -> None:
    for tasks in (2, 3):
        run(recipe(tasks=tasks), tmp_path / str(tasks))
    path = tmp_path / "3" / "run.json"
    path.write_text(changed(json.loads(path.read_text()), "experiment", "test-folder-2"))
    with pytest.raises(LimpetError, match=r"records of test-folder-2 in .* have 3 and 2 tasks"):
        gather([tmp_path])


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, '{"measured": "test"}', "NaN"])
def test_a_damaged_result_of_a_sweep(tmp_path: Path, text: str) -> None:
    trials = plan(recipe(), {"memory.strength": [1.0, 2.0]}, [0], tmp_path)
    outcomes = [Outcome(settings=trial.settings, scores=[50.0]) for trial in trials]
    result = SweepResult(measured="test", outcomes=outcomes, best=trials[0].settings)
    planned = json.dumps([trial.model_dump(mode="json") for trial in trials])
    (tmp_path / "plan.json").write_text(planned)
    (tmp_path / "sweep.json").write_text(json.dumps(result.model_dump(mode="json")))
    assert sweep(trials, tmp_path, resume=True) == result
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(LimpetError, match=r"sweep.json"):
        sweep(trials, tmp_path, resume=True)
    (tmp_path / "sweep.json").write_text(json.dumps(result.model_copy(update={"outcomes": []}).model_dump(mode="json")))
    with pytest.raises(LimpetError, match="outcomes of other trials"):
        sweep(trials, tmp_path, resume=True)
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(LimpetError, match=r"plan.json|different trials"):
        sweep(trials, tmp_path, resume=True)


# --- credentials -----------------------------------------------------------------------------------------------------

SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def test_no_credential_is_passed_to_ray_or_written_to_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [name for name in PASSED_ON if any(word in name.upper() for word in SECRET)]
    for word in SECRET:
        monkeypatch.setenv(f"MY_{word}", "canary-of-the-test")
    monkeypatch.setenv("HF_TOKEN", "canary-of-the-test")
    run(recipe(), tmp_path / "run")
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"canary-of-the-test" not in path.read_bytes()


def test_the_recipe_is_written_once(stopped: RunFolder) -> None:
    place = stopped
    written = place.recipe.read_text() + "# a comment\n"
    place.recipe.write_text(written)
    run(recipe(), place.path, resume=True)
    assert place.recipe.read_text() == written
    assert yaml.safe_load(written)["experiment"] == "test-folder"

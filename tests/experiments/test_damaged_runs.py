"""Test that damaged files of runs, results and sweeps give one line and exit status 2, never a traceback."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import damage
import damaged_runs
from damaged_runs import KINDS, Finished, MemoryFile, Results, Stopped, damaged
from limpet import cli

OWN = Path(damaged_runs.__file__)
RUN = [
    *("run", "test-damage", "--with", str(OWN), "--tasks", "2", "--threads", "1", "--epochs", "1", "--out", "files"),
    *("--set", "network.options={hidden: [4]}", "--set", "training.batch_size=40", "--set", "evaluation.track=20"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_at_random(kind: type[Any]) -> None:
    outcomes = damaged(kind, 21, seed=1)
    rejected = sum(number for name, number in outcomes.items() if name.endswith("rejected"))
    assert rejected >= 14 and outcomes.total() == 21


def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit status and standard error of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["limpet", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0), capsys.readouterr().err


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The files of each kind."""
    found = {}
    for kind in (Finished, Stopped, Results, MemoryFile):
        folder = tmp_path_factory.mktemp(kind.__name__) / "files"
        folder.mkdir()
        kind(folder)
        found[kind.__name__] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return found


CASES = [
    ("Finished", "recipe.yaml", [*RUN, "--resume"]),
    ("Finished", "run.json", [*RUN, "--resume"]),
    ("Finished", "run.json", ["report", "files", "--out", "out"]),
    ("Stopped", "recipe.yaml", [*RUN, "--resume"]),
    ("Stopped", "checkpoint.safetensors", [*RUN, "--resume"]),
    ("Results", "runs.jsonl", ["report", "files", "--out", "out"]),
    ("MemoryFile", "memory.safetensors", ["inspect", "files/memory.safetensors"]),
]


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def is_one_line(error: str) -> bool:
    return error.startswith("limpet: ") and error.count("\n") == 1


@pytest.mark.parametrize(("kind", "name", "words"), CASES)
def test_the_command_says_so_in_one_line(
    kind: str,
    name: str,
    words: list[str],
    folders: dict[str, dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(f"{kind} {name}")
    content = folders[kind][name]
    write(tmp_path / "files", folders[kind])
    assert main(monkeypatch, capsys, *words)[0] == 0  # it is the damage
    shutil.rmtree(tmp_path / "files")
    for way in (damage.flip, damage.cut, damage.overwrite, damage.extend):
        bad = way(rng, {name: content})[name]
        if kind == "Results" and way is damage.flip:
            bad = bad.replace(b"{", b"[", 1)  # a number may have changed, which nothing tells
        write(tmp_path / "files", {**folders[kind], name: bad})
        code, error = main(monkeypatch, capsys, *words)
        assert code == 2 and is_one_line(error), (way.__name__, error)
        assert not (tmp_path / "files" / "lock").exists()


@pytest.mark.slow
def test_the_real_command_says_so_in_one_line(folders: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    rng = random.Random(0)
    for number, (kind, name, words) in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        bad = damage.cut(rng, {name: folders[kind][name][:-2]})[name]
        write(folder / "files", {**folders[kind], name: bad})
        command = [sys.executable, "-m", "limpet", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2 and is_one_line(done.stderr), (words, done.stderr)
        assert "Traceback" not in done.stdout + done.stderr


def test_a_damaged_preset_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    for content in (b"\xff\xfe\x00", b"recipe: [", b"recipe: {tasks: 2026-99-99}", b"[" * 500, b"a: \x1b[31m", b""):
        path.write_bytes(content)
        code, error = main(monkeypatch, capsys, "run", "permuted-mnist", "--preset", str(path))
        assert code == 2 and is_one_line(error) and error[:-1].isprintable(), error


def test_a_number_that_nothing_checks_is_read(folders: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    """Records in results are under version control and have no checksum; those of run folders have."""
    line = json.loads(folders["Results"]["runs.jsonl"].splitlines()[0])
    assert "sha256" not in line and "sha256" in json.loads(folders["Finished"]["run.json"])

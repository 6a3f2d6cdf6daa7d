"""Test the command line: help texts, error messages, and runs with user-defined methods, tasks and networks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import limpet
from limpet.experiments.record import RunFolder
from limpet.version import __version__

OWN = '''
"""A method, a task sequence and a network of one's own."""
import torch
from limpet.experiments import METHODS, NETWORKS, SEQUENCES, Examples, Method, Network, TaskSequence


@SEQUENCES.register("halves")
class Halves(TaskSequence):
    """Which half-space is a point in?"""

    shape, heads = (4,), (2,)

    def examples(self, number, split):
        x = torch.randn(200, 4, generator=torch.Generator().manual_seed(2 * number + (split == "test")))
        return Examples(x, (x[:, number] > 0).long())


@NETWORKS.register("straight")
def straight(shape, heads):
    return Network(torch.nn.Identity(), shape[0], heads)


@METHODS.register("frozen")
class Frozen(Method):
    """Learns the first task, then nothing."""

    known = False

    def hold(self, optimizer, examples):
        if self.known:
            optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.zero_grad())
        return super().hold(optimizer, examples)

    def learned(self, lesson, earlier):
        self.known = True
'''


@pytest.mark.parametrize("command", [[], ["run"], ["sweep"], ["report"], ["list"], ["plan"]])
def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    code, out, _ = limpet(monkeypatch, capsys, *command, "--help")
    assert code == 0 and "Usage" in out and "Show this message" in out


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert limpet(monkeypatch, capsys, "--version") == (0, f"limpet {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "permutedmnist"], "did you mean 'permuted-mnist'?"),
        (["run", "permuted-mnist", "--method", "ewcc"], "unknown method 'ewcc'"),
        (["run", "permuted-mnist", "--method", "si", "--structure", "diagonal"], "si has no structure option"),
        (["run", "permuted-mnist", "--structure", "diag"], "not 'diag'"),
        (["run", "permuted-mnist", "--preset", "papr"], "did you mean 'permuted-mnist-paper'?"),
        (["run", "permuted-mnist", "--set", "training.lrr=1"], "did you mean 'lr'?"),
        (["run", "permuted-mnist", "--set", "training.lr=fast"], "training.lr: Input should be a valid number"),
        (["run", "permuted-mnist", "--set", "lr"], "--set takes name=value"),
        (["run", "permuted-mnist", "--with", "nowhere.py"], "file not found: nowhere.py"),
        (
            ["run", "permuted-mnist", "--seed", "0", "--seed", "1", "--out", "x"],
            "--out names the folder of a single",
        ),
        (["sweep", "permuted-mnist", "--scheduler", "best"], "--scheduler must be 'grid' or 'asha'"),
        (["sweep", "permuted-mnist", "--grid", "strength"], "--grid takes name=value"),
        (["sweep", "permuted-mnist", "--grid", "trainig.lr=1,2"], "unknown setting 'trainig'"),
        (["sweep", "permuted-mnist", "--grid", "seed=1,2"], "set seeds with --seed"),
        (["run", "permuted-mnist", "--set", "seed=3"], "set seeds with --seed"),
        (["run", "permuted-mnist", "--set", "training=5", "--set", "training.lr=1"], "training"),
        (["run", "permuted-mnist", "--set", "device='[b]'"], "device '[b]' is not available"),
        (["report", "nowhere"], "folder not found: nowhere"),
        (
            ["consolidate", "--model", "m", "--data", "d", "--structure", "kron"],
            "--structure must be one of diagonal, kron",
        ),
        (
            ["consolidate", "--model", "m", "--data", "d", "--at-rest", "int8"],
            "--storage-dtype must be one of bfloat16, float16",
        ),
    ],
)
def test_wrong_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = limpet(monkeypatch, capsys, *words)
    assert code == 2 and out == ""
    assert line in err and err.startswith("limpet: ") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_own_method_tasks_and_network_then_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own.py"
    own.write_text(OWN)
    shared = ["run", "halves", "--with", "own.py", "--tasks", "3", "--threads", "1", "--set", "network.name=straight"]
    shared += ["--set", "training.lr=0.5", "--epochs", "3"]
    for method in ("frozen", "fine-tuning"):
        code, out, err = limpet(monkeypatch, capsys, *shared, "--method", method, "--seed", "0", "--seed", "1")
        assert code == 0, err
        assert out.count("mean of 3") == 2
    code, out, err = limpet(monkeypatch, capsys, *shared, "--method", "frozen")
    assert code == 2 and "continue it with --resume" in err
    code, out, err = limpet(monkeypatch, capsys, *shared, "--method", "frozen", "--resume")
    assert code == 0, err
    code, out, err = limpet(monkeypatch, capsys, "list", "--with", "own.py")
    assert code == 0 and "Learns the first task, then nothing." in out and "Which half-space" in out
    reported = subprocess.run(  # by a process that does not know what own.py brings
        [sys.executable, "-m", "limpet", "report", "runs", "--out", "results"], capture_output=True, text=True
    )
    assert reported.returncode == 0, reported.stderr
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())
    runs = sorted((tmp_path / "runs").rglob("run.json"))
    records = [RunFolder(path.parent).load_record() for path in runs]
    frozen = [r.mean_accuracy for r in records if r is not None and r.recipe.method == "frozen"]
    assert all(
        len({row[0] for row in r.accuracy}) == 1 for r in records if r is not None and r.recipe.method == "frozen"
    )
    assert summary["halves-3"]["frozen"]["seeds"] == [round(score, 3) for score in frozen]
    assert summary["halves-3"]["frozen"]["mean"] == pytest.approx(sum(frozen) / 2, abs=1e-3)

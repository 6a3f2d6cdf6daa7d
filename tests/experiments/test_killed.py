"""Test that runs and sweeps killed with SIGKILL at random times resume with bit-identical results."""

from __future__ import annotations

import itertools
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from limpet.experiments.record import RunFolder


@contextmanager
def started(*words: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`limpet ...` as a process of its own; it and all it started end with the block, whatever happens."""
    command = [sys.executable, "-m", "limpet", *words]
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        _kill([process.pid, *(child.pid for child in _children(process.pid))])
        process.wait(30)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def file_names(folder: Path) -> list[str]:
    """The files below a folder, but those of TensorBoard and Ray, whose names contain times."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if not {"tensorboard", "ray"} & set(path.parts))


RUN = [
    *("run", "permuted-mnist", "--tasks", "3", "--epochs", "8", "--threads", "1", "--checkpoint-seconds", "0"),
    *("--set", "training.batch_size=4", "--set", "memory.every=3", "--set", "evaluation.track=50"),
]


SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL]


@pytest.mark.slow
def test_a_run_killed_at_random_moments(tmp_path: Path, small_data: Path) -> None:
    def finish(name: str) -> tuple[RunFolder, float, float]:
        """The run to its end; seconds until its first checkpoint, and from there."""
        folder, begin, first = RunFolder(tmp_path / name), time.monotonic(), 0.0
        with started(*RUN, "--out", name, "--resume", folder=tmp_path) as process:
            while process.poll() is None and time.monotonic() < begin + 120:
                first = first or (folder.checkpoint.exists() and time.monotonic() - begin)
                time.sleep(0.01)
            assert process.wait() == 0, (tmp_path / "log.txt").read_text()
        return folder, first, time.monotonic() - begin - first

    whole, start, length = finish("whole")
    moments, killed, names = random.Random(0), 0, ["killed-0"]
    while killed < len(SIGNALS):
        with started(*RUN, "--out", names[-1], "--resume", folder=tmp_path) as process:
            try:
                process.wait(start + moments.uniform(-0.5, 0.4 * length))
            except subprocess.TimeoutExpired:
                process.send_signal(SIGNALS[killed])
                process.wait(30)
                killed += 1
        if RunFolder(tmp_path / names[-1]).record.exists():  # it came to its end: begin another one
            names.append(f"killed-{len(names)}")
    finish(names[-1])
    expected = whole.load_record()
    assert expected is not None
    for name in names:
        folder = RunFolder(tmp_path / name)
        assert folder.memory.read_bytes() == whole.memory.read_bytes()
        assert folder.model.read_bytes() == whole.model.read_bytes()
        record = folder.load_record()
        assert record is not None
        assert file_names(folder.path) == file_names(whole.path)  # no checkpoint, lock or temporary file
        assert (record.accuracy, record.nll, record.curve) == (expected.accuracy, expected.nll, expected.curve)


SWEEP = [
    *("sweep", "disjoint-mnist", "--epochs", "30", "--grid", "memory.strength=0,300,100000"),
    *("--seed", "0", "--seed", "1", "--set", "training.batch_size=10", "--set", "training.validation=50"),
    *("--set", "training.lr=0.01"),
    *("--out", "sweep", "--resume"),
]


@pytest.mark.slow
def test_a_sweep_whose_driver_is_killed(tmp_path: Path, small_data: Path) -> None:
    folder = tmp_path / "sweep"
    with started(*SWEEP, folder=tmp_path) as process:
        deadline = time.monotonic() + 180
        while not list(folder.rglob("run.json")):  # the first trial has come to its end
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log.txt").read_text()
            time.sleep(0.2)
    finished = {path: path.stat().st_mtime_ns for path in folder.rglob("run.json")}
    assert len(finished) < 6 and not (folder / "sweep.json").exists()
    with started(*SWEEP, folder=tmp_path) as process:
        assert process.wait(300) == 0, (tmp_path / "log.txt").read_text()
    assert all(path.stat().st_mtime_ns == before for path, before in finished.items())  # not done again
    result = json.loads((folder / "sweep.json").read_text())
    assert result["measured"] == "validation"
    scores = {}
    for strength in (0, 300, 100000):
        records = [RunFolder(folder / f"strength={strength}" / f"seed{seed}").load_record() for seed in (0, 1)]
        scores[strength] = sum(record.metrics["validation_accuracy"] or 0 for record in records if record) / 2
    assert len(list(folder.rglob("run.json"))) == 6
    assert {o["settings"]["memory.strength"]: sum(o["scores"]) / 2 for o in result["outcomes"]} == pytest.approx(scores)
    assert result["best"] == {"memory.strength": max(scores, key=lambda s: scores[s])}
    files = ("memory.safetensors", "model.safetensors", "recipe.yaml", "run.json")
    runs = [f"strength={strength}/seed{seed}/{name}" for strength in scores for seed in (0, 1) for name in files]
    assert file_names(folder) == sorted(["plan.json", "sweep.json", *runs])


@pytest.mark.slow
def test_no_credential_reaches_the_logs_of_ray(
    tmp_path: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cluster that the sweep starts: its logs, the folder of the sweep, and what the command prints."""
    ray_folder, canary = Path(tempfile.mkdtemp(prefix="ray")), f"canary{secrets.token_hex(8)}"
    monkeypatch.setenv("RAY_TMPDIR", str(ray_folder))
    for name in ("HF_TOKEN", "MY_API_KEY", "SOME_SECRET", "DB_PASSWORD"):
        monkeypatch.setenv(name, canary)
    words = [*SWEEP, "--epochs", "1"]
    try:
        with started(*words, folder=tmp_path) as process:
            assert process.wait(300) == 0, (tmp_path / "log.txt").read_text()
        logs = [path for path in ray_folder.rglob("*") if path.is_file()]
        assert any(path.parent.name == "logs" for path in logs)  # we look at the right place
        assert any(str(small_data).encode() in path.read_bytes() for path in logs)  # which is where they would be
        for path in [*logs, *(path for path in tmp_path.rglob("*") if path.is_file())]:
            assert canary.encode() not in path.read_bytes(), path
    finally:
        _kill([p.pid for p in psutil.process_iter(["cmdline"]) if str(ray_folder) in " ".join(p.info["cmdline"] or [])])
        shutil.rmtree(ray_folder, ignore_errors=True)


@pytest.mark.slow
def test_a_sweep_with_asha_on_a_cluster_of_two_nodes(
    tmp_path: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray start --head` and a second node of one processor each: two trials at once need both."""
    ray_folder = Path(tempfile.mkdtemp(prefix="ray"))  # short: Ray keeps sockets there, whose paths are limited
    address = f"127.0.0.1:{_free_port()}"
    for name, value in (("TMPDIR", ray_folder), ("AUTH_MODE", "token"), ("AUTH_TOKEN", secrets.token_hex(32))):
        monkeypatch.setenv(f"RAY_{name}", str(value))
    node = ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--disable-usage-stats"]
    try:
        for words in (["--head", f"--port={address[10:]}", "--include-dashboard=false"], [f"--address={address}"]):
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *node]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        monkeypatch.setenv("RAY_ADDRESS", address)
        with started(*SWEEP, "--scheduler", "asha", folder=tmp_path) as process:
            assert process.wait(300) == 0, (tmp_path / "log.txt").read_text()
    finally:
        _kill([p.pid for p in psutil.process_iter(["cmdline"]) if str(ray_folder) in " ".join(p.info["cmdline"] or [])])
        shutil.rmtree(ray_folder, ignore_errors=True)
    result = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    ended = {o["settings"]["memory.strength"]: (len(o["scores"]), sum(o["scores"])) for o in result["outcomes"]}
    assert len(ended) == 3 and result["best"] == {"memory.strength": max(ended, key=lambda s: ended[s])}
    assert max(ended.values())[0] >= 1
    left = [Path(name).name for name in file_names(tmp_path / "sweep")]
    assert not [name for name in left if name == "lock" or name.startswith(".")]
    spans = [
        (folder.recipe.stat().st_mtime, folder.record.stat().st_mtime)
        for folder in (RunFolder(path.parent) for path in (tmp_path / "sweep").rglob("run.json"))
    ]
    assert any(a[0] < b[1] and b[0] < a[1] for a, b in itertools.combinations(spans, 2))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])

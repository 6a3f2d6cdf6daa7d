"""Kill `limpet run` and `limpet sweep` at random moments: resumed, they end with equal bits and leave nothing behind.

    python tests/kill_runs.py --runs 200 --sweeps 50 --seed 0 --folder kills

prints one line of JSON per command. What was done is kept in the folder, so that the same line goes on where it was
stopped (by --seconds, or by any other means).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

import limpet
from experiment_data import write_mirror
from limpet.experiments.data import images
from limpet.experiments.record import RunFolder
from limpet.io.atomic import write_text

RUN = [
    *("run", "permuted-mnist", "--tasks", "2", "--epochs", "4", "--threads", "1", "--checkpoint-seconds", "0"),
    *("--set", "training.batch_size=50", "--set", "memory.every=3", "--set", "evaluation.track=50", "--resume"),
]
SWEEP = [
    *("sweep", "disjoint-mnist", "--epochs", "20", "--grid", "memory.strength=0,300"),
    *("--seed", "0", "--seed", "1", "--set", "training.batch_size=10", "--set", "training.validation=50", "--resume"),
]
OWN_FILES = {"tensorboard", "ray"}
"""Folders of TensorBoard and Ray, whose file names contain times and process ids."""


def contents(folder: pathlib.Path) -> dict[str, Any]:
    """Every file below a folder: its bytes, or of a record what does not depend on the machine and its load."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_dir() or OWN_FILES & set(name.parts):
            continue
        found[str(name)] = path.read_bytes()
        if path.name == "run.json":
            record = RunFolder(path.parent).load_record()
            assert record is not None
            found[str(name)] = record.model_dump(exclude={"seconds", "peak_memory_bytes", "environment"})
        if path.name == "plan.json":
            found[str(name)] = found[str(name)].replace(str(folder.resolve()).encode(), b"")
    return found


def check(folder: pathlib.Path, whole: dict[str, Any]) -> None:
    """Raise an error unless a folder ended as an undisturbed one did."""
    found = contents(folder)
    assert set(found) == set(whole), f"{folder}: {set(found) ^ set(whole)}"
    for name, content in whole.items():
        assert found[name] == content, f"{folder / name} differs"


# --- commands that are killed ------------------------------------------------------------------------------------


class ForkedRun:
    """`limpet run` in a forked process, which has everything imported: it can be killed hundreds of times."""

    name = "run"
    result = "run.json"

    def __init__(self) -> None:
        import torch
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401

        import limpet.cli
        import limpet.experiments.live_display

        torch.set_num_threads(1)
        self.main: Callable[[], None] = limpet.cli.main

    def start(self, folder: pathlib.Path, log: pathlib.Path) -> int:
        """Start it, and return the process id."""
        pid = os.fork()
        if pid:
            return pid
        status: Any = 99
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.argv = ["limpet", *RUN, "--out", str(folder)]
            self.main()
            status = 0
        except SystemExit as end:
            status = end.code or 0
        finally:
            os._exit(status if isinstance(status, int) else 1)

    def kill(self, pid: int, rng: random.Random) -> None:
        """Kill it."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def finish(self, pid: int) -> int:
        """Wait for its end and return its exit status."""
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def ended(self, pid: int) -> bool:
        """Whether it has ended by itself."""
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def close(self) -> None:
        """Nothing is left running."""


class RealSweep(ForkedRun):
    """`limpet sweep` as a command with a Ray cluster of its own. Its driver is killed, and at times a worker before."""

    name = "sweep"
    result = "sweep.json"

    def __init__(self) -> None:
        self.temporary = pathlib.Path(tempfile.mkdtemp(prefix="ray"))  # short: Ray keeps sockets there
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, folder: pathlib.Path, log: pathlib.Path) -> int:
        """Start it, and return the process id."""
        command = [sys.executable, "-m", "limpet", *SWEEP, "--out", str(folder)]
        environment = {**os.environ, "RAY_TMPDIR": str(self.temporary)}
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        self.processes[process.pid] = process
        return process.pid

    def kill(self, pid: int, rng: random.Random) -> None:
        """Kill the driver; in one of four cases a worker first."""
        with suppress(psutil.NoSuchProcess):
            workers = [p for p in psutil.Process(pid).children(recursive=True) if "ray::" in " ".join(p.cmdline())]
            if workers and rng.random() < 0.25:
                rng.choice(workers).kill()
                time.sleep(rng.uniform(0, 3))
        super().kill(pid, rng)

    def finish(self, pid: int) -> int:
        """Wait for its end and return its exit status."""
        return self.processes[pid].wait()

    def ended(self, pid: int) -> bool:
        """Whether it has ended by itself."""
        return self.processes[pid].poll() is not None

    def close(self) -> None:
        """End what Ray has left running, all of which names our folder on its command line."""
        for process in psutil.process_iter(["cmdline"]):
            if str(self.temporary) in " ".join(process.info["cmdline"] or []):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)


def killed(kind: type[ForkedRun], kills: int, seed: int, folder: pathlib.Path, *, deadline: float) -> dict[str, Any]:
    """Kill a command again and again, resume it each time, and compare the end of every one with an undisturbed one.

    Args:
        kind: What to kill.
        kills: How often.
        seed: Seed of the moments.
        folder: Folder of the outputs; what is in it is continued.
        deadline: Time of `time.monotonic` at which to stop.

    Returns:
        The number of kills so far, and of outputs that ended as the undisturbed one.

    Raises:
        AssertionError: If an output ended in another way, or left a file behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, state_file = folder / "log.txt", folder / "state.json"
    state = json.loads(state_file.read_text()) if state_file.exists() else {"kills": 0, "ended": 0, "seconds": 0.0}
    subject = kind()
    try:
        if not state["seconds"]:
            shutil.rmtree(folder / "whole", ignore_errors=True)
            started = time.monotonic()
            assert subject.finish(subject.start(folder / "whole", log)) == 0, log.read_text()
            state["seconds"] = time.monotonic() - started
            write_text(state_file, json.dumps(state))
        whole = contents(folder / "whole")
        while state["kills"] < kills and time.monotonic() < deadline:
            rng = random.Random(f"{kind.name} {seed} {state['kills']}")
            place = folder / str(state["ended"])
            pid = subject.start(place, log)
            moment = time.monotonic() + rng.uniform(0, 0.9 * state["seconds"])
            while time.monotonic() < moment and not subject.ended(pid):
                time.sleep(0.002)
            subject.kill(pid, rng)
            code = subject.finish(pid)
            assert code in (0, -signal.SIGKILL), f"exit status {code}: {log.read_text()[-2000:]}"
            state["kills"] += code != 0
            _keep(state, state_file, place, kind, subject, whole, log, last=state["kills"] == kills)
    finally:
        subject.close()
    return {key: round(value, 1) if isinstance(value, float) else value for key, value in state.items()}


def _keep(
    state: dict[str, Any],
    state_file: pathlib.Path,
    place: pathlib.Path,
    kind: type[ForkedRun],
    subject: ForkedRun,
    whole: dict[str, Any],
    log: pathlib.Path,
    *,
    last: bool,
) -> None:
    """Compare an output that has a result, or that is the last one, and write the state."""
    if last or (place / kind.result).exists():
        code = subject.finish(subject.start(place, log))  # a command killed after its result tidies up when resumed
        assert code == 0, f"exit status {code}: {log.read_text()[-2000:]}"
        check(place, whole)
        shutil.rmtree(place)
        state["ended"] += 1
    write_text(state_file, json.dumps(state))


def main() -> None:
    """Run the long test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="number of kills of `limpet run`")
    parser.add_argument("--sweeps", type=int, default=50, help="number of kills of `limpet sweep`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("kills"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "data" / "complete").exists():
        shutil.rmtree(folder / "data", ignore_errors=True)
        write_mirror(folder / "data")
        (folder / "data" / "complete").touch()
    os.environ.update(LIMPET_DATA=str(folder / "data"), LIMPET_CACHE=str(folder / "cache"), OMP_NUM_THREADS="1")
    for split in ("train", "test"):
        images("mnist", split)  # decoded once, so that the first run takes no longer than the others
    deadline = time.monotonic() + asked.seconds
    for kind, kills in ((ForkedRun, asked.runs), (RealSweep, asked.sweeps)):
        if not kills:
            continue
        found = killed(kind, kills, asked.seed, folder / f"{kind.name}-{asked.seed}", deadline=deadline)
        print(json.dumps({"killed": kind.name, "seed": asked.seed, **found, "limpet": limpet.__version__}), flush=True)


if __name__ == "__main__":
    main()

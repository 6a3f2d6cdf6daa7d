"""Kill processes that save a memory, or make one with checkpoints, at random moments: nothing is lost or left behind.

    python tests/kill_writers.py --save 250 --pass 250 --seed 0

prints what was found after each kill, and stops at the first file that is torn, lost or left behind.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import limpet
from limpet.curvature.checkpoint import Checkpoint

MOST = 8
"""Kills before a pass is left to finish."""


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def data(width: int, batches: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(batches, 16, width, generator=generator)
    labels = torch.randint(0, 10, (batches, 16), generator=generator)
    return list(zip(inputs, labels, strict=True))


def forked(body: Callable[[], None]) -> int:
    """Run a function in a child process.

    Returns:
        Its process id, once the function has begun.
    """
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(tell, b"x")
            body()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    return child


def kill(child: int, after: float) -> bool:
    """Kill a child process after some seconds; return whether it was still running."""
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def kill_saves(folder: pathlib.Path, count: int, rng: random.Random) -> Counter[str]:
    """Kill a process that saves one state of a memory after the other."""
    model = network(100)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate(data(100, 1), progress=False)
    path, again = folder / "m.safetensors", folder.parent / "again.safetensors"
    start = time.monotonic()
    for _ in range(5):
        memory.save(again)
    duration = (time.monotonic() - start) / 5

    def save() -> None:
        number = 0
        while True:
            number += 1
            memory.strength = float(number)
            memory.save(path)

    found: Counter[str] = Counter()
    for i in range(count):
        path.unlink(missing_ok=True)
        if i % 2:
            memory.strength = 0.0
            memory.save(path)
        assert kill(forked(save), rng.uniform(0, 2 * duration))
        left = [name for name in names(folder) if name != path.name]
        assert len(left) <= 1, left
        found["a temporary file left" if left else "no temporary file left"] += 1
        assert path.exists() or not i % 2, "the old file is lost"
        if path.exists():
            loaded = limpet.load(path, model)
            loaded.save(again)
            assert again.read_bytes() == path.read_bytes()
            memory.strength = loaded.strength
            memory.save(again)
            assert again.read_bytes() == path.read_bytes(), "torn"
            found["the old file" if i % 2 and not loaded.strength else "a new file"] += 1
        else:
            found["no file yet"] += 1
        memory.save(path)
        assert names(folder) == [path.name], names(folder)
    return found


def kill_passes(folder: pathlib.Path, count: int, rng: random.Random) -> Counter[str]:
    """Kill a process that consolidates with checkpoints and saves the memory, until it has finished."""
    Checkpoint.SECONDS = 0.0
    batches = data(20, 30)
    out, checkpoint = folder / "m.safetensors", folder / "m.pass"
    found: Counter[str] = Counter()
    finished = 0
    while found["kills"] < count:
        fisher = ("exact", "sampled", "empirical")[finished % 3]

        def consolidate(fisher: str = fisher) -> None:
            memory = limpet.OnlineLaplace(network(20), fisher=fisher)
            memory.consolidate(batches, progress=False, checkpoint=checkpoint)
            memory.save(out)

        start = time.monotonic()
        consolidate()
        duration, wanted = time.monotonic() - start, out.read_bytes()
        out.unlink()
        kills = 0
        while not out.exists():
            after = rng.uniform(0, 0.8 * duration) if kills < MOST else 60.0
            kills += kill(forked(consolidate), after)
            found["a temporary file left"] += any(name.endswith(".tmp") for name in names(folder))
            found["a checkpoint left"] += checkpoint.exists()
        found["kills"] += kills
        assert out.read_bytes() == wanted, "the memory differs from that of a pass that was not killed"
        assert names(folder) == [out.name], names(folder)
        found[f"{fisher} passes bit-equal"] += 1
        finished += 1
        out.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=int, default=50, help="kills during saves")
    parser.add_argument("--pass", type=int, default=50, help="kills during passes", dest="passes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rng = random.Random(options.seed)
    kinds = ((kill_saves, options.save), (kill_passes, options.passes))
    for kind, count in kinds:
        with tempfile.TemporaryDirectory() as root:
            folder = pathlib.Path(root) / "folder"
            folder.mkdir()
            start = time.monotonic()
            found = kind(folder, count, rng)
            seconds = time.monotonic() - start
            print(f"{kind.__name__} {count}, seed {options.seed}, {seconds:.0f} s: {dict(found)}", flush=True)


if __name__ == "__main__":
    main()

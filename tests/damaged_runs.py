"""Damage the files of runs, reports and sweeps at random: each is rejected with one line, or read as something valid.

    python tests/damaged_runs.py --count 20000 --seed 0

prints how many were rejected and how many were read, by kind of file and damage, and stops at the first that raises
anything but limpet's own error or whose message has more than one line.
"""

from __future__ import annotations

import json
import pathlib
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from tqdm.auto import tqdm

from damage import GENERAL, MEMORY, Files, long_run
from limpet.errors import LimpetError
from limpet.experiments import SEQUENCES, Examples, Recipe, Record, TaskSequence, Watcher, run
from limpet.experiments.omissions import omissions
from limpet.experiments.record import compact_json, with_checksum
from limpet.experiments.report import summarise, table
from limpet.experiments.results import gather
from limpet.experiments.settings import checked
from limpet.experiments.sweep import SweepResult, Trial, collect, plan, sweep
from limpet.methods.inspect import inspect


@SEQUENCES.register("test-damage")
class Blobs(TaskSequence):
    """Two blobs, elsewhere in every task."""

    shape, heads = (3,), (2,)

    def examples(self, number: int, split: str) -> Examples:
        generator = torch.Generator().manual_seed(10 * number + (split == "test"))
        labels = torch.arange(40) % 2
        return Examples(torch.randn(40, 3, generator=generator) + labels[:, None], labels)


def recipe(**changes: Any) -> Recipe:
    """The recipe of the runs that are damaged."""
    values: dict[str, Any] = {
        "experiment": "test-damage",
        "tasks": 2,
        "threads": 1,
        "network": {"options": {"hidden": [4]}},
        "training": {"epochs": 1, "batch_size": 40},
        "evaluation": {"track": 20},
        "files": [str(pathlib.Path(__file__).resolve())],  # which lets the command know the sequence
        **changes,
    }
    return checked(Recipe, values, "test")


def timeless(record: Record) -> dict[str, Any]:
    """What does not depend on the machine and its load."""
    return record.model_dump(exclude={"seconds", "peak_memory_bytes", "environment"})


class Stop(Watcher):
    """Stops a run after its first task."""

    def learned(self, record: Record) -> None:
        raise KeyboardInterrupt


class Finished:
    """A finished run, which is loaded: a damaged one is never another result."""

    name = "finished run"
    files: tuple[str, ...] = ("recipe.yaml", "run.json")

    def __init__(self, folder: pathlib.Path) -> None:
        self.expected = timeless(run(recipe(), folder))

    def read(self, folder: pathlib.Path) -> None:
        """Load the run, or repeat it if its record was lost."""
        assert timeless(run(recipe(), folder, resume=True)) == self.expected


class Stopped(Finished):
    """A run that was stopped after its first task, and resumes."""

    name = "stopped run"
    files = ("recipe.yaml", "checkpoint.safetensors")

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        shutil.rmtree(folder)
        with suppress(KeyboardInterrupt):
            run(recipe(), folder, watcher=Stop(), checkpoint_seconds=0)

    def read(self, folder: pathlib.Path) -> None:
        """Resume the run."""
        assert timeless(run(recipe(), folder, resume=True)) == self.expected


class Results:
    """Records as `limpet report` keeps them, which have no checksum: what can be read gives tables."""

    name = "results"
    files = ("runs.jsonl",)

    def __init__(self, folder: pathlib.Path) -> None:
        records = [
            run(recipe(seed=seed, memory={"strength": s}), folder / f"{seed}{s}") for seed in (0, 1) for s in (1, 2)
        ]
        for path in folder.iterdir():
            shutil.rmtree(path)
        lines = [json.dumps(record.model_dump(mode="json")) for record in records]
        (folder / "runs.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def read(self, folder: pathlib.Path) -> None:
        """Make the tables."""
        experiments = gather([folder])
        for experiment in experiments:
            table(experiment)
            summarise(experiment)
        omissions(experiments, [folder])


class Sweep:
    """A finished sweep."""

    name = "sweep"
    files = ("plan.json", "sweep.json")

    def __init__(self, folder: pathlib.Path) -> None:
        self.trials = self._trials(folder)
        for trial in self.trials:
            run(trial.recipe, trial.folder)
        self.expected = collect(self.trials)
        (folder / "plan.json").write_text(json.dumps([trial.model_dump(mode="json") for trial in self.trials]))
        (folder / "sweep.json").write_text(compact_json(with_checksum(self.expected.model_dump(mode="json"))))

    def _trials(self, folder: pathlib.Path) -> list[Trial]:
        return plan(recipe(), {"memory.strength": [1.0, 2.0]}, [0], folder)

    def read(self, folder: pathlib.Path) -> None:
        """Load the result."""
        if (folder / "plan.json").exists() and (folder / "sweep.json").exists():
            result: SweepResult = sweep(self._trials(folder.parent / "whole"), folder, resume=True)
            assert result == self.expected


class MemoryFile:
    """The memory of a run."""

    name = "memory"
    files = ("memory.safetensors",)

    def __init__(self, folder: pathlib.Path) -> None:
        run(recipe(), folder)
        self.expected = self._shown(folder)

    def _shown(self, folder: pathlib.Path) -> str:
        found = inspect(folder / "memory.safetensors")
        return repr((found.settings, [(b.name, b.decided, b.stakes.tolist()) for b in found.blocks]))

    def read(self, folder: pathlib.Path) -> None:
        """Inspect it."""
        assert self._shown(folder) == self.expected


KINDS: tuple[type[Any], ...] = (Finished, Stopped, Results, Sweep, MemoryFile)


REPLACEMENTS = [b"0", b"9", b"-", b"[", b"]", b"{", b"}", b"null", b'"x"', b"1e400", b"NaN", b"", b"e9", b", 1", b".5"]


def structured(rng: random.Random, files: Files) -> Files:
    """Replace one number, string or punctuation mark of a text file, so that most of the result can be parsed."""
    name = rng.choice(sorted(files))
    content = files[name]
    places = [i for i, byte in enumerate(content) if byte in b'0123456789[]{},":-.eE']
    if not places:
        return {**files, name: b""}
    at = rng.choice(places)
    new = rng.choice(
        [b"0", b"9", b"-", b"[", b"]", b"{", b"}", b"null", b'"x"', b"1e400", b"NaN", b"", b"e9", b", 1", b".5"]
    )
    return {**files, name: content[:at] + new + content[at + 1 :]}


def damaged(kind: type[Any], count: int, seed: int, *, show: bool = False) -> Counter[str]:
    """Damage the files of one kind.

    Args:
        kind: What to damage.
        count: How often.
        seed: Seed of the damage.
        show: Whether to show a progress bar.

    Returns:
        The number of outcomes, by kind of damage.

    Raises:
        AssertionError: If a damaged file was read as something else, or the message has more than one line.
        Exception: If reading one raised anything but limpet's own error.
    """
    rng, outcomes = random.Random(seed), Counter[str]()
    ways: tuple[Callable[[random.Random, Files], Files], ...] = (*GENERAL, structured, structured)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as root:
        whole, bad = pathlib.Path(root) / "whole", pathlib.Path(root) / "bad"
        whole.mkdir()
        subject = kind(whole)
        files = {name: (whole / name).read_bytes() for name in kind.files}
        for i in tqdm(range(count), desc=kind.name, disable=not show):
            way = ways[i % len(ways)]
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(whole, bad, ignore=shutil.ignore_patterns(*kind.files, "tensorboard", "strength=*"))
            changed = way(rng, files)
            for name, content in changed.items():
                (bad / name).write_bytes(content)
            where = f"{kind.name}, seed {seed}, number {i} ({way.__name__})"
            try:
                subject.read(bad)
            except LimpetError as error:
                assert "\n" not in str(error) and len(str(error)) < 1000, f"{where}: {error}"
                outcomes[f"{way.__name__}: rejected"] += 1
            except Exception as error:
                raise AssertionError(where) from error
            else:
                outcomes[f"{way.__name__}: read"] += 1
    return outcomes


if __name__ == "__main__":
    long_run(str(__doc__), KINDS, damaged, 20_000)

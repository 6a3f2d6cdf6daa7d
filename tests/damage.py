"""Damage checkpoint folders, checkpoints of a pass and small files: each is rejected, or loads as if it were whole.

    python tests/damage.py --count 100000 --seed 0

prints how many were rejected and how many were harmless, by kind of damage, and stops at the first that is neither.
"""

from __future__ import annotations

import argparse
import json
import logging
import pathlib
import pickle
import random
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import metadata as dcp_metadata
from tqdm.auto import tqdm

import limpet
from limpet.curvature.checkpoint import Checkpoint
from limpet.errors import CurvatureError, MemoryFileError
from limpet.io.state import State

Files = dict[str, bytes]
INDEX = ".metadata"
MEMORY = pathlib.Path("/dev/shm")
ODD: list[Any] = [None, -1, 0, 2**40, 2**62, 1.5, "x", [], {}, torch.Size([1]), True, b"x", torch.float16]
PATHS: list[Any] = ["../other", "/etc/passwd", "/etc", "none", "", INDEX, "/proc/self/mem", "a\0b", ".", None, 5]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def data() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, generator=generator), torch.tensor([0, 1, 1, 0])) for _ in range(3)]


def same(one: State, other: State) -> bool:
    """Whether two states are equal to the bit."""
    a, b = one["tensors"], other["tensors"]
    return one["metadata"] == other["metadata"] and set(a) == set(b) and all(torch.equal(a[k], b[k]) for k in a)


class Folder:
    """A torch.distributed checkpoint with a model and its memory."""

    name = "checkpoint folder"
    rejections: tuple[type[Exception], ...] = (MemoryFileError,)

    def __init__(self, folder: pathlib.Path) -> None:
        self.model = network()
        memory = limpet.OnlineLaplace(self.model)
        memory.consolidate(data(), progress=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"memory": memory, "model": self.model.state_dict()}, checkpoint_id=folder, no_dist=True)
        self.wanted = memory.state_dict()

    def load(self, folder: pathlib.Path) -> State:
        """Load the memory."""
        return limpet.load(folder, self.model).state_dict()


class Pass:
    """The checkpoint of a pass that was interrupted after its second batch."""

    name = "checkpoint of a pass"
    rejections: tuple[type[Exception], ...] = (MemoryFileError, CurvatureError)

    def __init__(self, folder: pathlib.Path) -> None:
        self.model = network()
        folder.mkdir()

        def interrupted() -> Iterator[Any]:
            yield from data()[:2]
            raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            self._consolidate(folder, interrupted())
        self.wanted = self.load(folder.parent / "none")

    def load(self, folder: pathlib.Path) -> State:
        """Finish the pass."""
        return self._consolidate(folder, data())

    def _consolidate(self, folder: pathlib.Path, batches: Any) -> State:
        memory = limpet.OnlineLaplace(self.model)
        folder.mkdir(exist_ok=True)
        with mock.patch.object(Checkpoint, "SECONDS", 0):
            memory.consolidate(batches, examples=12, progress=False, checkpoint=folder / "pass")
        return memory.state_dict()


class SmallFile:
    """A file of format 2: truncated factors in 8 bits, and the checksums of the weights instead of the mean."""

    name = "file of format 2"
    rejections: tuple[type[Exception], ...] = (MemoryFileError,)

    def __init__(self, folder: pathlib.Path) -> None:
        self.model = network()
        memory = limpet.OnlineLaplace(self.model, rank=1, storage_dtype="int8", prior_mean="initial")
        memory.consolidate(data(), progress=False)
        folder.mkdir()
        memory.save(folder / "memory.safetensors", base="owner/model")
        self.wanted = self.loaded(folder, self.model)

    def loaded(self, folder: pathlib.Path, model: nn.Module) -> State:
        """Load the memory onto a model."""
        return limpet.load(folder / "memory.safetensors", model).state_dict()

    def load(self, folder: pathlib.Path) -> State:
        """Load the memory onto the model that it belongs to."""
        return self.loaded(folder, self.model)


class OtherModel(SmallFile):
    """The same file, whole, for a model with one other weight."""

    name = "file of format 2, for another model"

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.rng = random.Random(0)

    def load(self, folder: pathlib.Path) -> State:
        """Load the memory onto a model of which one weight is the next number in float32."""
        other = network()
        weight = self.rng.choice(list(other.parameters())).data.view(-1)
        place = self.rng.randrange(len(weight))
        weight[place] = torch.nextafter(weight[place], torch.tensor(9.0))
        found = self.loaded(folder, other)
        raise AssertionError(f"another model was accepted: {found['metadata']}")


# --- ways to damage files ----------------------------------------------------------------------------------------


def flip(rng: random.Random, files: Files) -> Files:
    """Flip up to eight bits of one file."""
    name = rng.choice(sorted(files))
    content = bytearray(files[name])
    for _ in range(rng.choice([1, 1, 2, 8])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return {**files, name: bytes(content)}


def cut(rng: random.Random, files: Files) -> Files:
    """Truncate one file."""
    name = rng.choice(sorted(files))
    return {**files, name: files[name][: rng.randrange(len(files[name]))]}


def overwrite(rng: random.Random, files: Files) -> Files:
    """Replace up to 64 bytes of one file by random ones."""
    name = rng.choice(sorted(files))
    content = bytearray(files[name])
    start = rng.randrange(len(content))
    content[start : start + 64] = rng.randbytes(len(content[start : start + 64]))
    return {**files, name: bytes(content)}


def extend(rng: random.Random, files: Files) -> Files:
    """Insert bytes into one file."""
    name, inserted = rng.choice(sorted(files)), rng.randbytes(rng.randrange(1, 20))
    at = rng.randrange(len(files[name]) + 1)
    return {**files, name: files[name][:at] + inserted + files[name][at:]}


def lose(rng: random.Random, files: Files) -> Files:
    """Delete one file."""
    name = rng.choice(sorted(files))
    return {other: content for other, content in files.items() if other != name}


def edit(rng: random.Random, files: Files) -> Files:
    """Change one thing that the index of a checkpoint folder says."""
    index = pickle.loads(files[INDEX])
    key, place = rng.choice(list(index.state_dict_metadata)), rng.choice(list(index.storage_data))
    entry, info, what = index.state_dict_metadata[key], index.storage_data[place], rng.randrange(12)
    if what < 2:
        setattr(index, rng.choice(["state_dict_metadata", "storage_data"]), rng.choice(ODD))
    elif what == 2:
        del index.storage_data[place]
    elif what == 3:
        index.storage_data[place] = rng.choice(ODD)
    elif what < 6:
        setattr(info, rng.choice(["offset", "length", "transform_descriptors"]), rng.choice([*ODD, ["zstd"]]))
    elif what < 8:
        info.relative_path = rng.choice(PATHS)
    elif what == 8:
        other = index.storage_data[rng.choice(list(index.storage_data))]
        info.offset, info.length = other.offset, other.length
    elif what == 9:
        index.state_dict_metadata[key] = rng.choice(ODD)
    elif what == 10 and isinstance(entry, dcp_metadata.TensorStorageMetadata):
        entry.size = rng.choice([torch.Size([2**40]), torch.Size([0]), None, "x"])
    else:
        name = rng.choice(["other.metadata", "other.tensors.x", "memory.tensors.x", "memory.metadata", "x"])
        index.storage_data[dcp_metadata.MetadataIndex(name)] = info
    return {**files, INDEX: pickle.dumps(index)}


def keep(_: random.Random, files: Files) -> Files:
    """Change nothing."""
    return files


GENERAL = (flip, cut, overwrite, extend)
WAYS: dict[type[Any], Sequence[Callable[[random.Random, Files], Files]]] = {
    Folder: (*GENERAL, lose, edit, edit),
    OtherModel: (keep,),
}


def damaged(
    kind: type[Folder] | type[Pass] | type[SmallFile], count: int, seed: int, *, show: bool = False
) -> Counter[str]:
    """Damage one kind of checkpoint.

    Args:
        kind: What to damage.
        count: How often.
        seed: Seed of the damage.
        show: Whether to show a progress bar.

    Returns:
        The number of outcomes, by kind of damage.

    Raises:
        AssertionError: If a damaged checkpoint was loaded as something else.
        Exception: If loading one raised anything but its own error.
    """
    rng, outcomes = random.Random(seed), Counter[str]()
    ways = WAYS.get(kind, GENERAL)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as root:
        whole, bad = pathlib.Path(root) / "whole", pathlib.Path(root) / "bad"
        subject = kind(whole)
        files = {path.name: path.read_bytes() for path in whole.iterdir()}
        weights = [p.clone() for p in subject.model.parameters()]
        for i in tqdm(range(count), desc=kind.name, disable=not show):
            way = ways[i % len(ways)]
            shutil.rmtree(bad, ignore_errors=True)
            bad.mkdir()
            for name, content in way(rng, files).items():
                (bad / name).write_bytes(content)
            try:
                found = subject.load(bad)
            except subject.rejections:
                outcomes[f"{way.__name__}: rejected"] += 1
                continue
            assert same(found, subject.wanted), f"{kind.name}, seed {seed}, number {i} ({way.__name__})"
            outcomes[f"{way.__name__}: harmless"] += 1
        assert all(torch.equal(p, w) for p, w in zip(subject.model.parameters(), weights, strict=True))
    return outcomes


def long_run(description: str, kinds: Sequence[Any], damage: Callable[..., Counter[str]], default: int) -> None:
    """Damage all kinds of files as the command line asks, and print one line of JSON for each.

    Args:
        description: What the command does.
        kinds: What to damage.
        damage: Damages one kind: `damage(kind, count, seed, show=True)`.
        default: Number of damaged files in all, unless --count says otherwise.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=default, help="number of damaged files in all")
    parser.add_argument("--seed", type=int, default=0)
    names = [kind.name for kind in kinds]
    parser.add_argument("--kinds", nargs="+", choices=names, default=names, help="what to damage")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    versions = {"torch": torch.__version__, "limpet": limpet.__version__}
    for kind in (kind for kind in kinds if kind.name in asked.kinds):
        started, count = time.perf_counter(), asked.count // len(asked.kinds)
        outcomes = damage(kind, count, asked.seed, show=True)
        result = {"kind": kind.name, "count": count, "seed": asked.seed, **dict(sorted(outcomes.items()))}
        print(json.dumps({**result, **versions, "seconds": round(time.perf_counter() - started)}))


if __name__ == "__main__":
    long_run(str(__doc__), (Folder, Pass, SmallFile, OtherModel), damaged, 100_000)

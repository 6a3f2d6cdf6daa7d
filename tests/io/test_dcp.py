"""Checkpoint folders: nothing outside is opened, nothing damaged is used, and older ones are read."""

from __future__ import annotations

import os
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import damage
import limpet
from limpet.errors import MemoryFileError
from limpet.io import dcp as checkpoints
from states import changed

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.pickle"))


@pytest.fixture
def model() -> nn.Module:
    return damage.network()


def memory_of(model: nn.Module) -> limpet.Memory:
    memory = limpet.OnlineLaplace(model)
    memory.consolidate(damage.data(), progress=False)
    return memory


@pytest.fixture
def folder(model: nn.Module, tmp_path: Path) -> Path:
    """A checkpoint with the model and its memory."""
    return saved({"memory": memory_of(model), "model": model.state_dict()}, tmp_path / "checkpoint")


def saved(content: dict[str, Any], path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=path, no_dist=True)
    return path


class Plain:
    """A memory whose state has no checksums, as those of earlier versions."""

    def __init__(self, memory: limpet.Memory) -> None:
        self.memory = memory

    def state_dict(self) -> Any:
        return changed(self.memory.state_dict())

    def load_state_dict(self, state: Any) -> None: ...


def test_the_memory_is_the_one_that_was_saved(folder: Path, model: nn.Module, tmp_path: Path) -> None:
    wanted = memory_of(model).state_dict()
    assert damage.same(limpet.load(folder, model).state_dict(), wanted)
    older = saved({"memory": Plain(memory_of(model))}, tmp_path / "older")
    assert damage.same(limpet.load(older, model).state_dict(), wanted)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_the_corpus_is_rejected(path: Path, folder: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    (folder / ".metadata").write_bytes(path.read_bytes())
    with pytest.raises(MemoryFileError):
        limpet.load(folder, model)
    assert list(folder.parent.iterdir()) == [folder]


def tensor_spans(folder: Path, tensors: dict[str, Tensor]) -> list[tuple[Path, int, int]]:
    """Where the bytes of the memory's tensors are."""
    found = []
    for info in pickle.loads((folder / ".metadata").read_bytes()).storage_data.values():
        content = (folder / info.relative_path).read_bytes()
        for tensor in tensors.values():
            data = tensor.numpy().tobytes()
            start = content.find(data, info.offset, info.offset + info.length)
            if start >= 0:
                found.append((folder / info.relative_path, start, start + len(data)))
    return found


def test_one_flipped_bit_in_a_tensor_is_found(folder: Path, model: nn.Module) -> None:
    kept = memory_of(model).state_dict()["tensors"]
    own = {name: tensor for name, tensor in kept.items() if not name.endswith("mean")}  # the model has those, too
    spans, rng = tensor_spans(folder, own), random.Random(0)
    assert len(spans) >= len(own)
    for _ in range(100):
        path, start, end = rng.choice(spans)
        content = bytearray(path.read_bytes())
        whole = bytes(content)
        content[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(content))
        with pytest.raises(MemoryFileError, match="checksum"):
            limpet.load(folder, model)
        path.write_bytes(whole)


def test_changed_metadata_are_found(model: nn.Module) -> None:
    state = memory_of(model).state_dict()
    state["metadata"] = state["metadata"].replace('"strength": 1.0', '"strength": 9.0')
    with pytest.raises(MemoryFileError, match="metadata do not match their checksum"):
        limpet.OnlineLaplace(model).load_state_dict(state)


def pointed(folder: Path, name: str, **changes: Any) -> None:
    """Change where the index says that an entry is."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = [info for key, info in index.storage_data.items() if key.fqn == name]
    for attribute, value in changes.items():
        setattr(info, attribute, value)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


@pytest.mark.parametrize("path", ["../secret.pt", "absolute", "link", "fifo", "/dev/zero", "a\0b", "", ".", "none", 5])
def test_nothing_outside_of_the_folder_is_opened(path: Any, folder: Path, model: nn.Module) -> None:
    secret = folder.parent / "secret.pt"
    torch.save(torch.full((4, 4), 7.0), secret)
    (folder / "link").symlink_to(secret)
    os.mkfifo(folder / "fifo")
    path = str(secret) if path == "absolute" else path
    pointed(folder, "memory.tensors.0/mean", relative_path=path, offset=0, length=secret.stat().st_size)
    with pytest.raises(MemoryFileError, match=r"outside of its folder|not a file in it|incomplete"):
        limpet.load(folder, model)


@pytest.mark.parametrize(
    "changes", [{"offset": -1}, {"length": 2**62}, {"offset": 2**62}, {"offset": None}, {"length": True}]
)
def test_invalid_places(changes: dict[str, Any], folder: Path, model: nn.Module) -> None:
    pointed(folder, "memory.metadata", **changes)
    with pytest.raises(MemoryFileError, match=r"offset or length|truncated|missing"):
        limpet.load(folder, model)


def test_a_folder_without_a_memory_or_with_two(model: nn.Module, tmp_path: Path) -> None:
    memory = memory_of(model)
    for name, content in {"none": {"model": model.state_dict()}, "two": {"a": memory, "b": memory}}.items():
        with pytest.raises(MemoryFileError, match="no memory" if name == "none" else "2 memories"):
            limpet.load(saved(content, tmp_path / name), model)


def test_a_large_index_is_rejected(folder: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limpet.io.pickle_reader.MAX_BYTES", 100)
    with pytest.raises(MemoryFileError, match=r"memory\.save"):
        checkpoints.read(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [damage.Folder, damage.Pass, damage.SmallFile, damage.OtherModel])
def test_random_damage(kind: Any) -> None:
    outcomes = damage.damaged(kind, 2500, seed=1)
    assert sum(outcomes.values()) == 2500
    assert sum(count for name, count in outcomes.items() if name.endswith("rejected")) > 1500

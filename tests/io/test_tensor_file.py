"""Tensor files: the bytes of safetensors, SHA-256, and files that change while they are read."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

from limpet.errors import MemoryFileError, UnsupportedError
from limpet.io import tensor_file


def tensors_of_every_dtype() -> dict[str, torch.Tensor]:
    found = {}
    known = [dtype for dtype in tensor_file.DTYPES if dtype in safetensors.torch._SIZE]  # 0.4 has no uint16
    for i, dtype in enumerate(known):
        for j, shape in enumerate([(), (0,), (3,), (2, 5)]):
            found[f"{'zyxabc'[i % 6]}/{i}.{j}"] = torch.arange(10)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    return found


def test_the_bytes_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors = tensors_of_every_dtype()
    tensor_file.write(tmp_path / "a", "test", {"title": 'quoted "\N{SNOWMAN}"'}, tensors)
    content = (tmp_path / "a").read_bytes()
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    assert list(metadata) == sorted(metadata)
    save_file(tensors, tmp_path / "b", metadata)
    other = (tmp_path / "b").read_bytes()
    assert len(content) == len(other) and content[8 + size :] == other[8 + size :]
    header = json.loads(other[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))  # the library's are in random order
    assert json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode() == content[8 : 8 + size].rstrip()
    again = load_file(tmp_path / "a")
    assert again.keys() == tensors.keys()
    assert all(t.dtype == again[n].dtype and t.shape == again[n].shape for n, t in tensors.items())
    assert all(torch.equal(t.double(), again[n].double()) for n, t in tensors.items())
    described, read = tensor_file.read(tmp_path / "a", "test")
    assert described == {"title": 'quoted "\N{SNOWMAN}"'} and read.keys() == tensors.keys()


def test_a_dtype_that_safetensors_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"^a has dtype torch\.complex128"):
        tensor_file.write(tmp_path / "a", "test", {}, {"a": torch.zeros(2, dtype=torch.complex128)})
    assert not list(tmp_path.iterdir())


def test_sha256_is_that_of_the_whole_file_and_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "a"
    tensor_file.write(path, "test", {}, {"a": torch.zeros(2)})
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert tensor_file.read(path, "test", sha256=digest)[1].sha256() == digest
    assert tensor_file.read(path, "test", sha256=digest.upper())[1].keys() == {"a"}
    with pytest.raises(MemoryFileError, match=f"is {digest}, not {'0' * 64}: it is not the file that you expect"):
        tensor_file.read(path, "test", sha256="0" * 64)
    path.write_bytes(b"no safetensors at all")
    with pytest.raises(MemoryFileError, match="it is not the file that you expect"):  # not: its header is invalid
        tensor_file.read(path, "test", sha256=digest)


def written_in_the_past(path: Path) -> tensor_file.Tensors:
    tensor_file.write(path, "test", {}, {"a": torch.zeros(1000), "b": torch.zeros(3)})
    os.utime(path, (1, 1))
    return tensor_file.read(path, "test")[1]


def test_a_file_that_is_changed_in_place_while_it_is_read_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a"
    tensors = written_in_the_past(path)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content[:-4] + b"1234")
    with pytest.raises(MemoryFileError, match="a was changed while it was read: load it again"):
        tensors["b"]
    tensors = written_in_the_past(path)
    os.truncate(path, 100)
    with pytest.raises(MemoryFileError, match="was changed while it was read"):  # not a bus error
        tensors["a"]


def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    tensors = written_in_the_past(path)
    tensor_file.write(path, "test", {}, {"a": torch.ones(1000)})
    assert torch.equal(tensors["a"], torch.zeros(1000))


def test_descriptors_are_closed(tmp_path: Path) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("open descriptors are not listed here")
    path = tmp_path / "a"
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        written_in_the_past(path)
        with pytest.raises(MemoryFileError):
            tensor_file.read(path, "other")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("none", "there is no file"),
        ("fifo", "is not a regular file"),
        ("folder", "is not a regular file"),
        ("dangling", "is a symbolic link that leads nowhere"),
        ("loop", "is a symbolic link that leads nowhere"),
        ("empty", "header size is invalid"),
    ],
)
def test_what_is_not_a_tensor_file(name: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "fifo":
        os.mkfifo(path)
    elif name == "folder":
        path.mkdir()
    elif name == "dangling":
        path.symlink_to(tmp_path / "none")
    elif name == "loop":
        path.symlink_to(path)
    elif name == "empty":
        path.write_bytes(b"")
    with pytest.raises(MemoryFileError, match=told):
        tensor_file.read(path, "test")

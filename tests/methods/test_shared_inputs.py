"""Layers with the same input: their input eigenvectors are found to be equal, and stored once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import limpet
from limpet.errors import MemoryFileError
from limpet.io import tensor_file
from limpet.methods import memory_file
from limpet.methods.inspect import inspect
from limpet.precision import Kronecker, KroneckerTerm
from limpet.precision.same_factor import same_factors
from limpet.precision.storage import Storage

SIZE = 24


class Attention(nn.Module):
    """Three layers that read one tensor, and one that reads another of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))
        self.out = nn.Linear(SIZE, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(torch.tanh(self.query(x)) * torch.sigmoid(self.key(x)) + self.value(x).relu())
        return found


def remembered(dtype: torch.dtype = torch.float64, **options: Any) -> limpet.OnlineLaplace:
    torch.manual_seed(0)
    model = Attention().to(dtype)
    memory = limpet.OnlineLaplace(model, strength=1.0, **options)
    x = torch.randn(200, SIZE, dtype=dtype) * torch.logspace(0, -1, SIZE, dtype=dtype)
    memory.consolidate([(x, torch.randint(0, 5, (200,)))], progress=False)
    return memory


def inputs(memory: limpet.OnlineLaplace) -> dict[str, Any]:
    held = {name: one.precision for name, one in memory.posterior.held.items()}
    return {name: precision.inputs for name, precision in held.items() if isinstance(precision, Kronecker)}


def reflections(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return sorted(name for name in file.keys() if name.endswith(".reflections"))  # noqa: SIM118


@pytest.mark.parametrize("rank", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_that_read_one_tensor_are_found_by_their_factors(rank: int | None, dtype: torch.dtype) -> None:
    memory = remembered(dtype, rank=rank)
    assert same_factors(inputs(memory)) == {"key": "query", "value": "query"}
    x = torch.randn(200, SIZE, dtype=dtype) * torch.logspace(-1, 0, SIZE, dtype=dtype)
    memory.consolidate([(x, torch.randint(0, 5, (200,)))], progress=False)  # which weighs differently in each of them
    assert same_factors(inputs(memory)) == {}


@pytest.mark.parametrize("storage", [None, "float16", "int8"])
def test_a_pass_of_a_rank_gives_them_equal_eigenvectors(storage: str | None, tmp_path: Path) -> None:
    memory = remembered(rank=6, storage_dtype=storage)
    path = tmp_path / "memory.safetensors"
    memory.save(path)
    assert "key/precision/inputs.reflections" in reflections(path)  # the first in alphabetical order
    assert "query/precision/inputs.reflections" not in reflections(path)
    again = limpet.load(path, memory.model)
    assert isinstance(again, limpet.OnlineLaplace)
    v = torch.randn(SIZE, SIZE, dtype=torch.float64)
    for name in ("query", "key", "value"):
        before, after = (one.posterior.held[name].precision.apply(v) for one in (memory, again))
        assert torch.equal(before, after)
    bases = inputs(again)
    assert bases["key"].vectors is bases["query"].vectors is bases["value"].vectors
    assert again.nbytes == memory.nbytes - 2 * bases["key"].vectors.nbytes
    assert inspect(path).sha256 == tensor_file.Tensors(path).sha256()


@pytest.mark.parametrize("storage", [None, "float16", "int8"])
def test_a_compressed_memory_has_them_once(storage: str | None, tmp_path: Path) -> None:
    memory = remembered(torch.float32)
    each = {
        name: held.precision.truncate(6, 6, Storage(storage)).dense()
        for name, held in memory.posterior.held.items()
        if isinstance(held.precision, Kronecker)
    }
    memory.compress(rank=6, storage_dtype=storage)
    bases = inputs(memory)
    assert bases["key"].vectors is bases["query"].vectors is bases["value"].vectors
    assert bases["out"].vectors is not bases["query"].vectors
    for name, held in memory.posterior.held.items():
        torch.testing.assert_close(held.precision.dense(), each[name], rtol=1e-3, atol=1e-3 * float(each[name].max()))
    memory.save(tmp_path / "memory.safetensors")
    assert sum("inputs" in name for name in reflections(tmp_path / "memory.safetensors")) == 2


@pytest.mark.parametrize("limit", [3_000, 5_000])
def test_a_target_in_bytes_counts_them_once(limit: int, tmp_path: Path) -> None:
    memory = remembered(torch.float32)
    memory.compress(max_bytes=limit, storage_dtype="float16")
    path = tmp_path / "memory.safetensors"
    memory.save(path)
    with safe_open(path, framework="pt") as file:
        sizes = {name: file.get_tensor(name).nbytes for name in file.keys() if "/precision/" in name}  # noqa: SIM118
    assert 0.9 * limit < sum(sizes.values()) <= limit


def test_ranks_for_a_target_in_bytes_fall_with_the_root_of_the_size() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 100, bias=False), nn.Tanh(), nn.Linear(100, 50, bias=False))
    memory = limpet.OnlineLaplace(model, strength=1.0)
    memory.consolidate([(torch.randn(600, 400), torch.randint(0, 50, (600,)))], progress=False)
    ranks = memory.compress(max_bytes=50_000)
    assert ranks["0"][1] == ranks["2"][0] == pytest.approx(2 * ranks["0"][0], abs=1)


def test_a_name_that_refers_to_nothing_is_rejected(tmp_path: Path) -> None:
    memory = remembered(rank=6)
    path = tmp_path / "memory.safetensors"
    memory.save(path)
    described, tensors = tensor_file.read(path, memory_file.FORMAT)
    kept = dict(tensors)
    first = next(iter(described["shared"]))
    for wrong in ({first: "nothing"}, {first: 3}, {first: first}, ["a"], {next(iter(kept)): next(iter(kept))}, {}):
        tensor_file.write(path, memory_file.FORMAT, json.loads(json.dumps({**described, "shared": wrong})), kept, 3)
        with pytest.raises(MemoryFileError, match=r"corrupted|missing"):
            limpet.load(path, memory.model)


@pytest.mark.parametrize("storage", [None, "float16"])
@pytest.mark.parametrize("ratio", [1e3, 1e6])
def test_one_large_direction_in_common_is_not_the_same_factor(ratio: float, storage: str | None) -> None:
    torch.manual_seed(0)
    large = torch.linalg.qr(torch.randn(SIZE, SIZE, dtype=torch.float64)).Q[:, :1]

    def basis(seed: int, scale: float) -> Any:
        root = torch.randn(SIZE, 2 * SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        factor = root @ root.mT / SIZE + ratio * large @ large.mT
        start = Kronecker.start(torch.Size((3, SIZE)), 0.0, torch.zeros(()), rest=Storage(storage))
        return start.add(KroneckerTerm(scale * factor, torch.eye(3, dtype=torch.float64)), 1.0).inputs

    assert same_factors({"a": basis(1, 1.0), "b": basis(1, 2.7), "c": basis(2, 1.0)}) == {"b": "a"}

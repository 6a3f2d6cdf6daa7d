"""Memory files: saving and loading is bit-exact, and corrupted files are rejected."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import limpet
import networks
import old_files
from limpet.errors import MemoryFileError
from limpet.io import tensor_file
from states import changed, metadata

STRUCTURES = ["diagonal", "kronecker", "kronecker-sum", "dense"]
METHODS: dict[str, Callable[..., Any]] = {
    "online": limpet.OnlineLaplace,
    "per task": limpet.PerTaskLaplace,
    "approximate": limpet.ApproximateLaplace,
}


def data(seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(10, 4, generator=generator), torch.randint(0, 3, (10,), generator=generator))]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def filled(method: Callable[..., Any], **options: Any) -> tuple[nn.Module, Any]:
    model = network()
    memory = method(model, **options)
    for t in range(2):
        earlier = {"earlier": [data(s) for s in range(t)]} if method is limpet.ApproximateLaplace else {}
        memory.consolidate(data(t), **earlier)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
    return model, memory


def tensors_equal(a: limpet.Memory, b: limpet.Memory) -> bool:
    one, two = a.state_dict(), b.state_dict()
    if one["metadata"] != two["metadata"] or one["tensors"].keys() != two["tensors"].keys():
        return False
    return all(torch.equal(one["tensors"][name], two["tensors"][name]) for name in one["tensors"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_memory_comes_back_bit_for_bit(method: str, structure: str, tmp_path: Path) -> None:
    model, memory = filled(METHODS[method], structure=structure, strength=3.0, exclude=["2.bias"], max_factor_size=4)
    memory.save(tmp_path / "m.safetensors")
    again = limpet.load(tmp_path / "m.safetensors", model)
    assert type(again) is type(memory) and tensors_equal(again, memory)
    assert torch.equal(again.penalty(), memory.penalty())
    assert (again.tasks, again.examples, again.exclude) == (2, 20, ("2.bias",))
    twin = METHODS[method](network(1), structure=structure, exclude=["2.bias"], max_factor_size=4)
    twin.load_state_dict(memory.state_dict())
    assert tensors_equal(twin, memory)


def test_it_goes_on_the_same_after_loading(tmp_path: Path) -> None:
    model, memory = filled(limpet.PerTaskLaplace)
    memory.save(tmp_path / "m.safetensors")
    again = limpet.load(tmp_path / "m.safetensors", model)
    memory.consolidate(data(3))
    again.consolidate(data(3))  # type: ignore[attr-defined]
    assert tensors_equal(again, memory)


def test_synaptic_intelligence_in_the_middle_of_a_task(tmp_path: Path) -> None:
    model = network()
    memory = limpet.SynapticIntelligence(model, strength=0.5, damping=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ((x, y),) = data(0)
    with memory.protect(optimizer, examples=10):
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        memory.save(tmp_path / "m.safetensors")
    again = limpet.load(tmp_path / "m.safetensors", model)
    memory.consolidate()
    again.consolidate()  # type: ignore[attr-defined]
    assert tensors_equal(again, memory) and again.damping == 0.2  # type: ignore[attr-defined]


def test_directly_measured_parameters_come_back(tmp_path: Path) -> None:
    model, x, y = networks.build("attention")
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, y)])
    memory.save(tmp_path / "m.safetensors")
    assert tensors_equal(limpet.load(tmp_path / "m.safetensors", model), memory)


def test_the_header_names_what_is_inside(tmp_path: Path) -> None:
    _, memory = filled(limpet.OnlineLaplace, strength=3.0, likelihood=limpet.Categorical(ignore_index=7))
    memory.save(tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "limpet memory" and metadata["version"] == "1" and len(metadata["sha256"]) == 64
    inside = json.loads(metadata["limpet"])
    settings = inside["settings"]
    assert inside["library"] == limpet.__version__
    assert settings["method"] == "online-laplace" and settings["structure"] == "kronecker"
    assert (settings["strength"], settings["prior_precision"], settings["examples"], settings["tasks"]) == (3, 1, 20, 2)
    assert settings["likelihood"] == {"name": "categorical", "class_dim": -1, "ignore_index": 7}
    assert [b["name"] for b in inside["blocks"]] == ["0", "1", "2"]
    assert inside["blocks"][0]["parameters"] == {"0.weight": [5, 4], "0.bias": [5]}


def test_likelihoods_come_back(tmp_path: Path) -> None:
    class Own(limpet.Categorical):
        name = "own"

    for likelihood in (limpet.Gaussian(0.5), limpet.MultiOutput(limpet.Categorical(), limpet.Gaussian()), Own()):
        model = nn.Linear(4, 3)
        limpet.OnlineLaplace(model, likelihood=likelihood).save(tmp_path / "m.safetensors")
        if isinstance(likelihood, Own):
            with pytest.raises(MemoryFileError, match="likelihood="):
                limpet.load(tmp_path / "m.safetensors", model)
            again = limpet.load(tmp_path / "m.safetensors", model, likelihood=likelihood)
        else:
            again = limpet.load(tmp_path / "m.safetensors", model)
        assert again.likelihood.describe() == likelihood.describe()


def test_a_file_for_another_model_says_what_differs(tmp_path: Path) -> None:
    _, memory = filled(limpet.OnlineLaplace)
    path = tmp_path / "m.safetensors"
    memory.save(path)
    with pytest.raises(MemoryFileError, match=r"the model has no 1\.weight, 1\.bias, 2\.weight, 2\.bias"):
        limpet.load(path, nn.Sequential(nn.Linear(4, 5)))
    wider = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    with pytest.raises(MemoryFileError, match=r"0\.weight has shape \(6, 4\), in the memory \(5, 4\)"):
        limpet.load(path, wider)
    with pytest.raises(MemoryFileError, match=r"limpet\.load"):
        limpet.PerTaskLaplace(network()).load_state_dict(memory.state_dict())
    with pytest.raises(MemoryFileError, match="no file"):
        limpet.load(tmp_path / "none.safetensors", network())
    frozen = network()
    frozen[0].requires_grad_(False)
    assert limpet.load(path, frozen).posterior.held["0"].tasks == 2  # what is known of it stays known
    more = nn.Sequential(*network(), nn.Linear(3, 2))
    assert limpet.load(path, more).posterior.held["3"].tasks == 0


def test_other_safetensors_and_other_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(MemoryFileError, match="not a limpet memory"):
        limpet.load(path, network())
    save_file({"a": torch.zeros(2)}, path, {"format": "limpet memory", "version": "4"})
    with pytest.raises(MemoryFileError, match="version '4'"):
        limpet.load(path, network())


# --- damage ----------------------------------------------------------------------------------------------------


def flipped(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 8, 64])):
        # half of them in the header, where the parsing is
        end = len(damaged) if rng.random() < 0.5 else min(len(damaged), 8 + int.from_bytes(content[:8], "little"))
        damaged[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def truncated(content: bytes, rng: random.Random) -> bytes:
    cut = content[: rng.randrange(len(content))]
    return cut if rng.random() < 0.7 else cut + bytes(rng.randrange(64))


def taken_apart(content: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def put_together(header: dict[str, Any], body: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + body


def wrong_shapes(content: bytes, rng: random.Random) -> bytes:
    header, body = taken_apart(content)
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    shape: list[int] = entry["shape"]
    change = rng.randrange(5)
    if change == 0:
        entry["shape"] = shape[::-1] if rng.random() < 0.5 else [*shape, 1]
    elif change == 1 and shape:
        shape[rng.randrange(len(shape))] = rng.choice([0, 2**31, 2**62, 2**64, -1, 3])
    elif change == 2:
        entry["data_offsets"] = [rng.randrange(2**40), rng.randrange(2**63)]
    elif change == 3:
        entry["dtype"] = rng.choice(["F64", "F16", "I32", "BOOL", "X1", "F8_E4M3"])
    else:
        entry.pop(rng.choice(sorted(entry)))
    return put_together(header, body)


def wrong_header(content: bytes, rng: random.Random) -> bytes:
    """Well-formed, with the right checksum, and untrue inside."""
    header, body = taken_apart(content)
    metadata = header["__metadata__"]
    inside = json.loads(metadata["limpet"])
    target: Any = rng.choice([inside, inside["settings"], *inside["blocks"], inside["blocks"][0]["precision"]])
    key = rng.choice(sorted(target))
    odd = [None, -1, 1e308, "x", [], {}, True, [[]], 2**70, "kronecker", float(rng.random()), {"0.weight": [5, 4]}]
    if rng.random() < 0.3:
        target.pop(key)
    else:
        target[key] = rng.choice(odd)
    metadata["limpet"] = json.dumps(inside)
    offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    tensors = {}
    for name, (start, stop) in offsets.items():
        flat = torch.frombuffer(bytearray(body[start:stop]), dtype=torch.float32)
        tensors[name] = flat.reshape(header[name]["shape"])
    metadata["sha256"] = tensor_file.checksum(metadata["limpet"], tensors)
    return put_together(header, body)


def huge(content: bytes, rng: random.Random) -> bytes:
    size = rng.choice([2**63, 2**64 - 1, 2**40, len(content), len(content) - 8, 100_000_001, 0, 1])
    return struct.pack("<Q", size) + content[8:]


DAMAGES = [flipped, flipped, flipped, truncated, wrong_shapes, wrong_header, huge]


def running_memory(path: Path) -> nn.Module:
    """A memory in the middle of a protected task, with forces and pending steps."""
    model, memory = filled(limpet.PerTaskLaplace)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ((x, y),) = data(0)
    with memory.protect(optimizer, examples=10, every=2):
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        memory.save(path)
    return model


def watching_memory(path: Path) -> nn.Module:
    """Synaptic Intelligence in the middle of a task."""
    model = network()
    memory = limpet.SynapticIntelligence(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ((x, y),) = data(0)
    with memory.protect(optimizer, examples=10):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        memory.save(path)
    return model


def saved_memory(path: Path, kind: str) -> nn.Module:
    if kind in ("running", "watching"):
        return running_memory(path) if kind == "running" else watching_memory(path)
    if kind == "shared":
        two = old_files.one_task(old_files.TwoReaders, exclude=["scale"])
        two.save(path)
        return two.model
    model, memory = filled(limpet.PerTaskLaplace if kind == "diagonal" else limpet.OnlineLaplace, structure=kind)
    memory.save(path)
    return model


def numbers(memory: limpet.Memory) -> tuple[dict[str, Tensor], float, float]:
    return memory.state_dict()["tensors"], memory.penalty().item(), float(memory.forecast())


@pytest.mark.parametrize("kind", ["kronecker", "diagonal", "kronecker-sum", "dense", "running", "watching", "shared"])
@pytest.mark.parametrize("count", [140, pytest.param(1540, marks=pytest.mark.slow)])
def test_damaged_files_are_refused_or_harmless(kind: str, count: int, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    model = saved_memory(path, kind)
    content = path.read_bytes()
    expected, penalty, forecast = numbers(limpet.load(path, model))
    rng = random.Random(count)
    refused = 0
    for i in range(count):
        damage = DAMAGES[i % len(DAMAGES)]
        path.write_bytes(damage(content, rng))
        try:
            again = limpet.load(path, model)
        except MemoryFileError:
            refused += 1
            continue
        found, *values = numbers(again)
        assert all(torch.equal(found[name], expected[name]) for name in found.keys() & expected.keys())
        # a header that is untrue under a right checksum cannot be told from a true one
        if damage is not wrong_header:
            assert found.keys() == expected.keys() and values == [penalty, forecast]
    assert refused > 0.8 * count


MEASURE = """
import resource, sys, torch, limpet
from limpet.errors import MemoryFileError
model = torch.nn.Linear(2000, 2000)
path, size = sys.argv[1], int(sys.argv[2])
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    limpet.load(path, model)
    print("read")
except MemoryFileError:
    print("refused")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((peak - base) * 1024 / size)
"""


@pytest.mark.slow
def test_loading_takes_at_most_twice_the_file(tmp_path: Path) -> None:
    model = nn.Linear(2000, 2000)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(torch.randn(4, 2000), torch.randint(0, 2000, (4,)))])
    path = tmp_path / "m.safetensors"
    memory.save(path)  # 64 MB
    content = path.read_bytes()
    damages = {
        "none": content,
        "bits": content[:-1] + bytes([content[-1] ^ 1]),
        "shape": content.replace(b"[2000,2001]", b"[9999,9999]", 1),
        "huge": struct.pack("<Q", 2**62) + content[8:],
    }
    for damage, damaged in damages.items():
        path.write_bytes(damaged)
        command = [sys.executable, "-c", MEASURE, str(path), str(len(content))]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        said, ratio = done.stdout.split()
        assert said == ("read" if damage == "none" else "refused")
        assert float(ratio) <= 2.0, f"{damage}: {ratio} times the file"


def test_the_checksum_covers_tensors_and_metadata(tmp_path: Path) -> None:
    _, memory = filled(limpet.OnlineLaplace)
    state = memory.state_dict()
    tensors = {name: tensor.contiguous() for name, tensor in state["tensors"].items()}
    described = state["metadata"]
    whole = hashlib.sha256(described.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        whole.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        whole.update(tensor.numpy().tobytes())
    assert tensor_file.checksum(described, tensors) == whole.hexdigest()


def test_numbers_that_no_memory_has_are_refused() -> None:
    model, memory = filled(limpet.OnlineLaplace)
    eigenvalues = "0/precision/eigenvalues"
    for name, value in ((eigenvalues, float("nan")), (eigenvalues, -1.0), ("0/mean", float("inf"))):
        state = changed(memory.state_dict())
        state["tensors"] = {**state["tensors"], name: torch.full_like(state["tensors"][name], value)}
        with pytest.raises(MemoryFileError, match=r"inf or nan|negative"):
            limpet.OnlineLaplace(model).load_state_dict(state)
    for constant in (float("inf"), "5", None):
        state = changed(memory.state_dict(), constant=constant)
        with pytest.raises(MemoryFileError, match=r"constant|Infinity"):
            limpet.OnlineLaplace(model).load_state_dict(state)
    for structure, name in (("kronecker-sum", "0/precision/terms.0.outputs"), ("dense", "0/precision/matrix")):
        model, other = filled(limpet.OnlineLaplace, structure=structure)
        state = changed(other.state_dict())
        state["tensors"] = {**state["tensors"], name: -state["tensors"][name]}
        with pytest.raises(MemoryFileError, match="negative"):
            limpet.OnlineLaplace(model, structure=structure).load_state_dict(state)
    for running in ({"every": 1, "count": 3, "pending": {"0": "nan"}}, {"every": 1, "count": -3, "pending": {}}):
        state = changed(memory.state_dict(), proximal=running)
        with pytest.raises(MemoryFileError):
            limpet.OnlineLaplace(model).load_state_dict(state)


def test_a_state_brings_its_own_settings_or_changes_nothing() -> None:
    _, memory = filled(limpet.OnlineLaplace, prior_precision=7.0, prior_mean="initial", max_factor_size=4)
    other = limpet.OnlineLaplace(network(), exclude=["2"])
    before = other.state_dict()
    blocks = metadata(memory)["blocks"]
    broken = changed(memory.state_dict(), blocks=[{**blocks[0], "tasks": -1}, *blocks[1:]])
    with pytest.raises(MemoryFileError):
        other.load_state_dict(broken)
    assert other.state_dict()["metadata"] == before["metadata"] and other.exclude == ("2",)
    other.load_state_dict(memory.state_dict())
    assert other.exclude == () and tensors_equal(other, memory)
    assert isinstance(other.model, nn.Sequential)
    other.model.append(nn.Linear(3, 2))
    with other.protect(torch.optim.SGD(other.model.parameters(), lr=0.1), examples=10):
        pass
    joined = other.posterior.held["3"]
    assert joined.precision.prior == 7.0 and torch.equal(joined.mean[:, :3], other.model[3].weight)
    with pytest.raises(MemoryFileError, match="likelihood"):
        limpet.OnlineLaplace(network(), likelihood="gaussian").load_state_dict(memory.state_dict())


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    _, memory = filled(limpet.OnlineLaplace)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        memory.save(tmp_path / "none" / "m.safetensors")


class RunsCode:
    """A pickle of it runs code when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("code-ran"),))


def test_reading_a_checkpoint_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(3, 2)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(torch.randn(8, 3), torch.randint(0, 2, (8,)))], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"memory": memory}, checkpoint_id=tmp_path / "kept")
    assert limpet.load(tmp_path / "kept", model).tasks == 1
    index = tmp_path / "kept" / ".metadata"
    index.write_bytes(pickle.dumps(RunsCode()))
    with pytest.raises(MemoryFileError, match=r"is not a torch\.distributed checkpoint"):
        limpet.load(tmp_path / "kept", model)
    index.write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(MemoryFileError, match=r"is not a torch\.distributed checkpoint"):
        limpet.load(tmp_path / "kept", model)
    memory.save(tmp_path / "kept" / "memory.safetensors")  # the file is preferred to the index
    assert limpet.load(tmp_path / "kept", model).tasks == 1
    assert not (tmp_path / "code-ran").exists()

"""Tests of eigenbases stored in half precision or offloaded to the CPU between uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import limpet
import networks
from limpet.errors import UnsupportedError
from limpet.precision import Kronecker
from limpet.precision.basis import Basis


def memories(network: str = "transformer", **options: Any) -> tuple[limpet.OnlineLaplace, limpet.OnlineLaplace]:
    """A memory of two tasks as it is used, and the same at rest."""
    found = []
    for settings in ({}, options):
        model, x, y = networks.build(network)
        model, x = model.float(), x.float() if x.is_floating_point() else x
        memory = limpet.OnlineLaplace(model, **settings)
        memory.consolidate([(x, y)], progress=False)
        memory.consolidate([(x.flip(0), y)], progress=False)
        found.append(memory)
    return found[0], found[1]


def moved(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def bases(memory: limpet.Memory) -> list[Tensor]:
    held = memory.posterior.held.values()
    kept = [h.precision for h in held if isinstance(h.precision, Kronecker)]
    return [b.vectors for p in kept for b in (p.inputs, p.outputs) if b.vectors is not None]


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-3), ("float16", 2e-4)])
def test_bases_at_rest_take_half_the_bytes_and_give_the_same_to_their_digits(dtype: str, tolerance: float) -> None:
    plain, resting = memories(storage_dtype=dtype)
    saved = sum(vectors.nbytes for vectors in bases(plain)) // 2
    assert resting.nbytes == plain.nbytes - saved
    assert all(vectors.dtype == getattr(torch, dtype) for vectors in bases(resting))
    for memory in (plain, resting):
        moved(memory.model)
    assert resting.penalty().item() == pytest.approx(plain.penalty().item(), rel=tolerance)
    assert resting.forecast().quadratic == pytest.approx(plain.forecast().quadratic, rel=tolerance)


@pytest.mark.parametrize("step", [1e-6, 1e-2, 1.0, 1e3])
def test_a_proximal_map_with_rounded_bases_leaves_alone_what_is_not_held(step: float) -> None:
    plain, resting = memories(storage_dtype="bfloat16")
    for name, held in plain.posterior.held.items():
        other = resting.posterior.held[name].precision
        v = torch.randn(held.block.shape, generator=torch.Generator().manual_seed(2))
        expected = held.precision.proximal(v, step)
        taken = (v - expected).norm()  # the error is a share of what the penalty takes away, not of the weights
        assert (other.proximal(v, step) - expected).norm() <= 1e-2 * taken + 1e-6 * v.norm()


@pytest.mark.parametrize("mode", ["proximal", "gradient"])
def test_training_with_bases_at_rest_ends_where_it_does_without(mode: str) -> None:
    ends = []
    for memory in memories("linear", storage_dtype="bfloat16"):
        model, x, y = memory.model, *networks.build("linear")[1:]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        with memory.protect(optimizer, examples=6, mode=mode):
            for _ in range(100):
                optimizer.zero_grad()
                F.cross_entropy(model(-x.float()), y).backward()
                optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    start = torch.cat([p.detach().float().flatten() for p in networks.build("linear")[0].parameters()])
    assert (ends[1] - ends[0]).norm() < 0.02 * (ends[0] - start).norm()


def test_bases_on_the_host_are_the_same_bases() -> None:
    plain, resting = memories(offload=True)
    assert all(vectors.device.type == "cpu" for vectors in bases(resting))
    for memory in (plain, resting):
        moved(memory.model)
    assert resting.penalty().item() == plain.penalty().item() and resting.nbytes == plain.nbytes


def test_what_lies_at_rest_is_kept_so(tmp_path: Path) -> None:
    _, resting = memories(storage_dtype="bfloat16", offload=True)
    resting.save(tmp_path / "memory.safetensors")
    again = limpet.load(tmp_path / "memory.safetensors", resting.model)
    assert again.posterior.structure.rest == resting.posterior.structure.rest
    assert all(map(torch.equal, bases(again), bases(resting))) and again.nbytes == resting.nbytes
    with pytest.raises(UnsupportedError, match="orthonormal"):
        again.protect(torch.optim.SGD(again.model.parameters(), lr=0.1), examples=6, budget=0.1)
    with pytest.raises(ValueError, match="storage_dtype must be one of bfloat16"):
        limpet.OnlineLaplace(resting.model, storage_dtype="int4")


def test_offloaded_bases_come_once_a_step_and_are_not_kept_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(8, 5), torch.randint(0, 3, (8,))
    memory = limpet.OnlineLaplace(model, offload=True)
    memory.consolidate([(x, y)], progress=False)
    for held in memory.posterior.held.values():
        assert held.precision.applier() == held.precision.apply
    brought = []
    ready = Basis.columns.fget
    assert ready is not None
    monkeypatch.setattr(Basis, "columns", property(lambda self: (brought.append(1), ready(self))[1]))
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())):
        with memory.protect(optimizer, examples=8):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            brought.clear()
            optimizer.step()
            assert len(brought) == 4  # two sides of two blocks

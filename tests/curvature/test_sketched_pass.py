"""Passes that sum sketches of long factors, for memories of a rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import limpet
from limpet.curvature import FisherPass
from limpet.curvature import structure as structures
from limpet.curvature.accumulators import KroneckerAccumulator
from limpet.curvature.checkpoint import Checkpoint
from limpet.curvature.structure import Structure
from limpet.model import discover
from limpet.precision import KroneckerTerm

IN, HIDDEN, OUT, RANK = 40, 6, 48, 4


def network(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT)).double()
    return model, torch.randn(90, IN, dtype=torch.float64), torch.randint(0, OUT, (90,))


def moved(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)


def memory_of(model: nn.Module, batches: Any, **options: Any) -> limpet.OnlineLaplace:
    memory = limpet.OnlineLaplace(model, rank=RANK, strength=1.0, **options)
    memory.consolidate(batches, progress=False)
    return memory


def with_and_without(monkeypatch: pytest.MonkeyPatch, measured: Callable[[nn.Module, Tensor, Tensor], Any]) -> Any:
    """What is measured with sketches of long factors, and with their sums."""
    sketched = measured(*network())
    monkeypatch.setattr(structures, "sketch_columns", lambda size, rank: None)
    return sketched, measured(*network())


def test_long_sides_are_sketched() -> None:
    model, _, _ = network()
    blocks = discover(model)
    sums = [Structure("kronecker", 4096, rank=RANK).accumulator(block, torch.zeros(())) for block in blocks]
    found = {
        block.name: one.sketches
        for block, one in zip(blocks, sums, strict=True)
        if isinstance(one, KroneckerAccumulator)
    }
    assert found == {"0": {"in": 2 * RANK}, "2": {"out": 2 * RANK}}


def test_a_pass_over_few_examples_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
        memory = memory_of(model, [(x[:5], y[:5])], fisher="empirical")
        moved(model)
        return memory.penalty().item(), float(memory.forecast().quadratic)

    sketched, exact = with_and_without(monkeypatch, measured)
    # the leading eigenvalues of a complete factor come from a range finder
    assert sketched == pytest.approx(exact, rel=1e-6)


def test_a_pass_over_many_examples_is_close(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(model: nn.Module, x: Tensor, y: Tensor) -> tuple[list[float], float]:
        memory = memory_of(model, list(zip(x.split(30), y.split(30), strict=True)))
        traces = [float(held.precision.trace()) for held in memory.posterior.held.values()]
        moved(model)
        return traces, memory.penalty().item()

    (traces, penalty), (exact_traces, exact_penalty) = with_and_without(monkeypatch, measured)
    assert traces == pytest.approx(exact_traces, rel=1e-9)
    assert penalty == pytest.approx(exact_penalty, rel=0.1)


def test_a_resumed_pass_is_the_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "SECONDS", 0.0)
    model, x, y = network()
    batches = list(zip(x.split(10), y.split(10), strict=True))
    whole = memory_of(model, batches)
    path = tmp_path / "pass.safetensors"

    class Interrupted:
        """Batches of which the last ones cannot be read."""

        def __len__(self) -> int:
            return len(batches)

        def __iter__(self) -> Any:
            yield from batches[:6]
            raise KeyboardInterrupt

    resumed = limpet.OnlineLaplace(model, rank=RANK, strength=1.0)
    with pytest.raises(KeyboardInterrupt):
        resumed.consolidate(Interrupted(), checkpoint=path, progress=False)
    assert path.exists()
    resumed.consolidate(batches, checkpoint=path, progress=False)
    moved(model)
    assert resumed.penalty().item() == pytest.approx(whole.penalty().item(), rel=1e-12)


def test_a_side_longer_than_the_largest_factor_stays_whole() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(14_336, 3), torch.randn(40, 14_336), torch.randint(0, 3, (40,))
    blocks = discover(model)
    chosen = Structure("kronecker", 4096, rank=8)
    accumulator = chosen.accumulator(blocks[0], torch.zeros(()))
    memory = limpet.OnlineLaplace(model, rank=8, strength=1.0)
    memory.consolidate([(x, y)], progress=False, probe=20)
    assert "inputs of rank 8" in str(memory.report())
    assert isinstance(accumulator, KroneckerAccumulator) and accumulator.sketches == {"in": 16}
    assert memory.posterior.nbytes < 4 * (14_337 * (8 + 3) + 1000)
    with torch.no_grad():
        model.weight += 0.02 * torch.randn(model.weight.shape)
    before = float(memory.drift())
    limpet.repair(model, memory, [(x + 1, y)], strength=1.0, progress=False)
    assert 0 < float(memory.drift()) < before


def test_a_second_task_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(model: nn.Module, x: Tensor, y: Tensor) -> float:
        memory = memory_of(model, [(x[:4], y[:4])], fisher="empirical")
        memory.consolidate([(x[4:7], y[4:7])], progress=False)
        moved(model)
        return memory.penalty().item()

    sketched, exact = with_and_without(monkeypatch, measured)
    assert sketched == pytest.approx(exact, rel=1e-6)


def test_sums_of_ranks_add_up_to_those_of_one_process() -> None:
    model, x, y = network()
    asked = Structure("kronecker", 4096, rank=RANK)

    def read(rows: slice) -> FisherPass:
        one_pass = FisherPass(model, discover(model), limpet.Categorical(), asked, fisher="sampled")
        one_pass._read_all([(x[rows], y[rows])], None, False, None)
        return one_pass

    whole, *parts = (read(rows) for rows in (slice(0, 90), slice(0, 40), slice(40, 90)))
    for name, accumulator in whole.sums.items():
        one, other = (part.sums[name].sums() for part in parts)
        assert any(key.endswith(".sketch") for key in one)
        reduced = asked.accumulator(accumulator.block, x)
        reduced.load({key: tensor + other[key] for key, tensor in one.items()})
        (expected,), (found,) = accumulator.terms(2.0), reduced.terms(2.0)
        assert isinstance(expected, KroneckerTerm) and isinstance(found, KroneckerTerm)
        for factor, same in zip(expected.factors(), found.factors(), strict=True):
            torch.testing.assert_close(same, factor, rtol=1e-6, atol=1e-9)

"""Truncated memories: what they store, protect, repair and read back."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import limpet
from limpet.errors import LimpetError, MemoryFileError, UnsupportedError
from limpet.methods.compress import parsed_bytes, stored_bytes
from limpet.methods.inspect import inspect
from limpet.posterior.summary import described
from limpet.precision import Kronecker, KroneckerTerm

N = 240
TARGETS: list[dict[str, Any]] = [{"rank": 3}, {"energy": 0.9}, {"bytes_per_weight": 1.5}, {"max_bytes": "1.2kB"}]


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)


def task(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 12, generator=generator, dtype=torch.float64) * torch.logspace(0, -1.5, 12, dtype=torch.float64)
    return x.to(dtype), (x @ torch.randn(12, 4, generator=generator, dtype=torch.float64)).argmax(1)


def trained(memory: limpet.Memory | None, model: nn.Module, seed: int, steps: int = 30, **options: Any) -> None:
    x, y = task(seed, next(model.parameters()).dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with nullcontext() if memory is None else memory.protect(optimizer, examples=N, **options):
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def remembered(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Sequential, limpet.OnlineLaplace]:
    model = network(dtype=dtype)
    trained(None, model, 1)
    memory = limpet.OnlineLaplace(model, **options)
    memory.consolidate([task(1, dtype)], progress=False, probe=40)
    return model, memory


def dense_penalty(memory: limpet.Memory, model: nn.Module) -> Tensor:
    """The penalty with every precision written out as a matrix."""
    weights = dict(model.named_parameters())
    total = torch.zeros((), dtype=torch.float64)
    for held in memory.posterior.held.values():
        d = held.displacement(weights).double().flatten()
        total += d @ held.precision.dense().double() @ d / 2
    return total


@pytest.mark.parametrize("tasks", [1, 2])
def test_the_penalty_and_the_forecast_are_those_of_the_dense_matrix(tasks: int) -> None:
    model, memory = remembered(rank=3)
    if tasks == 2:
        trained(memory, model, 2)
        memory.consolidate([task(2)], progress=False)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    torch.testing.assert_close(memory.penalty().detach(), dense_penalty(memory, model), rtol=1e-6, atol=1e-9)
    rises = sum(memory.posterior.rises().values())
    weights = dict(model.named_parameters())
    wanted = 0.0
    for held in memory.posterior.held.values():
        d = held.displacement(weights).flatten()
        wanted += float(d @ held.precision.fisher().dense() @ d / 2)
    assert rises == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("options", [{"mode": "proximal"}, {"mode": "gradient"}, {"budget": 0.02}], ids=str)
def test_a_rank_of_everything_trains_like_the_whole_memory(options: dict[str, Any]) -> None:
    whole, all_of_it = remembered()
    cut, truncated = remembered(rank=100)
    trained(all_of_it, whole, 2, **options)
    trained(truncated, cut, 2, **options)
    for a, b in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_a_small_rank_protects_nearly_as_well() -> None:
    x, y = task(1)

    def old_loss(**options: Any) -> float:
        model, memory = remembered(strength=30.0, **options)
        trained(memory, model, 2, steps=200)
        return float(F.cross_entropy(model(x), y).detach())

    plain, _ = remembered()
    trained(None, plain, 2, steps=200)
    before, after = old_loss(), float(F.cross_entropy(plain(x), y).detach())
    assert after - before > 0.1
    assert old_loss(rank=5) - before < 0.25 * (after - before)


def test_compressing_afterwards_is_the_rank_from_the_start() -> None:
    _, first = remembered(rank=3)
    _, second = remembered()
    ranks = second.compress(rank=3, storage_dtype=None)
    assert ranks == {"0": (3, 3), "2": (3, 3), "4": (3, 4)} and first.nbytes == second.nbytes
    for name, held in first.posterior.held.items():
        torch.testing.assert_close(held.precision.dense(), second.posterior.held[name].precision.dense())


@pytest.mark.parametrize("dtype", [None, "float16", "int8"])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_the_bytes_are_those_of_the_file(target: dict[str, Any], dtype: str | None, tmp_path: Path) -> None:
    _, memory = remembered(torch.float32)
    kept = {name: held.precision for name, held in memory.posterior.held.items()}
    if dtype is None and ("max_bytes" in target or "bytes_per_weight" in target):
        target = {name: 3 * value if isinstance(value, float) else "4kB" for name, value in target.items()}
    ranks = memory.compress(**target, storage_dtype=dtype)
    total = 0
    for name, held in memory.posterior.held.items():
        before = kept[name]
        assert isinstance(before, Kronecker)
        stored = sum(tensor.nbytes for tensor in held.precision.tensors().values())
        assert stored == stored_bytes(before, ranks[name], dtype, product=True)
        total += stored
    weights = sum(p.numel() for p in memory.model.parameters())
    assert total <= target.get("bytes_per_weight", 1e9) * weights
    assert total <= parsed_bytes(target.get("max_bytes", "1GB"))
    if "energy" in target:
        for name, (inputs, _) in ranks.items():
            trace = kept[name].inputs.trace.sort(descending=True).values  # type: ignore[attr-defined]
            assert trace[:inputs].sum() >= 0.9 * trace.sum()
            assert inputs == 1 or trace[: inputs - 1].sum() < 0.9 * trace.sum()
    memory.save(tmp_path / "memory.safetensors")
    again = limpet.load(tmp_path / "memory.safetensors", memory.model)
    assert again.nbytes == memory.nbytes
    v = torch.randn(16, 13)
    first = [m.posterior.held["0"].precision.apply(v) for m in (memory, again)]  # type: ignore[union-attr]
    assert torch.equal(*first)
    assert (
        "of rank" in str(again.report()) and "of rank" in inspect(tmp_path / "memory.safetensors").blocks[0].structure
    )


def test_a_repair_with_a_truncated_memory_is_nearly_that_of_the_whole_one() -> None:
    model, memory = remembered()
    trained(None, model, 2, steps=60)
    tuned = copy.deepcopy(model.state_dict())
    limpet.repair(model, memory, [task(2)], strength=1.0, progress=False)
    drift = memory.drift()
    model.load_state_dict(tuned)
    unrepaired = memory.drift()
    memory.compress(rank=4)
    limpet.repair(model, memory, [task(2)], strength=1.0, progress=False)
    assert memory.drift() - drift < 0.2 * (unrepaired - drift)


def test_a_file_that_names_the_published_weights(tmp_path: Path) -> None:
    model, memory = remembered(torch.float32)
    memory.compress(rank=3, storage_dtype="int8")
    path, full = tmp_path / "small.safetensors", tmp_path / "full.safetensors"
    memory.save(full)
    memory.save(path, base="owner/model@main")
    assert path.stat().st_size < full.stat().st_size - 4 * sum(p.numel() for p in model.parameters()) + 2000
    again = limpet.load(path, copy.deepcopy(model))
    for name, held in memory.posterior.held.items():
        assert torch.equal(held.mean, again.posterior.held[name].mean)  # type: ignore[union-attr]
    stakes = [inspect(each).blocks[0].stakes for each in (path, full)]
    torch.testing.assert_close(*stakes)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2].weight[0, 0] += 1e-6
    with pytest.raises(MemoryFileError, match=r"2\.weight of the model is not that of owner/model@main"):
        limpet.load(path, other)
    for base in (model, lambda: model):
        tuned = limpet.load(path, other, base=base)
        assert torch.equal(tuned.posterior.held["2"].mean, memory.posterior.held["2"].mean)  # type: ignore[union-attr]
    assert limpet.load(full, other, base=pytest.fail).tasks == 1  # not called
    with torch.no_grad():
        model[0].bias += 1
    with pytest.raises(LimpetError, match="the mean of 0 is not its current weight"):
        memory.save(path, base="owner/model")


def test_published_weights_in_bfloat16_have_the_checksums_of_their_float32(tmp_path: Path) -> None:
    model, memory = remembered(torch.float32)
    half = copy.deepcopy(model).bfloat16()
    model.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    memory = limpet.OnlineLaplace(model, rank=3, prior_mean="initial")
    memory.consolidate([task(1, torch.float32)], progress=False)
    memory.save(tmp_path / "memory.safetensors", base="owner/model")
    again = limpet.load(tmp_path / "memory.safetensors", half)
    assert torch.equal(again.posterior.held["0"].mean, memory.posterior.held["0"].mean)  # type: ignore[union-attr]


def test_files_without_truncation_keep_their_version(tmp_path: Path) -> None:
    from safetensors import safe_open

    for number, options in (("1", {}), ("2", {"rank": 2})):
        _, memory = remembered(torch.float32, **options)
        memory.save(tmp_path / "memory.safetensors")
        with safe_open(tmp_path / "memory.safetensors", "pt") as file:
            assert file.metadata()["version"] == number


def test_errors_say_what_to_do() -> None:
    model, memory = remembered()
    with pytest.raises(ValueError, match="pass one of rank="):
        memory.compress()
    with pytest.raises(ValueError, match="pass one of rank="):
        memory.compress(rank=3, energy=0.5)
    with pytest.raises(ValueError, match="energy must be in"):
        memory.compress(energy=1.5)
    with pytest.raises(ValueError, match="max_bytes is '4 apples'"):
        memory.compress(max_bytes="4 apples")
    with pytest.raises(LimpetError, match="do not hold one eigenvector"):
        memory.compress(max_bytes=10)
    with pytest.raises(ValueError, match="int8' is for truncated factors"):
        limpet.OnlineLaplace(model, storage_dtype="int8")
    with pytest.raises(ValueError, match="rank= and energy= truncate Kronecker"):
        limpet.OnlineLaplace(model, structure="diagonal", rank=3)
    with pytest.raises(LimpetError, match="no Kronecker factors yet"):
        limpet.OnlineLaplace(model).compress(rank=3)
    with pytest.raises(UnsupportedError, match="structure 'diagonal'"):
        limpet.OnlineLaplace(model, structure="diagonal").compress(rank=3)


def test_predictions_are_those_of_the_dense_covariance() -> None:
    model, memory = remembered(rank=3)
    x = task(3)[0][:4]
    found = memory.output_distribution(x).covariance
    wanted = torch.zeros_like(found)
    for held in memory.posterior.held.values():
        covariance = torch.linalg.inv(held.precision.dense())
        parameters = [dict(model.named_parameters())[name] for name in held.block.parameters]
        for example in range(len(x)):
            outputs = model(x[example : example + 1])[0]
            rows = []
            for output in outputs:
                gradients = torch.autograd.grad(output, parameters, retain_graph=True)
                named = dict(zip(held.block.parameters, gradients, strict=True))
                rows.append(held.block.gather(named).flatten())
            jacobian = torch.stack(rows)
            wanted[example] += jacobian @ covariance @ jacobian.mT
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("before", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("after", [None, "float16", "bfloat16", "int8"])
def test_any_storage_can_be_compressed_to_any_other(before: str | None, after: str | None, tmp_path: Path) -> None:
    model, memory = remembered(torch.float32, storage_dtype=before)
    x = torch.randn(16, 13)
    whole = memory.posterior.held["0"].precision.apply(x)
    assert memory.compress(rank=10, storage_dtype=after) == {"0": (10, 10), "2": (10, 9), "4": (10, 4)}
    assert float((memory.posterior.held["0"].precision.apply(x) - whole).norm() / whole.norm()) < 0.1
    memory.save(tmp_path / "memory.safetensors")
    limpet.load(tmp_path / "memory.safetensors", model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("storage", [None, "float16", "int8"])
def test_a_number_of_bytes_is_kept_with_tasks_of_different_strengths(dtype: torch.dtype, storage: str | None) -> None:
    _, memory = remembered(dtype)
    memory.strength = 3.0
    memory.consolidate([task(2, dtype)], progress=False)
    memory.compress(max_bytes=8000, storage_dtype=storage)
    stored = [tensor.nbytes for held in memory.posterior.held.values() for tensor in held.precision.tensors().values()]
    assert 4000 < sum(stored) <= 8000


def test_blocks_without_a_task_are_truncated_when_they_get_one(tmp_path: Path) -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 4), nn.Linear(16, 4)
            self.old = True

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = (self.first if self.old else self.second)(torch.tanh(self.body(x)))
            return found

    torch.manual_seed(0)
    model = TwoHeads().double()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([task(1)], progress=False)
    memory.compress(energy=0.8)
    rank = memory.posterior.structure.rank
    assert rank is not None and rank < 12
    memory.save(tmp_path / "memory.safetensors", base="owner/model")
    assert limpet.load(tmp_path / "memory.safetensors", model).tasks == 1
    model.old = False
    memory.consolidate([task(2)], progress=False)
    assert "of rank" in described(memory.posterior.held["second"].precision)


def test_a_group_of_small_curvature_is_no_product_because_others_are() -> None:
    start = Kronecker.start(torch.Size((2, 5, 6)), 0.0, torch.zeros((), dtype=torch.float64), rank=2)
    scales = torch.tensor([1.0, 1e-6], dtype=torch.float64).reshape(2, 1, 1)

    def term(seed: int) -> KroneckerTerm:
        roots = [
            torch.randn(n, n, generator=torch.Generator().manual_seed(seed + n), dtype=torch.float64) for n in (6, 5)
        ]
        q, h = (root @ root.mT for root in roots)
        same = [torch.eye(n, dtype=torch.float64) for n in (6, 5)]
        return KroneckerTerm(torch.stack([same[0], q]), torch.stack([same[1], h]) * scales)

    precision = start.add(term(0), 1.0).add(term(1), 1.0)
    assert "eigenvalues" in precision.tensors()


@pytest.mark.parametrize("target", [{"max_bytes": 30_000}, {"max_bytes": "50kB"}, {"bytes_per_weight": 0.5}])
@pytest.mark.parametrize("dtype", [None, "float16", "int8"])
def test_the_rank_that_a_target_in_bytes_allows(target: dict[str, Any], dtype: str | None) -> None:
    def made(**options: Any) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 300))
        memory = limpet.OnlineLaplace(model, storage_dtype=dtype, **options)
        memory.consolidate([(torch.randn(20, 300), torch.randint(0, 300, (20,)))], progress=False)
        ranks.append(memory.posterior.structure.rank)
        kept = {name: tensor for name, tensor in memory.state_dict()["tensors"].items() if not name.endswith("mean")}
        return sum(tensor.nbytes for tensor in kept.values())

    ranks: list[Any] = []
    limit = {30_000: 30_000, "50kB": 50_000}.get(target.get("max_bytes", ""), 0.5 * (300 * 41 + 301 * 40))
    assert made(**target) <= limit < made(rank=ranks[0] + 1)
    with pytest.raises(LimpetError, match="do not hold one eigenvector per factor"):
        limpet.OnlineLaplace(nn.Linear(30, 30), max_bytes=10)
    with pytest.raises(ValueError, match="not several"):
        limpet.OnlineLaplace(nn.Linear(30, 30), max_bytes=10, rank=3)


@pytest.mark.parametrize("energy", [0.7, 0.95, 1.0])
def test_the_rank_that_an_energy_needs_grows_with_the_tasks(energy: float, tmp_path: Path) -> None:
    model, memory = remembered(energy=energy)
    _, whole = remembered()
    found = []
    for seed in (1, 2, 3):
        if seed > 1:
            for one in (memory, whole):
                one.model.load_state_dict(network(seed).state_dict())
                one.consolidate([task(seed)], progress=False)
        for name, held in memory.posterior.held.items():
            complete = whole.posterior.held[name].precision
            assert isinstance(held.precision, Kronecker) and isinstance(complete, Kronecker)
            torch.testing.assert_close(held.precision.trace(), complete.trace())
            for basis in (held.precision.inputs, held.precision.outputs):
                total = basis.spread(basis.trace).sum()
                assert energy == 1 or basis.trace[:-1].sum() >= energy * total  # n - 1 of n are exact
                assert len(basis.trace) <= 2 or energy == 1 or basis.trace[:-2].sum() < energy * total
            if energy == 1:
                dense = complete.dense()
                gap = held.precision.dense() - dense
                assert gap.norm() < 1e-6 * dense.norm()
        found.append(sum(held.precision.inputs.length for held in memory.posterior.held.values()))  # type: ignore[attr-defined]
    assert found[0] <= found[2] and (energy == 1.0 or found[2] < 13 + 17 + 10)
    memory.save(tmp_path / "memory.safetensors")
    again = limpet.load(tmp_path / "memory.safetensors", model)
    assert isinstance(again, limpet.OnlineLaplace)
    for one in (memory, again):
        one.consolidate([task(4)], progress=False)
    for name, held in memory.posterior.held.items():
        assert torch.equal(held.precision.dense(), again.posterior.held[name].precision.dense())


def test_an_energy_has_to_be_a_part_of_the_trace() -> None:
    for wrong in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="energy"):
            limpet.OnlineLaplace(network(), energy=wrong)
    with pytest.raises(ValueError, match="not several"):
        limpet.OnlineLaplace(network(), energy=0.9, rank=3)
    with pytest.raises(ValueError, match="use structure='kronecker'"):
        limpet.OnlineLaplace(network(), energy=0.9, structure="diagonal")

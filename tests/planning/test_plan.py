"""Tests of plans, computed from shapes alone, against actual memories: bytes, peaks and operations."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import limpet
import networks
from allocated import allocations
from limpet.curvature import FisherPass, Structure
from limpet.curvature.accumulators import DenseAccumulator, DiagonalAccumulator, KroneckerAccumulator
from limpet.distributed.assignment import share
from limpet.errors import LimpetError, UnsupportedError
from limpet.model import discover
from limpet.planning.block_shape import EIGENVECTORS, BlockShape
from limpet.planning.plan import plan
from limpet.planning.table import in_bytes

Batch = dict[str, Tensor] | tuple[Tensor, Tensor]
STRUCTURES = ["diagonal", "kronecker", "kronecker-sum", "dense"]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 12, bias=False), nn.ReLU(), nn.Linear(12, 4))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 12, 3, groups=2), nn.GroupNorm(3, 12), nn.ReLU(),
        nn.Conv2d(12, 9, 3, bias=False), nn.BatchNorm2d(9), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(9, 4),
    )  # fmt: skip


def tied_llama() -> nn.Module:
    pytest.importorskip("transformers")
    from language_models import llama

    model: nn.Module = llama(tie_word_embeddings=True, initializer_range=0.5)
    return model


def images() -> Batch:
    return torch.randn(8, 4, 6, 6), torch.randint(0, 4, (8,))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "mlp": (mlp, lambda: (torch.randn(8, 20), torch.randint(0, 4, (8,)))),
    "convolutions": (convolutions, images),
    "llama": (tied_llama, lambda: {"input_ids": torch.randint(1, 23, (4, 7))}),
    "direct parameter": (networks.DirectParameter, lambda: (torch.randn(6, 5, 4), torch.randint(0, 3, (6,)))),
}


SIDES = ("inputs", "outputs")


def remembered(name: str, tasks: int, **options: Any) -> tuple[nn.Module, limpet.OnlineLaplace, Batch]:
    torch.manual_seed(0)
    make, data = NETWORKS[name]
    model = make()
    strengths = options.pop("strengths", [1.0] * tasks)
    memory = limpet.OnlineLaplace(model, fisher="sampled", **options)
    for strength in strengths:
        memory.strength = strength
        memory.consolidate([data()], progress=False)
    return model, memory, data()


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = make()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model


def long_sides(bias: bool = True) -> nn.Module:
    """Sides of 12, 40 and 64: at rank 4, the first is truncated, and the others are also sketched."""
    return nn.Sequential(
        nn.Linear(40, 12, bias=bias), nn.Tanh(), nn.Linear(12, 64, bias=bias), nn.Linear(64, 3, bias=bias)
    )


# --- truncated factors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "float16", "int8"])
def test_the_bytes_of_truncated_factors(dtype: str | None) -> None:
    torch.manual_seed(0)
    model = long_sides()
    memory = limpet.OnlineLaplace(model, rank=4, storage_dtype=dtype, fisher="sampled")
    for tasks in (1, 2):
        memory.consolidate([(torch.randn(30, 40), torch.randint(0, 3, (30,)))], progress=False)
        planned = plan(on_meta(long_sides), factor_rank=4, storage_dtype=dtype, tasks=tasks)
        assert planned.nbytes == memory.nbytes
        for row, held in zip(planned.rows, memory.posterior.held.values(), strict=True):
            assert row.bytes == held.nbytes
        assert [row.structure for row in planned.rows] == [
            "kronecker (inputs of rank 4, outputs of rank 4)",
            "kronecker (inputs of rank 4, outputs of rank 4)",
            "kronecker (inputs of rank 4)",
        ]
    asked = Structure("kronecker", 4096, rank=4)
    one_pass = FisherPass(model, discover(model), memory.likelihood, asked, fisher="sampled")
    one_pass._read_all([(torch.randn(30, 40), torch.randint(0, 3, (30,)))], None, False, None)
    for block in discover(model):
        sums = {
            name: tensor.numel() for name, tensor in one_pass.sums[block.name].sums().items() if "count/" not in name
        }
        assert BlockShape.of(block, asked).sums() == sums


@pytest.mark.parametrize("dtype", [None, "float16", "int8"])
def test_the_file_of_truncated_factors(dtype: str | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(500, 500) for _ in range(3)])
    memory = limpet.OnlineLaplace(model, rank=32, storage_dtype=dtype, fisher="sampled", prior_mean="initial")
    memory.consolidate([(torch.randn(30, 500), torch.randint(0, 3, (30,)))], progress=False)
    memory.save(tmp_path / "memory.safetensors", base="owner/model")
    planned = plan(model, factor_rank=32, storage_dtype=dtype, tasks=1)
    size = (tmp_path / "memory.safetensors").stat().st_size
    assert sum(row.file for row in planned.rows) == pytest.approx(size, abs=8_000)  # names and checksums
    assert f"its file, without published weights         {in_bytes(sum(row.file for row in planned.rows))}" in str(
        planned
    )


def big_llama(hidden: int, inner: int, heads: int, layers: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=8,
        num_hidden_layers=layers, vocab_size=128_256,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def test_memories_of_large_models_fit() -> None:
    sizes = {"8B": (4096, 14_336, 32, 32), "70B": (8192, 28_672, 64, 80)}
    for name, most in (("8B", 4e9), ("70B", 20e9)):
        model = on_meta(lambda name=name: big_llama(*sizes[name]))  # type: ignore[misc]
        planned = plan(model, rank=16, factor_rank=128, storage_dtype="float16", tasks=1, quantized=True)
        assert planned.nbytes < most and sum(row.file for row in planned.rows) < most
        assert all(row.structure == "kronecker (inputs of rank 128, outputs of rank 128)" for row in planned.rows)
        weights = {p for module in model.modules() if isinstance(module, nn.Linear) for p in module.parameters()}
        base = sum(p.numel() for p in weights) / 2 + 2 * sum(p.numel() for p in model.parameters() if p not in weights)
        if name == "8B":  # with the base in 4 bits, and AdamW in float32 for the adapters
            adapters = 16 * sum(row.trained // 2 for row in planned.rows)
            assert base + adapters + planned.nbytes + planned.replicated.ready < 24e9
    with pytest.raises(LimpetError, match="train through adapters"):
        plan(mlp(), quantized=True)
    with pytest.raises(ValueError, match="pass factor_rank="):
        plan(mlp(), storage_dtype="int8")


@pytest.mark.slow
@pytest.mark.parametrize("size", [640, 160])
def test_the_peak_of_a_consolidate_with_truncated_factors(size: int) -> None:
    torch.manual_seed(0)
    with allocations():
        model = nn.Sequential(*[nn.Linear(size, size) for _ in range(6)])
        memory = limpet.OnlineLaplace(model, rank=24, strength=1.0, fisher="sampled")
    kept, batch = memory.nbytes, (torch.randn(4, size), torch.randint(0, 9, (4,)))
    for tasks in (1, 2, 3):
        with allocations() as found:
            memory.consolidate([batch], progress=False)
        planned = plan(model, tasks=tasks, factor_rank=24)
        assert planned.replicated.peak == pytest.approx(kept + found.peak, rel=0.05)
        kept += found.left


@pytest.mark.parametrize("mode", ["gradient", "proximal"])
def test_the_operations_of_a_step_with_truncated_factors(mode: str) -> None:
    torch.manual_seed(0)
    model = long_sides(bias=False)
    memory = limpet.OnlineLaplace(model, rank=4, fisher="sampled")
    memory.consolidate([(torch.randn(30, 40), torch.randint(0, 3, (30,)))], progress=False)
    planned = plan(model, factor_rank=4, mode=mode, tasks=1)
    assert protected_step(model, memory, torch.optim.SGD(model.parameters(), lr=1e-3), mode) == planned.replicated.step


# --- bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_bytes_are_those_of_the_memory(name: str, structure: str) -> None:
    blank = on_meta(NETWORKS[name][0])
    model, memory, batch = remembered(name, 0, structure=structure)
    for tasks in (1, 2):
        memory.consolidate([batch], progress=False)
        planned = plan(blank, structure=structure, tasks=tasks)
        assert planned.nbytes == memory.nbytes == planned.replicated.memory
        assert [row.block for row in planned.rows] == list(memory.posterior.held)
        for row, held in zip(planned.rows, memory.posterior.held.values(), strict=True):
            assert row.bytes == held.nbytes and row.shape == held.mean.shape and row.weights == held.mean.nbytes
        assert plan(model, structure=structure, tasks=tasks) == planned


@pytest.mark.parametrize("max_factor_size", [8, 4096])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_tensor_kept_and_summed_is_foreseen_by_name(name: str, structure: str, max_factor_size: int) -> None:
    model, memory, batch = remembered(
        name, 2, structure=structure, max_factor_size=max_factor_size, strengths=[1.0, 2.0]
    )
    asked = Structure(structure, max_factor_size)
    outlines = {block.name: BlockShape.of(block, asked) for block in discover(model)}
    for key, held in memory.posterior.held.items():
        kept = {name: tensor.numel() for name, tensor in held.precision.tensors().items()}
        terms = [
            tuple(sum(kept.pop(key) for key in list(kept) if key.startswith(f"terms.{i}.{side}")) for side in SIDES)
            for i in range(len(getattr(held.precision, "terms", ())))
        ]
        assert outlines[key].kept(2, several_strengths=True) == kept and outlines[key].terms() * 2 == terms
    one_pass = FisherPass(model, discover(model), memory.likelihood, asked, fisher="sampled")
    one_pass._read_all([batch], None, False, None)
    assert one_pass.sums.keys() == outlines.keys()
    for key, accumulator in one_pass.sums.items():
        sums = {name: tensor.numel() for name, tensor in accumulator.sums().items() if not name.startswith("count/")}
        assert outlines[key].sums() == sums


def test_half_precision_weights_are_kept_in_single() -> None:
    model = mlp().bfloat16()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(torch.randn(8, 20).bfloat16(), torch.randint(0, 4, (8,)))], progress=False)
    planned = plan(model, tasks=1)
    assert planned.nbytes == memory.nbytes
    assert sum(row.trained for row in planned.rows) == 2 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bases_at_rest_take_two_bytes(dtype: str) -> None:
    model, x, y = networks.build("transformer")
    memory = limpet.OnlineLaplace(model.float(), storage_dtype=dtype)
    memory.consolidate([(x.float(), y)], progress=False)
    assert plan(model, tasks=1, storage_dtype=dtype).nbytes == memory.nbytes < plan(model, tasks=1).nbytes


def long_and_short() -> nn.Module:
    layers = [layer for _ in range(3) for layer in (nn.Linear(90, 200), nn.Linear(200, 90), nn.LayerNorm(90))]
    return nn.Sequential(*layers)


WIDE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "deep": (lambda: nn.Sequential(*[nn.Linear(160, 160) for _ in range(8)]), (160,)),
    "long and short": (long_and_short, (90,)),
    "small": (lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)]), (16,)),
    "one layer": (lambda: nn.Sequential(nn.Linear(400, 300)), (400,)),
    "groups": (
        lambda: nn.Sequential(nn.Conv2d(16, 128, 3, groups=4), nn.ReLU(), nn.Flatten(), nn.Linear(128, 90)),
        (16, 3, 3),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "structure", "auto"),
    [(name, structure, False) for name in WIDE if name != "small" for structure in ("diagonal", "kronecker")]
    + [("deep", "kronecker-sum", False), ("deep", "kronecker", True), ("one layer", "kronecker", True)]
    + [("one layer", "diagonal", True), ("small", "dense", False), ("small", "dense", True)],
)
def test_the_peak_of_a_consolidate_is_foreseen(name: str, structure: str, auto: bool) -> None:
    torch.manual_seed(0)
    make, shape = WIDE[name]
    strength: float | str = "auto" if auto else 1.0
    batch = torch.randn(4, *shape), torch.randint(0, 9, (4,))
    with allocations():
        model = make()
        memory = limpet.OnlineLaplace(model, structure=structure, strength=strength, fisher="sampled")
    kept = memory.nbytes
    for tasks in (1, 2, 3):
        with allocations() as found:
            memory.consolidate([batch], progress=False)
        planned = plan(model, structure=structure, tasks=tasks, auto_strength=auto)
        assert planned.replicated.memory == memory.nbytes
        assert planned.replicated.peak == pytest.approx(kept + found.peak, rel=0.05)
        kept += found.left


@pytest.mark.parametrize("tasks", [1, 2])
@pytest.mark.parametrize("mode", ["gradient", "proximal"])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_what_protection_needs_more_is_foreseen(structure: str, mode: str, tasks: int) -> None:
    torch.manual_seed(0)
    with allocations():
        model = nn.Sequential(*[nn.Linear(120, 120) for _ in range(16)])
        memory = limpet.OnlineLaplace(model, structure=structure, fisher="sampled")
        for _ in range(tasks):
            memory.consolidate([(torch.randn(4, 120), torch.randint(0, 90, (4,)))], progress=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    with allocations() as found, memory.protect(optimizer, examples=10, mode=mode):
        optimizer.step()
    planned = plan(model, structure=structure, mode=mode, tasks=tasks)
    assert planned.replicated.ready == pytest.approx(found.peak, rel=0.1)


# --- ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 5, 64])
def test_the_loads_of_ranks_add_up(ranks: int) -> None:
    planned = plan(on_meta(tied_llama), ranks=ranks)
    owners = share({row.block: row.bytes for row in planned.rows}, ranks)
    own = [[row for row in planned.rows if owners[row.block] == rank] for rank in range(ranks)]
    assert {row.block: row.owner for row in planned.rows} == owners
    assert planned.sharded.memory == max(sum(row.bytes for row in rows) for rows in own)
    assert planned.sharded.step == max(sum(row.step for row in rows) for rows in own)
    assert planned.sharded.update == max(sum(row.update for row in rows) for rows in own)
    weights = sum(row.trained for row in planned.rows)
    sent = []  # written out: what others own of one's shards, and what one owns of the others'
    for rows in own:
        mine = sum(row.trained for row in rows)
        sent.append((weights - mine) / ranks + mine * (ranks - 1) / ranks)
    assert planned.sharded.sent_step == int(max(sent))
    assert sum(sent) / ranks == pytest.approx(2 * weights * (ranks - 1) / ranks**2)
    sums = sum(row.sums for row in planned.rows)
    assert planned.replicated.sent_step == 0 and planned.replicated.sent_task == 2 * sums * (ranks - 1) // ranks
    assert planned.replicated.peak >= planned.sharded.peak
    assert planned.sharded.sent_batch == sums - min(sum(row.sums for row in rows) for rows in own)
    if ranks == 1:
        assert planned.sharded.memory == planned.nbytes and planned.sharded.sent_task == 0
    assert planned.training == 6 * planned.parameters * planned.tokens
    assert planned.share_of_step(planned.replicated) == planned.replicated.step * ranks / planned.training


# --- operations ------------------------------------------------------------------------------------------------


def _mv(a: tuple[int, int], b: tuple[int], **_: Any) -> int:
    return 2 * a[0] * a[1]


def _addmm(total: tuple[int, int], a: tuple[int, int], b: tuple[int, int], **_: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


NOT_COUNTED = {torch.ops.aten.mv: _mv, torch.ops.aten.addmm_: _addmm}  # by the counter itself


def counted(action: Callable[[], object]) -> int:
    with FlopCounterMode(display=False, custom_mapping=NOT_COUNTED) as counter:
        action()
    return counter.get_total_flops()


def protected_step(model: nn.Module, memory: limpet.Memory, optimizer: torch.optim.Optimizer, mode: str) -> int:
    """The operations of a second step under protection: the optimizer's own makes no matrix product."""
    with memory.protect(optimizer, examples=100, mode=mode):
        counts = []
        for _ in range(2):
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = 1e-3 * torch.randn_like(parameter)
            counts.append(counted(optimizer.step))
    return counts[1]


@pytest.mark.parametrize(("tasks", "max_factor_size"), [(1, 4096), (2, 16)])
@pytest.mark.parametrize("mode", ["gradient", "proximal"])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "dense"])
@pytest.mark.parametrize("name", ["mlp", "convolutions", "llama"])
def test_the_operations_of_a_protected_step(
    name: str, structure: str, mode: str, tasks: int, max_factor_size: int
) -> None:
    model, memory, _ = remembered(name, tasks, structure=structure, max_factor_size=max_factor_size)
    planned = plan(model, structure=structure, mode=mode, tasks=tasks, max_factor_size=max_factor_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    assert protected_step(model, memory, optimizer, mode) == planned.replicated.step
    assert structure == "diagonal" or planned.replicated.step > 0


@pytest.mark.parametrize("name", ["mlp", "convolutions", "llama"])
def test_the_operations_of_a_growing_sum(name: str) -> None:
    model, memory, _ = remembered(name, 3, structure="kronecker-sum")
    planned = plan(model, structure="kronecker-sum", tasks=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    assert protected_step(model, memory, optimizer, "gradient") == planned.replicated.step
    for held in memory.posterior.held.values():
        if held.precision.structure != "kronecker-sum":
            continue
        outline = BlockShape.of(held.block, memory.posterior.structure)
        gradient, whole = outline.gradient(3), outline.proximal(3)
        in_bases = (whole - 5 * gradient) / 6
        v = torch.randn(held.mean.shape)
        made = counted(lambda held=held, v=v: held.precision.proximal(v, 1e-4))  # type: ignore[misc]
        steps = (made - gradient - 2 * in_bases) / (gradient + in_bases)
        assert steps == int(steps) and 0 <= steps < 10


@pytest.mark.parametrize("bias", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("tasks", "max_factor_size"), [(1, 16), (2, 16), (2, 4096)])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_operations_of_adapters(structure: str, tasks: int, max_factor_size: int, bias: bool) -> None:
    peft = pytest.importorskip("peft")
    from language_models import llama

    torch.manual_seed(0)
    model = llama(attention_bias=bias, mlp_bias=bias, initializer_range=0.5)  # large: no side is a bias alone
    memory = limpet.OnlineLaplace(model, structure=structure, max_factor_size=max_factor_size, fisher="sampled")
    for _ in range(tasks):
        memory.consolidate([{"input_ids": torch.randint(1, 23, (4, 7))}], progress=False)
    plain = plan(model, structure=structure, tasks=tasks, max_factor_size=max_factor_size, rank=3)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    made = protected_step(adapted, memory, torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0), "gradient")
    assert plain.replicated.step == made > 0
    own = plan(adapted, structure=structure, tasks=tasks, max_factor_size=max_factor_size)
    assert [row.block for row in own.rows] == [row.block for row in plain.rows] and own.rows == plain.rows
    assert sum(row.trained for row in own.rows) == sum(parameter.nbytes for parameter in trained)
    assert plain.training == 4 * plain.parameters * plain.tokens
    with pytest.raises(LimpetError, match="already has adapters"):
        plan(adapted, rank=3)


@pytest.mark.parametrize("tasks", [1, 2, 3])
@pytest.mark.parametrize("max_factor_size", [16, 4096])
@pytest.mark.parametrize("name", ["mlp", "convolutions", "llama"])
def test_the_operations_of_taking_a_task_in(name: str, max_factor_size: int, tasks: int) -> None:
    strengths = [1.0, 2.0][: tasks - 1]
    model, memory, batch = remembered(name, tasks - 1, max_factor_size=max_factor_size, strengths=strengths)
    if tasks == 1:
        memory.posterior.arrange(memory._planned())
    fisher = FisherPass(model, discover(model), memory.likelihood, memory.posterior.structure, fisher="sampled").run(
        [batch], progress=False
    )
    several = tasks == 3
    for row, held in zip(
        plan(model, tasks=tasks, max_factor_size=max_factor_size).rows, memory.posterior.held.values(), strict=True
    ):
        outline = BlockShape.of(held.block, memory.posterior.structure)
        made = counted(lambda held=held: memory._updated(held, [fisher], held.mean))  # type: ignore[misc]
        sides = ((outline.in_sizes, outline.inputs), (outline.out_sizes, outline.outputs))
        cubes = sum(size**3 for sizes, is_dense in sides if is_dense for size in sizes)
        terms = len(fisher.terms[held.block.name])
        eigenvectors = EIGENVECTORS * terms * outline.groups * cubes
        assert made == outline.update(tasks, several) - eigenvectors
        assert several or row.update == outline.update(tasks)


WIDE_LAYER = (lambda: nn.Linear(301, 270), lambda: (torch.randn(8, 301), torch.zeros(8).long()))
TOKENS = {"mlp": 8, "wide": 8, "llama": 28, "convolutions": {"0": 8 * 16, "3": 8 * 4, "7": 8}}


@pytest.mark.parametrize(
    ("name", "structure"),
    [(name, structure) for name in TOKENS for structure in ("kronecker", "diagonal")] + [("mlp", "dense")],
)
def test_the_operations_of_the_sums(name: str, structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    make, data = {**NETWORKS, "wide": WIDE_LAYER}[name]
    model, made = make(), dict[str, int]()

    def watched(original: Any) -> Any:
        def method(self: Any, calls: Any) -> None:
            own = counted(lambda: original(self, calls))
            made[self.block.name] = made.get(self.block.name, 0) + own

        return method

    for kind in (KroneckerAccumulator, DiagonalAccumulator, DenseAccumulator):
        for name_of_method in ("add_data", "add_gradients"):
            monkeypatch.setattr(kind, name_of_method, watched(getattr(kind, name_of_method)))
    likelihood, asked = limpet.Categorical(), Structure(structure, 4096)
    FisherPass(model, discover(model), likelihood, asked, fisher="sampled").run([data()], progress=False)
    tokens = TOKENS[name]
    for row in plan(model, structure=structure).rows:
        count = tokens.get(row.block, 0) if isinstance(tokens, dict) else tokens
        assert made.get(row.block, 0) == row.per_token * count
    assert sum(made.values()) > 0


# --- words -----------------------------------------------------------------------------------------------------


def test_the_table_says_what_the_rows_are() -> None:
    planned = plan(on_meta(tied_llama), ranks=4, max_factor_size=16, tokens=64)
    told = str(planned)
    lines = told.splitlines()
    assert "kronecker, 10 tasks, gradient mode, 64 tokens a step" in lines[0] and f"{planned.parameters:,}" in lines[0]
    gate = [row for row in planned.rows if row.block.endswith("gate_proj")]
    (line,) = [line for line in lines if "gate_proj" in line]
    cells = re.split(r"  +", line)
    assert cells[:4] == ["model.layers.*.mlp.gate_proj", "2", "20x12", "kronecker (outputs in 2 pieces)"]
    assert cells[4] == in_bytes(sum(row.bytes for row in gate))
    assert cells[6:] == [f"{sum(row.step for row in gate):.2g}", f"{sum(row.update for row in gate):.2g}"]
    assert "note: 7 blocks (such as model.embed_tokens) are longer than 16 on a side" in told
    together = sum(int(re.split(r"  +", line)[1]) for line in lines[3 : lines.index("")])
    assert together == len(planned.rows)
    short = planned.table(most=2).splitlines()
    assert short[5].startswith(f"and {len(planned.rows) - 4} smaller blocks")
    assert "sent in" not in str(plan(mlp())) and "every batch" not in str(plan(mlp()))
    assert "fully_shard" not in str(plan(mlp(), rank=2))


def test_wrong_input_names_the_mend() -> None:
    big = on_meta(lambda: nn.Linear(200, 200))
    with pytest.raises(UnsupportedError, match="at most 20000 weights per block, but model has 40200: use structure"):
        plan(big, structure="dense")
    with pytest.raises(ValueError, match="structure must be one of"):
        plan(big, structure="diag")
    with pytest.raises(ValueError, match="mode must be one of"):
        plan(big, mode="newton")
    with pytest.raises(ValueError, match="storage_dtype must be one of None, bfloat16, float16, int8, not 'int4'"):
        plan(big, storage_dtype="int4")
    with pytest.raises(ValueError, match="ranks must be an integer >= 1"):
        plan(big, ranks=0)
    with pytest.raises(LimpetError, match="nothing to protect"):
        plan(big.requires_grad_(False))
    with pytest.raises(LimpetError, match="no linear layer"):
        plan(on_meta(lambda: nn.Conv2d(3, 4, 3)), rank=4)
    with pytest.raises(UnsupportedError, match="no closed-form proximal step"):
        plan(mlp(), rank=4, mode="proximal")


def test_a_model_is_left_as_it_was() -> None:
    model = mlp()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    plan(model, ranks=3)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and all(p.grad is None for p in model.parameters())

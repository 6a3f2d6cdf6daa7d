"""Low-rank adapters: the penalty applies to the change of the effective weight."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import limpet
from limpet.errors import UnsupportedError
from states import changed

peft = pytest.importorskip("peft")
STRUCTURES = ["diagonal", "kronecker", "kronecker-sum", "dense"]


class Net(nn.Module):
    """An embedding, linear layers with and without bias, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.mix = nn.Conv1d(6, 5, 3, padding=1)
        self.up = nn.Linear(5, 8)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.mix(self.tokens(x).mT).mT
        return self.down(self.norm(torch.tanh(self.up(h.mean(1)))))  # type: ignore[no-any-return]


LAYERS = ["tokens", "mix", "up", "down"]


def made(n: int = 60, dtype: torch.dtype = torch.float64) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    return Net().to(dtype), torch.randint(0, 7, (n, 5)), torch.randint(0, 4, (n,))


def adapted(model: nn.Module, **options: Any) -> Any:
    """The model in PEFT's hands, with adapters that already do something."""
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 3, "target_modules": LAYERS, **options})
    wrapped = peft.get_peft_model(model, config)
    shaken(wrapped)
    return wrapped


def shaken(model: nn.Module, size: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter)


def memory_of(structure: str = "kronecker", **options: Any) -> tuple[Net, limpet.OnlineLaplace, Tensor, Tensor]:
    model, x, y = made()
    memory = limpet.OnlineLaplace(model, structure=structure, **options)
    memory.consolidate([(x, y)], progress=False)
    return model, memory, x, y


def merged(wrapped: Any) -> nn.Module:
    """A plain model with the same function."""
    model: nn.Module = copy.deepcopy(wrapped).merge_and_unload()
    return model.requires_grad_(True)


@pytest.mark.parametrize(
    ("structure", "options"), [*((name, {}) for name in STRUCTURES), ("kronecker", {"rank": 2})], ids=str
)
@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_the_penalty_and_its_gradients_are_those_of_the_whole_weight(
    structure: str, options: dict[str, Any], rank_stabilised: bool
) -> None:
    model, memory, _, _ = memory_of(structure, strength=2.0, **options)
    plain = copy.deepcopy(memory.state_dict())
    wrapped = adapted(model, use_rslora=rank_stabilised, lora_dropout=0.5)
    whole = merged(wrapped)
    other = limpet.OnlineLaplace(whole, structure=structure, strength=2.0)
    other.load_state_dict(plain)
    value, expected = memory.penalty(), other.penalty()
    assert expected.item() > 1
    assert value.item() == pytest.approx(expected.item(), rel=1e-9)
    assert float(memory.forecast()) == pytest.approx(float(other.forecast()), rel=1e-9)
    assert memory.forecast().blocks == pytest.approx(other.forecast().blocks, rel=1e-6)
    value.backward()
    expected.backward()
    dense = {name: p.grad for name, p in whole.named_parameters()}
    seen = 0
    for name, module in wrapped.base_model.model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        weight = module.base_layer.weight
        G = dense[f"{name}.weight"].reshape(weight.shape[0], -1)
        scaling = module.scaling["default"]
        assert scaling == pytest.approx(3 / math.sqrt(2) if rank_stabilised else 1.5)
        if name == "tokens":
            a, b = module.lora_embedding_A["default"], module.lora_embedding_B["default"]
            G = G.mT
        else:
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        assert torch.allclose(b.grad.flatten(1), scaling * G @ a.flatten(1).mT, rtol=1e-8, atol=1e-10)
        assert torch.allclose(a.grad.flatten(1), scaling * b.flatten(1).mT @ G, rtol=1e-8, atol=1e-10)
        seen += 1
    assert seen == len(LAYERS)


@pytest.mark.parametrize(
    ("structure", "options"), [*((name, {}) for name in STRUCTURES), ("kronecker", {"rank": 2})], ids=str
)
@pytest.mark.parametrize("method", [limpet.OnlineLaplace, limpet.PerTaskLaplace])
def test_protected_steps_add_the_gradient_of_the_penalty(structure: str, options: dict[str, Any], method: Any) -> None:
    model, x, y = made()
    memory = method(model, structure=structure, **options)
    for data in ((x, y), (x.flip(0), y)):
        memory.consolidate([data], progress=False)
    wrapped = adapted(model)
    again = copy.deepcopy(wrapped)
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=1e-3)
    with memory.protect(optimizer, examples=50) as protection:
        assert protection.mode == "gradient"  # although SGD has a proximal map where weights train themselves
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        before = {name: p.grad.clone() for name, p in wrapped.named_parameters() if p.grad is not None}
        optimizer.step()
    after = {name: p.grad for name, p in wrapped.named_parameters() if p.grad is not None}
    assert all(torch.equal(after[name], g) for name, g in before.items())  # the user's gradients are the user's
    other = method(merged(again), structure=structure)
    by_hand = limpet.OnlineLaplace if method is limpet.OnlineLaplace else limpet.PerTaskLaplace
    assert isinstance(other, by_hand)
    state = changed(memory.state_dict(), proximal=None)
    held = method(again.base_model.model, structure=structure)
    held.load_state_dict(state)
    loss = F.cross_entropy(again(x), y) + held.penalty() / 50
    loss.backward()
    with torch.no_grad():
        for (name, ours), (_, theirs) in zip(wrapped.named_parameters(), again.named_parameters(), strict=True):
            if theirs.requires_grad:
                assert torch.allclose(ours, theirs - 1e-3 * theirs.grad, rtol=1e-9, atol=1e-12), name


def test_a_memory_of_the_plain_model_is_that_of_the_wrapped_one_and_back(tmp_path: Path) -> None:
    model, memory, _, _ = memory_of()
    memory.save(tmp_path / "plain.safetensors")
    fresh, _, _ = made()
    fresh.load_state_dict(model.state_dict())
    wrapped = adapted(fresh)
    loaded = limpet.load(tmp_path / "plain.safetensors", wrapped)
    assert list(loaded.posterior.held) == list(memory.posterior.held)
    assert loaded.forecast().quadratic > 0
    notes = {row.name: row for row in loaded.report().rows}
    assert notes["up.weight"].protected and notes["up.weight"].note == "linear, through its adapters"
    assert notes["up.lora_A.default.weight"].protected
    assert notes["norm.weight"].note == "frozen since it was measured"
    loaded.save(tmp_path / "wrapped.safetensors")
    back = limpet.load(tmp_path / "wrapped.safetensors", model)
    for name, held in memory.posterior.held.items():
        assert torch.equal(back.posterior.held[name].mean, held.mean)
        assert torch.equal(back.posterior.held[name].precision.dense(), held.precision.dense())
    assert float(back.forecast()) == 0.0


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.parametrize("state", ["trained", "merged", "disabled"])
def test_a_task_learned_with_adapters_is_taken_in_at_the_weight_they_make(structure: str, state: str) -> None:
    model, memory, x, y = memory_of(structure)
    kept = copy.deepcopy(memory.state_dict())
    wrapped = adapted(model, lora_dropout=0.4)
    whole = merged(wrapped)
    if state == "merged":
        wrapped.merge_adapter()
    if state == "disabled":
        wrapped.base_model.disable_adapter_layers()
        whole = copy.deepcopy(wrapped).unload()
    flags = {name: p.requires_grad for name, p in wrapped.named_parameters()}
    weights = {name: p.clone() for name, p in wrapped.named_parameters()}
    memory.consolidate([(x.flip(0), y)], progress=False)
    assert {name: p.requires_grad for name, p in wrapped.named_parameters()} == flags
    assert all(torch.equal(p, weights[name]) for name, p in wrapped.named_parameters())
    other = limpet.OnlineLaplace(whole, structure=structure)
    other.load_state_dict(kept)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(name.partition(".")[0] in LAYERS)  # norms are frozen under the adapters
    other.consolidate([(x.flip(0), y)], progress=False)
    for name, held in other.posterior.held.items():
        if name == "norm":
            continue
        ours = memory.posterior.held[name]
        assert torch.allclose(ours.mean, held.mean, rtol=1e-9, atol=1e-12)
        expected = held.precision.dense()
        assert (ours.precision.dense() - expected).norm() < 1e-6 * expected.norm()
        assert ours.tasks == 2
    if state == "trained":  # the base is no longer the mean, so there is an offset to go from
        shaken(wrapped, 0.1)
        other.load_state_dict(memory.state_dict())
        with torch.no_grad():
            for name, parameter in merged(wrapped).named_parameters():
                dict(whole.named_parameters())[name].copy_(parameter)
        assert memory.penalty().item() == pytest.approx(other.penalty().item(), rel=1e-9)


def test_several_adapters_add_up_and_only_the_active_ones_count() -> None:
    model, memory, _, _ = memory_of()
    wrapped = adapted(model)
    wrapped.add_adapter("second", peft.LoraConfig(r=3, lora_alpha=1, target_modules=["up", "down"]))
    shaken(wrapped)

    def penalty_of_the_merged() -> float:
        whole = copy.deepcopy(wrapped).merge_and_unload(adapter_names=list(wrapped.base_model.active_adapters))
        other = limpet.OnlineLaplace(whole)
        other.load_state_dict(memory.state_dict())
        return other.penalty().item()

    for active in (["default"], ["second"], ["default", "second"]):
        wrapped.base_model.set_adapter(active)
        assert memory.penalty().item() == pytest.approx(penalty_of_the_merged(), rel=1e-9), active
    wrapped.base_model.set_adapter(["second"])
    second = [p for name, p in wrapped.named_parameters() if ".second." in name and p.requires_grad]
    with memory.protect(torch.optim.AdamW(second, lr=1e-3, weight_decay=0.0), examples=10) as protection:
        assert {bound.held.block.name for bound in protection.binding.bound} == {"up", "down"}


@pytest.mark.parametrize(
    ("options", "word"),
    [({"use_dora": True, "target_modules": ["up"]}, "DoRA"), ({"lora_bias": True, "target_modules": ["up"]}, "bias")],
)
def test_what_is_not_a_product_of_two_matrices_is_refused(options: dict[str, Any], word: str) -> None:
    model, memory, _, _ = memory_of()
    wrapped = adapted(model, **options)
    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    with pytest.raises(UnsupportedError, match=word):
        memory.protect(torch.optim.AdamW(parameters), examples=10).__enter__()


def test_proximal_steps_are_refused_with_a_word() -> None:
    model, memory, _, _ = memory_of()
    wrapped = adapted(model)
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(UnsupportedError, match="low-rank adapters"):
        memory.protect(optimizer, examples=10, mode="proximal").__enter__()


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "dense"])
def test_a_budget_is_kept_by_adapters(structure: str) -> None:
    model, memory, x, y = memory_of(structure)
    config = peft.LoraConfig(r=2, target_modules=LAYERS)
    wrapped = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=0.03, weight_decay=0.0)
    other = (y + 1) % 4
    losses = []
    with memory.protect(optimizer, examples=len(x), budget=0.05):
        for _ in range(150):
            optimizer.zero_grad()
            loss = F.cross_entropy(wrapped(x), other)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert 0.02 < float(memory.forecast()) <= 0.05 * 1.001


def test_the_end_of_a_budget_sees_adapters_that_are_not_trained() -> None:
    model, memory, x, y = memory_of()
    wrapped = adapted(model, target_modules=["up"])
    for name, parameter in wrapped.named_parameters():
        parameter.requires_grad_("lora_" not in name)
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0)
    with memory.protect(optimizer, examples=len(x), budget=0.01, mode="gradient"):
        for _ in range(60):  # the base learns to undo the adapter
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
        assert float(memory.forecast()) > 0.01
    assert 0 < float(memory.forecast()) <= 0.01 * 1.001


def test_a_new_head_that_peft_keeps_whole_is_seen_under_its_own_name() -> None:
    model, memory, _, _ = memory_of()
    wrapped = adapted(model, target_modules=["up"], modules_to_save=["down"])
    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    with memory.protect(torch.optim.AdamW(parameters, weight_decay=0.0), examples=10) as protection:
        bound = {one.held.block.name: one for one in protection.binding.bound}
        assert set(bound) == {"up", "down"} and bound["down"].lora is None and bound["up"].lora is not None
        assert any(bound["down"].parameters[0] is p for p in parameters)


def test_half_precision_bases_hold_a_change_they_would_round_away() -> None:
    model, x, y = made(dtype=torch.float32)
    model = model.bfloat16()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, y)], progress=False)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["up"]))
    assert float(memory.forecast()) == 0.0
    module = wrapped.base_model.model.up
    with torch.no_grad():
        module.lora_B["default"].weight.fill_(1e-4)
    d = module.scaling["default"] * module.lora_B["default"].weight.float() @ module.lora_A["default"].weight.float()
    held = memory.posterior.held["up"]
    padded = F.pad(d, (0, 1)).flatten()
    expected = (padded @ held.precision.fisher().dense() @ padded).item() / (2 * len(x))
    assert float(memory.forecast().quadratic) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_biases_that_train_beside_adapters_are_held_also_by_fused_optimizers(fused: bool) -> None:
    """Which change parameters without counting up their version."""
    model, memory, x, y = memory_of(strength=3.0)
    wrapped = adapted(model, bias="all")
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, weight_decay=0.0, fused=fused)
    with memory.protect(optimizer, examples=len(x)):
        for _ in range(40):
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), (y + 1) % 3).backward()
            optimizer.step()
    told = float(memory.forecast())
    memory.posterior._lora_penalties.clear()
    assert told == pytest.approx(float(memory.forecast()), rel=1e-9) and told > 0


def test_a_block_of_which_a_part_is_frozen_stays_whole() -> None:
    """As adapters with bias="all" leave a norm, whose weight is frozen and whose bias trains."""
    model, memory, x, y = memory_of(strength=3.0)
    wrapped = adapted(model, bias="all")
    assert not model.norm.weight.requires_grad and model.norm.bias.requires_grad
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.05)
    weight = model.norm.weight.detach().clone()
    with memory.protect(optimizer, examples=len(x)):
        for _ in range(10):
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), (y + 1) % 3).backward()
            optimizer.step()
    assert memory.posterior.held["norm"].tasks == 1 and memory.forecast().blocks["norm"] > 0
    memory.consolidate([(x, y)])
    assert memory.posterior.held["norm"].tasks == 2 and torch.equal(model.norm.weight, weight)

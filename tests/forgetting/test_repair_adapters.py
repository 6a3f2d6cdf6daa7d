"""Repair of models tuned with low-rank adapters: the repaired update is written back to the adapters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_repair import NEW, OLD, Net, data, trained, with_mean
from test_repair import fisher as fisher_with
from torch import Tensor, nn

import limpet
from limpet.errors import LimpetWarning
from limpet.model.adapters import adapted_parameters

peft = pytest.importorskip("peft")
LAYERS = ["tokens", "mix", "up", "down"]


def tuned(rank: int = 2, bias: str = "none", **options: Any) -> tuple[Any, Net, Any, Net]:
    """A network that learned a second task by adapters, the network inside, the memory, and the network before."""
    torch.manual_seed(0)
    model = Net().double()
    trained(model, data(1))
    memory = limpet.OnlineLaplace(model, fisher="exact")
    memory.consolidate(data(1), progress=False)
    before = copy.deepcopy(model)
    config = peft.LoraConfig(r=rank, lora_alpha=3, target_modules=LAYERS, bias=bias, **options)
    wrapped = peft.get_peft_model(model, config)
    trained(wrapped, data(2), steps=30, lr=0.05)
    return wrapped, model, memory, before


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights as they act, by layer."""
    adapted = adapted_parameters(model)
    found = {}
    for layer in LAYERS:
        module = getattr(model, layer)
        weight = getattr(module, "base_layer", module).weight
        with torch.no_grad():
            found[layer] = weight + sum(a.added(weight.shape) for a in adapted.get(weight, ()))
    return found


def fisher_of(model: nn.Module, batches: Any) -> Any:
    return fisher_with(model, batches, "kronecker")


def repaired_in_full(wrapped: Any, memory: Any, strength: float) -> dict[str, Tensor]:
    """What repair makes of the same weights where no rank holds it back: the adapters merged into their base."""
    merged = copy.deepcopy(wrapped)
    merged.merge_adapter()
    with pytest.warns(LimpetWarning, match="adapters are merged"):
        limpet.repair(merged, memory, data(2), strength=strength, progress=False)
    return weights(merged.base_model.model)


def test_the_adapters_hold_the_repaired_change_where_their_rank_is_enough() -> None:
    wrapped, model, memory, before = tuned(rank=8)
    full = repaired_in_full(wrapped, memory, 0.5)
    limpet.repair(wrapped, memory, data(2), strength=0.5, progress=False)
    base = dict(before.named_parameters())
    for layer, weight in weights(model).items():
        torch.testing.assert_close(weight, full[layer], rtol=1e-7, atol=1e-8)
        own = getattr(model, layer).base_layer.weight
        assert torch.equal(own, base[f"{layer}.weight"])  # the base is not touched


@pytest.mark.parametrize("rank", [None, 1])
def test_a_rank_that_is_not_enough_gives_the_best_of_that_rank_in_the_metric_of_both(rank: int | None) -> None:
    wrapped, model, memory, before = tuned(rank=2)
    full = repaired_in_full(wrapped, memory, 0.5)
    tuned_copy = copy.deepcopy(wrapped).merge_and_unload().requires_grad_(True)
    limpet.repair(wrapped, memory, data(2), strength=0.5, rank=rank, progress=False)
    start = weights(before)
    for layer in ("up", "down"):
        change = weights(model)[layer] - start[layer]
        assert int(torch.linalg.matrix_rank(change, rtol=1e-9)) == (rank or 2)
        wanted = full[layer] - start[layer]
        old, new = (
            fisher_of(one, batches).terms[layer][0] for one, batches in ((before, data(1)), (tuned_copy, data(2)))
        )
        roots = []
        for side in ("outputs", "inputs"):
            width = wanted.shape[1] if side == "inputs" else None
            both = [with_mean(getattr(t, side)[:width, :width], e) for t, e in ((new, NEW), (old, OLD))]
            roots.append(torch.linalg.cholesky(torch.stack([m / m.diagonal().mean() for m in both]).sum(0)))
        u, s, v = torch.linalg.svd(roots[0].mT @ wanted @ roots[1], full_matrices=False)
        k = rank or 2
        best = torch.linalg.solve(roots[0].mT, (u[:, :k] * s[:k]) @ v[:k]) @ torch.linalg.inv(roots[1])
        torch.testing.assert_close(change, best, rtol=1e-6, atol=1e-8)
    assert model.up.lora_A["default"].weight.shape == (2, 5)


@pytest.mark.parametrize("options", [{"use_rslora": True}, {"bias": "all"}, {"lora_dropout": 0.2}])
def test_options_of_lora(options: dict[str, Any]) -> None:
    wrapped, model, memory, before = tuned(rank=8, **options)
    merged = copy.deepcopy(wrapped)
    full = repaired_in_full(merged, memory, 0.5)
    limpet.repair(wrapped, memory, data(2), strength=0.5, progress=False)
    for layer, weight in weights(model).items():
        torch.testing.assert_close(weight, full[layer], rtol=1e-7, atol=1e-8)
        assert torch.equal(getattr(model, layer).base_layer.weight, getattr(before, layer).weight)
    merged.merge_adapter()
    with pytest.warns(LimpetWarning, match="adapters are merged"):
        limpet.repair(merged, memory, data(2), strength=0.5, progress=False)
    for name in ("mix", "up"):  # where biases train they are repaired, too
        own, wanted = (getattr(one, name).base_layer.bias for one in (model, merged.base_model.model))
        torch.testing.assert_close(own, wanted, rtol=1e-7, atol=1e-8)


def test_a_memory_that_was_made_with_the_adapter_leaves_the_base_alone() -> None:
    """The adapter goes on to a second task, so the frozen base is not the mean, and must not change all the same."""
    torch.manual_seed(0)
    model = Net().double()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=3, target_modules=LAYERS))
    trained(wrapped, data(1), steps=30, lr=0.05)
    memory = limpet.OnlineLaplace(model, fisher="exact")
    memory.consolidate(data(1), progress=False, probe=20)
    assert float(memory.drift()) < 1e-12
    start = weights(model)
    trained(wrapped, data(2), steps=30, lr=0.05)
    base = {layer: getattr(model, layer).base_layer.weight.detach().clone() for layer in LAYERS}
    full = repaired_in_full(wrapped, memory, 0.5)
    repair = limpet.repair(wrapped, memory, data(2), strength=0.5, progress=False)
    for layer, weight in weights(model).items():
        assert torch.equal(getattr(model, layer).base_layer.weight, base[layer])
        torch.testing.assert_close(weight, full[layer], rtol=1e-6, atol=1e-7)
    repair.at(1e12)
    for layer, weight in weights(model).items():
        torch.testing.assert_close(weight, start[layer], rtol=1e-5, atol=1e-6)


def test_ranks_that_are_not_needed_can_still_be_trained() -> None:
    wrapped, model, memory, _ = tuned(rank=3)
    limpet.repair(wrapped, memory, data(2), strength=0.5, rank=1, progress=False)
    a, b = model.up.lora_A["default"].weight, model.up.lora_B["default"].weight
    assert not b[:, 1:].any() and bool(a[1:].any(1).all())


def test_an_adapter_that_adds_nothing_is_not_touched() -> None:
    torch.manual_seed(0)
    model = Net().double()
    memory = limpet.OnlineLaplace(model, fisher="exact")
    memory.consolidate(data(1), progress=False)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=LAYERS))
    with pytest.raises(limpet.LimpetError, match="nothing to repair"):
        limpet.repair(wrapped, memory, data(2), progress=False)


def test_several_adapters_each_keep_their_own_share() -> None:
    wrapped, model, memory, before = tuned(rank=8)
    wrapped.add_adapter("second", peft.LoraConfig(r=8, lora_alpha=5, target_modules=LAYERS))
    wrapped.base_model.set_adapter(["default", "second"])
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "second" in name:
                generator = torch.Generator().manual_seed(3)
                parameter += 0.1 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
    full = repaired_in_full(wrapped, memory, 0.5)
    limpet.repair(wrapped, memory, data(2), strength=0.5, progress=False)
    for layer, weight in weights(model).items():
        torch.testing.assert_close(weight, full[layer], rtol=1e-7, atol=1e-8)
    del before


def test_undo_gives_the_adapters_back_to_the_bit() -> None:
    wrapped, _, memory, _ = tuned()
    before = copy.deepcopy(wrapped.state_dict())
    repair = limpet.repair(wrapped, memory, data(2), tolerance=0.1, progress=False)
    assert any(not torch.equal(wrapped.state_dict()[name], value) for name, value in before.items())
    repair.undo()
    assert all(torch.equal(wrapped.state_dict()[name], value) for name, value in before.items())


def test_merged_adapters_are_repaired_in_the_base_weight() -> None:
    wrapped, model, memory, before = tuned()
    wrapped.merge_adapter()
    merged = model.up.base_layer.weight.detach().clone()
    factors = {n: p.detach().clone() for n, p in wrapped.named_parameters() if "lora_" in n}
    with pytest.warns(LimpetWarning, match="adapters are merged"):
        limpet.repair(wrapped, memory, data(2), strength=1e12, progress=False)
    assert not torch.equal(model.up.base_layer.weight, merged)
    torch.testing.assert_close(model.up.base_layer.weight, before.up.weight, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(dict(wrapped.named_parameters())[name], value) for name, value in factors.items())


def test_the_shares_of_drift_are_those_of_the_merged_weights() -> None:
    torch.manual_seed(0)
    model = Net().double()
    trained(model, data(1))
    memory = limpet.OnlineLaplace(model, fisher="exact")
    memory.consolidate(data(1), progress=False, probe=40)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=3, target_modules=LAYERS))
    trained(wrapped, data(2), steps=30, lr=0.05)
    through = memory.drift(blocks=True)
    wrapped.merge_adapter()
    merged = memory.drift(blocks=True)
    assert float(through) > 0.01 and abs(float(through) - float(merged)) < 1e-12
    assert set(through.blocks) == set(merged.blocks) and through.blocks["norm"] == 0
    for name, value in merged.blocks.items():
        assert abs(through.blocks[name] - value) < 1e-10

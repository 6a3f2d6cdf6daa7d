"""Repair of models that were tuned by low-rank adapters: the repaired change goes back into the adapters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import limpet
from limpet.layers.adapters import adapted_parameters
from limpet.precision.pencil import truncated
from test_repair import Net, data, trained

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


def repaired_in_full(wrapped: Any, memory: Any, strength: float) -> dict[str, Tensor]:
    """What repair makes of the same weights where no rank holds it back: the adapters merged into their base."""
    merged = copy.deepcopy(wrapped)
    merged.merge_adapter()
    own = limpet.repair(merged, memory, data(2), strength=strength, progress=False)
    assert own.blocks
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
    limpet.repair(wrapped, memory, data(2), strength=0.5, rank=rank, progress=False)
    start = weights(before)
    for layer in ("up", "down"):
        change = weights(model)[layer] - start[layer]
        assert int(torch.linalg.matrix_rank(change, rtol=1e-9)) == (rank or 2)
        # near in the metric, and not the plain truncation
        left, right = truncated(full[layer] - start[layer], rank or 2)
        assert float((change - left @ right).norm() / (left @ right).norm()) > 1e-4
        wanted = full[layer] - start[layer]
        assert float((change - wanted).norm() / wanted.norm()) < 0.9
    assert model.up.lora_A["default"].weight.shape == (2, 5)


@pytest.mark.parametrize("options", [{"use_rslora": True}, {"bias": "all"}, {"lora_dropout": 0.2}])
def test_options_of_lora(options: dict[str, Any]) -> None:
    wrapped, model, memory, _ = tuned(rank=8, **options)
    full = repaired_in_full(wrapped, memory, 0.5)
    limpet.repair(wrapped, memory, data(2), strength=0.5, progress=False)
    for layer, weight in weights(model).items():
        torch.testing.assert_close(weight, full[layer], rtol=1e-7, atol=1e-8)


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
    # the path is linear in the displacement, so one adapter alone is repaired as if the other were not there
    wrapped.base_model.set_adapter("default")
    alone = weights(model)["up"] - weights(before)["up"]
    assert 0 < float(alone.norm()) < float((full["up"] - weights(before)["up"]).norm()) * 2


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

"""Parameter names do not depend on the wrappers around modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import limpet
from limpet.errors import UnsupportedError
from limpet.model import named_parameters


class Gated(nn.Module):
    """Somebody's own module, with a name in it that adapters also use."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))
        self.base_layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) * (1 + self.bias)
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).tanh())
        return out


def data() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(40, 3), torch.randint(0, 2, (40,)))]


def test_only_what_is_an_adapter_is_left_out_of_a_name() -> None:
    model = Gated()
    assert list(named_parameters(model)) == ["bias", "base_layer.weight", "base_layer.bias"]
    memory = limpet.OnlineLaplace(model, exclude=["base_layer.bias"])
    assert [row.name for row in memory.report().rows if row.protected] == ["bias", "base_layer.weight"]


def test_blocks_whose_activations_are_made_again_keep_their_names() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    memory = limpet.OnlineLaplace(model)
    memory.consolidate(data())
    apply_activation_checkpointing(model, check_fn=lambda layer: isinstance(layer, nn.Linear))
    with memory.protect(torch.optim.SGD(model.parameters(), lr=0.1), examples=40):
        pass
    assert {name: held.tasks for name, held in memory.posterior.held.items()} == {"0": 1, "2": 1}


def test_of_several_copies_of_a_head_the_active_one_is_held() -> None:
    peft = pytest.importorskip("peft")
    base = Net()
    config = peft.LoraConfig(r=2, target_modules=["body"], modules_to_save=["head"])
    model = peft.get_peft_model(base, config, adapter_name="first")
    model.add_adapter("second", config)
    for active, other in (("first", "second"), ("second", "first")):
        model.set_adapter(active)
        memory = limpet.OnlineLaplace(model, prior_mean="initial")
        memory.consolidate(data())
        assert list(memory.posterior.held) == ["body", "head"]
        copies = base.head.modules_to_save
        assert isinstance(copies, nn.ModuleDict)
        with torch.no_grad():
            copies[other].weight += 1.0
        assert float(memory.forecast()) == 0
        with torch.no_grad():
            copies[active].weight[0] += 1.0
        assert float(memory.forecast()) > 0.01


def test_two_parameters_of_one_name_are_refused() -> None:
    inner = nn.Linear(3, 2)
    outer = nn.Module()
    outer.weight = nn.Parameter(torch.zeros(2))
    outer._orig_mod = inner
    with pytest.raises(UnsupportedError, match="two parameters of the model are called weight"):
        named_parameters(outer)

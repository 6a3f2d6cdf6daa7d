"""Half-precision weights: small steps accumulate in proximal mode, and gradient mode warns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import limpet
from limpet.errors import LimpetWarning
from limpet.protection.rounding import Rounding, sgd_update
from reference import close

N = 200
F = nn.functional
OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.8, "dampening": 0.5, "weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_the_update_of_sgd_is_recomputed(options: dict[str, Any], fused: bool) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(7, 3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=fused, **options)
    for _ in range(3):
        start = parameter.detach().clone()
        parameter.grad = torch.randn(7, 3)
        optimizer.step()
        update = sgd_update(parameter, start, optimizer.state.get(parameter, {}), optimizer.param_groups[0])
        close(start + update, parameter.detach(), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_changes_below_the_resolution_accumulate(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(5, dtype=dtype))
    rounding = Rounding({})
    rounding.track({"w": parameter})
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(1000):
        parameter.grad = torch.full((5,), 1e-5, dtype=dtype)
        rounding.before_step()
        optimizer.step()
        rounding.after_step(optimizer.state, {parameter: optimizer.param_groups[0]})
        with torch.no_grad():
            rounding.write("w", parameter, rounding.weight("w", parameter) - 1e-5)
    close(parameter.detach().float(), torch.full((5,), 0.98), 0.005)


def test_where_the_optimizer_did_something_else_its_result_stands() -> None:
    parameter = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    rounding = Rounding({})
    rounding.track({"w": parameter})
    parameter.grad = torch.ones_like(parameter)
    rounding.before_step()
    with torch.no_grad():
        parameter.fill_(3.0)  # not a step of SGD
    rounding.after_step({}, {parameter: {"lr": 0.1}})
    assert torch.equal(rounding.weight("w", parameter), torch.full((5,), 3.0))


def learned_and_kept(dtype: torch.dtype, every: int = 1, steps: int = 300, **options: Any) -> dict[str, float]:
    """Train a second task under a strong penalty, with weights of this dtype."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3))
    x, x2 = torch.randn(N, 5), torch.randn(N, 5)
    y, y2 = x[:, :3].argmax(1), (x2[:, :3].argmax(1) + 1) % 3
    train(model, torch.optim.SGD(model.parameters(), lr=0.3), x, y, 200)
    model, x, x2 = model.to(dtype), x.to(dtype), x2.to(dtype)
    memory = limpet.OnlineLaplace(model, strength=30.0, prior_precision=0.0)
    memory.consolidate([(x, y)], progress=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, **options)
    with memory.protect(optimizer, examples=N, every=every) as protection:
        train(model, optimizer, x2, y2, steps)
    assert bool(protection.state.residual) is (dtype != torch.float32)
    return {
        "old": F.cross_entropy(model(x).float(), y).item(),
        "new": F.cross_entropy(model(x2).float(), y2).item(),
        "quadratic": memory.forecast().quadratic,
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 4])
def test_training_in_half_precision_ends_where_float32_does(every: int) -> None:
    whole, half = (learned_and_kept(dtype, every) for dtype in (torch.float32, torch.bfloat16))
    assert half == pytest.approx(whole, rel=0.05)


def test_a_run_in_half_precision_is_resumed_to_the_same_bits(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 3).bfloat16(), torch.randn(N, 5).bfloat16(), torch.randint(0, 3, (N,))
    memory = limpet.OnlineLaplace(model, strength=10.0)
    memory.consolidate([(x, y)], progress=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with memory.protect(optimizer, examples=N, every=3):
        train(model, optimizer, x, (y + 1) % 3, 7)
        memory.save(tmp_path / "memory.safetensors")
        twin, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, x, (y + 1) % 3, 13)
    again = limpet.load(tmp_path / "memory.safetensors", twin)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    optimizer.load_state_dict(state)
    with again.protect(optimizer, examples=N, every=3):
        train(twin, optimizer, x, (y + 1) % 3, 13)
    assert torch.equal(twin.weight, model.weight) and torch.equal(twin.bias, model.bias)


def test_gradient_mode_warns_of_weights_in_half_precision() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 3).bfloat16(), torch.randn(N, 5).bfloat16(), torch.randint(0, 3, (N,))
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, y)], progress=False)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.warns(LimpetWarning, match="bfloat16, .* 1/256 .* float32"), memory.protect(optimizer, examples=N):
        pass

"""What a protection says about itself: counts of steps, and warnings where weights moved without the penalty."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import limpet
from limpet.errors import LimpetWarning

N = 60
F = nn.functional


def problem(strength: float = 1000.0) -> tuple[nn.Linear, limpet.OnlineLaplace, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3), torch.randn(N, 5)
    y = x[:, :3].argmax(1)
    memory = limpet.OnlineLaplace(model, strength=strength)
    train(model, torch.optim.SGD(model.parameters(), lr=0.5), x, y, 50)
    memory.consolidate([(x, y)], progress=False)
    return model, memory, x, (y + 1) % 3


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int, after: Callable[[], Any] = int
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        after()


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization in its usual form: two methods, and a base optimizer that takes the step."""

    def __init__(self, parameters: Any, base: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(parameters, options)
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["old"] = p.detach().clone()
            p.add_(0.05 * p.grad / norm)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()
        self.zero_grad()


def sam_steps(model: nn.Module, optimizer: SAM, x: Tensor, y: Tensor, steps: int) -> None:
    for _ in range(steps):
        F.cross_entropy(model(x), y).backward()
        optimizer.first_step()
        F.cross_entropy(model(x), y).backward()
        optimizer.second_step()


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", LimpetWarning)
        yield


@pytest.mark.parametrize(("kind", "every"), [("SGD", 1), ("SGD", 4), ("Adam", 1), ("Adam", 4)])
def test_steps_and_penalised_steps_are_counted(kind: str, every: int) -> None:
    model, memory, x, y = problem(1.0)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    with memory.protect(optimizer, examples=N, every=every) as protection:
        assert protection.summary().steps == 0 and protection.summary().forecast_after == 0
        train(model, optimizer, x, y, 10)
        during = protection.summary()
        assert during.steps == 10
        assert during.penalised == (8 if (kind, every) == ("SGD", 4) else 10)  # two wait for their proximal step
        assert during.forecast_after == pytest.approx(float(memory.forecast()))
    after = protection.summary()
    assert (after.steps, after.penalised, after.skipped, after.warnings) == (10, 10, 0, ())
    assert (after.mode, after.every, after.examples) == (protection.mode, every, N)
    assert after.forecast_before == 0 and after.forecast_after == pytest.approx(float(memory.forecast())) != 0
    assert str(after).startswith(
        f"10 steps, 10 with the penalty (mode {after.mode}, every {every}, N = 60); forecast 0"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.steps = 3  # type: ignore[misc]


def test_skipped_steps_are_counted_apart() -> None:
    model, memory, x, y = problem(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with memory.protect(optimizer, examples=N) as protection:
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y) * (float("inf") if step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    found = protection.summary()
    assert (found.steps, found.penalised, found.skipped) == (4, 4, 1) and ", 1 skipped" in str(found)


def test_a_step_that_calls_the_step_of_its_base_class_is_one_step() -> None:
    class Own(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    ends = []
    for kind in (torch.optim.Adam, Own):
        model, memory, x, y = problem(1.0)
        optimizer = kind(model.parameters(), lr=0.01)
        with memory.protect(optimizer, examples=N, every=3) as protection:
            train(model, optimizer, x, y, 7)
        assert (protection.summary().steps, protection.summary().penalised) == (7, 7)
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)


def test_an_error_leaves_no_forecast_at_the_end() -> None:
    model, memory, x, y = problem(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(KeyboardInterrupt), memory.protect(optimizer, examples=N) as protection:
        train(model, optimizer, x, y, 3)
        raise KeyboardInterrupt
    found = protection.summary()
    assert found.steps == 3 and found.forecast_after is None and "unknown" in str(found)


def test_the_two_steps_of_sam_are_explained() -> None:
    model, memory, x, y = problem()
    start = copy.deepcopy(model.state_dict())
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with (
        pytest.warns(LimpetWarning, match=r"memory\.protect\(optimizer\.base_optimizer"),
        memory.protect(optimizer, examples=N) as protection,
    ):
        sam_steps(model, optimizer, x, y, 30)
    unprotected = float(memory.forecast())
    found = protection.summary()
    assert found.steps == found.penalised == 0 and "SAM" in found.warnings[0] and "warning: " in str(found)
    model.load_state_dict(start)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with no_warning(), memory.protect(optimizer.base_optimizer, examples=N) as protection:
        sam_steps(model, optimizer, x, y, 30)
    assert protection.summary().penalised == 30
    assert float(memory.forecast()) < 0.01 * unprotected


@pytest.mark.parametrize("fused", [False, True])
def test_another_optimizer_that_takes_all_steps_is_noticed(fused: bool) -> None:
    model, memory, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.Adam(model.parameters(), lr=0.05, fused=fused)
    with (
        pytest.warns(LimpetWarning, match=r"SGD\.step\(\) was never called, .*another optimizer"),
        memory.protect(optimizer, examples=N),
    ):
        train(model, other, x, y, 5)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_another_optimizer_that_steps_in_turn_is_noticed(kind: str) -> None:
    model, memory, x, y = problem()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    other = torch.optim.Adam(model.parameters(), lr=0.05)
    with (
        pytest.warns(LimpetWarning, match=rf"other than {kind} changed .* before 9 of its 10 steps"),
        memory.protect(optimizer, examples=N),
    ):
        for _ in range(10):
            train(model, optimizer, x, y, 1)
            train(model, other, x, y, 1)


def test_an_optimizer_that_hardly_takes_part_is_noticed() -> None:
    model, memory, x, y = problem()
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.01), torch.optim.Adam(model.parameters(), lr=0.05)
    with (
        pytest.warns(LimpetWarning, match="SGD took 2 steps, but the protected weights were written .* times outside"),
        memory.protect(optimizer, examples=N),
    ):
        train(model, optimizer, x, y, 2)
        train(model, other, x, y, 50)


def test_weights_that_move_without_a_gradient_are_noticed() -> None:
    model, memory, _, _ = problem()
    model.zero_grad()
    head = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [head]}], lr=0.1)
    with pytest.warns(LimpetWarning, match="no protected weight had a gradient"), memory.protect(optimizer, examples=N):
        head.sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.weight.mul_(2)


def test_what_others_may_do_with_the_weights_is_not_warned_about() -> None:
    model, memory, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with no_warning(), memory.protect(optimizer, examples=N):
        pass  # no step, but no weight has moved either

    def look_at_the_average() -> None:
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: 0.5 * tensor for name, tensor in kept.items()})
        model.load_state_dict(kept)

    best = copy.deepcopy(model.state_dict())
    for every in (1, 3):
        with no_warning(), memory.protect(optimizer, examples=N, every=every) as protection:
            train(model, optimizer, x, y, 10, look_at_the_average)
            model.load_state_dict(best)
        assert protection.summary().steps == 10


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("budget", [None, 0.05])
def test_weights_that_are_replaced_after_the_last_step_are_left_alone(through_data: bool, budget: float | None) -> None:
    """As `load_best_model_at_end` does: the steps since the last proximal step are not those of the new weights."""
    model, memory, x, y = problem(1.0)
    best = {name: -tensor for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if budget is None else torch.optim.Adam(model.parameters())
    over = nullcontext() if budget is None else pytest.warns(LimpetWarning, match="exceeds the budget")
    with over, memory.protect(optimizer, examples=N, every=7, budget=budget) as protection:
        train(model, optimizer, x, y, 10)
        if through_data:
            for name, parameter in model.named_parameters():
                parameter.data.copy_(best[name])
        else:
            model.load_state_dict(best)
    assert all(torch.equal(tensor, best[name]) for name, tensor in model.state_dict().items())
    assert "replaced after the last step" in protection.summary().warnings[0]
    assert protection.summary().penalised == (7 if budget is None else 10)

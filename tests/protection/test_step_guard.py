"""A step that raises, and everything else that wraps `optimizer.step`."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import limpet

N = 40


def problem() -> tuple[nn.Linear, limpet.OnlineLaplace, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 3), torch.randn(N, 5), torch.randint(0, 3, (N,))
    memory = limpet.OnlineLaplace(model, strength=10.0)
    memory.consolidate([(x, y)], progress=False)
    with torch.no_grad():
        model.weight.add_(0.5)
    return model, memory, x, y


class Failing(torch.optim.Adam):
    """Raises in its third step."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if closure is not None:
            with torch.enable_grad():
                closure()
        if self.count == 3:
            raise RuntimeError("the step failed")
        return super().step()


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("scheduled", ["before", "inside", "never"])
def test_a_step_that_raises_leaves_the_gradient_of_the_loss(every: int, closure: bool, scheduled: str) -> None:
    model, memory, x, y = problem()
    optimizer = Failing(model.parameters(), lr=0.01)
    if scheduled == "before":
        torch.optim.lr_scheduler.StepLR(optimizer, 10)
    before: list[Tensor] = []

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(model(x), y)
        value.backward()
        before[:] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return value

    failed = 0
    with memory.protect(optimizer, examples=N, every=every) as protection:
        if scheduled == "inside":
            torch.optim.lr_scheduler.StepLR(optimizer, 10)
        for _ in range(5):
            try:
                if closure:
                    optimizer.step(loss)
                else:
                    loss()
                    optimizer.step()
            except RuntimeError:
                failed += 1
            for parameter, gradient in zip(model.parameters(), before, strict=True):
                assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
    assert failed == 1 and protection.summary().steps == 4


def test_the_step_of_the_optimizer_is_its_own_again() -> None:
    model, memory, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plain = inspect.signature(optimizer.step)
    with memory.protect(optimizer, examples=N):
        assert inspect.signature(optimizer.step) == plain and optimizer.step.hooked  # type: ignore[attr-defined]
        again = pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)
        assert all("step" not in vars(one) for one in again)
    assert "step" not in vars(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    wrapped = optimizer.step
    with warnings.catch_warnings(), memory.protect(optimizer, examples=N):
        warnings.simplefilter("error")
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()  # warns if optimizer.step was replaced without regard to it, or was not called
    assert optimizer.step is wrapped and optimizer.param_groups[0]["lr"] == 0.005


def test_a_scheduler_made_inside_keeps_working_after_the_block() -> None:
    model, memory, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with memory.protect(optimizer, examples=N) as protection:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    before = model.weight.detach().clone()
    gradient = model.weight.grad
    assert gradient is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
        optimizer.step()
    assert torch.allclose(model.weight, before - 0.005 * gradient, atol=1e-7)
    assert protection.summary().steps == 1


def test_two_memories_may_be_left_in_any_order() -> None:
    model, memory, x, y = problem()
    other = limpet.OnlineLaplace(model)
    other.consolidate([(x, y)], progress=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first, second = memory.protect(optimizer, examples=N), other.protect(optimizer, examples=N)
    first.__enter__()
    second.__enter__()
    for leaving in (first, second):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        leaving.__exit__(None, None, None)
    assert (first.summary().steps, second.summary().steps) == (1, 2)
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(model.weight, before)

"""Budgets, compared with the exact optimum of constrained problems."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import limpet
from limpet.errors import UnsupportedError
from limpet.forgetting.budget import Budget
from limpet.forgetting.loss_curve import Curve, TaskHistory

BENT = Curve.through([(1e-4, 1e-4), (1e-1, 5e-1)])
STEPS = 400


class Problem:
    """Linear regression after linear regression: everything is a quadratic, so every optimum can be solved for."""

    def __init__(self, structure: str, curve: Curve, method: Any = limpet.OnlineLaplace, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2, bias=False).double()
        self.old, self.new = self._task(0.0), self._task(1.0)
        self.memory = method(self.model, likelihood="gaussian", structure=structure, prior_precision=0.5, **options)
        with torch.no_grad():
            self.model.weight.copy_(torch.linalg.lstsq(*self.old).solution.T)
        self.memory.consolidate([self.old])
        self.memory.history = TaskHistory().learned(len(self.old[0]), curve, 0.0)
        self.mean = self.model.weight.detach().clone()

    @staticmethod
    def _task(shift: float) -> tuple[Tensor, Tensor]:
        x = torch.randn(40, 3, dtype=torch.float64)
        return x, x @ torch.randn(3, 2, dtype=torch.float64) + shift

    def loss(self, weight: Tensor | None = None) -> Tensor:
        x, y = self.new
        weight = self.model.weight if weight is None else weight
        return (x @ weight.T - y).square().sum() / (2 * len(x))

    def train(self, optimizer: torch.optim.Optimizer, steps: int = STEPS, anneal: bool = True, **options: Any) -> float:
        with self.memory.protect(optimizer, examples=len(self.new[0]), **options) as protection:
            for step in range(steps):
                if anneal:
                    for group in optimizer.param_groups:
                        group["lr"] = (
                            group.setdefault("first", group["lr"]) * 0.5 * (1 + math.cos(math.pi * step / steps))
                        )
                optimizer.zero_grad()
                self.loss().backward()
                optimizer.step()
        return protection.factor

    def optimum(self, factor: float) -> Tensor:
        """The weights that the penalty times `factor` asks for, from the normal equations."""
        x, y = self.new
        (held,) = self.memory.posterior.held.values()
        n = self.mean.numel()
        F = held.precision.fisher().dense()
        L = (factor * F + 0.5 * torch.eye(n, dtype=torch.float64)) / len(x)
        H = torch.kron(torch.eye(2, dtype=torch.float64), x.T @ x / len(x))
        b = (y.T @ x / len(x)).flatten() + L @ self.mean.flatten()
        return torch.linalg.solve(H + L, b).reshape(2, 3)

    def quadratic(self, weight: Tensor) -> float:
        (held,) = self.memory.posterior.held.values()
        return float(held.precision.fisher().quadratic(weight - self.mean)) / (2 * len(self.old[0]))

    def sgd(self, lr: float = 0.05) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)


def solved(problem: Problem, wanted: Any) -> float:
    """The factor at which a function of it and of the quadratic at its optimum is zero."""
    low, high = -12.0, 12.0
    for _ in range(80):
        middle = math.exp((low + high) / 2)
        low, high = (
            ((low + high) / 2, high)
            if wanted(middle, problem.quadratic(problem.optimum(middle))) > 0
            else (low, (low + high) / 2)
        )
    return math.exp(high)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("structure", ["kronecker", "diagonal", "dense"])
def test_a_budget_ends_at_the_optimum_of_the_constrained_problem(structure: str, every: int) -> None:
    problem = Problem(structure, BENT)
    budget = BENT(0.3 * problem.quadratic(problem.optimum(1e-6)))
    factor = solved(problem, lambda _, q: BENT(q) - budget)
    found = problem.train(problem.sgd(), budget=budget, every=every)
    forecast = problem.memory.forecast()
    assert forecast == pytest.approx(budget, rel=2e-3) and forecast <= budget * (1 + 1e-6)
    assert found == pytest.approx(factor, rel=0.05)
    assert (problem.model.weight - problem.optimum(factor)).norm() < 5e-3 * (
        problem.optimum(factor) - problem.mean
    ).norm()


def test_a_budget_that_is_not_reached_does_not_hold() -> None:
    problem = Problem("kronecker", Curve())
    budget = 2 * problem.quadratic(problem.optimum(1e-9))
    assert problem.train(problem.sgd(), budget=budget) == 0
    assert (problem.model.weight - problem.optimum(1e-9)).norm() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("start", [-15.0, 0.0, 5.0])
@pytest.mark.parametrize("adam", [False, True])
def test_in_gradient_mode_a_budget_is_kept_from_any_start(adam: bool, start: float) -> None:
    problem = Problem("kronecker", BENT)
    budget = BENT(0.3 * problem.quadratic(problem.optimum(1e-6)))
    factor = solved(problem, lambda _, q: BENT(q) - budget)
    optimizer = torch.optim.Adam(problem.model.parameters(), lr=0.02) if adam else problem.sgd(0.01)
    before = Budget.__init__

    def begin(self: Budget, *args: Any) -> None:
        before(self, *args)
        self.state = start

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Budget, "__init__", begin)
        problem.train(optimizer, steps=1500, budget=budget, mode="gradient")
    assert problem.memory.forecast() <= budget * (1 + 1e-6)
    assert problem.memory.forecast() == pytest.approx(budget, rel=2e-3)
    best = problem.loss(problem.optimum(factor)).item()
    worst = problem.loss(problem.mean).item()
    assert problem.loss().item() - best < 0.02 * (worst - best)


def test_a_budget_with_penalties_around_several_means() -> None:
    """Per-task Laplace: the slope of the older penalties is multiplied with them."""
    problem = Problem("kronecker", Curve(), method=limpet.PerTaskLaplace)
    with torch.no_grad():
        problem.model.weight += 0.05
    problem.memory.consolidate([problem.new])
    problem.memory.history = TaskHistory().learned(80, Curve(), 0.0)
    problem.new = Problem._task(2.0)
    budget = 1e-3
    problem.train(problem.sgd(), budget=budget)
    assert problem.memory.forecast() == pytest.approx(budget, rel=5e-3)


@pytest.mark.parametrize("mode", ["proximal", "gradient"])
def test_a_budget_goes_on_where_it_was_saved(mode: str) -> None:
    problem = Problem("kronecker", BENT)
    other = copy.deepcopy(problem)
    options: dict[str, Any] = {"budget": 1e-3, "mode": mode, "every": 4 if mode == "proximal" else 1}
    optimizer = problem.sgd(0.01)
    saved: dict[str, Any] = {}
    with problem.memory.protect(optimizer, examples=40, **options):
        for step in range(20):
            if step == 10:
                saved = copy.deepcopy(
                    {
                        "memory": problem.memory.state_dict(),
                        "model": problem.model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                    }
                )
            optimizer.zero_grad()
            problem.loss().backward()
            optimizer.step()
    again = other.sgd(0.01)
    other.model.load_state_dict(saved["model"])
    other.memory.load_state_dict(saved["memory"])
    again.load_state_dict(saved["optimizer"])
    with other.memory.protect(again, examples=40, **options):
        for _ in range(10):
            again.zero_grad()
            other.loss().backward()
            again.step()
    assert torch.equal(problem.model.weight, other.model.weight)


def test_solving_for_a_multiplier() -> None:
    history = TaskHistory().learned(10, BENT, 0.0)

    def q(m: float) -> float:
        return 0.05 / (1 + m) ** 2

    budget = Budget(history, 0.002)
    m = budget.solve(q)
    assert BENT(q(m)) == pytest.approx(0.002, rel=3e-3) and BENT(q(m)) <= 0.002 * (1 + 1e-5)
    assert Budget(history, 1.0).solve(q) == 0.0
    assert Budget(TaskHistory(), 0.01).solve(q) == 0.0  # nothing is known yet, so nothing can be forgotten


def test_before_the_first_task_there_is_nothing_to_hold() -> None:
    model = nn.Linear(3, 2)
    memory = limpet.OnlineLaplace(model, prior_precision=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with memory.protect(optimizer, examples=10, budget=0.1):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert torch.allclose(model.weight, before - 0.1)


def test_what_cannot_follow_a_forecast_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="Laplace"):
        limpet.SynapticIntelligence(model).protect(optimizer, examples=10, budget=0.1)
    with pytest.raises(UnsupportedError, match="kronecker"):
        limpet.OnlineLaplace(model, structure="kronecker-sum").protect(optimizer, examples=10, budget=0.1)
    for budget in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="budget"):
            limpet.OnlineLaplace(model).protect(optimizer, examples=10, budget=budget)


def test_a_budget_moves_nothing_that_the_optimizer_does_not_have() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(40, 3), torch.randint(0, 2, (40,))
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, y)])
    bias = model.bias.detach().clone()
    optimizer = torch.optim.Adam([model.weight], lr=0.5)
    with memory.protect(optimizer, examples=40, budget=0.01):
        for _ in range(20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), 1 - y).backward()
            optimizer.step()
    assert torch.equal(model.bias, bias)
    assert 0.005 < float(memory.forecast()) <= 0.01 * 1.01


# --- one objective: 1/2 d^T (prior + m F) d -------------------------------------------------------------------------


def two_tasks(method: Any, structure: str, strengths: tuple[float, float] = (10.0, 10.0)) -> Problem:
    """A memory of two tasks with different means and strengths, at the second mean."""
    problem = Problem(structure, Curve(), method=method, strength=strengths[0])
    with torch.no_grad():
        problem.model.weight += 0.3 * torch.randn(2, 3, dtype=torch.float64)
    problem.memory.strength = strengths[1]
    problem.memory.consolidate([problem.new])
    problem.memory.history = TaskHistory().learned(80, Curve(), 0.0)
    problem.mean = problem.model.weight.detach().clone()
    return problem


def dense_penalty(problem: Problem, factor: float) -> Tensor:
    """1/2 d^T (prior + factor F) d of the unweighted Fisher, written out."""
    (held,) = problem.memory.posterior.held.values()
    d = (problem.model.weight.detach() - problem.mean).flatten()
    L = factor * held.precision.fisher().dense() + 0.5 * torch.eye(6, dtype=torch.float64)
    return d @ L @ d / 2


METHODS = [limpet.OnlineLaplace, limpet.PerTaskLaplace]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("structure", ["kronecker", "diagonal", "dense"])
@pytest.mark.parametrize("factor", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("mode", ["proximal", "gradient"])
def test_both_modes_apply_the_dense_objective(
    method: Any, structure: str, factor: float, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From anywhere, with mixed strengths: the objective is that of the forecast, whatever the multiplier."""
    problem = two_tasks(method, structure, (0.5, 7.0))
    monkeypatch.setattr(Budget, "solve", lambda self, q: factor)
    monkeypatch.setattr(Budget, "follow", lambda self, q: factor)
    with torch.no_grad():
        problem.model.weight += torch.randn(2, 3, dtype=torch.float64)
    start = problem.model.weight.detach().clone()
    (held,) = problem.memory.posterior.held.values()
    L = factor * held.precision.fisher().dense() + 0.5 * torch.eye(6, dtype=torch.float64)
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1)
    with pytest.raises(KeyboardInterrupt), problem.memory.protect(optimizer, examples=40, mode=mode, budget=0.1) as one:
        (0 * problem.model.weight.sum()).backward()
        before = dense_penalty(problem, 1.0)
        assert one.penalty() == pytest.approx(float(before) / 40)  # the multiplier is 1 before the first step
        optimizer.step()
        assert one.factor == factor
        assert one.penalty() == pytest.approx(float(dense_penalty(problem, factor)) / 40)
        raise KeyboardInterrupt  # without the correction at the end
    d = (start - problem.mean).flatten()
    if mode == "gradient":
        expected = d - 0.1 / 40 * (L @ d)
    else:
        expected = torch.linalg.solve(torch.eye(6, dtype=torch.float64) + 0.1 / 40 * L, d)
    assert torch.allclose((problem.model.weight - problem.mean).flatten(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_budget_moves_nothing_where_there_is_no_loss(method: Any, kind: str) -> None:
    """The mean is where the forecast is 0, so it is a minimum of the penalty for every multiplier."""
    problem = two_tasks(method, "kronecker")
    optimizer = getattr(torch.optim, kind)(problem.model.parameters(), lr=0.05)
    with problem.memory.protect(optimizer, examples=40, budget=0.05):
        for _ in range(200):
            optimizer.zero_grad()
            (0 * problem.model.weight.sum()).backward()
            optimizer.step()
    assert torch.allclose(problem.model.weight, problem.mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "strengths", "mode"),
    [
        (limpet.PerTaskLaplace, (0.0, 0.0), "proximal"),
        (limpet.OnlineLaplace, (0.0, 4.0), "proximal"),
        (limpet.PerTaskLaplace, (10.0, 10.0), "gradient"),
        (limpet.OnlineLaplace, (0.0, 0.0), "gradient"),
    ],
)
def test_a_budget_replaces_the_strengths(method: Any, strengths: tuple[float, float], mode: str) -> None:
    """The optimum is that of the constrained problem, with any strengths, also where all of them are 0."""
    problem = two_tasks(method, "dense", strengths)
    problem.new = Problem._task(2.0)
    problem.old = torch.zeros(80, 3), torch.zeros(80, 2)  # 80 old examples
    budget = 0.3 * problem.quadratic(problem.optimum(1e-6))
    factor = solved(problem, lambda _, q: q - budget)
    optimizer = problem.sgd(0.02)
    problem.train(optimizer, steps=600, budget=budget, mode=mode)
    assert problem.memory.forecast() == pytest.approx(budget, rel=2e-3)
    optimum = problem.optimum(factor)
    assert (problem.model.weight - optimum).norm() < 2e-2 * (optimum - problem.mean).norm()


def test_the_penalty_of_a_budget_is_reported_as_it_is_applied() -> None:
    """It does not depend on the strength, which a budget replaces."""
    values = []
    for strength in (1.0, 4.0):
        problem = Problem("kronecker", Curve(), strength=strength)
        optimizer = problem.sgd()
        budget = 0.1 * problem.quadratic(problem.optimum(1e-6))
        with problem.memory.protect(optimizer, examples=40, budget=budget) as protection:
            for _ in range(50):
                optimizer.zero_grad()
                problem.loss().backward()
                optimizer.step()
            values.append(protection.penalty())
            assert values[-1] == pytest.approx(float(dense_penalty(problem, protection.factor)) / 40)
    assert values[0] == pytest.approx(values[1], rel=1e-6)

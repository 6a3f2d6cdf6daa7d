"""A new output layer is fitted again to the features of a repaired model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import limpet
from limpet.forgetting.output_layer import RIDGES, ridge_regression


@pytest.mark.parametrize(("rows", "intercept"), [(30, True), (30, False), (8, True)])
def test_ridge_regression_has_the_least_leave_one_out_error(rows: int, intercept: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 12, dtype=torch.float64, generator=generator) + 2
    y = x[:, :3] + 3 + torch.randn(rows, 3, dtype=torch.float64, generator=generator)

    def solved(features: Tensor, targets: Tensor, ridge: float) -> Tensor:
        """The weights and the constant, in one matrix, by the normal equations."""
        ones = torch.ones(len(features), int(intercept), dtype=torch.float64)
        both = torch.cat([features, ones], 1)
        shrunk = torch.cat([torch.full((12,), ridge), torch.zeros(int(intercept))]).double()
        return torch.linalg.solve(both.T @ both + shrunk.diag(), both.T @ targets)

    def left_out(ridge: float) -> float:
        total = 0.0
        for i in range(rows):
            others = torch.arange(rows) != i
            found = solved(x[others], y[others], ridge)
            total += float((x[i] @ found[:12] + (found[12] if intercept else 0) - y[i]).square().sum())
        return total

    centered = x - x.mean(0) * intercept
    ridges = [ridge * float(centered.square().sum()) / 12 for ridge in RIDGES]
    ridge = min(ridges, key=left_out)
    expected = solved(x, y, ridge)
    weights, constant = ridge_regression(x, y, intercept=intercept)
    assert torch.allclose(weights.T, expected[:12], atol=1e-8)
    assert torch.allclose(constant, expected[12] if intercept else torch.zeros(3).double(), atol=1e-8)


class Encoder(nn.Module):
    """A body with batch norm and dropout, and a head of its own for every task."""

    def __init__(self, *, bias: bool = True, twice: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3, bias=bias)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.tanh(self.body(x)))
        return 2 * outputs if self.twice else outputs


def task(seed: int, rows: int = 96) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, dtype=torch.float64, generator=generator)
    y = (x @ torch.randn(6, 3, dtype=torch.float64, generator=generator)).argmax(1)
    return list(zip(x.split(16), y.split(16), strict=True))


def fitted(model: nn.Module, batches: list[tuple[Tensor, Tensor]], steps: int = 60) -> None:
    model.eval()  # statistics of batch norm stay as they are
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(steps):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.train()


def two_tasks(*, replace: bool = True, probe: int | None = 48, **options: Any) -> tuple[Encoder, limpet.OnlineLaplace]:
    torch.manual_seed(0)
    model = Encoder(**options).double()
    fitted(model, task(1))
    memory = limpet.OnlineLaplace(model, exclude=["head"])
    memory.consolidate(task(1), progress=False, **({} if probe is None else {"probe": probe}))
    if replace:
        model.head.weight.data = -model.head.weight.data.roll(1, 0)
    fitted(model, task(2))
    return model, memory


def features(model: Encoder, x: Tensor) -> Tensor:
    return torch.tanh(copy.deepcopy(model).eval().body(x)).detach()


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_is_the_ridge_regression_to_the_tuned_outputs(bias: bool) -> None:
    model, memory = two_tasks(bias=bias)
    x = torch.cat([x for x, _ in task(2)])
    tuned = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outputs = copy.deepcopy(model).eval()(x).detach()
    repair = limpet.repair(model, memory, task(2), strength=2.0, progress=False)
    assert repair.refitted == "head"
    weight, constant = tuned["head.weight"], tuned.get("head.bias", torch.zeros(3).double())
    missing = outputs - features(model, x) @ weight.T - constant
    change, shift = ridge_regression(features(model, x), missing, intercept=bias)
    assert torch.allclose(model.head.weight, weight + change, atol=1e-10)
    assert not bias or torch.allclose(model.head.bias, constant + shift, atol=1e-10)
    refitted = model.head.weight.clone()
    repair.at(0.5).at(2.0)
    assert torch.equal(model.head.weight, refitted)
    repair.undo()
    assert all(torch.equal(tensor, tuned[name]) for name, tensor in model.state_dict().items())
    assert model.training and not model.head._forward_hooks
    assert all(p.grad is None for p in model.parameters())


def test_the_new_task_gains_and_the_old_ones_do_not_see_it() -> None:
    model, memory = two_tasks()
    other = copy.deepcopy(model)
    with_fit = limpet.repair(model, memory, task(2), strength=30.0, progress=False)
    without = limpet.repair(other, memory, task(2), strength=30.0, refit=False, progress=False)
    assert without.refitted is None
    assert torch.equal(model.body[0].weight, other.body[0].weight)
    fitted_loss, trained_loss = with_fit.measured().loss, without.measured().loss
    assert fitted_loss is not None and trained_loss is not None and fitted_loss < trained_loss - 0.02
    assert with_fit.measured().drift == pytest.approx(without.measured().drift, rel=1e-12)
    limits = [repair._limit("auto", 0.3, 0.5)[1] for repair in (with_fit, without)]
    assert limits[0] == pytest.approx(limits[1], rel=1e-12)  # what a budget may cost is not less for the fit
    within = with_fit.within_budget(0.05)
    assert float(memory.drift()) <= 0.05
    loss = within.measured().loss
    assert loss is not None and loss == pytest.approx(within.at(within.strength).measured().loss, rel=1e-12)


def test_a_layer_that_was_added_is_fitted() -> None:
    class Heads(Encoder):
        task = 0

        def forward(self, x: Tensor) -> Tensor:
            return (self.head if self.task == 0 else self.second)(torch.tanh(self.body(x)))  # type: ignore[operator]

    torch.manual_seed(0)
    model = Heads().double()
    fitted(model, task(1))
    memory = limpet.OnlineLaplace(model, exclude=["head"])
    memory.consolidate(task(1), progress=False, probe=48)
    model.second, model.task = nn.Linear(8, 3).double(), 1
    fitted(model, task(2))

    def old(model: nn.Module, batch: Any) -> Tensor:
        return model.head(torch.tanh(model.body(batch[0])))  # type: ignore[operator]

    repair = limpet.repair(model, memory, task(2), budget=0.05, probe_forward=old, progress=False)
    assert repair.refitted == "second" and repair.strength > 0
    assert float(memory.drift(forward=old)) <= 0.05


def test_a_layer_that_has_replaced_it_is_not_touched() -> None:
    model, memory = two_tasks()
    repair = limpet.repair(model, memory, task(2), strength=2.0, progress=False)
    body = model.body[0].weight.clone()
    model.head = nn.Linear(8, 5).double()
    head = copy.deepcopy(model.head.state_dict())
    repair.undo().at(2.0)
    assert torch.equal(model.body[0].weight, body)
    assert all(torch.equal(tensor, head[name]) for name, tensor in model.head.state_dict().items())


@pytest.mark.parametrize("kind", ["trained further", "no probe", "not the output", "frozen"])
def test_only_a_new_layer_that_computes_the_outputs_is_fitted(kind: str) -> None:
    model, memory = two_tasks(
        replace=kind != "trained further",
        probe=None if kind == "no probe" else 48,
        twice=kind == "not the output",
    )
    if kind == "frozen":
        model.head.requires_grad_(False)
    head = copy.deepcopy(model.head.state_dict())
    repair = limpet.repair(model, memory, task(2), strength=2.0, progress=False)
    assert repair.refitted is None and repair.strength == 2.0
    assert all(torch.equal(tensor, head[name]) for name, tensor in model.head.state_dict().items())


def test_protect_fits_it_at_the_end_of_training() -> None:
    model, memory = two_tasks()
    torch.manual_seed(1)
    model.head.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model.eval()
    with memory.protect(optimizer, examples=96, mode="repair", budget=0.2) as protection:
        for x, y in task(3) * 6:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert protection.repair is not None and protection.repair.refitted == "head"
    x, y = (torch.cat(tensors) for tensors in zip(*task(3), strict=True))
    here = F.cross_entropy(model(x), y).item()
    head = copy.deepcopy(model.head.state_dict())
    strength = protection.repair.strength
    protection.repair.undo()
    trained = copy.deepcopy(model.head.state_dict())
    protection.repair.at(strength)
    assert all(torch.equal(tensor, head[name]) for name, tensor in model.head.state_dict().items())
    model.head.load_state_dict(trained)
    assert here < F.cross_entropy(model(x), y).item() - 0.01


@pytest.mark.parametrize("how", ["frozen", "compiled"])
def test_the_state_of_the_tuned_model_does_not_change_what_is_fitted(how: str) -> None:
    model, memory = two_tasks()
    other = copy.deepcopy(model)
    if how == "frozen":
        other.requires_grad_(False)
    else:
        other.compile(backend="eager")
        other.eval()(task(2)[0][0])
        other.train()
    repairs = [limpet.repair(one, memory, task(2), strength=2.0, progress=False) for one in (model, other)]
    assert [repair.refitted for repair in repairs] == ["head", "head"]
    assert torch.allclose(model.head.weight, other.head.weight, atol=1e-12)


@pytest.mark.parametrize("replace", [True, False])
def test_a_new_head_that_the_memory_covers_is_warned_about(replace: bool) -> None:
    torch.manual_seed(0)
    model = Encoder().double()
    fitted(model, task(1))
    memory = limpet.OnlineLaplace(model, prior_mean="initial")
    memory.consolidate(task(1), progress=False)
    if replace:
        model.head.reset_parameters()
    fitted(model, task(2), steps=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        limpet.repair(model, memory, task(2), strength=1.0, progress=False)
    told = [str(one.message) for one in caught if "covers the output layer head" in str(one.message)]
    assert len(told) == int(replace) and all("exclude=['head']" in one for one in told)

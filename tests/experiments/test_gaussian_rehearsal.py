"""Rehearsal on inputs drawn from the memory: their distribution, and the gradient that every step adds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import limpet
from limpet.errors import LimpetError
from limpet.experiments import METHODS, GaussianRehearsal, Recipe
from limpet.experiments.gaussian_rehearsal import input_gaussian
from limpet.experiments.networks import build
from limpet.experiments.settings import checked


def inputs(seed: int) -> Tensor:
    """Correlated, and not around zero."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(40, 6, generator=generator) @ torch.randn(6, 6, generator=generator) + 2


def recipe(**memory: Any) -> Recipe:
    values = {
        "experiment": "permuted-mnist",
        "tasks": 2,
        "method": "gaussian-rehearsal",
        "training": {"batch_size": 20},
        "memory": {"rehearsal": 0.7, "strength": 1.0, "mode": "gradient", "smoothing": 0, **memory},
    }
    return checked(Recipe, values, "test")


def learned(**memory: Any) -> tuple[nn.Module, GaussianRehearsal]:
    model = build("mlp", {"hidden": [5]}, (6,), (3,), seed=0)
    method = METHODS["gaussian-rehearsal"](model, recipe(**memory))
    assert isinstance(method, GaussianRehearsal)
    method.memory.consolidate([(inputs(0), torch.zeros(40, dtype=torch.long))], progress=False)
    return model, method


def test_inputs_have_the_mean_and_the_covariance_of_the_task() -> None:
    _, method = learned()
    mean, root = input_gaussian(method.memory)
    torch.testing.assert_close(mean, inputs(0).mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(root @ root.mT, inputs(0).mT.cov(correction=0), atol=1e-3, rtol=1e-3)


def test_inputs_of_two_tasks_are_those_of_a_mixture() -> None:
    _, method = learned()
    weights = [float(next(iter(method.memory.posterior.held.values())).precision.inputs.trace.sum())]  # type: ignore[attr-defined]
    method.memory.consolidate([(inputs(1), torch.zeros(40, dtype=torch.long))], progress=False)
    weights.append(float(next(iter(method.memory.posterior.held.values())).precision.inputs.trace.sum()))  # type: ignore[attr-defined]
    # the trace of a task is that of its output factor, times that of its input factor
    moments = [torch.cat([x, torch.ones(40, 1)], 1) for x in (inputs(0), inputs(1))]
    seconds = [m.mT @ m / 40 for m in moments]
    traces = torch.tensor([weights[0] / seconds[0].trace(), (weights[1] - weights[0]) / seconds[1].trace()])
    shares = traces / traces.sum()
    expected = shares[0] * inputs(0).mean(0) + shares[1] * inputs(1).mean(0)
    torch.testing.assert_close(input_gaussian(method.memory)[0], expected, atol=1e-3, rtol=1e-3)


def test_a_step_adds_the_gradient_of_the_divergence() -> None:
    model, method = learned(strength=0.0)
    before = copy.deepcopy(model)
    with torch.no_grad():  # as after some training on the next task
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    by_hand = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = inputs(2), torch.arange(40) % 3
    with method.hold(optimizer, examples=10**12):  # so many that the prior does not count
        F.cross_entropy(model(x), y).backward()
        torch.manual_seed(5)
        optimizer.step()

    torch.manual_seed(5)
    mean, root = input_gaussian(method.memory)
    drawn = mean + torch.randn(20, 6) @ root.mT
    old, new = before(drawn).log_softmax(-1), by_hand(drawn).log_softmax(-1)
    divergence = (old.exp() * (old - new)).sum(-1).mean()
    (F.cross_entropy(by_hand(x), y) + 0.7 * divergence).backward()
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(ours, theirs - 0.1 * theirs.grad, atol=2e-6, rtol=1e-5)


def test_the_first_task_has_nothing_to_rehearse() -> None:
    model = build("mlp", {"hidden": [5]}, (6,), (3,), seed=0)
    by_hand = copy.deepcopy(model)
    method = METHODS["gaussian-rehearsal"](model, recipe())
    x, y, state = inputs(2), torch.arange(40) % 3, torch.get_rng_state()
    optimizer, plain = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, by_hand))
    with method.hold(optimizer, examples=10**12):  # so many that the prior does not count
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    F.cross_entropy(by_hand(x), y).backward()
    plain.step()
    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("network", "options", "shape", "heads", "memory"),
    [
        ("lenet", {}, (3, 32, 32), (3,), {}),
        ("mlp", {}, (6,), (3, 3), {}),
        ("mlp", {}, (6,), (3,), {"rank": 2}),
    ],
)
def test_other_networks_and_memories_are_rejected(
    network: str, options: dict[str, Any], shape: tuple[int, ...], heads: tuple[int, ...], memory: dict[str, Any]
) -> None:
    with pytest.raises(LimpetError, match="complete factors"):
        METHODS["gaussian-rehearsal"](build(network, options, shape, heads, seed=0), recipe(**memory))


def test_a_memory_without_input_factor_is_rejected() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    memory = limpet.OnlineLaplace(model, structure="diagonal")
    memory.consolidate([(inputs(0), torch.zeros(40, dtype=torch.long))], progress=False)
    with pytest.raises(LimpetError, match="complete input factor"):
        input_gaussian(memory)

"""Curvature around the mode: the distribution of the perturbations, and the Fisher averaged over them."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import limpet
import networks
from limpet.curvature import FisherPass, Structure
from limpet.curvature.checkpoint import fingerprint
from limpet.errors import LimpetError
from limpet.likelihoods import Categorical
from limpet.model import discover
from limpet.posterior.perturbation import WeightPerturbation, weight_perturbation
from limpet.precision import DiagonalTerm
from reference import close, dense_fisher, measure
from states import changed

STRUCTURES = ["diagonal", "kronecker", "kronecker-sum", "dense"]


def around(memory: limpet.OnlineLaplace, x: Any, y: Any, rise: float) -> tuple[WeightPerturbation, Any]:
    look = measure(memory.model, [(x, y)], Categorical(), memory.structure)
    found = weight_perturbation(memory.posterior, look, memory.strength, rise, seed=3)
    assert found is not None
    return found, look


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("tasks", [0, 2])
def test_draws_raise_the_predicted_loss_by_what_was_asked(structure: str, tasks: int) -> None:
    model, x, y = networks.build("linear")
    memory = limpet.OnlineLaplace(model, structure=structure, strength=2.0)
    for _ in range(tasks):
        memory.consolidate([(x, y)])
    for rise in (1e-4, 1e-3):
        found, _ = around(memory, x, y, rise)
        assert found.predicted(found.temperature) == pytest.approx(rise, rel=0.05)


@pytest.mark.slow
def test_draws_have_the_stated_covariance() -> None:
    model, x, y = networks.build("linear")
    memory = limpet.OnlineLaplace(model, structure="dense", strength=2.0, prior_precision=0.5)
    found, _ = around(memory, x, y, 1e-3)
    for place in found.block_perturbations:
        n = place.precision.shape.numel()
        # L / T + I / v, with L = prior + strength F written out
        F = dense_fisher(memory.model, place.block, x, y, Categorical())
        square = place.block.gather(dict(model.named_parameters())).detach().square().mean()
        expected = ((0.5 * torch.eye(n) + 2.0 * F) / found.temperature + torch.eye(n) / square).inverse()
        generator = torch.Generator().manual_seed(0)
        many = torch.stack([place.draw(found.temperature, generator).flatten() for _ in range(4000)])
        close(many.T @ many / 4000, expected, tolerance=0.15)


def test_the_same_number_gives_the_same_displacement_and_another_another() -> None:
    model, x, y = networks.build("linear")
    found, _ = around(limpet.OnlineLaplace(model), x, y, 1e-3)
    first, again, other = found(5), found(5), found(6)
    assert first.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name]) for name in first)


def moved(model: nn.Module, displacement: dict[str, torch.Tensor]) -> nn.Module:
    there = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in there.named_parameters():
            parameter += displacement.get(name, 0.0)
    return there


@pytest.mark.parametrize("name", ["linear", "conv2d", "attention"])
def test_the_smoothed_fisher_is_the_sum_of_dense_fishers_at_the_draws(name: str) -> None:
    model, x, y = networks.build(name)
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    memory = limpet.OnlineLaplace(model, structure="diagonal", smoothing=1e-3, seed=7)
    memory.consolidate(batches)
    look = measure(model, batches, Categorical())
    found = weight_perturbation(limpet.OnlineLaplace(model, structure="diagonal").posterior, look, 1.0, 1e-3, seed=7)
    assert found is not None
    for held in memory.posterior.held.values():
        expected = sum(
            dense_fisher(moved(model, found(k)), held.block, *batch, Categorical()).diagonal()
            for k, batch in enumerate(batches)
        )
        close(held.precision.fisher().diagonals()[0].flatten(), expected)
    plain = limpet.OnlineLaplace(model, structure="diagonal")
    plain.consolidate(batches)
    assert memory.posterior.penalty() == plain.posterior.penalty() == 0  # the mean is the mode all the same
    for name, held in plain.posterior.held.items():
        smoothed = memory.posterior.held[name].precision.diagonals()[0]
        assert not torch.allclose(held.precision.diagonals()[0], smoothed)


def test_smoothing_sees_the_loss_rise_that_a_saturated_mode_does_not() -> None:
    """A network far too sure of itself has next to no curvature; around the mode there is some."""
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    x[:, 0] += 0.1 * x[:, 0].sign()  # no example is near the boundary
    y = (x[:, 0] > 0).long()
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(30 * torch.tensor([[-1.0, 0, 0, 0], [1, 0, 0, 0]]))
        model.bias.zero_()
    traces = []
    for smoothing in (0.0, 0.5):
        memory = limpet.OnlineLaplace(model, smoothing=smoothing)
        memory.consolidate([(x[i : i + 20], y[i : i + 20]) for i in range(0, 200, 20)])
        traces.append(sum(float(held.precision.fisher().trace()) for held in memory.posterior.held.values()))
    assert traces[1] > 10 * traces[0]  # 35 to 170 times with other seeds


def test_the_weights_are_the_same_tensors_afterwards_also_after_an_error() -> None:
    model, x, y = networks.build("conv2d")
    memory = limpet.OnlineLaplace(model, smoothing=1e-3)
    before = {name: (p.data_ptr(), p.detach().clone(), p._version) for name, p in model.named_parameters()}
    calls = itertools.count()

    def failing(model: nn.Module, batch: Any) -> Any:
        if next(calls) > 3:
            raise KeyboardInterrupt
        return model(batch[0]), batch[1]

    with pytest.raises(KeyboardInterrupt):
        memory.consolidate([(x, y)] * 3, forward=failing)
    memory.consolidate([(x, y)] * 3)
    for name, parameter in model.named_parameters():
        pointer, value, version = before[name]
        assert parameter.data_ptr() == pointer and torch.equal(parameter, value) and parameter._version == version


def test_saved_loaded_and_files_that_do_not_know_it(tmp_path: Path) -> None:
    model, x, y = networks.build("linear")
    memory = limpet.OnlineLaplace(model.float(), smoothing=0.02)
    memory.consolidate([(x.float(), y)])
    memory.save(tmp_path / "memory.safetensors")
    loaded = limpet.load(tmp_path / "memory.safetensors", model)
    assert isinstance(loaded, limpet.OnlineLaplace) and loaded.smoothing == 0.02
    loaded.load_state_dict(changed(memory.state_dict(), without="smoothing"))
    assert loaded.smoothing == 0.0


def test_a_pass_of_another_smoothing_is_another_pass(tmp_path: Path) -> None:
    model, x, y = networks.build("linear")
    found = [around(limpet.OnlineLaplace(model), x, y, rise)[0] for rise in (1e-4, 1e-3)]
    prints = {
        fingerprint(FisherPass(model, discover(model), Categorical(), Structure("kronecker", 4096), displacement=place))
        for place in (None, *found)
    }
    assert len(prints) == 3


def test_looking_around_leaves_the_memory_as_it_was() -> None:
    model, x, y = networks.build("linear")
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, y)])
    before = dict(memory.posterior.held)
    around(memory, x, y, 1e-3)
    assert memory.posterior.held == before


def test_batches_of_unknown_size_are_read_whole() -> None:
    model, x, y = networks.build("linear")

    class Loader:
        def __iter__(self) -> Any:
            return iter([(x, y)])

    memory, same = (limpet.OnlineLaplace(model, smoothing=1e-3) for _ in range(2))
    memory.consolidate(Loader())
    same.consolidate([(x, y)])
    for name, held in memory.posterior.held.items():
        close(held.precision.diagonals()[0], same.posterior.held[name].precision.diagonals()[0])


def test_what_cannot_be_is_said() -> None:
    model, x, y = networks.build("linear")
    with pytest.raises(ValueError, match="smoothing must be a finite number >= 0"):
        limpet.OnlineLaplace(model, smoothing=-1.0)
    with pytest.raises(LimpetError, match="reads the data twice"):
        limpet.OnlineLaplace(model, smoothing=0.1).consolidate(iter([(x, y)]))


def test_a_task_that_says_nothing_is_measured_as_it_is() -> None:
    model, x, y = networks.build("linear")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    memory = limpet.OnlineLaplace(model, structure="diagonal", smoothing=0.1)
    memory.consolidate([(x, y)])
    found = measure(model, [(x, y)], Categorical())
    for name, held in memory.posterior.held.items():
        (term,) = found.terms[name]
        assert isinstance(term, DiagonalTerm)
        close(held.precision.fisher().diagonals()[0], term.diagonal)

"""The drift along coherent displacements, and which forecasts can be trusted."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import limpet
import networks
from limpet.errors import LimpetWarning
from limpet.forgetting.coherent import RISES, rolled
from limpet.forgetting.loss_curve import Curve, TaskHistory

STRUCTURES = ("diagonal", "kronecker", "kronecker-sum", "dense")


def consolidated(model: nn.Module, x: Tensor, y: Tensor, **options: object) -> limpet.OnlineLaplace:
    memory = limpet.OnlineLaplace(model, **options)
    memory.consolidate([(x, y)], progress=False)
    return memory


def move(model: nn.Module, size: float, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_points_are_the_dense_quadratic_and_the_divergence_at_the_signs_of_a_gradient(structure: str) -> None:
    model, x, y = networks.build("linear")
    memory = consolidated(model, x, y, structure=structure)
    (task,) = memory.history.tasks
    assert task.coherent is not None and task.coherent.predicted == pytest.approx(RISES)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    loss = F.cross_entropy(model(x), y.roll(1), reduction="sum")
    signs = dict(zip(weights, (-g.sign() for g in torch.autograd.grad(loss, list(model.parameters()))), strict=True))
    q = 0.0
    for held in memory.posterior.held.values():
        z = held.block.gather(signs).flatten().double()
        q += float(z @ held.precision.fisher().dense().double() @ z) / (2 * len(x))
    before = model(x).detach().log_softmax(1)
    for rise, measured in zip(RISES, task.coherent.measured, strict=True):
        found = []
        for sign in (1, -1):
            at = {name: w + sign * (rise / q) ** 0.5 * signs[name] for name, w in weights.items()}
            now = functional_call(model, at, (x,)).log_softmax(1)
            found.append(float(F.kl_div(now, before, log_target=True, reduction="batchmean")))
        assert measured == pytest.approx(sum(found) / 2, rel=1e-4)


@pytest.mark.parametrize("variance", [1.0, 0.3, "estimate"])
def test_where_the_quadratic_is_exact_the_coherent_curve_is_the_line(variance: float | str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(1, 3, dtype=torch.float64).expand(64, 3).contiguous()
    y = torch.randn(1, 2, dtype=torch.float64).expand(64, 2).contiguous()
    memory = consolidated(model, x, y, likelihood=limpet.Gaussian(variance), structure="kronecker")
    (task,) = memory.history.tasks
    assert task.coherent is not None and task.quadratic_holds
    assert task.coherent.measured == pytest.approx(task.coherent.predicted, rel=1e-6)
    move(model, 0.01)
    found = memory.forecast()
    assert found.trusted and found.drift == pytest.approx(found.quadratic, rel=1e-6)


def test_a_forecast_is_not_trusted_where_the_structure_misses_what_adds_up() -> None:
    """A diagonal knows nothing of inputs that vary together, along which small changes add up."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(400, 60, generator=generator), torch.randint(0, 5, (400,), generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(60, 5)
    assert consolidated(model, x, y, structure="kronecker").history.tasks[0].quadratic_holds
    memory = consolidated(model, x, y, structure="diagonal", prior_precision=1e-3)
    assert memory.history.tasks[0].quadratic_holds is False
    before = model(x).detach().log_softmax(1)
    with torch.no_grad():  # a coherent displacement
        model.weight += 0.01 * torch.tensor([1.0, -1, 1, -1, 1])[:, None]
    true = float(F.kl_div(model(x).detach().log_softmax(1), before, log_target=True, reduction="batchmean"))
    with pytest.warns(LimpetWarning, match=r"cannot be trusted here.*memory.drift"):
        found = memory.forecast()
    assert not found.trusted and "coherent" in str(found)
    assert found.quadratic < true / 10 and true / 3 < found < 3 * true
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory.forecast()  # one warning is enough


def test_beyond_the_measured_distance_a_forecast_is_not_trusted() -> None:
    model, x, y = networks.build("linear")
    memory = consolidated(model, x, y, structure="dense")
    assert memory.forecast().trusted  # nothing has moved
    move(model, 0.02)
    assert memory.forecast().trusted
    move(model, 3.0)
    with pytest.warns(LimpetWarning, match="further away than the loss was measured"):
        assert not memory.forecast().trusted


def test_after_a_repair_no_forecast_is_trusted_until_the_next_consolidation() -> None:
    model, x, y = networks.build("linear")
    memory = consolidated(model, x, y, structure="dense")
    move(model, 0.02)
    repair = limpet.repair(model, memory, [(x.flip(0), y)], progress=False)
    with pytest.warns(LimpetWarning, match="was repaired"):
        assert not memory.forecast().trusted
    repair.undo()
    assert memory.forecast().trusted
    repair.at(1.0)
    assert not memory.forecast().trusted
    memory.consolidate([(x.flip(0), y)], progress=False)
    assert memory.forecast().trusted


def test_the_summary_of_a_protection_says_so() -> None:
    model, x, y = networks.build("linear")
    memory = consolidated(model, x, y, structure="dense")
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    with memory.protect(optimizer, examples=10**9) as protection:
        F.cross_entropy(model(x), y.roll(1)).backward()
        optimizer.step()
    assert protection.summary().forecast_doubt is not None
    assert "the forecast is not to be trusted: the weights are further away" in str(protection.summary())


def test_the_curve_is_stored_and_files_without_it_are_read(tmp_path: Path) -> None:
    model, x, y = networks.build("linear")
    memory = consolidated(model, x, y)
    memory.save(tmp_path / "memory.safetensors")
    loaded = limpet.load(tmp_path / "memory.safetensors", model)
    assert loaded.history == memory.history and loaded.history.tasks[0].coherent is not None
    plain = {name: value for name, value in memory.history.plain().items() if name != "coherent"}
    older = TaskHistory.restore(plain)
    assert older.tasks[0].coherent is None and older.tasks[0].curve == memory.history.tasks[0].curve
    assert older.drift(0.1) is None and older.doubt(0.1) == (
        "it was not measured how the old loss increases around these weights"
    )
    assert older.doubt(0.0) is None


def test_the_larger_curve_counts_where_they_differ() -> None:
    low, high = Curve.through([(0.01, 0.01), (0.1, 0.1)]), Curve.through([(0.001, 0.02), (0.1, 0.3)])
    (near,) = TaskHistory().learned(10, low, 0.0, Curve.through([(0.01, 0.02), (0.1, 0.2)])).rises(0.05)
    assert near == low(0.05)
    history = TaskHistory().learned(10, low, 0.0, high)
    assert history.rises(0.05) == [high(0.05)] and history.drift(0.05) == high(0.05)
    rises = [history.rises(0.0001 * 1.2**k)[0] for k in range(60)]
    assert rises == sorted(rises)  # a budget is found by bisection


def test_measuring_leaves_the_model_as_it_was() -> None:
    model, x, y = networks.build("linear")
    state, mode, random = copy.deepcopy(model.state_dict()), model.training, torch.get_rng_state()
    consolidated(model, x, y)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training is mode and torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_targets_of_every_form_are_rolled() -> None:
    x = torch.arange(3)
    assert rolled(x).tolist() == [2, 0, 1] and rolled(torch.tensor(1.0)) == 1
    assert rolled({"a": x})["a"].tolist() == [2, 0, 1] and rolled([x, None])[1] is None

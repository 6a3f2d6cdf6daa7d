"""Predicted increases of the loss, compared with the measured increases."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import limpet
import networks
from limpet.errors import LimpetError, MemoryFileError, UnsupportedError
from limpet.forgetting.loss_curve import EXPECTED, KEPT, MARGIN, Curve, TaskHistory
from limpet.forgetting.loss_probe import SURE, LossProbe
from limpet.forgetting.measurement import LEAST, RISES, along_gradient, expected_rise, measure, step_for_rise
from limpet.likelihoods import Categorical
from limpet.posterior.perturbation import block_perturbations, by_parameter, displacer_of, numbered
from reference import dense_fisher
from reference import measure as measured_fisher
from states import changed

STRUCTURES = ["diagonal", "kronecker", "kronecker-sum", "dense"]


def test_a_curve_goes_through_its_points_and_its_slope_is_its_derivative() -> None:
    curve = Curve.through([(0.2, 0.9), (0.002, 0.003), (0.02, 0.04)])
    for q, rise in ((0.002, 0.003), (0.02, 0.04), (0.2, 0.9)):
        assert curve(q) == pytest.approx(rise, rel=1e-12)
    assert curve(1e-5) == pytest.approx(1.5e-5) and curve(2.0) == pytest.approx(9.0)
    for q in (0.003, 0.01, 0.05, 0.1):  # smooth over the points, so only nearly the derivative between them
        assert curve.slope(q) == pytest.approx((curve(q * 1.0001) - curve(q * 0.9999)) / (0.0002 * q), rel=0.25)
    slopes = [curve.slope(0.001 * 1.1**k) for k in range(80)]
    assert all(a <= b for a, b in itertools.pairwise(slopes))
    straight = Curve.through([(10.0**k, 3 * 10.0 ** (1.5 * k)) for k in range(-4, 0)])  # R = 3 q^1.5
    for q in (1e-3, 3e-3, 1e-2):
        assert straight.slope(q) == pytest.approx(4.5 * q**0.5, rel=1e-9)
    rises = [curve(0.001 * 1.1**k) for k in range(80)]
    assert all(a < b for a, b in itertools.pairwise(rises))


def test_a_curve_leaves_out_what_cannot_be() -> None:
    points = [(0.001, -0.0002), (0.01, 0.02), (0.02, 0.015), (0.1, math.inf), (0.05, math.nan)]
    assert Curve.through(points) == Curve((0.01, 0.02), (0.02, 0.02))
    assert Curve.through([])(0.7) == 0.7 and Curve().slope(0.7) == 1.0


def test_a_history_adds_to_the_way_behind_each_task() -> None:
    bent = Curve.through([(0.01, 0.01), (1.0, 5.0)])
    history = TaskHistory().learned(100, bent, 0.0).learned(300, Curve(), 0.3)
    rises = history.rises(0.2)
    assert rises == pytest.approx([bent(0.5) - bent(0.3), 0.2])
    assert history.mean(rises) == pytest.approx((100 * rises[0] + 300 * rises[1]) / 400)
    assert history.measured_again().rises(0.2) == pytest.approx([bent(0.2), 0.2])


def test_a_long_history_stays_short_and_says_the_same() -> None:
    bent = Curve.through([(0.01, 0.01), (1.0, 5.0)])
    short, long = TaskHistory(), TaskHistory()
    for _ in range(KEPT):
        short = short.learned(50, bent, 0.0)
    for _ in range(3 * KEPT):
        long = long.learned(50, bent, 0.0)
    assert len(long.tasks) == KEPT and sum(task.examples for task in long.tasks) == 150 * KEPT
    assert long.mean(long.rises(0.3)) == pytest.approx(short.mean(short.rises(0.3)), rel=1e-9)


# --- measuring -------------------------------------------------------------------------------------------------


def one_example_many_times(variance: float | str, n: int = 64) -> tuple[nn.Module, Tensor, Tensor]:
    """A loss that is a quadratic everywhere, and the same for any part of the data."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(1, 3, dtype=torch.float64).expand(n, 3).contiguous()
    y = torch.randn(1, 2, dtype=torch.float64).expand(n, 2).contiguous()
    return model, x, y


@pytest.mark.parametrize("variance", [1.0, 0.3, "estimate"])
@pytest.mark.parametrize("structure", ["kronecker", "kronecker-sum", "dense"])
def test_where_the_loss_is_a_quadratic_the_curve_is_the_line(structure: str, variance: float | str) -> None:
    model, x, y = one_example_many_times(variance)
    memory = limpet.OnlineLaplace(model, likelihood=limpet.Gaussian(variance), structure=structure)
    memory.consolidate([(x, y)])
    (task,) = memory.history.tasks
    assert len(task.curve.predicted) >= 3
    assert task.curve.measured == pytest.approx(task.curve.predicted, rel=1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_points_are_the_dense_quadratic_and_the_loss_at_the_pushed_weights(structure: str) -> None:
    model, x, y = networks.build("linear")
    memory = limpet.OnlineLaplace(model, structure=structure, strength=2.0)
    fisher = measured_fisher(memory.model, [(x, y)], Categorical(), structure)
    memory._settle([fisher], None)
    curve, _ = measure(memory.posterior, fisher, Categorical(), None, seed=5)
    again, _ = measure(memory.posterior, fisher, Categorical(), None, seed=5)
    assert curve == again
    blocks = block_perturbations(memory.posterior, fisher)
    weights = dict(model.named_parameters())
    rows = torch.cat([batch[0] for batch in fisher.first.take(len(x))])
    assert torch.equal(rows, x) and len(x) <= LEAST
    seen = len(rows)  # so few examples that all are looked at
    expected = []
    for number, rise in enumerate(RISES):
        step = step_for_rise(expected_rise(blocks, displacer_of(memory.posterior, blocks)), rise * len(x))
        pushes = [block.push(step, numbered(5, number, block.block))[0] for block in blocks]
        quadratic = 0.0
        for held, z in zip(memory.posterior.held.values(), pushes, strict=True):
            flat = z.flatten().double()
            quadratic += float(flat @ held.precision.fisher().dense().double() @ flat) / (2 * len(x))
        losses = []
        for sign in (1, -1, 0):
            at = {}
            for block, z in zip(blocks, pushes, strict=True):
                for name, part in block.block.scatter(sign * z).items():
                    at[name] = weights[name].detach() + part
            outputs = functional_call(model, at, (x[:seen],))
            losses.append(float(nn.functional.cross_entropy(outputs, y[:seen])))
        expected.append((quadratic, (losses[0] + losses[1]) / 2 - losses[2]))
        if not step:
            break
    wanted = Curve.through(expected)
    assert curve.predicted == pytest.approx(wanted.predicted, rel=1e-4)
    assert curve.measured == pytest.approx(wanted.measured, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_pushes_have_the_stated_covariance(structure: str) -> None:
    model, x, y = networks.build("linear")
    memory = limpet.OnlineLaplace(model, structure=structure, strength=2.0, prior_precision=0.5)
    fisher = measured_fisher(memory.model, [(x, y)], Categorical(), structure)
    memory._settle([fisher], None)
    block = block_perturbations(memory.posterior, fisher)[0]
    held = next(iter(memory.posterior.held.values()))
    generator = torch.Generator().manual_seed(0)
    many = torch.stack([block.push(0.3, generator)[0].flatten() for _ in range(4000)])
    P = (torch.eye(many.shape[1], dtype=torch.float64) + 0.3 * held.precision.dense()).inverse()
    square = held.matrix(memory.posterior.weights()).detach().square().mean()
    expected = 2 * square * P @ P
    assert (many.T @ many / 4000 - expected).norm() < 0.15 * expected.norm()
    F = held.precision.fisher().dense()
    assert block.spectrum.expected_rise(0.3) == pytest.approx(float((P @ F @ P).trace()) / 2, rel=1e-4)


def test_the_fisher_of_the_curve_is_that_of_the_task() -> None:
    """Not of the memory, which holds others too."""
    model, x, y = networks.build("linear")
    memory = limpet.OnlineLaplace(model, structure="dense")
    memory.consolidate([(2 * x, y)])
    fisher = measured_fisher(memory.model, [(x, y)], Categorical(), "dense")
    memory._settle([fisher], None)
    for block, held in zip(block_perturbations(memory.posterior, fisher), memory.posterior.held.values(), strict=True):
        z = torch.randn(block.precision.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        F = dense_fisher(memory.model, held.block, x, y, Categorical())
        assert block.rise(z) == pytest.approx(float(z.flatten() @ F @ z.flatten()) / 2, rel=1e-3)


def some_classes(n: int = 120) -> tuple[nn.Module, Tensor, Tensor]:
    """Six outputs of which the task has three labels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 6)).double()
    return model, torch.randn(n, 3, dtype=torch.float64), torch.randint(0, 3, (n,))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_way_to_new_labels_is_the_inverse_of_the_dense_precision(structure: str) -> None:
    model, x, y = some_classes()
    memory = limpet.OnlineLaplace(model, structure=structure, prior_precision=0.7)
    fisher = measured_fisher(memory.model, [(x, y)], Categorical(), structure)
    memory._settle([fisher], None)
    look = LossProbe(model, [(x, y)], Categorical(), None, seed=5)
    start = look.loss({})
    gradient = look.towards_unseen([name for name, _ in model.named_parameters()])
    assert gradient is not None
    labels = Categorical().relabelled(y, torch.tensor([3, 4, 5]), torch.Generator().manual_seed(5))
    assert set(labels.tolist()) == {3, 4, 5}
    wanted = torch.autograd.grad(-nn.functional.cross_entropy(model(x), labels), list(model.parameters()))
    for (name, _), part in zip(model.named_parameters(), wanted, strict=True):
        assert torch.allclose(gradient[name], part)
    blocks = block_perturbations(memory.posterior, fisher)
    displacer, solved = displacer_of(memory.posterior, blocks), []
    for held in memory.posterior.held.values():
        precision = held.precision.eigenbasis if structure == "kronecker-sum" else held.precision  # type: ignore[attr-defined]
        flat = held.block.gather(gradient).flatten()
        solved.append(torch.linalg.solve(precision.dense().double(), flat).reshape(held.block.shape))
    before = 0.0
    for rise, (pushed, _) in zip(RISES, along_gradient(blocks, displacer, gradient, len(x)), strict=True):
        for z, direction in zip(pushed, solved, strict=True):
            assert torch.allclose(z / z.norm(), direction / direction.norm(), atol=1e-5)
        assert sum(b.rise(z) for b, z in zip(blocks, pushed, strict=True)) / len(x) == pytest.approx(rise)
        now = look.loss(by_parameter(blocks, pushed)) - start
        assert now > before  # new labels are never free
        before = now


def test_only_labels_that_are_missing_for_a_reason_are_new() -> None:
    model, x, y = some_classes()
    likelihood = Categorical()

    def new_labels(targets: Tensor, rows: int = 120, likelihood: Any = likelihood) -> bool:
        look = LossProbe(model, [(x[:rows], targets[:rows])], likelihood, None, seed=0)
        look.loss({})
        return look.towards_unseen([name for name, _ in model.named_parameters()]) is not None

    assert new_labels(y)
    assert not new_labels(y, rows=SURE * 6 - 1)  # too few to tell
    assert not new_labels(torch.arange(120) % 6)
    masked = y.clone()
    masked[:10] = -100
    assert not new_labels(masked)  # what is ignored does not count
    assert torch.equal(likelihood.label_counts(model(x), masked), torch.bincount(y[10:], minlength=6))
    assert bool((likelihood.relabelled(masked, torch.tensor([4]), None)[:10] == -100).all())
    assert limpet.Gaussian().label_counts(model(x), model(x)) is None


def test_new_labels_make_an_automatic_strength_hold_harder() -> None:
    model, x, y = some_classes(1200)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long() + (x[:, 1] > 0).long()))
        optimizer.step()
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    closed = nn.Sequential(*copy.deepcopy(model)[:2], nn.Linear(4, 3).double())
    with torch.no_grad():  # the same function of the same data, without outputs that never came
        closed[2].weight.copy_(model[2].weight[:3])
        closed[2].bias.copy_(model[2].bias[:3])
    strengths = []
    for network in (model, closed):
        found = []
        for seed in range(8):  # random displacements of a network this small vary a lot
            memory = limpet.OnlineLaplace(network, strength="auto", seed=seed)
            memory.consolidate([(x, y)])
            found.append(memory.history.tasks[0].curve.strength)
        strengths.append(statistics.median(found))
    assert strengths[0] > 2 * strengths[1]


def test_data_without_targets_take_the_models_own() -> None:
    model, x, _ = networks.build("linear")
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([x])
    (task,) = memory.history.tasks
    assert len(task.curve.predicted) == len(task.curve.measured) > 0


def test_an_iterator_is_read_once_and_still_gives_the_curve() -> None:
    model, x, y = networks.build("linear")
    data = list(zip(x.split(4), y.split(4), strict=True))
    first, second = (limpet.OnlineLaplace(copy.deepcopy(model)) for _ in range(2))
    first.consolidate(data)
    second.consolidate(iter(data))
    assert first.history == second.history


def test_a_forecast_says_each_task_and_block(tmp_path: Path) -> None:
    model, x, y = networks.build("linear")
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, y)])
    _moved(model, 0.05)
    memory.consolidate([(x.flip(-1), y)])
    assert memory.history.travelled == memory.history.tasks[1].since > 0
    _moved(model, 0.05)
    found = memory.forecast()
    assert found.tasks == memory.history.rises(found.quadratic)
    assert float(found) == pytest.approx(sum(found.tasks) / 2)  # both have as many examples
    assert sum(found.blocks.values()) == pytest.approx(found)
    memory.save(tmp_path / "memory.safetensors")
    loaded = limpet.load(tmp_path / "memory.safetensors", model)
    assert loaded.history == memory.history and loaded.forecast() == found


@pytest.mark.parametrize(
    "history",
    [
        {"travelled": -1.0, "tasks": []},
        {"travelled": 0.0, "tasks": [[10, 0.0, [0.1, 0.05], [0.1, 0.2]]]},
        {"travelled": 0.0, "tasks": [[10, 0.0, [0.1], [0.1, 0.2]]]},
        {"travelled": 0.0, "tasks": [[0, 0.0, [0.1], [0.1]]]},
        {"travelled": 0.0, "tasks": [[10, 0.0, [0.1], [math.nan]]]},
        {"travelled": 0.0, "tasks": [[10, 0.0, [0.0], [0.1]]]},
        {"travelled": 0.0, "tasks": [[10, 0.0, [0.1], [0.1]]], "coherent": []},
        {"travelled": 0.0, "tasks": [[10, 0.0, [0.1], [0.1]]], "coherent": [[[0.1], [0.2, 0.3]]]},
        {"travelled": 0.0},
    ],
)
def test_a_damaged_history_is_refused(history: dict[str, Any]) -> None:
    model, x, y = networks.build("linear")
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, y)])
    with pytest.raises(MemoryFileError):
        memory.load_state_dict(changed(memory.state_dict(), settings={"history": history}))


def test_a_file_without_a_history_is_read_as_one_without_curves() -> None:
    model, x, y = networks.build("linear")
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, y)])
    memory.load_state_dict(changed(memory.state_dict(), without="history"))
    _moved(model, 0.05)
    assert float(memory.forecast()) == memory.forecast().quadratic > 0


def _moved(model: nn.Module, size: float) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("method", [limpet.OnlineLaplace, limpet.PerTaskLaplace])
def test_an_automatic_strength_is_the_slope_of_each_tasks_own_curve(method: Any, structure: str) -> None:
    model, x, y = networks.build("linear")
    automatic = method(model, structure=structure, strength="auto", prior_precision=0.0)
    plain = method(copy.deepcopy(model), structure=structure, prior_precision=0.0)
    strengths = []
    for data in ([(x, y)], [(x.flip(0), y)]):
        automatic.consolidate(data)
        curve = automatic.history.tasks[-1].curve
        strengths.append(MARGIN * curve.slope(EXPECTED))
        plain.strength = strengths[-1]
        plain.consolidate(data)
    assert strengths[0] != strengths[1] and min(strengths) > 0
    for name, held in automatic.posterior.held.items():
        expected = plain.posterior.held[name].precision.dense()
        assert (held.precision.dense() - expected).norm() < 1e-9 * expected.norm()
    # measured around what the task would leave at strength 1, so that it does not depend on itself
    first = method(copy.deepcopy(model), structure=structure, prior_precision=0.0)
    first.consolidate([(x, y)])
    if structure != "kronecker-sum":  # which is drawn from in its form of constant size
        assert first.history.tasks[0].curve == automatic.history.tasks[0].curve


def test_an_automatic_strength_is_kept_in_the_state() -> None:
    model, x, y = networks.build("linear")
    memory = limpet.OnlineLaplace(model, strength="auto")
    memory.consolidate([(x, y)])
    again = limpet.OnlineLaplace(copy.deepcopy(model))
    again.load_state_dict(memory.state_dict())
    assert again.strength == "auto" and "strength=auto" in repr(again)
    assert f"strength auto ({memory._strength:.2g} for the last task)" in str(again.report())
    again.strength = 2.0
    assert again.strength == 2.0 and "strength=2 " in repr(again)


def test_a_strength_that_is_neither_a_number_nor_auto_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="auto"):
        limpet.OnlineLaplace(model, strength="strong")
    with pytest.raises(UnsupportedError, match="auto"):
        limpet.SynapticIntelligence(model, strength="auto")  # type: ignore[arg-type]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_old_data_in_hand_give_the_rise_itself(structure: str) -> None:
    model, x, y = networks.build("linear")
    memory = limpet.OnlineLaplace(model, structure=structure)
    memory.consolidate([(x, y)])
    mean = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    _moved(model, 0.3)
    now = copy.deepcopy(model.state_dict())
    data = [(x[:4], y[:4]), (x[4:], y[4:])]
    found = memory.forecast(data, curvature="fresh")
    before, after = (nn.functional.cross_entropy(functional_call(model, w, (x,)), y).item() for w in (mean, now))
    assert float(found) == pytest.approx(after - before, rel=1e-6)
    # the same data as the memory's own, so the quadratic and the shares are the memory's
    kept = memory.forecast()
    assert found.quadratic == pytest.approx(kept.quadratic, rel=1e-6)
    for name, share in found.blocks.items():
        assert share / found == pytest.approx(kept.blocks[name] / kept, rel=1e-6)
    for name, value in model.state_dict().items():
        assert torch.equal(value, now[name])


def test_old_data_and_fresh_curvature_go_together() -> None:
    model, x, y = networks.build("linear")
    memory = limpet.OnlineLaplace(model)
    for wrong in (lambda: memory.forecast([(x, y)]), lambda: memory.forecast(curvature="fresh")):
        with pytest.raises(LimpetError, match="must be passed together"):
            wrong()
    with pytest.raises(ValueError, match="kept"):
        memory.forecast(curvature="new")


def test_positions_of_sequences_count_as_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from language_models import VOCABULARY, llama
    from limpet.forgetting import loss_probe, measurement

    found: list[int] = []

    class Counting(loss_probe.LossProbe):
        def __init__(self, model: Any, batches: Any, *rest: Any) -> None:
            batches = list(batches)
            found.append(sum(len(batch["input_ids"]) for batch in batches))
            super().__init__(model, batches, *rest)

    monkeypatch.setattr(measurement, "LossProbe", Counting)
    rows = torch.randint(1, VOCABULARY, (40, 9), generator=torch.Generator().manual_seed(0))
    memory = limpet.OnlineLaplace(llama())
    memory.consolidate([{"input_ids": part, "labels": part} for part in rows.split(8)], progress=False)
    # eight positions in a row: 2 rows have 16 of them, and 8 rows 64
    assert found == [4, 8]
    (task,) = memory.history.tasks
    assert task.curve.predicted

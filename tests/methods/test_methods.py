"""Each method against a direct implementation of its formula."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import limpet
from limpet.errors import LimpetError, LimpetWarning, NotProtectedWarning, UnsupportedError
from reference import close

STRUCTURES = ["diagonal", "kronecker", "kronecker-sum", "dense"]
LAPLACE = [limpet.OnlineLaplace, limpet.PerTaskLaplace, limpet.ApproximateLaplace]


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def task(seed: int, dtype: torch.dtype = torch.float64, n: int = 20) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator).to(dtype)
    return [(x, torch.randint(0, 3, (n,), generator=generator))]


def shift(model: nn.Module, seed: int, size: float = 0.1) -> None:
    """Move the weights somewhere else, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(size * torch.randn(p.shape, generator=generator).to(p.dtype))


def exact_diagonal(model: nn.Module, x: Tensor) -> list[Tensor]:
    """sum_n sum_c p_c (d log p_c / d w)^2, one example and class after another."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for row in x:
        log_p = F.log_softmax(model(row[None]), -1)[0]
        for value in log_p:
            gradients = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
            for t, g in zip(total, gradients, strict=True):
                t += value.detach().exp() * g.square()
    return total


def test_per_task_diagonal_is_elastic_weight_consolidation() -> None:
    model = network()
    memory = limpet.PerTaskLaplace(model, structure="diagonal", strength=7.0, prior_precision=0.5)
    kept: list[tuple[list[Tensor], list[Tensor]]] = []
    for t in range(3):
        data = task(t)
        memory.consolidate(data)
        importance = [7.0 * f for f in exact_diagonal(model, data[0][0])]
        if t == 0:  # the prior belongs to the first task's Gaussian
            importance = [0.5 + f for f in importance]
        kept.append(([p.detach().clone() for p in model.parameters()], importance))
        shift(model, seed=10 + t)
        by_hand = sum(
            (f * (p - m).square()).sum() / 2
            for means, importances in kept
            for p, m, f in zip(model.parameters(), means, importances, strict=True)
        )
        assert isinstance(by_hand, Tensor)
        close(memory.penalty().detach(), by_hand.detach(), 1e-10)
        ours = torch.autograd.grad(memory.penalty(), list(model.parameters()))
        theirs = torch.autograd.grad(by_hand, list(model.parameters()))
        for a, b in zip(ours, theirs, strict=True):
            close(a, b, 1e-10)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker-sum", "dense"])
def test_per_task_is_the_sum_of_the_tasks_own_penalties(structure: str) -> None:
    """In every structure that adds without loss; `kronecker` is its constant-size form."""
    model = network()
    memory = limpet.PerTaskLaplace(model, structure=structure, strength=2.0, prior_precision=0.0)
    alone: list[limpet.Memory] = []
    for t in range(3):
        data = task(t)
        memory.consolidate(data)
        single = limpet.OnlineLaplace(model, structure=structure, strength=2.0, prior_precision=0.0)
        single.consolidate(data)
        alone.append(single)
        shift(model, seed=10 + t)
        close(memory.penalty().detach(), sum(m.penalty().detach() for m in alone), 1e-10)  # type: ignore[arg-type]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_three_laplace_methods_agree_while_the_second_task_is_learned(structure: str) -> None:
    models = [network() for _ in LAPLACE]
    for kind, model in zip(LAPLACE, models, strict=True):
        memory = kind(model, structure=structure, strength=3.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for t in range(2):
            ((x, y),) = task(t)
            with memory.protect(optimizer, examples=20):
                for _ in range(10):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
            if t == 0:
                memory.consolidate(task(0))
    for model in models[1:]:
        for a, b in zip(models[0].parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_online_laplace_adds_each_fisher_at_its_own_mode(structure: str) -> None:
    model = network()
    memory = limpet.OnlineLaplace(model, structure=structure, strength=2.0, prior_precision=0.3)
    separate = []
    for t in range(3):
        shift(model, t)
        memory.consolidate(task(t))
        single = limpet.OnlineLaplace(model, structure=structure, prior_precision=0.0)
        single.consolidate(task(t))
        separate.append({n: h.precision for n, h in single.posterior.held.items()})
    for name, held in memory.posterior.held.items():
        expected = 0.3 * torch.eye(held.block.shape.numel()).double() + 2 * sum(p[name].dense() for p in separate)  # type: ignore[operator]
        if structure == "kronecker":
            close(held.precision.trace(), expected.trace(), 1e-10)
        else:
            close(held.precision.dense(), expected, 1e-10)
        assert torch.equal(held.mean, held.matrix(dict(model.named_parameters())).detach())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_approximate_laplace_measures_all_tasks_at_the_newest_mode(structure: str) -> None:
    model = network()
    memory = limpet.ApproximateLaplace(model, structure=structure, strength=2.0)
    for t in range(3):
        shift(model, t)
        memory.consolidate(task(t), earlier=[task(s) for s in range(t)])
    at_once = limpet.OnlineLaplace(model, structure=structure, strength=2.0)
    for t in range(3):
        at_once.consolidate(task(t))
    for name, held in memory.posterior.held.items():
        close(held.precision.dense(), at_once.posterior.held[name].precision.dense(), 1e-12)
    assert memory.tasks == 3 and memory.examples == 60
    with pytest.raises(LimpetError, match="earlier"):
        memory.consolidate(task(3))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_equal_tasks_add_up_from_a_float32_model(structure: str) -> None:
    model = network(dtype=torch.float32)
    one = limpet.OnlineLaplace(model, structure=structure, strength=3.0, prior_precision=0.0)
    many = limpet.OnlineLaplace(model, structure=structure, strength=3.0, prior_precision=0.0)
    one.consolidate(task(0, torch.float32))
    for _ in range(10):
        many.consolidate(task(0, torch.float32))
    for name, held in many.posterior.held.items():
        for seed in range(5):
            v = torch.randn(held.block.shape, generator=torch.Generator().manual_seed(seed))
            close(held.precision.apply(v), 10 * one.posterior.held[name].precision.apply(v), 1e-6)


def test_different_tasks_keep_the_trace_and_constant_size() -> None:
    model = network(dtype=torch.float32)
    eigen = limpet.OnlineLaplace(model, structure="kronecker", strength=3.0)
    exact = limpet.OnlineLaplace(model, structure="kronecker-sum", strength=3.0)
    sizes = []
    for t in range(50):
        shift(model, t)
        eigen.consolidate(task(t, torch.float32))
        sizes.append(eigen.nbytes)
        if t < 10:
            exact.consolidate(task(t, torch.float32))
        if t == 9:
            for name, held in eigen.posterior.held.items():
                close(held.precision.trace(), exact.posterior.held[name].precision.trace(), 1e-6)
    assert sizes[0] == sizes[-1]


@pytest.mark.parametrize("kind", ["sgd", "proximal", "adam"])
def test_synaptic_intelligence_is_the_path_integral(kind: str) -> None:
    model = network()
    memory = limpet.SynapticIntelligence(model, strength=0.3, damping=0.05)
    hand = copy.deepcopy(model)
    Omega = [torch.zeros_like(p) for p in hand.parameters()]
    means: list[Tensor] = []
    mode = "proximal" if kind == "proximal" else "gradient"

    def optimizer_for(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(m.parameters(), 0.01) if kind == "adam" else torch.optim.SGD(m.parameters(), lr=0.1)

    for t in range(3):
        ((x, y),) = task(t)
        optimizer, other = optimizer_for(model), optimizer_for(hand)
        with memory.protect(optimizer, examples=20, mode=mode):
            for _ in range(8):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        memory.consolidate()
        start = [p.detach().clone() for p in hand.parameters()]
        omega = [torch.zeros_like(p) for p in start]
        for _ in range(8):
            other.zero_grad()
            F.cross_entropy(hand(x), y).backward()
            gradients = [p.grad.clone() for p in hand.parameters() if p.grad is not None]
            before = [p.detach().clone() for p in hand.parameters()]
            with torch.no_grad():
                if means and mode == "gradient":
                    for p, m, big in zip(hand.parameters(), means, Omega, strict=True):
                        p.grad += 2 * 0.3 * big * (p - m)  # type: ignore[operator]
                other.step()
                if means and mode == "proximal":
                    for p, m, big in zip(hand.parameters(), means, Omega, strict=True):
                        p.copy_(m + (p - m) / (1 + 0.1 * 2 * 0.3 * big))
            for o, g, p, b in zip(omega, gradients, hand.parameters(), before, strict=True):
                o -= g * (p.detach() - b)
        for big, o, p, s in zip(Omega, omega, hand.parameters(), start, strict=True):
            big += o / ((p.detach() - s).square() + 0.05)
            big.clamp_min_(0)
        means = [p.detach().clone() for p in hand.parameters()]
        for p, q in zip(model.parameters(), hand.parameters(), strict=True):
            close(p.detach(), q.detach(), 1e-10)
        for held, big in zip(memory.posterior.held.values(), Omega, strict=True):
            close(held.precision.dense().diagonal(), 2 * 0.3 * 20 * big.flatten(), 1e-10)


def test_synaptic_intelligence_wants_every_task_protected() -> None:
    memory = limpet.SynapticIntelligence(network())
    with pytest.raises(LimpetError, match="inside `with"):
        memory.consolidate()


def test_prior_mean_and_precision() -> None:
    model = network()
    start = [p.detach().clone() for p in model.parameters()]
    zero = limpet.OnlineLaplace(model, prior_precision=2.0)
    initial = limpet.OnlineLaplace(model, prior_precision=2.0, prior_mean="initial")
    close(zero.penalty().detach(), sum(p.detach().square().sum() for p in model.parameters()))  # type: ignore[arg-type]
    assert initial.penalty().item() == 0
    shift(model, 1)
    expected = sum((p.detach() - s).square().sum() for p, s in zip(model.parameters(), start, strict=True))
    close(initial.penalty().detach(), expected)  # type: ignore[arg-type]


def test_separate_heads_are_left_out() -> None:
    model = nn.ModuleDict(
        {"body": nn.Linear(4, 5), "heads": nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])}
    ).double()

    def forward(head: int) -> Any:
        return lambda m, batch: (m["heads"][head](torch.tanh(m["body"](batch[0]))), batch[1])

    for exclude in (["heads"], [model["heads"]], ["heads.*"], "heads", model["heads"]):
        memory = limpet.OnlineLaplace(model, exclude=exclude)
        assert list(memory.posterior.held) == ["body"]
    memory.consolidate(task(0), forward=forward(0))
    memory.consolidate(task(1), forward=forward(1))
    assert memory.tasks == 2
    with pytest.raises(ValueError, match="not a module inside the model"):
        limpet.OnlineLaplace(model, exclude=[nn.Linear(1, 1)])


def test_a_head_that_another_task_uses_gets_nothing_and_is_named() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)}).double()
    memory = limpet.OnlineLaplace(model)
    with pytest.warns(NotProtectedWarning, match="no gradient"):
        memory.consolidate(task(0), forward=lambda m, batch: (m["a"](batch[0]), batch[1]))
    assert memory.unused == {"b.weight", "b.bias"}


def test_parameters_that_join_later_start_from_the_prior() -> None:
    model = nn.Sequential(nn.Linear(4, 3)).double()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate(task(0))
    known = memory.posterior.held["0"].precision
    model.append(nn.Linear(3, 3).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memory.protect(optimizer, examples=20):
        pass
    assert memory.posterior.held["0"].precision is known
    assert memory.posterior.held["1"].tasks == 0
    memory.consolidate(task(1))
    assert memory.posterior.held["0"].tasks == 2 and memory.posterior.held["1"].tasks == 1


def test_strengths_may_differ_between_tasks() -> None:
    model = network()
    memory = limpet.OnlineLaplace(model, structure="dense", strength=2.0, prior_precision=0.0)
    single = limpet.OnlineLaplace(model, structure="dense", prior_precision=0.0)
    memory.consolidate(task(0))
    memory.strength = 5.0
    memory.consolidate(task(0))
    single.consolidate(task(0))
    for name, held in memory.posterior.held.items():
        F_ = single.posterior.held[name].precision.dense()
        close(held.precision.dense(), 7 * F_)
        close(held.precision.fisher().dense(), 2 * F_)


def test_forecast_is_the_quadratic_of_the_fisher_per_example() -> None:
    model = network()
    memory = limpet.OnlineLaplace(model, structure="dense", strength=9.0)
    memory.consolidate(task(0, n=30))
    assert float(memory.forecast()) == 0
    mean = {n: p.detach().clone() for n, p in model.named_parameters()}
    shift(model, 1, size=1e-3)
    diagonal_blocks = 0.0
    for held in memory.posterior.held.values():
        d = (held.block.gather(dict(model.named_parameters())) - held.block.gather(mean)).detach().flatten()
        diagonal_blocks += float(d @ held.precision.fisher().dense() @ d) / 60
    found = memory.forecast()
    assert abs(found.quadratic - diagonal_blocks) < 1e-12 * diagonal_blocks
    assert abs(sum(found.blocks.values()) - found) < 1e-15
    assert "nats per example" in str(found)


def test_forecast_foretells_a_small_rise() -> None:
    """At a minimum of the loss, a small step raises it as the Fisher says (one layer, so there are no cross terms)."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x = torch.randn(200, 4).double()
    y = torch.distributions.Categorical(logits=model(x).detach()).sample()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-14)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    memory = limpet.OnlineLaplace(model, structure="dense")
    memory.consolidate([(x, y)])
    before = F.cross_entropy(model(x), y).item()
    shift(model, 3, size=1e-3)
    rise = F.cross_entropy(model(x), y).item() - before
    assert abs(memory.forecast().quadratic - rise) < 0.01 * rise


def test_predictive_averages_over_drawn_weights() -> None:
    """Linear Gaussian model: the variance of the prediction is x^T L^-1 x."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    memory = limpet.OnlineLaplace(model, likelihood="gaussian", structure="dense")
    memory.consolidate([(torch.randn(20, 3).double(), torch.randn(20, 1).double())])
    x = torch.randn(1, 3).double()
    before = model.weight.detach().clone()
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([x @ memory.sample_weights(generator)["weight"].T for _ in range(4000)]).flatten()
    L = memory.posterior.held["model"].precision.dense()
    expected = x @ torch.linalg.solve(L, x.T)
    assert abs(draws.var().item() / expected.item() - 1) < 0.1
    mean = memory.predictive(x, link_approximation="sampled", draws=2000, generator=generator)
    assert abs(mean.item() - (x @ before.T).item()) < 5 * (expected.item() / 2000) ** 0.5
    assert torch.equal(model.weight, before)


def test_wrong_settings_name_the_mend() -> None:
    model = network()
    for options, message in (
        ({"structure": "full"}, "diagonal, kronecker, kronecker-sum, dense"),
        ({"strength": -1.0}, "strength"),
        ({"strength": float("nan")}, "strength"),
        ({"prior_precision": -1.0}, "prior_precision"),
        ({"prior_mean": "mean"}, "zero, initial"),
        ({"fisher": "true"}, "auto, exact, sampled, empirical"),
        ({"draws": 0}, "draws"),
        ({"likelihood": "softmax"}, "categorical"),
    ):
        with pytest.raises(ValueError, match=message):
            limpet.OnlineLaplace(model, **options)


def test_strength_zero_measures_and_does_not_hold() -> None:
    model = network()
    free = limpet.OnlineLaplace(model, strength=0.0, prior_precision=0.0)
    held = limpet.OnlineLaplace(model, strength=1.0, prior_precision=0.0)
    for memory in (free, held):
        memory.consolidate(task(0))
    shift(model, 1)
    assert free.penalty().item() == 0 < held.penalty().item()
    assert abs(free.forecast().quadratic / held.forecast().quadratic - 1) < 1e-10


def test_a_block_that_a_task_does_not_use_stays_as_it_was_known() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)}).double()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate(task(0), forward=lambda m, batch: (m["a"](batch[0]), batch[1]))
    known = memory.posterior.held["a"]
    memory.consolidate(task(1), forward=lambda m, batch: (m["b"](batch[0]), batch[1]))
    assert memory.posterior.held["a"].precision is known.precision
    assert [held.tasks for held in memory.posterior.held.values()] == [1, 1]


def test_heads_that_go_or_grow() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate(task(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1] = nn.Linear(5, 6).double()
    known = dict(memory.posterior.held)
    with pytest.raises(LimpetError, match=r"had shape \(3, 5\) .* has shape \(6, 5\).*exclude=\['1'\]"):
        memory.protect(optimizer, examples=20)
    assert memory.posterior.held == known
    del model[1]
    for use in (lambda: memory.protect(optimizer, examples=20), memory.forecast, memory.penalty):
        with pytest.raises(
            UnsupportedError, match=r"1.weight was measured, but the model no longer has it.*drop\(\['1'\]\)"
        ):
            use()
    assert memory.posterior.held == known
    assert [row.name for row in memory.report().rows if "no longer in the model" in row.note] == ["1.weight", "1.bias"]
    memory.drop(["1"])
    with pytest.raises(ValueError, match="'1' matches no block"):
        memory.drop(["1"])
    with memory.protect(optimizer, examples=20):
        pass
    assert list(memory.posterior.held) == ["0"]
    assert float(memory.forecast()) == 0


def test_one_loop_serves_all_four_methods() -> None:
    for kind in (*LAPLACE, limpet.SynapticIntelligence):
        model = network()
        memory = kind(model)
        ((x, y),) = task(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with memory.protect(optimizer, examples=20):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        memory.consolidate(task(0), examples=20, limit=20, progress=False)
        assert memory.tasks == 1 and memory.examples == 20


def test_what_is_excluded_is_checked() -> None:
    model = network()
    with pytest.warns(limpet.LimpetWarning, match="'haed' matches no parameter"):
        limpet.OnlineLaplace(model, exclude=["haed"])
    with pytest.raises(ValueError, match="inside the model"):
        limpet.OnlineLaplace(model, exclude=[model])
    by_parameter = limpet.OnlineLaplace(model, exclude=[model[0].weight])
    assert [n for h in by_parameter.posterior.held.values() for n in h.block.parameters] == [
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    tied = nn.ModuleDict({"e": nn.Linear(3, 3), "h": nn.Linear(3, 3, bias=False)})
    tied["h"].weight = tied["e"].weight
    assert list(limpet.OnlineLaplace(tied, exclude=["h"]).posterior.held) == ["e"]
    assert limpet.OnlineLaplace(tied, exclude=["h"]).posterior.held["e"].block.parameters == ("e.bias",)


def test_models_that_cannot_be_protected() -> None:
    with pytest.raises(limpet.UnsupportedError, match="run one batch"):
        limpet.OnlineLaplace(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        limpet.OnlineLaplace("model")  # type: ignore[arg-type]


def test_numbers_of_every_kind() -> None:
    import numpy as np

    model = network()
    memory = limpet.OnlineLaplace(
        model, strength=np.float32(3), prior_precision=np.float64(0.5), max_factor_size=np.int64(9)
    )
    assert memory.strength == 3.0
    with memory.protect(torch.optim.SGD(model.parameters(), lr=0.1), examples=np.int64(20)):
        pass
    for options in ({"seed": -1}, {"draws": "3"}, {"max_factor_size": "3"}, {"max_factor_size": -1}):
        with pytest.raises(ValueError, match="must be a"):
            limpet.OnlineLaplace(model, **options)  # type: ignore[arg-type]


def test_warnings_point_at_the_users_line() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.warns(NotProtectedWarning) as caught:
        limpet.PerTaskLaplace(model)
    assert caught[0].filename == __file__


def test_synaptic_intelligence_under_a_fused_optimizer_with_a_scaler() -> None:
    found = []
    for scaled in (True, False):
        model = network(dtype=torch.float32)
        memory = limpet.SynapticIntelligence(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=scaled)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        ((x, y),) = task(0, torch.float32)
        with memory.protect(optimizer, examples=20, mode="gradient"):
            for _ in range(5):
                optimizer.zero_grad()
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
        memory.consolidate()
        found.append(torch.cat([h.precision.dense().diagonal() for h in memory.posterior.held.values()]))
    close(found[0], found[1], 1e-4)


def test_synaptic_intelligence_stays_positive_with_strengths_that_differ() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    memory = limpet.SynapticIntelligence(model, strength=3.0)
    for strength, target in ((3.0, 1.0), (0.3, -1.0)):
        memory.strength = strength
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with memory.protect(optimizer, examples=10, mode="gradient"):
            optimizer.zero_grad()
            (model.weight - target).square().sum().backward()
            optimizer.step()
        assert memory._watch is not None
        if target < 0:
            memory._watch.path["weight"].fill_(-100.0)  # a path that went uphill
        memory.consolidate()
    (held,) = memory.posterior.held.values()
    assert held.precision.fisher().dense().item() == 0 <= held.precision.dense().item()


def test_each_task_draws_labels_of_its_own() -> None:
    model = network()
    twice = limpet.OnlineLaplace(model, structure="dense", fisher="sampled", prior_precision=0.0, seed=5)
    for _ in range(2):
        twice.consolidate(task(0))
    separate = []
    for seed in (5, 6):
        one = limpet.OnlineLaplace(model, structure="dense", fisher="sampled", prior_precision=0.0, seed=seed)
        one.consolidate(task(0))
        separate.append(one)
    for name, held in twice.posterior.held.items():
        first, second = (m.posterior.held[name].precision.dense() for m in separate)
        assert not torch.allclose(first, second)
        close(held.precision.dense(), first + second, 1e-12)


def test_approximate_laplace_limits_every_pass() -> None:
    model = network()
    memory = limpet.ApproximateLaplace(model, structure="dense", prior_precision=0.0)
    memory.consolidate(task(0), limit=5)
    memory.consolidate(task(1), earlier=[task(0)], limit=5)
    parts = []
    for t in range(2):
        one = limpet.OnlineLaplace(model, structure="dense", prior_precision=0.0)
        ((x, y),) = task(t)
        one.consolidate([(x[:5], y[:5])], examples=20)
        parts.append(one)
    for name, held in memory.posterior.held.items():
        expected = sum(one.posterior.held[name].precision.dense() for one in parts)
        close(held.precision.dense(), expected, 1e-12)  # type: ignore[arg-type]


def test_blocks_that_are_cut_anew_keep_their_prior_mean() -> None:
    model = network()
    memory = limpet.OnlineLaplace(model, prior_mean="initial")
    initial = model[0].weight.detach().clone()
    shift(model, 1)
    memory.posterior.arrange([b for block in memory._planned() for b in block.as_per_sample()])
    assert torch.equal(memory.posterior.held["0.weight"].mean.reshape(5, 4), initial)


@pytest.mark.parametrize("method", LAPLACE)
def test_a_task_is_taken_in_wholly_or_not_at_all(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = network(), task(1)
    memory = method(model)
    memory.consolidate(data)
    shift(model, 1)
    kept = memory.state_dict()
    more = {"earlier": [data]} if method is limpet.ApproximateLaplace else {}

    def fails(*_: Any) -> Any:
        raise RuntimeError("no memory left")

    for place in ("limpet.precision.kronecker.Kronecker.add", "limpet.forgetting.loss_curve.TaskHistory.learned"):
        with monkeypatch.context() as patch:
            patch.setattr(place, fails)
            with pytest.raises(RuntimeError, match="no memory left"):
                memory.consolidate(task(2), **more)
        after = memory.state_dict()
        assert after["metadata"] == kept["metadata"]
        assert all(torch.equal(tensor, kept["tensors"][name]) for name, tensor in after["tensors"].items())
    with monkeypatch.context() as patch:
        patch.setattr("limpet.forgetting.measurement.measure", fails)
        with pytest.warns(LimpetWarning, match="could not be measured .RuntimeError: no memory left"):
            memory.consolidate(task(2), **more)
    assert memory.tasks == 2 and memory.examples == 40
    assert [bool(known.curve.predicted) for known in memory.history.tasks] == [True, False]


def test_examples_without_targets_may_come_first() -> None:
    x, y = task(1)[0]
    ignored = torch.full_like(y, -100)
    for batches in ([(x, ignored), (x, y)], [(x, y), (x, ignored)]):
        memory = limpet.OnlineLaplace(network())
        memory.consolidate(batches)
        assert (memory.tasks, memory.examples) == (1, 20)


def test_an_empty_batch_is_passed_over() -> None:
    class Viewing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(x.size(0), -1))  # which cannot be told for no example

    x, y = task(1, torch.float32, n=10)[0]
    memory = limpet.OnlineLaplace(Viewing(4, 3))
    memory.consolidate([(x, y), (x[:0], y[:0])])
    assert memory.examples == 10


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_model_may_change_its_dtype_between_tasks(structure: str) -> None:
    model, data = network(), task(1)
    memory, same = (limpet.OnlineLaplace(model, structure=structure) for _ in range(2))
    for one in (memory, same):
        one.consolidate(data)
    same.consolidate(data)
    model.float()
    memory.consolidate(task(1, torch.float32))
    for name, held in same.posterior.held.items():
        close(memory.posterior.held[name].precision.dense(), held.precision.dense(), 1e-4)
    fresh = memory.forecast(task(1, torch.float32), curvature="fresh")
    assert fresh.quadratic == pytest.approx(0, abs=1e-9)


def test_large_seeds_are_seeds() -> None:
    for options in ({}, {"smoothing": 0.02}):
        memory = limpet.OnlineLaplace(network(), seed=2**50, **options)
        memory.consolidate(task(1))
        assert memory.tasks == 1


def test_the_path_of_an_attempt_that_was_undone_does_not_count() -> None:
    x, y = task(1)[0]
    traces = []
    for fails in (False, True):
        model = network()
        start = copy.deepcopy(model.state_dict())
        memory = limpet.SynapticIntelligence(model)

        def fit(steps: int, model: nn.Module = model, memory: limpet.Memory = memory) -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            with memory.protect(optimizer, examples=20):
                for _ in range(steps):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                if steps < 50:
                    raise RuntimeError("out of memory")

        if fails:
            with pytest.raises(RuntimeError, match="out of memory"):
                fit(40)
            model.load_state_dict(start)
        fit(50)
        memory.consolidate()
        traces.append([float(held.precision.trace()) for held in memory.posterior.held.values()])
    assert traces[0] == traces[1]


def test_what_one_task_has_to_measure_directly_all_are_measured_so() -> None:
    """Approximate Laplace: positions are one row for all examples of a batch, and of a batch of one nobody can tell."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.out = nn.Embedding(7, 4), nn.Embedding(5, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out((self.words(x) + self.places(torch.arange(5))).tanh().mean(1))
            return out

    torch.manual_seed(0)
    model, x, y = Positions(), torch.randint(0, 7, (24, 5)), torch.randint(0, 2, (24,))
    traces = []
    for size in (1, 4):
        first, four = (list(zip(x.split(n), y.split(n), strict=True)) for n in (size, 4))
        memory = limpet.ApproximateLaplace(model, prior_precision=0.0)
        memory.consolidate(first)
        memory.consolidate(four, earlier=[first])
        traces.append({name: float(held.precision.trace()) for name, held in memory.posterior.held.items()})
    assert traces[0] == pytest.approx(traces[1], rel=1e-4)


def test_under_inference_mode_it_is_the_same() -> None:
    model, (x, y) = network(), task(1)[0]
    plain, inside = limpet.OnlineLaplace(model), limpet.OnlineLaplace(model)
    data = torch.utils.data.TensorDataset(x, y)
    plain.consolidate(torch.utils.data.DataLoader(data, batch_size=5))
    with torch.inference_mode():
        inside.consolidate(torch.utils.data.DataLoader(data, batch_size=5))
        other = limpet.OnlineLaplace(model)
        other.consolidate([(x.clone(), y.clone())])
    for name, held in plain.posterior.held.items():
        close(inside.posterior.held[name].precision.dense(), held.precision.dense())
    for memory in (inside, other):
        memory.penalty().backward()


def test_forecasts_can_be_copied() -> None:
    model = network()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate(task(1))
    shift(model, 2)
    found = memory.forecast()
    again = copy.deepcopy(found)
    assert (again, again.blocks, again.tasks, again.quadratic) == (found, found.blocks, found.tasks, found.quadratic)

"""Repair of whole networks, compared with the minimizer of the two dense quadratics, block by block."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import limpet
from limpet.errors import CurvatureError, LimpetError, LimpetWarning, NotProtectedWarning, UnsupportedError
from limpet.likelihoods import Categorical
from limpet.precision import DiagonalTerm, KroneckerTerm
from limpet.precision.pencil import Damping
from reference import measure

OLD, NEW = Damping().old, Damping().new
Batches = list[tuple[Tensor, Tensor]]


class Net(nn.Module):
    """An embedding, a convolution, linear layers with and without bias, and a norm."""

    def __init__(self, head: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.mix = nn.Conv1d(6, 5, 3, padding=1)
        self.up = nn.Linear(5, 8)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(8, head, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.mix(self.tokens(x).mT).mT
        return self.down(self.norm(torch.tanh(self.up(h.mean(1)))))  # type: ignore[no-any-return]


def data(seed: int, n: int = 60, batch: int = 12) -> Batches:
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, 7, (n, 5), generator=g), torch.randint(0, 4, (n,), generator=g)
    return list(zip(x.split(batch), y.split(batch), strict=True))


def trained(model: nn.Module, batches: Batches, steps: int = 20, lr: float = 0.02) -> None:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(steps):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()


def tuned(
    structure: str = "kronecker", kind: Any = limpet.OnlineLaplace, probe: int | None = None, **options: Any
) -> tuple[Net, Any, Net]:
    """A model that has learned two tasks, the memory of the first, and a copy from before the second."""
    torch.manual_seed(0)
    model = Net().double()
    trained(model, data(1))
    memory = kind(model, structure=structure, fisher="exact", strength=3.0, **options)
    memory.consolidate(data(1), progress=False, **({} if probe is None else {"probe": probe}))
    before = copy.deepcopy(model)
    trained(model, data(2))
    return model, memory, before


def with_mean(matrix: Tensor, amount: float) -> Tensor:
    return matrix + amount * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=matrix.dtype)


def dense(term: Any, amount: float, columns: slice = slice(None)) -> Tensor:
    """The damped Fisher of a block, written out."""
    if isinstance(term, KroneckerTerm):
        q, h = term.factors()
        return torch.kron(with_mean(h, amount).contiguous(), with_mean(q[columns, columns], amount).contiguous())
    return with_mean(torch.diag(term.diagonal.flatten()) if isinstance(term, DiagonalTerm) else term.matrix, amount)


def fisher(model: nn.Module, batches: Batches, structure: str) -> Any:
    return measure(model, batches, Categorical(), structure, fisher="exact")


@pytest.mark.parametrize("structure", ["kronecker", "diagonal", "dense", "kronecker-sum"])
def test_every_block_is_the_dense_minimiser(structure: str) -> None:
    model, memory, before = tuned(structure)
    old, new = fisher(before, data(1), structure), fisher(model, data(2), structure)
    start, end = (copy.deepcopy(one).state_dict() for one in (before, model))
    limpet.repair(model, memory, data(2), strength=0.7, progress=False)
    after = {name: p.detach() for name, p in model.named_parameters()}
    assert {block.kind for block in new.blocks} == {"embedding", "convolution", "linear", "layer norm"}
    for block in new.blocks:
        origin = block.gather(start)
        d = (block.gather(end) - origin).flatten()
        n, o = (dense(one.terms[block.name][0], amount) for one, amount in ((new, NEW), (old, OLD)))
        want = torch.linalg.solve(n + 0.7 * o, n @ d)
        found = (block.gather(after) - origin).flatten()
        assert float((found - want).norm() / want.norm()) < 1e-8, block.name


def test_a_memory_of_two_tasks_is_solved_too() -> None:
    torch.manual_seed(0)
    model = Net().double()
    memory = limpet.OnlineLaplace(model, structure="kronecker-sum", fisher="exact")
    terms: dict[str, list[Any]] = {}
    for seed in (1, 3):
        trained(model, data(seed))
        for name, found in fisher(model, data(seed), "kronecker").terms.items():
            terms.setdefault(name, []).extend(found)
        memory.consolidate(data(seed), progress=False)
    before = copy.deepcopy(model.state_dict())
    trained(model, data(2))
    end, new = copy.deepcopy(model.state_dict()), fisher(model, data(2), "kronecker")
    limpet.repair(model, memory, data(2), strength=1.5, progress=False)
    after = {name: p.detach() for name, p in model.named_parameters()}
    for block in new.blocks:
        origin = block.gather(before)
        d = (block.gather(end) - origin).flatten()
        n = dense(new.terms[block.name][0], NEW)
        if block.kind == "layer norm":  # a diagonal is summed before it is damped
            o = dense(DiagonalTerm(sum(t.diagonal for t in terms[block.name])), OLD)
        else:
            o = torch.stack([dense(term, OLD) for term in terms[block.name]]).sum(0)
        want = torch.linalg.solve(n + 1.5 * o, n @ d)
        assert float(((block.gather(after) - origin).flatten() - want).norm() / want.norm()) < 1e-8, block.name


def test_tasks_around_weights_of_their_own() -> None:
    torch.manual_seed(0)
    model = Net().double()
    memory = limpet.PerTaskLaplace(model, structure="dense", fisher="exact", strength=2.0, prior_precision=0.0)
    means, fishers = [], []
    for seed in (1, 3):
        trained(model, data(seed))
        memory.consolidate(data(seed), progress=False)
        means.append(copy.deepcopy(model.state_dict()))
        fishers.append(fisher(model, data(seed), "dense"))
    trained(model, data(2))
    end, new = copy.deepcopy(model.state_dict()), fisher(model, data(2), "dense")
    limpet.repair(model, memory, data(2), strength=0.5, progress=False)
    after = {name: p.detach() for name, p in model.named_parameters()}
    for block in new.blocks:
        if block.name != "up":
            continue
        n = with_mean(new.terms["up"][0].matrix, NEW)
        first, second = (one.terms["up"][0].matrix for one in fishers)
        o, (m1, m2) = with_mean(first + second, OLD), (block.gather(m).flatten() for m in means)
        # the damped curvature around the last mean, and the slope that the first task has there
        d = block.gather(end).flatten() - m2
        want = torch.linalg.solve(n + 0.5 * o, n @ d - 0.5 * first @ (m2 - m1))
        assert float((block.gather(after).flatten() - m2 - want).norm() / want.norm()) < 1e-8


def test_from_the_tuned_weights_to_those_before() -> None:
    model, memory, before = tuned()
    end = copy.deepcopy(model.state_dict())
    repair = limpet.repair(model, memory, data(2), strength=0.0, progress=False)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in end.items())
    repair.at(1e12)
    moved = [(model.state_dict()[name] - value).norm() for name, value in before.state_dict().items()]
    assert max(moved) < 1e-6
    repair.undo()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in end.items())
    repair.at(0.0, 0.5)
    for name, value in before.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], (value + end[name]) / 2)


def test_at_goes_where_a_new_repair_goes() -> None:
    model, memory, _ = tuned()
    first = limpet.repair(model, memory, data(2), strength=0.2, progress=False)
    first.at(5.0, 0.9)
    there = copy.deepcopy(model.state_dict())
    first.undo()
    limpet.repair(model, memory, data(2), strength=5.0, scale=0.9, progress=False)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in there.items())


def test_strength_one_is_the_laplace_answer_whatever_the_counts_are() -> None:
    """Twice as many new examples of the same kind pull twice as hard: strength 2 undoes it."""
    model, memory, _ = tuned()
    repair = limpet.repair(model, memory, data(2), strength=1.0, progress=False)
    once = copy.deepcopy(model.state_dict())
    repair.undo()
    limpet.repair(model, memory, data(2) * 2, strength=2.0, progress=False)
    for name, value in once.items():
        torch.testing.assert_close(model.state_dict()[name], value)


def test_nothing_else_of_the_model_changes() -> None:
    model, memory, _ = tuned()
    model.train()
    model.up.bias.requires_grad_(False)
    model.down.weight.grad = torch.ones_like(model.down.weight)
    random, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    state = memory.state_dict()
    repair = limpet.repair(model, memory, data(2), tolerance=0.05, progress=False)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model.down.weight.grad, torch.ones_like(model.down.weight))
    assert not model.up.bias.requires_grad and model.up.weight.requires_grad
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    after = memory.state_dict()
    assert state["metadata"] == after["metadata"]
    assert all(torch.equal(tensor, after["tensors"][name]) for name, tensor in state["tensors"].items())
    assert repair.strength > 0


def test_a_parameter_that_has_not_moved_stays() -> None:
    torch.manual_seed(0)
    model = Net().double()
    memory = limpet.OnlineLaplace(model, fisher="exact")
    memory.consolidate(data(1), progress=False)
    model.up.bias.requires_grad_(False)
    bias = model.up.bias.detach().clone()
    trained(model, data(2))
    moved = model.up.weight.detach().clone()
    limpet.repair(model, memory, data(2), strength=3.0, progress=False)
    assert torch.equal(model.up.bias, bias)
    assert not torch.equal(model.up.weight, moved)


def test_an_error_leaves_the_model_as_it_was() -> None:
    model, memory, _ = tuned()
    end = copy.deepcopy(model.state_dict())
    calls = 0

    def forward(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise RuntimeError("no more")
        return model(batch[0]), batch[1]

    with pytest.raises(RuntimeError, match="no more"):
        limpet.repair(model, memory, data(2), tolerance=0.1, forward=forward, progress=False)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in end.items())


def test_a_new_head_and_what_was_excluded_stay_as_tuned() -> None:
    torch.manual_seed(0)
    model = Net().double()
    trained(model, data(1))
    memory = limpet.OnlineLaplace(model, fisher="exact", exclude=["down"])
    memory.consolidate(data(1), progress=False)
    model.down = nn.Linear(8, 9, bias=False).double()
    trained(model, data(2))
    head, up = model.down.weight.detach().clone(), model.up.weight.detach().clone()
    repair = limpet.repair(model, memory, data(2), strength=1.0, progress=False)
    assert torch.equal(model.down.weight, head) and not torch.equal(model.up.weight, up)
    assert "down" not in repair.blocks and "up" in repair.blocks


def test_what_the_new_data_do_not_use_is_said_and_left() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Two()
    batch = [(torch.randn(30, 3), torch.randint(0, 4, (30,)))]
    memory = limpet.OnlineLaplace(model, fisher="exact")
    memory.consolidate(batch, progress=False)
    with torch.no_grad():
        model.a.weight += 1
        model.b.weight += 1
    b = model.b.weight.detach().clone()
    with pytest.warns(NotProtectedWarning, match=r"do not use 1 blocks .*such as b"):
        limpet.repair(model, memory, batch, strength=1.0, forward=lambda m, xy: (m.a(xy[0]), xy[1]), progress=False)
    assert torch.equal(model.b.weight, b)


def test_tolerance_takes_the_largest_strength_that_the_held_out_loss_allows() -> None:
    def held_out(model: nn.Module) -> float:
        x, y = data(2)[4]  # one batch in five, and a fifth of the first
        first_x, first_y = data(2)[0]
        x, y = torch.cat([first_x[10:], x]), torch.cat([first_y[10:], y])
        with torch.no_grad():
            return float(F.cross_entropy(model(x), y))

    found = {}
    for tolerance in (0.01, 0.2):
        model, memory, _ = tuned()
        start = held_out(model)
        repair = limpet.repair(model, memory, data(2), tolerance=tolerance, progress=False)
        found[tolerance] = repair.strength
        assert held_out(model) <= start + tolerance + 1e-9
        repair.at(repair.strength * 1.3)
        assert held_out(model) > start + tolerance
    assert found[0.2] > 2 * found[0.01]


def test_the_automatic_tolerance_is_a_tenth_of_what_was_learned_and_at_most_a_twentieth_of_a_nat() -> None:
    model, memory, _ = tuned()
    repair = limpet.repair(model, memory, data(2), tolerance=0.0, progress=False)
    start, before = (float(repair.at(0.0, scale).measured().loss or 0) for scale in (1.0, 0.0))
    affordable = min(0.05, (before - start) / 10)
    assert 0 < affordable < 0.05
    repair.within_tolerance("auto")
    assert repair.strength == pytest.approx(repair.within_tolerance(affordable).strength)
    model, memory, _ = tuned()
    assert limpet.repair(model, memory, data(2), tolerance="auto", progress=False).strength == repair.strength


def test_beside_a_budget_it_is_half_of_what_was_learned_and_at_most_three_tenths() -> None:
    model, memory, _ = tuned(probe=40)
    repair = limpet.repair(model, memory, data(2), tolerance=0.0, progress=False)
    start, before = (float(repair.at(0.0, scale).measured().loss or 0) for scale in (1.0, 0.0))
    expected = repair.within_tolerance(min(0.3, (before - start) / 2)).strength
    limit = start + min(0.3, (before - start) / 2)
    with pytest.warns(LimpetWarning, match=f"the budget of 1e-09: .* to more than {limit:.3g}") as told:
        assert repair.within_budget(1e-9, tolerance="auto").strength == pytest.approx(expected)
    assert f"the drift may be {memory.drift().upper:.3g} nats" in str(told[0].message)


def test_a_budget_with_a_tolerance_is_the_smaller_of_the_two_strengths() -> None:
    model, memory, _ = tuned(probe=40)
    affordable = limpet.repair(model, memory, data(2), tolerance=0.05, progress=False).strength
    drift = memory.drift()

    def strength(budget: float, **options: float) -> float:
        model, memory, _ = tuned(probe=40)
        return limpet.repair(model, memory, data(2), budget=budget, progress=False, **options).strength

    # the same held-out rows with and without the budget: a tolerance that never binds gives the strength of the budget
    generous, tight = strength(1.5 * drift, tolerance=100.0), strength(drift / 2, tolerance=100.0)
    assert 0 < generous < affordable < tight
    assert strength(1.5 * drift, tolerance=0.05) == generous
    with pytest.warns(LimpetWarning, match="pass a larger tolerance="):
        assert strength(drift / 2, tolerance=0.05) == affordable


def test_what_is_held_out_is_not_in_the_curvature() -> None:
    model, memory, _ = tuned()
    seen: list[Tensor] = []

    def forward(model: nn.Module, batch: Any) -> Any:
        if torch.is_grad_enabled():
            seen.append(batch[0])
        return model(batch[0]), batch[1]

    limpet.repair(model, memory, data(2), tolerance=0.1, forward=forward, progress=False)
    rows = {tuple(row.tolist()) for x in seen for row in x}
    held = torch.cat([data(2)[0][0][10:], data(2)[4][0]])
    passed = torch.cat([data(2)[0][0][:10], *(x for x, _ in data(2)[1:4])])
    known = {tuple(row.tolist()) for row in passed}
    assert not any(tuple(row.tolist()) in rows - known for row in held)


def test_a_copy_of_the_model_is_repaired_by_the_memory_of_another() -> None:
    model, memory, _ = tuned()
    other = copy.deepcopy(model)
    memory.model.load_state_dict(copy.deepcopy(model.state_dict()))
    limpet.repair(other, memory, data(2), strength=1.0, progress=False)
    assert not torch.equal(other.up.weight, model.up.weight)
    limpet.repair(model, memory, data(2), strength=1.0, progress=False)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_the_table_shows_what_was_measured_and_leaves_the_model() -> None:
    model, memory, _ = tuned()
    repair = limpet.repair(model, memory, data(2), strength=1.0, progress=False)
    here = copy.deepcopy(model.state_dict())
    lines = repair.table((0.0, 10.0)).splitlines()
    assert lines[0].split() == ["strength", "new", "loss", "drift", "forecast"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "10"]
    assert lines[3].endswith("<-") and "not measured" in lines[2]
    forecasts = [float(line.split("not measured")[1].split()[0]) for line in lines[2:]]
    assert forecasts[0] > forecasts[1] > forecasts[2]
    assert all(torch.equal(model.state_dict()[name], value) for name, value in here.items())


def test_what_cannot_be_repaired_says_why() -> None:
    model, memory, before = tuned()
    with pytest.raises(LimpetError, match="either them or strength="):
        limpet.repair(model, memory, data(2), strength=1.0, tolerance=0.1)
    with pytest.raises(LimpetError, match="no probe"):
        limpet.repair(model, memory, data(2), budget=0.1)
    with pytest.raises(LimpetError, match="no consolidated task"):
        limpet.repair(model, limpet.OnlineLaplace(model), data(2))
    with pytest.raises(UnsupportedError, match="measures no curvature"):
        limpet.repair(model, limpet.SynapticIntelligence(model), data(2))
    with pytest.raises(LimpetError, match="nothing to repair"):
        limpet.repair(before, memory, data(2))
    with pytest.raises(CurvatureError, match="put it into a list"):
        limpet.repair(model, memory, data(2)[0])
    with pytest.raises(LimpetError, match="only one small batch"):
        limpet.repair(model, memory, [(x[:3], y[:3]) for x, y in data(2)[:1]], tolerance=0.1)
    for name in ("strength", "tolerance", "budget"):
        with pytest.raises(ValueError, match=name):
            limpet.repair(model, memory, data(2), **{name: math.inf})


def test_small_batches_and_a_limit_still_leave_something_held_out() -> None:
    model, memory, _ = tuned()
    seen = 0

    def forward(model: nn.Module, batch: Any) -> Any:
        nonlocal seen
        seen += len(batch[0]) if torch.is_grad_enabled() else 0
        return model(batch[0]), batch[1]

    small = [(x[i : i + 3], y[i : i + 3]) for x, y in data(2) for i in range(0, 12, 3)]
    repair = limpet.repair(model, memory, small, tolerance=0.1, limit=9, forward=forward, progress=False)
    assert repair.strength > 0 and repair._measures.loss is not None
    held = small[1]  # the second batch
    repair.undo()
    with torch.no_grad():
        assert math.isclose(repair._measures.loss(), float(F.cross_entropy(model(held[0]), held[1])), rel_tol=1e-9)


def test_batches_of_transformers_are_split_too() -> None:
    transformers = pytest.importorskip("transformers")
    model, memory, _ = tuned()
    batches = [transformers.BatchEncoding({"x": x, "labels": y}) for x, y in data(2)]
    repair = limpet.repair(model, memory, batches, tolerance=0.1, progress=False)
    pairs = limpet.repair(copy.deepcopy(repair.undo() and model), memory, data(2), tolerance=0.1, progress=False)
    assert math.isclose(limpet.repair(model, memory, batches, tolerance=0.1, progress=False).strength, pairs.strength)


def test_blocks_of_no_curvature_are_left() -> None:
    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(3, 4), nn.Linear(3, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + 0 * self.norm(self.b(x))  # type: ignore[no-any-return]

    batch = [(torch.randn(30, 3), torch.randint(0, 4, (30,)))]
    for structure in ("kronecker", "diagonal", "dense"):
        torch.manual_seed(0)
        model = Dead()
        memory = limpet.OnlineLaplace(model, structure=structure, fisher="exact")
        memory.consolidate(batch, progress=False)
        with torch.no_grad():
            for p in model.parameters():
                p += 0.3
        kept = model.b.weight.detach().clone()
        limpet.repair(model, memory, batch, strength=1.0, progress=False)
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
        assert torch.equal(model.b.weight, kept)


def test_an_estimated_noise_variance_makes_nats_of_the_loss() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    x = torch.randn(200, 3)
    y = model(x).detach() + 0.1 * torch.randn(200, 1)
    memory = limpet.OnlineLaplace(model, likelihood=limpet.Gaussian("estimate"))
    memory.consolidate([(x, y)], progress=False)
    with torch.no_grad():
        model.weight += 0.05
    new = [(x[i : i + 20], y[i : i + 20] + 0.1) for i in range(0, 200, 20)]
    repair = limpet.repair(model, memory, new, strength=0.0, progress=False)
    residuals = torch.cat([model(a).detach() - b for a, b in new])
    variance = float(residuals.square().mean())
    loss = float(repair.measured().loss or 0)
    assert math.isclose(loss, (0.5 * variance + 0.5 * math.log(2 * math.pi)) / variance, rel_tol=1e-3)

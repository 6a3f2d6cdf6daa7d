"""Training under `protect`: fixed points, and every kind of optimizer step, compared with hand-written loops."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import limpet
from limpet.errors import LimpetError, LimpetWarning, UnsupportedError
from reference import close
from states import metadata

N = 40
SGD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.8, "dampening": 0.5},
]
STRUCTURES = ["diagonal", "kronecker", "kronecker-sum", "dense"]


def problem(
    structure: str = "kronecker", strength: float = 1.0, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, limpet.OnlineLaplace, Tensor, Tensor]:
    """A convex problem: linear regression, a memory of an old task, and a new task far from it."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).to(dtype)
    memory = limpet.OnlineLaplace(model, likelihood="gaussian", structure=structure, strength=strength)
    memory.consolidate([(torch.randn(N, 5, dtype=dtype), torch.randn(N, 3, dtype=dtype))])
    mixing = torch.randn(5, 5, dtype=dtype)
    x, y = torch.randn(N, 5, dtype=dtype) @ mixing / 2, 3 * torch.randn(N, 3, dtype=dtype)
    return model, memory, x, y


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().sum() / (2 * len(x))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def set_flat(model: nn.Module, values: Tensor) -> None:
    torch.nn.utils.vector_to_parameters(values.clone(), model.parameters())


def minimiser(model: nn.Module, memory: limpet.Memory, x: Tensor, y: Tensor) -> Tensor:
    """Of loss + penalty / N, which is quadratic: one Newton step from anywhere."""
    model = copy.deepcopy(model)
    held = memory.posterior.held["model"]

    def objective(w: Tensor) -> Tensor:
        weight, bias = w[:15].reshape(3, 5), w[15:]
        outputs = x @ weight.T + bias
        penalty = held.value({"weight": weight, "bias": bias})
        return (outputs - y).square().sum() / (2 * N) + penalty / N

    w = torch.zeros(18, dtype=x.dtype)
    gradient = torch.autograd.functional.jacobian(objective, w)
    hessian = torch.autograd.functional.hessian(objective, w)
    return w - torch.linalg.solve(hessian, gradient)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int, after: Callable[[], Any] = int
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        after()


@pytest.mark.parametrize(
    ("structure", "options"),
    [("kronecker", o) for o in SGD_OPTIONS] + [(s, SGD_OPTIONS[1]) for s in STRUCTURES],
    ids=str,
)
@pytest.mark.parametrize("every", [1, pytest.param(4, marks=pytest.mark.slow), 16])
def test_proximal_training_reaches_the_minimiser(structure: str, options: dict[str, Any], every: int) -> None:
    model, memory, x, y = problem(structure)
    target = minimiser(model, memory, x, y)
    rate = 0.05 if not options.get("momentum") else 0.02
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, **options)
    with memory.protect(optimizer, examples=N, every=every, mode="proximal"):
        train(model, optimizer, x, y, 1000)
    close(flat(model), target, 1e-4)


def test_a_rate_that_changes_keeps_the_minimiser() -> None:
    model, memory, x, y = problem()
    target = minimiser(model, memory, x, y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 500, 0.7)
    with memory.protect(optimizer, examples=N, every=4):
        train(model, optimizer, x, y, 2500, schedule.step)
    close(flat(model), target, 1e-4)


@pytest.mark.parametrize(("structure", "every"), [*((s, 1) for s in STRUCTURES), ("kronecker", 4)])
def test_gradient_training_reaches_the_minimiser_where_it_is_stable(structure: str, every: int) -> None:
    model, memory, x, y = problem(structure)
    target = minimiser(model, memory, x, y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 / every, momentum=0.9)
    with memory.protect(optimizer, examples=N, mode="gradient", every=every):
        train(model, optimizer, x, y, 1000 * every)
    close(flat(model), target, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strength", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("every", [1, 4, 16])
def test_stiff_penalties_diverge_in_gradient_mode_and_not_in_proximal_mode(strength: float, every: int) -> None:
    model, memory, x, y = problem(strength=strength)
    start = flat(model)
    target = minimiser(model, memory, x, y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with memory.protect(optimizer, examples=N, every=every):
        train(model, optimizer, x, y, 4000)
    close(flat(model), target, 1e-4)
    set_flat(model, start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with memory.protect(optimizer, examples=N, mode="gradient"):
        train(model, optimizer, x, y, 2000)
    assert not torch.isfinite(flat(model)).all()


# --- every way into a step ------------------------------------------------------------------------------------


class ByHand:
    """The same steps with nothing hidden: penalty gradient by autograd, proximal map by a dense solve."""

    def __init__(self, model: nn.Module, memory: limpet.Memory, *, mode: str, examples: int = N) -> None:
        self.model = copy.deepcopy(model)
        self.held = memory.posterior.held["model"]
        self.mode, self.examples = mode, examples
        self.L = self.held.precision.dense()

    def step(self, optimizer: torch.optim.Optimizer, size: float) -> None:
        weights = dict(self.model.named_parameters())
        if self.mode == "gradient":
            gradients = torch.autograd.grad(self.held.value(weights) / self.examples, list(weights.values()))
            for parameter, gradient in zip(weights.values(), gradients, strict=True):
                assert parameter.grad is not None
                parameter.grad += gradient
        optimizer.step()
        if self.mode == "proximal":
            with torch.no_grad():
                d = (self.held.matrix(weights) - self.held.mean).flatten()
                system = torch.eye(len(d), dtype=d.dtype) + size / self.examples * self.L
                pulled = self.held.mean + torch.linalg.solve(system, d).reshape(self.held.mean.shape)
                for parameter, part in zip(weights.values(), self.held.block.split(pulled), strict=True):
                    parameter.copy_(part)

    def train(self, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(self.model, x, y).backward()
            self.step(optimizer, SIZE)


MODES = ["proximal", "gradient"]
SGD = {"lr": 0.02, "momentum": 0.9}
SIZE = 0.2  # lr / (1 - momentum)


@pytest.mark.parametrize("mode", MODES)
def test_plain_steps(mode: str) -> None:
    model, memory, x, y = problem()
    hand = ByHand(model, memory, mode=mode)
    optimizer, other = torch.optim.SGD(model.parameters(), **SGD), torch.optim.SGD(hand.model.parameters(), **SGD)
    with memory.protect(optimizer, examples=N, mode=mode):
        train(model, optimizer, x, y, 5)
    hand.train(other, x, y, 5)
    close(flat(model), flat(hand.model), 1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keyword", [False, True])
def test_closures(mode: str, keyword: bool) -> None:
    model, memory, x, y = problem()
    hand = ByHand(model, memory, mode=mode)
    optimizer, other = torch.optim.SGD(model.parameters(), **SGD), torch.optim.SGD(hand.model.parameters(), **SGD)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    with memory.protect(optimizer, examples=N, mode=mode):
        for _ in range(5):
            loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
            assert loss is not None and loss > 0
    hand.train(other, x, y, 5)
    close(flat(model), flat(hand.model), 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_accelerate_wraps_an_optimizer_whose_hooks_it_does_not_run(mode: str) -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    model, memory, x, y = problem()
    hand = ByHand(model, memory, mode=mode)
    other = torch.optim.SGD(hand.model.parameters(), **SGD)
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), **SGD))
    with memory.protect(optimizer, examples=N, mode=mode):
        for _ in range(5):
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, x, y))
            optimizer.step()
    hand.train(other, x, y, 5)
    close(flat(model), flat(hand.model), 1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(mode: str, fused: bool, unscale: bool) -> None:
    model, memory, x, y = problem(dtype=torch.float32)
    hand = ByHand(model, memory, mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), **SGD, fused=fused)
    other = torch.optim.SGD(hand.model.parameters(), **SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with memory.protect(optimizer, examples=N, mode=mode):
        for i in range(6):
            optimizer.zero_grad()
            factor = float("inf") if i == 3 else 1.0  # one step that the scaler must skip
            scaler.scale(loss_of(model, x, y) * factor).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    hand.train(other, x, y, 5)
    close(flat(model), flat(hand.model), 1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_two_parameter_groups_with_their_own_rates(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    memory = limpet.OnlineLaplace(model, likelihood="gaussian")
    x, y = torch.randn(N, 4).double(), torch.randn(N, 2).double()
    memory.consolidate([(x, y)])
    hand = copy.deepcopy(model)

    def groups(m: nn.Sequential) -> list[dict[str, Any]]:
        return [{"params": m[0].parameters(), "lr": 0.05}, {"params": m[1].parameters(), "lr": 0.01, "momentum": 0.5}]

    optimizer = torch.optim.SGD(groups(model), lr=0.1)
    other = torch.optim.SGD(groups(hand), lr=0.1)
    with memory.protect(optimizer, examples=N, mode=mode):
        train(model, optimizer, x.flip(1), y, 5)
    for _ in range(5):
        other.zero_grad()
        loss_of(hand, x.flip(1), y).backward()
        weights = dict(hand.named_parameters())
        if mode == "gradient":
            total = torch.stack([h.value(weights) for h in memory.posterior.held.values()]).sum() / N
            for parameter, g in zip(
                hand.parameters(), torch.autograd.grad(total, list(hand.parameters())), strict=True
            ):
                assert parameter.grad is not None
                parameter.grad += g
        other.step()
        if mode == "proximal":
            for held, size in zip(memory.posterior.held.values(), (0.05, 0.02), strict=True):
                with torch.no_grad():
                    d = (held.matrix(weights) - held.mean).flatten()
                    L = held.precision.dense()
                    d = torch.linalg.solve(torch.eye(len(d)).double() + size / N * L, d)
                    for name, part in zip(
                        held.block.parameters, held.block.split(held.mean + d.reshape(held.mean.shape)), strict=True
                    ):
                        weights[name].copy_(part)
    close(flat(model), flat(hand), 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_accumulation_and_clipping(mode: str) -> None:
    model, memory, x, y = problem()
    hand = ByHand(model, memory, mode=mode)
    optimizer, other = torch.optim.SGD(model.parameters(), **SGD), torch.optim.SGD(hand.model.parameters(), **SGD)
    with memory.protect(optimizer, examples=N, mode=mode):
        for _ in range(5):
            optimizer.zero_grad()
            for part in range(4):
                rows = slice(10 * part, 10 * part + 10)
                (loss_of(model, x[rows], y[rows]) / 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    for _ in range(5):
        other.zero_grad()
        loss_of(hand.model, x, y).backward()
        nn.utils.clip_grad_norm_(hand.model.parameters(), 0.5)
        hand.step(other, SIZE)
    close(flat(model), flat(hand.model), 1e-12)


def test_a_loss_that_sums_over_the_batch() -> None:
    model, memory, x, y = problem()
    hand = ByHand(model, memory, mode="gradient")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    other = torch.optim.SGD(hand.model.parameters(), lr=0.02)
    with memory.protect(optimizer, examples=N, mode="gradient", reduction="sum", batch_size=10):
        optimizer.zero_grad()
        (10 * loss_of(model, x[:10], y[:10])).backward()
        optimizer.step()
    hand.train(other, x[:10], y[:10], 1)
    close(flat(model), flat(hand.model), 1e-12)


def test_adam_takes_gradient_mode() -> None:
    model, memory, x, y = problem()
    hand = ByHand(model, memory, mode="gradient")
    optimizer, other = (
        torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0),
        torch.optim.AdamW(hand.model.parameters(), 0.01, weight_decay=0),
    )
    with memory.protect(optimizer, examples=N) as protection:
        assert protection.mode == "gradient"
        train(model, optimizer, x, y, 5)
    hand.train(other, x, y, 5)
    close(flat(model), flat(hand.model), 1e-12)


def test_maximise_turns_the_penalty_with_the_loss() -> None:
    model, memory, x, y = problem()
    twin = copy.deepcopy(model)
    twin_memory = limpet.OnlineLaplace(twin, likelihood="gaussian")
    twin_memory.load_state_dict(memory.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    up = torch.optim.SGD(twin.parameters(), lr=0.01, maximize=True)
    with memory.protect(optimizer, examples=N, mode="gradient"):
        train(model, optimizer, x, y, 4)
    with twin_memory.protect(up, examples=N, mode="gradient"):
        for _ in range(4):
            up.zero_grad()
            (-loss_of(twin, x, y)).backward()
            up.step()
    close(flat(twin), flat(model), 1e-12)


def test_the_penalty_added_to_the_loss_is_gradient_mode() -> None:
    model, memory, x, y = problem()
    hand = ByHand(model, memory, mode="gradient")
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.01), torch.optim.SGD(hand.model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        (loss_of(model, x, y) + memory.penalty() / N).backward()
        optimizer.step()
        hand.train(other, x, y, 1)
    close(flat(model), flat(hand.model), 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradients(mode: str) -> None:
    models, x, y = [], torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 1])
    for sparse in (True, False):
        torch.manual_seed(0)
        layers = [nn.Embedding(4, 3, sparse=sparse), nn.Flatten(), nn.Linear(6, 2)]
        model = nn.Sequential(*layers).double()
        memory = limpet.OnlineLaplace(model)
        memory.consolidate([(x, y)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with memory.protect(optimizer, examples=2, mode=mode):
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x.flip(1)), y).backward()
                optimizer.step()
        models.append(model)
    close(flat(models[0]), flat(models[1]), 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_and_hooks_are_the_users_again(mode: str) -> None:
    model, memory, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with memory.protect(optimizer, examples=N, mode=mode):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        before = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        for parameter, (gradient, copy_) in zip(model.parameters(), before, strict=True):
            assert parameter.grad is gradient and torch.equal(gradient, copy_)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    weights = flat(model)
    set_flat(model, weights + 1)
    moved = flat(model)
    optimizer.zero_grad()
    optimizer.step()  # nothing to do, and nothing is done
    assert torch.equal(flat(model), moved)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_without_a_gradient_are_left_alone(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}).double()
    memory = limpet.OnlineLaplace(model, likelihood="gaussian")
    x, y = torch.randn(N, 3).double(), torch.randn(N, 2).double()
    memory.consolidate([(x, y)], forward=lambda m, b: (m["a"](b[0]) + m["b"](b[0]), b[1]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memory.protect(optimizer, examples=N, mode=mode, every=3 if mode == "proximal" else 1):
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(model["a"], x, y).backward()
            optimizer.step()
    after = dict(model.named_parameters())
    assert all(torch.equal(after[n], before[n]) for n in ("b.weight", "b.bias"))
    assert not any(torch.equal(after[n], before[n]) for n in ("a.weight", "a.bias"))


def test_weight_and_bias_with_different_rates() -> None:
    model, memory, x, y = problem()
    groups = [{"params": [model.weight], "lr": 0.01}, {"params": [model.bias], "lr": 0.02}]
    optimizer = torch.optim.SGD(groups)
    with pytest.raises(UnsupportedError, match="mode='gradient'"), memory.protect(optimizer, examples=N):
        train(model, optimizer, x, y, 1)
    start = flat(model)
    with memory.protect(optimizer, examples=N, mode="gradient"):
        train(model, optimizer, x, y, 1)
    assert not torch.equal(flat(model), start)


def test_a_gradient_that_is_made_now_and_then_is_taken_as_it_was_in_between() -> None:
    model, memory, x, y = problem()
    by_hand = copy.deepcopy(model)
    mine = limpet.OnlineLaplace(by_hand, likelihood="gaussian")
    mine.load_state_dict(copy.deepcopy(memory.state_dict()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with memory.protect(optimizer, examples=N, every=3):
        train(model, optimizer, x, y, 7)
    own, penalty = torch.optim.Adam(by_hand.parameters(), lr=0.01), ()
    for step in range(7):
        if step % 3 == 0:
            penalty = torch.autograd.grad(mine.penalty(), list(by_hand.parameters()))
        own.zero_grad()
        torch.autograd.backward(loss_of(by_hand, x, y))
        for parameter, part in zip(by_hand.parameters(), penalty, strict=True):
            assert parameter.grad is not None
            parameter.grad += part / N
        own.step()
    assert torch.allclose(flat(model), flat(by_hand), rtol=1e-9)


def test_what_cannot_be_right_is_refused() -> None:
    model, memory, _, _ = problem()
    parameters = list(model.parameters())
    sgd = torch.optim.SGD(parameters, lr=0.1)
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (torch.optim.LBFGS(parameters), {}, UnsupportedError, "penalty"),
        (torch.optim.SparseAdam(parameters), {}, UnsupportedError, "SparseAdam"),
        (torch.optim.Adam(parameters), {"mode": "proximal"}, UnsupportedError, "mode='gradient'"),
        (sgd, {"mode": "soft"}, ValueError, "auto, proximal, gradient"),
        (sgd, {"every": 0}, ValueError, "every"),
        (sgd, {"examples": 0}, ValueError, "examples"),
        (sgd, {"reduction": "sum"}, ValueError, "batch_size"),
        ("sgd", {}, UnsupportedError, "Optimizer"),
        (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), {}, LimpetError, "none of the parameters"),
    ]
    for optimizer, options, kind, message in cases:
        with pytest.raises(kind, match=message), memory.protect(optimizer, **{"examples": N, **options}):
            pass

    class FlatParameter(nn.Parameter):
        pass

    flattened = torch.optim.SGD([FlatParameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(UnsupportedError, match="FSDP2"), memory.protect(flattened, examples=N):
        pass
    fake = type("DeepSpeedZeroOptimizer", (torch.optim.SGD,), {"__module__": "deepspeed.runtime.zero.stage_1_and_2"})
    with pytest.raises(UnsupportedError, match="DeepSpeed"), memory.protect(fake(parameters, lr=0.1), examples=N):
        pass
    with memory.protect(sgd, examples=N):
        with pytest.raises(LimpetError, match="already"), memory.protect(sgd, examples=N):
            pass
        with pytest.raises(LimpetError, match="not inside"):
            memory.consolidate([(torch.zeros(2, 5).double(), torch.zeros(2, 3).double())])


def test_weight_decay_is_warned_about() -> None:
    model, memory, _, _ = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    with pytest.warns(LimpetWarning, match="weight_decay=0"), memory.protect(optimizer, examples=N):
        pass
    with warnings.catch_warnings(), memory.protect(torch.optim.SGD(model.parameters(), lr=0.1), examples=N):
        warnings.simplefilter("error")


@pytest.mark.parametrize("mode", ["proximal", "gradient"])
@pytest.mark.parametrize("every", [1, 4])
def test_a_run_that_is_saved_and_resumed_goes_on_the_same(every: int, mode: str, tmp_path: Any) -> None:
    """Stopped after 5 of 12 steps, between two proximal maps, with model, optimizer and memory saved."""
    model, memory, x, y = problem()
    start = flat(model)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with memory.protect(optimizer, examples=N, every=every, mode=mode):
        train(model, optimizer, x, y, 12)
    expected = flat(model)

    set_flat(model, start)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with pytest.raises(KeyboardInterrupt), memory.protect(optimizer, examples=N, every=every, mode=mode):
        train(model, optimizer, x, y, 5)
        memory.save(tmp_path / "memory.safetensors")
        weights, state = flat(model), copy.deepcopy(optimizer.state_dict())
        raise KeyboardInterrupt
    fresh = nn.Linear(5, 3).double()
    set_flat(fresh, weights)
    again = limpet.load(tmp_path / "memory.safetensors", fresh)
    optimizer = torch.optim.SGD(fresh.parameters(), **SGD)
    optimizer.load_state_dict(state)
    with again.protect(optimizer, examples=N, every=every, mode=mode):
        train(fresh, optimizer, x, y, 7)
    assert torch.equal(flat(fresh), expected)


def test_groups_that_change_under_way() -> None:
    """A state loaded inside the block brings new groups, whose rates count; a group added inside is protected."""
    ends = []
    for inside in (False, True):
        model, memory, x, y = problem()
        state = torch.optim.SGD(model.parameters(), **SGD).state_dict()
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        if not inside:
            optimizer.load_state_dict(state)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        with memory.protect(optimizer, examples=N):
            if inside:
                optimizer.load_state_dict(state)
            train(model, optimizer, x, y, 6, schedule.step)
        ends.append(flat(model))
    close(ends[1], ends[0], 1e-12)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3)).double()
    memory = limpet.OnlineLaplace(model, likelihood="gaussian", strength=1e6)
    memory.consolidate([(x, y)])
    before = model[1].weight.detach().clone()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01)
    with memory.protect(optimizer, examples=N):
        optimizer.add_param_group({"params": list(model[1].parameters())})
        train(model, optimizer, 2 * x, y, 5)
    assert (model[1].weight - before).abs().max() < 1e-3


def test_a_protection_is_entered_once_at_a_time_and_not_forgotten() -> None:
    model, memory, _, _ = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = memory.protect(optimizer, examples=N), memory.protect(optimizer, examples=N)
    with first:
        with pytest.raises(LimpetError, match="already"), second:
            pass
        with pytest.raises(LimpetError, match="already"), first:
            pass
        with pytest.raises(LimpetError, match="already"):
            memory.load_state_dict(memory.state_dict())
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    with pytest.warns(LimpetWarning, match="never entered"):
        memory.protect(optimizer, examples=N)


def test_an_error_leaves_nothing_behind_for_the_next_attempt() -> None:
    model, memory, x, y = problem()
    start = flat(model)
    ends = []
    for fails in (True, False):
        set_flat(model, start)
        if fails:
            optimizer = torch.optim.SGD(model.parameters(), **SGD)
            with pytest.raises(RuntimeError), memory.protect(optimizer, examples=N, every=4):
                train(model, optimizer, x, y, 7)
                raise RuntimeError
            set_flat(model, start)
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        with memory.protect(optimizer, examples=N, every=4):
            train(model, optimizer, x, y, 6)
        ends.append(flat(model))
    assert torch.equal(ends[0], ends[1])


def test_a_closure_that_runs_twice() -> None:
    class Twice(torch.optim.SGD):
        """Looks at the loss first; it has a step of its own, so it is taken for any optimizer, not for SGD."""

        def step(self, closure: Any = None) -> Any:
            with torch.enable_grad():
                closure()
                loss = closure()
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])
            return loss

    ends = []
    for to_none in (True, False):
        model, memory, x, y = problem()
        optimizer = Twice(model.parameters(), lr=0.02)

        def closure() -> Tensor:
            optimizer.zero_grad(set_to_none=to_none)  # noqa: B023
            loss = loss_of(model, x, y)  # noqa: B023
            loss.backward()
            return loss

        with memory.protect(optimizer, examples=N) as protection:
            assert protection.mode == "gradient"  # a step of its own need not have SGD's step size
            for _ in range(3):
                optimizer.step(closure)
        ends.append(flat(model))
    close(ends[1], ends[0], 1e-12)


def test_proximal_mode_refuses_before_anything_has_moved() -> None:
    model, memory, x, y = problem()
    start = flat(model)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    with pytest.raises(UnsupportedError, match="one block"), memory.protect(optimizer, examples=N):
        train(model, optimizer, x, y, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="one block"), memory.protect(optimizer, examples=N):
        loss_of(model, x, y).backward()
        model.bias.grad = None
        optimizer.step()
    assert torch.equal(flat(model), start)


def test_momentum_without_a_step_size_is_refused() -> None:
    model, memory, _, _ = problem()
    for options in ({"momentum": 1.0}, {"momentum": 1.5}, {"momentum": 0.9, "dampening": 1.0}):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
        with pytest.raises(UnsupportedError, match="below 1"), memory.protect(optimizer, examples=N):
            pass


def test_a_state_resumed_with_another_every_is_not_carried_over(tmp_path: Any) -> None:
    model, memory, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with pytest.raises(KeyboardInterrupt), memory.protect(optimizer, examples=N, every=4):
        train(model, optimizer, x, y, 6)
        memory.save(tmp_path / "m.safetensors")
        raise KeyboardInterrupt
    ends = []
    for loaded in (True, False):
        twin = copy.deepcopy(model)
        again = limpet.load(tmp_path / "m.safetensors", twin)
        if not loaded:
            again._resume = None
        optimizer = torch.optim.SGD(twin.parameters(), **SGD)
        with again.protect(optimizer, examples=N, every=1) as protection:
            assert protection.state.every == 1
            train(twin, optimizer, x, y, 1)
        ends.append(flat(twin))
    assert torch.equal(ends[0], ends[1])


def test_consolidating_ends_what_an_error_left_open() -> None:
    model, memory, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with pytest.raises(RuntimeError), memory.protect(optimizer, examples=N, every=4):
        train(model, optimizer, x, y, 5)
        raise RuntimeError
    assert metadata(memory)["proximal"] is not None
    memory.consolidate([(x, y)])
    assert metadata(memory)["proximal"] is None
    assert not any(name.startswith("force/") for name in memory.state_dict()["tensors"])


@pytest.mark.parametrize("mode", ["proximal", "gradient"])
def test_steps_under_autocast_hold_in_full_precision(mode: str) -> None:
    ends = []
    for enabled in (False, True):
        model, memory, x, y = problem(strength=0.5, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with memory.protect(optimizer, examples=N, mode=mode):
            for _ in range(20):
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                    optimizer.step()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            ends.append((flat(model), float(memory.forecast()), memory.penalty().item()))
    assert torch.equal(ends[0][0], ends[1][0]) and ends[0][1:] == ends[1][1:]


def test_a_block_that_only_some_steps_reach_is_held_in_those() -> None:
    """In gradient mode with every=k, also where none of them is one in which gradients are made anew."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

        def forward(self, x: Tensor, head: int) -> Tensor:
            out: Tensor = self.heads[head](x)
            return out

    x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
    ends = []
    for every in (1, 2):
        torch.manual_seed(0)
        model = TwoHeads()
        memory = limpet.OnlineLaplace(model, strength=10.0)
        memory.consolidate([(x, y)], forward=lambda model, batch: (model(batch[0], 0) + model(batch[0], 1), batch[1]))
        means = flat(model)
        away = torch.randn(16)
        set_flat(model, means + away)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with memory.protect(optimizer, examples=40, mode="gradient", every=every):
            for step in range(100):
                optimizer.zero_grad()
                (0 * model(x, step % 2).sum()).backward()  # nothing but the penalty
                optimizer.step()
        ends.append(flat(model) - means)
    close(ends[0], ends[1], 1e-5)
    assert float(ends[0].norm()) < 0.8 * float(away.norm())


def test_parameters_may_leave_the_optimizer_between_two_gradients() -> None:
    model, memory, x, y = problem(structure="diagonal")
    weight, bias = model.parameters()
    optimizer = torch.optim.Adam([{"params": [weight]}, {"params": [bias]}], lr=0.01)
    with memory.protect(optimizer, examples=N, every=3):
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            if step == 1:
                del optimizer.param_groups[1]
                before = bias.detach().clone()
    assert torch.equal(bias, before)


@pytest.mark.filterwarnings("ignore:limpet. protected weights are float16")
@pytest.mark.parametrize("every", [1, 3])
def test_a_penalty_over_many_examples_does_not_overflow_half_precision(every: int) -> None:
    ends = []
    for dtype in (torch.float32, torch.float16):
        torch.manual_seed(0)
        model, x = nn.Linear(20, 5).to(dtype), torch.randn(500, 20).to(dtype)
        memory = limpet.OnlineLaplace(model, strength=3.0)
        memory.consolidate([(x, torch.randint(0, 5, (500,)))], examples=1_000_000)
        with torch.no_grad():
            model.weight.add_(0.2 * torch.randn(5, 20).to(dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = flat(model).float()
        with memory.protect(optimizer, examples=1_000_000, mode="gradient", every=every):
            (0 * model(x).sum()).backward()
            optimizer.step()
        ends.append(flat(model).float() - before)
    assert float((ends[1] - ends[0]).norm()) < 0.05 * float(ends[0].norm())


def test_two_memories_of_one_model_give_the_gradients_back() -> None:
    model, memory, x, y = problem()
    other = limpet.OnlineLaplace(model, likelihood="gaussian")
    other.consolidate([(x, y)])
    set_flat(model, flat(model) + 0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of(model, x, y).backward()
    before = [parameter.grad for parameter in model.parameters()]
    with memory.protect(optimizer, examples=N), other.protect(optimizer, examples=N):
        optimizer.step()
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("modes", "every"),
    [(("gradient", "gradient"), 1), (("proximal", "gradient"), 2), (("gradient", "proximal"), 1)],
)
def test_two_memories_reach_the_minimum_of_both_penalties(modes: tuple[str, str], every: int) -> None:
    model, memory, x, y = problem(strength=3.0)
    other = limpet.OnlineLaplace(model, likelihood="gaussian", structure="dense", strength=2.0)
    set_flat(model, flat(model) + torch.randn(18, dtype=torch.float64))
    other.consolidate([(x.roll(1, 1), y)])
    weights = nn.Parameter(flat(model))

    def objective(w: Tensor) -> Tensor:
        named = {"weight": w[:15].reshape(3, 5), "bias": w[15:]}
        penalties = [one.posterior.held["model"].value(named) for one in (memory, other)]
        return (x @ named["weight"].T + named["bias"] - y).square().sum() / (2 * N) + sum(penalties) / N

    gradient = torch.autograd.functional.jacobian(objective, weights.detach())
    target = weights.detach() - torch.linalg.solve(
        torch.autograd.functional.hessian(objective, weights.detach()), gradient
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 / every, momentum=0.9)
    with (
        memory.protect(optimizer, examples=N, mode=modes[0], every=every),
        other.protect(optimizer, examples=N, mode=modes[1], every=every),
    ):
        train(model, optimizer, x, y, 500 * every)
    close(flat(model), target, 1e-4)


def test_a_second_proximal_step_on_the_same_weights_is_refused() -> None:
    model, memory, x, y = problem()
    other = limpet.OnlineLaplace(model, likelihood="gaussian")
    other.consolidate([(x, y)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with memory.protect(optimizer, examples=N):
        with pytest.raises(UnsupportedError, match="mode='gradient'"), other.protect(optimizer, examples=N):
            pass
        with other.protect(optimizer, examples=N, mode="gradient"):
            train(model, optimizer, x, y, 1)
        with other.protect(torch.optim.SGD(model.parameters(), lr=0.01), examples=N):
            pass  # of another optimizer
    with other.protect(optimizer, examples=N):
        train(model, optimizer, x, y, 1)

    two = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)).double()
    both = [limpet.OnlineLaplace(two, likelihood="gaussian", exclude=[two[i]]) for i in range(2)]
    for one in both:
        one.consolidate([(x, y[:, :2])])
    optimizer = torch.optim.SGD(two.parameters(), lr=0.01)
    with both[0].protect(optimizer, examples=N), both[1].protect(optimizer, examples=N):
        train(two, optimizer, x, y[:, :2], 1)  # of other weights


def test_an_observer_sees_the_gradient_of_the_loss_beside_another_memory() -> None:
    model, memory, x, y = problem()
    seen: list[list[Tensor]] = []
    for beside in (False, True):
        set_flat(model, torch.ones(18, dtype=torch.float64))
        importance = limpet.SynapticIntelligence(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with contextlib.ExitStack() as stack:
            if beside:
                stack.enter_context(memory.protect(optimizer, examples=N))
            stack.enter_context(importance.protect(optimizer, examples=N))
            train(model, optimizer, x, y, 1)
        assert importance._watch is not None
        moved = flat(model) - 1
        path = torch.cat([tensor.flatten() for tensor in importance._watch.path.values()])
        seen.append([path / moved])  # - gradient of the loss
    close(seen[1][0], seen[0][0], 1e-9)

"""Protection by repair: plain steps while the inputs are recorded, and a repair when training ends."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import limpet
from limpet.errors import LimpetError, LimpetWarning, UnsupportedError
from limpet.protection.recorder import InputRecorder

N = 120


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))


def task(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 6, generator=generator)
    return x, (x @ torch.randn(6, 3, generator=generator)).argmax(1)


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, epochs: int = 10) -> None:
    for _ in range(epochs):
        for rows in torch.arange(N).split(20):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


def learned(**options: Any) -> tuple[nn.Sequential, limpet.OnlineLaplace, Tensor, Tensor]:
    """A model that has learned a task, its memory, and another task."""
    model = network()
    old = task(1)
    train(model, torch.optim.Adam(model.parameters(), lr=0.02), *old, epochs=30)
    memory = limpet.OnlineLaplace(model, **{"strength": "auto", "prior_mean": "initial", **options})
    memory.consolidate([old], progress=False, probe=60)
    return model, memory, *task(2)


class Unsized:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_auto_chooses_repair_for_automatic_strengths_and_for_budgets() -> None:
    model, memory, _, _ = learned()
    adam, sgd = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)

    def mode(memory: limpet.Memory, optimizer: Any, **options: Any) -> str:
        with memory.protect(optimizer, examples=N, **options) as protection:
            return protection.mode

    assert mode(memory, adam) == "repair"
    assert mode(memory, sgd) == "proximal"
    assert mode(memory, adam, mode="gradient") == "gradient"
    memory.strength = 3.0
    assert mode(memory, adam) == "gradient"
    assert mode(memory, adam, budget=0.1) == "repair"
    assert mode(memory, sgd, mode="repair") == "repair"
    memory.probes = ()
    assert mode(memory, adam, budget=0.1) == "gradient"
    with pytest.raises(UnsupportedError, match="has no probe"):
        mode(memory, adam, budget=0.1, mode="repair")
    empty = limpet.OnlineLaplace(model, strength="auto")
    assert mode(empty, adam) == "gradient"
    with pytest.raises(UnsupportedError, match="no task has been consolidated"):
        mode(empty, adam, mode="repair")
    with pytest.raises(UnsupportedError, match="measures no curvature"):
        mode(limpet.SynapticIntelligence(model), adam, mode="repair")
    with pytest.raises(ValueError, match="tolerance"):
        mode(memory, adam, mode="repair", repair={"tolerance": -1.0})


@pytest.mark.parametrize("options", [{"tolerance": 0.02}, {"strength": 0.5, "scale": 0.9}])
def test_it_is_plain_training_and_then_a_repair(options: dict[str, float]) -> None:
    model, memory, x, y = learned()
    twin, data = copy.deepcopy(model), [(x[:80], y[:80]), (x[80:], y[80:])]
    train(twin, torch.optim.AdamW(twin.parameters(), lr=0.02), x, y)
    by_hand = limpet.repair(twin, memory, data, examples=N, limit=N, **options)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with memory.protect(optimizer, examples=N, batches=data, repair=options) as protection:
        train(model, optimizer, x, y)
    assert torch.equal(flat(model), flat(twin))
    assert protection.repair is not None and protection.repair.strength == by_hand.strength
    summary = protection.summary()
    assert (summary.mode, summary.steps, summary.repair_strength) == ("repair", 60, by_hand.strength)
    assert str(summary).startswith(f"60 steps, then repaired at strength {by_hand.strength:.3g} (mode repair, N = 120)")
    assert summary.metrics()["memory_repair_strength"] == by_hand.strength
    protection.repair.undo()
    by_hand.undo()
    assert torch.equal(flat(model), flat(twin))


def test_recorded_inputs_give_the_repair_that_the_data_without_targets_give() -> None:
    model, memory, x, y = learned()
    twin, seen = copy.deepcopy(model), []
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.02)
    handle = twin.register_forward_pre_hook(lambda _, args: seen.append((args[0].clone(), None)))
    train(twin, optimizer, x, y, epochs=2)
    handle.remove()
    by_hand = limpet.repair(twin, memory, Unsized(seen), examples=N, limit=N, budget="auto", tolerance="auto")

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    state, hooks = torch.get_rng_state(), dict(model._forward_pre_hooks)
    with memory.protect(optimizer, examples=N) as protection:
        train(model, optimizer, x, y, epochs=2)
        with torch.no_grad():
            model(torch.full((5, 6), 1e9))  # evaluation is not recorded
    assert torch.equal(torch.get_rng_state(), state) and dict(model._forward_pre_hooks) == hooks
    assert protection.repair is not None and protection.repair.strength == by_hand.strength > 0
    assert torch.equal(flat(model), flat(twin))


def test_what_was_learned_first_is_kept() -> None:
    model, memory, x, y = learned()
    old_x, old_y = task(1)
    plain = copy.deepcopy(model)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.02), x, y)
    with torch.no_grad():
        before = float(F.cross_entropy(model(old_x), old_y))
        forgotten = float(F.cross_entropy(plain(old_x), old_y)) - before
        new = float(F.cross_entropy(plain(x), y))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with (
        pytest.warns(LimpetWarning, match=r"more than the budget of 0\.04"),  # more would cost too much of the new task
        memory.protect(optimizer, examples=N),
    ):
        train(model, optimizer, x, y)
    with torch.no_grad():
        assert float(F.cross_entropy(model(old_x), old_y)) - before < 0.7 * forgotten
        assert float(F.cross_entropy(model(x), y)) < new + 0.4


def test_a_budget_is_kept_on_the_probe() -> None:
    for budget in (0.02, 0.1):
        model, memory, x, y = learned(strength=1.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        with memory.protect(optimizer, examples=N, budget=budget) as protection:
            train(model, optimizer, x, y)
        assert protection.mode == "repair" and 0.8 * budget < memory.drift().upper <= budget


def test_an_error_in_training_leaves_the_weights_and_removes_the_hook() -> None:
    model, memory, x, y = learned()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with pytest.raises(KeyboardInterrupt), memory.protect(optimizer, examples=N) as protection:
        train(model, optimizer, x, y, epochs=1)
        left = flat(model)
        raise KeyboardInterrupt
    assert torch.equal(flat(model), left) and protection.repair is None and not model._forward_pre_hooks
    memory.forecast()


def test_a_model_that_is_never_called_itself_is_said_not_to_be_repaired() -> None:
    model, memory, x, y = learned()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    parts = lambda x: model[2](model[1](model[0](x)))  # noqa: E731
    with pytest.warns(LimpetWarning, match="batches=new_data"), memory.protect(optimizer, examples=N) as protection:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(parts(x), y).backward()
            optimizer.step()
        left = flat(model)
    assert torch.equal(flat(model), left) and "not repaired" in str(protection.summary())


def test_two_repairs_of_the_same_weights_are_rejected() -> None:
    model, memory, x, y = learned()
    other = limpet.OnlineLaplace(model, strength="auto", prior_mean="initial")
    other.consolidate([(x, y)], progress=False)
    optimizer = torch.optim.Adam(model.parameters())
    with memory.protect(optimizer, examples=N):
        with pytest.raises(UnsupportedError, match="mode='gradient'"), other.protect(optimizer, examples=N):
            pass
        with other.protect(optimizer, examples=N, mode="gradient"):
            pass


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
        out: Tensor = self.inner(x + shift)
        return out


def test_models_with_several_inputs_are_repaired() -> None:
    torch.manual_seed(0)
    model, (x, y), shift = TwoInputs(), task(1), torch.full((N, 6), 0.5)
    memory = limpet.OnlineLaplace(model, strength="auto", prior_mean="initial")

    def forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        return model(batch[0], shift=batch[1]), batch[2]

    memory.consolidate([(x, shift, y)], forward=forward, progress=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with memory.protect(optimizer, examples=N) as protection:
        for _ in range(12):
            optimizer.zero_grad()
            F.cross_entropy(model(-x[:20], shift=shift[:20]), y[:20]).backward()
            optimizer.step()
    assert protection.repair is not None and protection.repair.strength > 0


def test_the_sample_is_uniform_and_bounded() -> None:
    model, counts = nn.Linear(1, 1), torch.zeros(40)
    for seed in range(300):
        recorder = InputRecorder(model, rows=16, seed=seed)
        recorder.start()
        for step in range(40):
            model(torch.full((4, 1), float(step)))
        recorder.stop()
        assert len(recorder.batches) == 4 and recorder.seen == 40
        for inputs, targets in recorder.batches:
            assert targets is None and inputs.shape == (4, 1)
            counts[int(inputs[0, 0])] += 1
    expected = 300 * 4 / 40
    chi_square = float(((counts - expected).square() / (expected * (1 - 4 / 40))).sum())
    assert chi_square < 72  # 39 degrees of freedom: exceeded once in 1000 times


def test_large_batches_are_cut_and_copied() -> None:
    model, x = nn.Linear(2, 1), torch.zeros(40, 2)
    recorder = InputRecorder(model, rows=16)
    recorder.start()
    model(x)
    recorder.stop()
    x += 1
    assert recorder.batches[0][0].shape == (16, 2) and not recorder.batches[0][0].any()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(self.norm(x)).relu()
        return out


@pytest.mark.filterwarnings("ignore:limpet. the drift may be")
@pytest.mark.filterwarnings("ignore:limpet. the memory covers the output layer")
def test_frozen_weights_in_the_optimizer_do_not_hide_that_the_others_moved() -> None:
    """A few weights are watched, the largest and some smaller ones; training may leave just these where they were."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Residual() for _ in range(6)], nn.Linear(6, 3))
    memory = limpet.OnlineLaplace(model, strength="auto", prior_mean="initial")
    memory.consolidate([task(1)], progress=False, probe=60)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("6"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with memory.protect(optimizer, examples=N) as protection:
        train(model, optimizer, *task(2), epochs=20)
        drifted = memory.drift()
    assert protection.repair is not None and protection.repair.blocks == ["6"]
    assert memory.drift() < drifted / 2


class Conditional(nn.Module):
    """Takes an input, as a mapping or not, and perhaps the class to generate, which is named as targets are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.classes, self.head = nn.Linear(6, 8), nn.Embedding(5, 8), nn.Linear(8, 3)

    def forward(self, x: Any, y: Tensor | None = None) -> Tensor:
        hidden = self.inner(x["x"] if isinstance(x, dict) else x)
        out: Tensor = self.head((hidden if y is None else hidden + self.classes(y)).tanh())
        return out


def as_mapping(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return model({"x": x})


def in_two_ways(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return model(x) if int(y[0]) else model(x, y + 2)


def with_a_class(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return model(x=x, y=y + 2)


def under_autocast(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x.bfloat16()).float()


@pytest.mark.parametrize("called", [as_mapping, in_two_ways, with_a_class, under_autocast])
def test_inputs_are_recorded_as_the_model_was_called(called: Any) -> None:
    torch.manual_seed(0)
    model, (x, y) = Conditional(), task(2)
    memory = limpet.OnlineLaplace(model, strength="auto", prior_mean="initial")
    memory.consolidate([task(1)], progress=False, probe=60)
    trained, by_hand = model, copy.deepcopy(model)
    second = limpet.OnlineLaplace(by_hand, strength="auto", prior_mean="initial")
    second.consolidate([task(1)], progress=False, probe=60)
    for network in (trained, by_hand):
        optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
        given: Any = memory.protect(optimizer, examples=N, repair={"strength": 1.0}) if network is trained else None
        with given or torch.enable_grad():
            for rows in torch.arange(N).split(30):
                optimizer.zero_grad()
                F.cross_entropy(called(network, x[rows], y[rows]), y[rows]).backward()
                optimizer.step()
    batches = [(x[rows], y[rows]) for rows in torch.arange(N).split(30)]
    limpet.repair(
        by_hand, second, batches, strength=1.0, examples=N, progress=False,
        forward=lambda model, batch: (called(model, *batch), None),
    )  # fmt: skip
    tolerance = 2e-2 if called is under_autocast else 1e-5  # the pass by hand runs in half precision
    assert torch.allclose(flat(trained), flat(by_hand), atol=tolerance)


def test_any_error_of_the_repair_is_a_warning_once_the_model_is_trained() -> None:
    model, memory, x, y = learned()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    batches = [{"unknown": x, "labels": y}]
    with (
        pytest.warns(LimpetWarning, match="keeps its trained weights: TypeError"),
        memory.protect(optimizer, examples=N, batches=batches) as protection,
    ):
        train(model, optimizer, x, y)
        left = flat(model)
    assert torch.equal(flat(model), left) and protection.repair is None and protection.summary().warnings


def test_a_probe_that_cannot_be_run_is_told_before_training() -> None:
    model = TwoInputs()
    x, y = task(1)
    shifted = lambda model, batch: (model(batch[0], shift=batch[1]), batch[2])  # noqa: E731
    memory = limpet.OnlineLaplace(model, strength="auto", prior_mean="initial")
    memory.consolidate([(x, torch.ones_like(x), y)], forward=shifted, progress=False, probe=60)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with pytest.raises(LimpetError, match=r"repair=\{'probe_forward': \.\.\.\}"), memory.protect(optimizer, examples=N):
        raise AssertionError("the block must not be entered")
    with memory.protect(optimizer, examples=N, repair={"probe_forward": shifted}) as protection:
        for _ in range(10):
            optimizer.zero_grad()
            F.cross_entropy(model(-x, shift=torch.ones_like(x)), y).backward()
            optimizer.step()
    assert protection.repair is not None


def test_targets_that_the_repair_will_need_are_asked_for_in_the_first_step() -> None:
    model, memory, x, y = learned(fisher="empirical")
    trained = flat(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with pytest.raises(LimpetError, match="batches=new_data"), memory.protect(optimizer, examples=N):
        train(model, optimizer, x, y)
    assert torch.equal(flat(model), trained)
    with memory.protect(optimizer, examples=N, batches=[(x, y)], repair={"strength": 1.0}) as protection:
        train(model, optimizer, x, y, epochs=2)
    assert protection.repair is not None


def test_a_compiled_model_that_was_called_before_is_recorded_after_a_reset() -> None:
    """Compiled code of a container of torch has no guard on hooks that are added later."""
    model, (x, _) = network(), task(1)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    recorder = InputRecorder(model)
    for calls in (0, 1):
        recorder.start()
        compiled(x)
        recorder.stop()
        assert recorder.seen == calls
        torch.compiler.reset()

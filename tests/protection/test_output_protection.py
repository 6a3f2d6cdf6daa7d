"""Steps with outputs compared, held against autograd of loss + weight * KL by hand."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import limpet
from limpet.errors import LimpetError, LimpetWarning, UnsupportedError
from own_device import DEVICE, SUPPORTED, own_device

STEPS = 7
WEIGHT = 0.7


class Busy(nn.Module):
    """Everything that a pass of our own could disturb: dropout, batch norm, a buffer counted up, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(1)
        random.random()
        np.random.rand()
        return self.last(self.frozen(self.dropout(torch.tanh(self.norm(self.first(x))))))


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.randn(STEPS, 6, 5, dtype=torch.float64), torch.randint(0, 3, (STEPS, 6))


def kl(before: nn.Module, now: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        reference = before(x).log_softmax(-1)
    return F.kl_div(now(x).log_softmax(-1), reference, log_target=True, reduction="batchmean")


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.0),
}


def same(one: nn.Module, other: nn.Module, tolerance: float = 1e-10) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in pairs)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("how", ["plain", "closure", "accumulated", "sum", "laplace"])
def test_distillation_steps_are_those_of_the_sum_by_hand(name: str, every: int, how: str) -> None:
    model, x, y = problem()
    before, by_hand = copy.deepcopy(model), copy.deepcopy(model)
    memory = limpet.Distillation(model, weight=WEIGHT)
    memory.consolidate()
    laplace, penalised = limpet.OnlineLaplace(model), limpet.OnlineLaplace(by_hand)
    for one in (laplace, penalised):
        one.consolidate([(x[0], y[0])], progress=False)
    factor = 6.0 if how == "sum" else 1.0

    optimizer = OPTIMIZERS[name](by_hand.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = factor * F.cross_entropy(by_hand(x[step]), y[step])
        if step % every == 0:
            loss = loss + WEIGHT * factor * every * kl(before, by_hand, x[step])
        if how == "laplace":
            loss = loss + penalised.penalty() / 6
        loss.backward()
        optimizer.step()

    def add_gradients(rows: Tensor, labels: Tensor, share: float = 1.0) -> Tensor:
        loss = share * factor * F.cross_entropy(model(rows), labels)
        loss.backward()
        return loss

    optimizer = OPTIMIZERS[name](model.parameters())
    options: dict[str, Any] = {"reduction": "sum", "batch_size": 6} if how == "sum" else {}
    with memory.protect(optimizer, examples=6, every=every, **options) as protection:
        second = laplace.protect(optimizer, examples=6, mode="gradient")
        if how == "laplace":
            second.__enter__()
        for step in range(STEPS):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                return add_gradients(x[step], y[step])

            if how == "closure":
                optimizer.step(closure)
            elif how == "accumulated":
                optimizer.zero_grad()
                for part in (slice(0, 2), slice(2, 4), slice(4, 6)):
                    add_gradients(x[step, part], y[step, part], 1 / 3)
                optimizer.step()
            else:
                closure()
                optimizer.step()
        if how == "laplace":
            second.__exit__(None, None, None)
    assert same(model, by_hand)
    second._entered = True  # it warns if it was never entered
    assert protection.steps == STEPS and protection.penalised == -(-STEPS // every)
    assert protection.summary().divergence is not None


def test_nothing_of_the_users_is_changed() -> None:
    torch.manual_seed(0)
    model = Busy()
    x, y = torch.randn(8, 5), torch.randint(0, 3, (8,))
    memory = limpet.Distillation(model)
    memory.consolidate([x], probe=4)
    outside = nn.Parameter(torch.ones(2))  # trained by nobody here, and without a gradient
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.1)
    plain = copy.deepcopy(model)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)

    def state(network: nn.Module) -> dict[str, Any]:
        found: dict[str, Any] = {f"{n}.training": m.training for n, m in network.named_modules()}
        found |= {name: buffer.clone() for name, buffer in network.named_buffers()}
        found |= {f"{n}.grad": None if p.grad is None else p.grad.clone() for n, p in network.named_parameters()}
        found |= {f"{n}.requires_grad": p.requires_grad for n, p in network.named_parameters()}
        return found

    def run(network: nn.Module, one: torch.optim.Optimizer) -> Any:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        network.train()
        F.cross_entropy(network(x), y).backward()
        gradients = [p.grad for p in network.parameters()]
        one.step()
        assert all(a is b for a, b in zip(gradients, (p.grad for p in network.parameters()), strict=True))
        return torch.rand(3), random.random(), float(np.random.rand())

    hooks = {name: dict(module._forward_pre_hooks) for name, module in model.named_modules()}
    with memory.protect(optimizer):
        with torch.no_grad():
            model.first.weight += 0.1
            plain.first.weight += 0.1
        drawn = run(model, optimizer)
    expected = run(plain, other)
    assert torch.equal(drawn[0], expected[0]) and drawn[1:] == expected[1:]
    for name, value in state(plain).items():
        now = state(model)[name]
        assert torch.equal(now, value) if isinstance(value, Tensor) else now == value, name
    assert hooks == {name: dict(module._forward_pre_hooks) for name, module in model.named_modules()}
    assert outside.grad is None and model.frozen.weight.grad is None
    assert not torch.equal(model.first.weight, plain.first.weight)  # the step itself was another one
    assert torch.equal(model.frozen.weight, plain.frozen.weight)
    assert not optimizer._optimizer_step_pre_hooks and "step" not in optimizer.__dict__


def test_a_parameter_without_a_gradient_of_the_loss_gets_ours_for_the_step() -> None:
    torch.manual_seed(0)

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.old, self.new = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.new(torch.tanh(self.body(x)))

    def old_outputs(network: Any, batch: Any) -> Any:
        return network.old(torch.tanh(network.body(batch[0]))), None

    model, x, y = TwoHeads(), torch.randn(8, 4), torch.randint(0, 2, (8,))
    memory = limpet.Distillation(model, forward=old_outputs)
    memory.consolidate()
    before = copy.deepcopy(model)
    with torch.no_grad():
        model.body.weight += 0.3
    expected = torch.autograd.grad(
        F.kl_div(
            old_outputs(model, (x, None))[0].log_softmax(-1),
            old_outputs(before, (x, None))[0].log_softmax(-1).detach(),
            log_target=True,
            reduction="batchmean",
        ),
        model.old.weight,
    )[0]
    start = model.old.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with memory.protect(optimizer):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert model.old.weight.grad is None
    assert torch.allclose(start - model.old.weight, expected, atol=1e-6)


def test_a_step_that_raises_leaves_the_gradients_of_the_loss() -> None:
    model, x, y = problem()
    memory = limpet.Distillation(model)
    memory.consolidate()

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("no")

    optimizer = Failing(model.parameters(), lr=0.1)
    F.cross_entropy(model(x[0]), y[0]).backward()
    gradients = [p.grad for p in model.parameters()]
    with pytest.raises(RuntimeError, match="no"), memory.protect(optimizer):
        model(x[0])
        optimizer.step()
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    with memory.protect(torch.optim.SGD(model.parameters(), lr=0.1)):  # it can protect again
        pass


def test_a_scaled_gradient_gets_a_scaled_divergence() -> None:
    model, x, y = problem()
    model.float()
    by_hand = copy.deepcopy(model)
    rows = x[0].float()
    memory = limpet.Distillation(model)
    memory.consolidate()
    with torch.no_grad():
        for network in (model, by_hand):
            network[0].weight += 0.2
    before = memory._before
    scale = torch.tensor(8.0)
    fused = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    plain = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    (F.cross_entropy(by_hand(rows), y[0]) + kl(before.model, by_hand, rows)).backward()  # type: ignore[union-attr]
    plain.step()
    with memory.protect(fused) as protection:
        (F.cross_entropy(model(rows), y[0]) * scale).backward()
        fused.grad_scale, fused.found_inf = scale, torch.tensor(0.0)  # type: ignore[attr-defined]
        fused.step()
        fused.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
        fused.step()
    assert same(model, by_hand, 1e-6)
    assert protection.steps == 1 and protection.skipped == 1


def test_the_pass_runs_in_the_autocast_state_of_the_users() -> None:
    model, x, y = problem()
    model.float()
    seen: list[tuple[bool, bool]] = []
    model[2].register_forward_hook(lambda _, __, out: seen.append((out.dtype == torch.bfloat16, model.training)))
    memory = limpet.Distillation(model)
    memory.consolidate()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memory.protect(optimizer):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x[0].float()), y[0])
        loss.backward()
        optimizer.step()
    # the user's pass, that of the copy (whose hook is the same function), and ours
    assert [half for half, _ in seen] == [True, True, True]
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in model.parameters())


def test_padding_does_not_count() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.head(self.embed(input_ids))

    torch.manual_seed(0)
    model = Tagger()
    memory, ids = limpet.Distillation(model), torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0]])
    memory.consolidate([{"input_ids": ids, "attention_mask": (ids > 0).long()}])
    with torch.no_grad():
        model.embed.weight[1:] += 0.5
    before = memory._before.model  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with memory.protect(optimizer) as protection:
        model(input_ids=ids, attention_mask=(ids > 0).long()).sum().backward()
        optimizer.step()
    each = F.kl_div(model(ids).log_softmax(-1), before(ids).log_softmax(-1), log_target=True, reduction="none").sum(-1)
    expected = float(each[ids > 0].detach().mean())
    assert protection.summary().divergence == pytest.approx(expected, rel=1e-5) and expected > 0.01
    assert float(memory.drift()) == pytest.approx(expected, rel=1e-5)


def test_what_is_not_possible_is_rejected() -> None:
    model, x, _ = problem()
    memory = limpet.Distillation(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LimpetError, match="consolidate"):
        memory.protect(optimizer)
    memory.consolidate()
    with pytest.raises(LimpetError, match="held-out"):
        memory.drift()
    with pytest.raises(UnsupportedError, match="mode='proximal'"):
        memory.protect(optimizer, mode="proximal")
    with pytest.raises(UnsupportedError, match="budget"):
        memory.protect(optimizer, budget=0.1)
    with pytest.raises(ValueError, match="every"):
        memory.protect(optimizer, every=0)
    with pytest.raises(UnsupportedError, match="LBFGS"):
        memory.protect(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UnsupportedError, match="no parameter"), memory.protect(torch.optim.SGD([x], lr=0.1)):
        pass
    with pytest.raises(UnsupportedError, match="stored"):
        limpet.Distillation(model, reference="stored")
    with pytest.raises(ValueError, match="reference"):
        limpet.Distillation(model, reference="other")
    with pytest.raises(UnsupportedError, match="only adapters"):
        limpet.Distillation(model, reference="adapters").consolidate()
    with memory.protect(optimizer), pytest.raises(LimpetError, match="already protecting"):
        memory.consolidate()


def test_a_sharded_model_is_rejected_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = problem()
    memory = limpet.Distillation(model)
    memory.consolidate()
    monkeypatch.setattr("limpet.protection.output_protection.is_sharded", lambda _: True)
    with pytest.raises(UnsupportedError, match="DistributedDataParallel"):
        memory.protect(torch.optim.SGD(model.parameters(), lr=0.1))


def test_steps_without_a_call_of_the_model_are_warned_about() -> None:
    model, x, y = problem()
    memory = limpet.Distillation(model)
    memory.consolidate()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(LimpetWarning, match="never called"), memory.protect(optimizer) as protection:
        F.cross_entropy(model[2](model[1](model[0](x[0]))), y[0]).backward()
        optimizer.step()
    assert "never called" in str(protection.summary())
    with pytest.warns(LimpetWarning, match="never called"), memory.protect(optimizer), torch.no_grad():
        model[0].weight += 1


def test_a_new_head_without_a_forward_is_explained() -> None:
    model, x, y = problem()
    memory = limpet.Distillation(model)
    memory.consolidate()
    model[2] = nn.Linear(8, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x[0])
    with pytest.raises(UnsupportedError, match="forward="), memory.protect(optimizer):
        F.cross_entropy(model(x[0]), y[0] % 2).backward()
        optimizer.step()


def test_our_passes_are_not_recorded_as_the_users() -> None:
    model, x, y = problem()
    memory = limpet.Distillation(model)
    memory.consolidate()
    laplace = limpet.OnlineLaplace(model, strength="auto")
    laplace.consolidate([(x[0], y[0])], progress=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with memory.protect(optimizer), laplace.protect(optimizer, examples=6, mode="repair") as repairing:
        for step in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x[step]), y[step]).backward()
            optimizer.step()
    assert repairing._penalty_step._recorder.seen == 3  # type: ignore[attr-defined]


def test_what_is_not_finite_is_not_added_and_warned_about() -> None:
    """Old rows may overflow in half precision where the loss of the new ones does not, which GradScaler cannot see."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Tokens()
    model.embedding.weight.data[19] = 6e4
    plain = copy.deepcopy(model)
    memory = limpet.SelfRehearsal(model, forward=lambda model, batch: (model(batch), None))
    memory.consolidate([torch.full((8, 8), 19)], held_out=0, progress=False)
    for network in (model, plain):
        network.head.weight.data.mul_(3.0)
    ids = torch.randint(0, 18, (4, 8))

    def train(network: nn.Module) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(network(ids).flatten(0, 1), ids.flatten())
        loss.backward()

    optimizers = [torch.optim.AdamW(network.parameters(), lr=0.01) for network in (model, plain)]
    with pytest.warns(LimpetWarning, match="inf or nan in 2 of 2 comparisons"), memory.protect(optimizers[0]) as held:
        for _ in range(2):
            for network, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                train(network)
                optimizer.step()
    assert same(model, plain, 1e-7) and "inf or nan" in str(held.summary())


def test_an_error_while_drift_is_measured_ends_the_protection() -> None:
    model, x, y = problem()
    memory = limpet.Distillation(model)
    memory.consolidate([(x[0], None)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="if the model has a new head"), memory.protect(optimizer):
        F.cross_entropy(model(x[0]), y[0]).backward()
        optimizer.step()
        model[2] = nn.Linear(8, 4).double()
    assert memory.state_dict()["metadata"] and memory._protection is None
    memory.protect(torch.optim.SGD(model.parameters(), lr=0.1))  # it can begin again


def test_the_copy_follows_the_dtype_of_the_model() -> None:
    model, x, y = problem()
    memory = limpet.Distillation(model)
    memory.consolidate()
    model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memory.protect(optimizer) as protection:
        F.cross_entropy(model(x[0].bfloat16()).float(), y[0]).backward()
        optimizer.step()
    assert protection.penalised == 1 and abs(protection.summary().divergence or 0.0) < 1e-3


def test_a_compiled_forward_does_not_make_the_copy_train() -> None:
    model, x, y = problem()
    before = copy.deepcopy(model)
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    memory = limpet.Distillation(model, weight=0.1)
    memory.consolidate()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with memory.protect(optimizer) as protection:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x[0]), y[0]).backward()
            last = kl(before, model, x[0]).detach()
            optimizer.step()
    assert protection.summary().divergence == pytest.approx(float(last), rel=1e-6) and last > 1e-3


@pytest.mark.skipif(not SUPPORTED, reason="this torch cannot register a backend from Python")
def test_the_copy_follows_the_device_of_the_model() -> None:
    model, x, y = problem()
    before, inputs, targets = copy.deepcopy(model).float(), x.float(), y
    model.float()
    memory = limpet.Distillation(model)
    memory.consolidate()
    with own_device():
        model.to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with memory.protect(optimizer) as protection:
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[0].to(DEVICE)), targets[0].to(DEVICE)).backward()
                last = {name: p.detach().cpu() for name, p in model.named_parameters()}
                optimizer.step()
        found = protection.summary().divergence
    now = copy.deepcopy(before)
    now.load_state_dict(last)
    expected = float(kl(before, now, inputs[0]).detach())
    assert found == pytest.approx(expected, rel=1e-4) and expected > 1e-3


class Encoder(nn.Module):
    """Its outputs at padded positions are zero on the path that torch takes in eval mode, and not in training."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


def test_the_reference_takes_the_path_of_training() -> None:
    torch.manual_seed(0)
    model, x = Encoder(), torch.randn(4, 6, 8)
    padding = torch.arange(6).expand(4, 6) >= torch.tensor([[6], [4], [3], [2]])
    memory = limpet.Distillation(model)
    memory.consolidate()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    with memory.protect(optimizer) as protection:
        model(x, padding).sum().backward()
        optimizer.step()
    assert abs(protection.summary().divergence) < 1e-6
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_forecast_in_the_block_is_not_recorded() -> None:
    model, x, y = problem()
    memory = limpet.Distillation(model)
    memory.consolidate()
    laplace = limpet.OnlineLaplace(model, strength="auto", prior_mean="initial")
    laplace.consolidate([(x[0], y[0])], progress=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memory.protect(optimizer) as protection:
        F.cross_entropy(model(x[1]), y[1]).backward()
        limpet.OnlineLaplace(model, strength="auto").consolidate([(x[2], y[2])], progress=False)
        assert len(protection._inputs.batches) == 1
        laplace.forecast([(x[2], y[2])], curvature="fresh")
        assert len(protection._inputs.batches) == 1

"""Calls to a memory leave the model and the random states bit-identical."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import limpet
import networks


class Busy(nn.Module):
    """Everything that a pass could disturb: dropout, batch norm, a buffer counted up in forward, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.last = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.calls = self.calls.clone()  # replaced as well as changed
        torch.rand(1)
        random.random()
        np.random.rand()
        return self.last(self.frozen(self.dropout(networks.pool(torch.relu_(self.norm(self.conv(x)))))))


def everything(model: nn.Module) -> dict[str, Any]:
    """All that must stay, by value."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name}.training"] = module.training
        for attribute in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs"):
            found[f"{name}.{attribute}"] = list(getattr(module, attribute).items())
        found[f"{name}.attributes"] = sorted(module.__dict__)
        for buffer_name, buffer in module._buffers.items():
            found[f"{name}.{buffer_name}"] = (id(buffer), None if buffer is None else buffer.clone())
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name] = (id(parameter), parameter.detach().clone(), parameter.requires_grad, id(gradient))
        found[f"{name}.grad"] = None if gradient is None else gradient.clone()
    found["torch"] = torch.get_rng_state()
    found["python"] = random.getstate()
    found["numpy"] = np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def check(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    assert [key for key in before if not same(before[key], after[key])] == []


def busy() -> tuple[nn.Module, Any, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Busy()
    model.train()
    model.frozen.eval()  # a mixture of modes
    model.last.register_forward_hook(lambda *_: None)
    x, y = torch.randn(12, 2, 5, 5), torch.randint(0, 3, (12,))
    nn.functional.cross_entropy(model(x), y).backward()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4, shuffle=True)
    return model, loader, x, y


METHODS: list[Callable[[nn.Module], Any]] = [
    limpet.OnlineLaplace,
    limpet.PerTaskLaplace,
    limpet.ApproximateLaplace,
    lambda model: limpet.OnlineLaplace(model, structure="diagonal", fisher="sampled"),
    lambda model: limpet.OnlineLaplace(model, structure="dense", fisher="empirical"),
]


@pytest.mark.parametrize("method", METHODS)
def test_consolidate_penalty_report_save_and_the_rest(method: Callable[[nn.Module], Any], tmp_path: Any) -> None:
    model, loader, x, _ = busy()
    before = everything(model)
    memory = method(model)
    memory.consolidate(loader)
    check(before, everything(model))
    memory.penalty()
    str(memory.report())
    repr(memory)
    memory.forecast()
    memory.save(tmp_path / "memory.safetensors")
    limpet.load(tmp_path / "memory.safetensors", model)
    memory.predictive(x, link_approximation="sampled", draws=2)
    check(before, everything(model))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_also_when_the_pass_is_interrupted(error: type[BaseException]) -> None:
    model, loader, _, _ = busy()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate(loader)
    before, held = everything(model), dict(memory.posterior.held)

    def half() -> Iterator[Any]:
        for i, batch in enumerate(loader):
            if i == 1:
                raise error
            yield batch

    with pytest.raises(error):
        memory.consolidate(half())
    check(before, everything(model))
    assert memory.tasks == 1 and all(memory.posterior.held[name] is held[name] for name in held)

    def fails(module: nn.Module, batch: Any) -> Any:
        module(batch[0])
        raise error

    with pytest.raises(error):
        memory.consolidate(loader, forward=fails)
    check(before, everything(model))


def test_also_for_layers_without_a_class() -> None:
    model, x, y = networks.build("lstm")
    model.train()
    before = everything(model)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, y)])
    check(before, everything(model))
    calls = 0

    def interrupted(module: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:  # in the middle of the examples, one after another
            raise KeyboardInterrupt
        return module(batch[0]), batch[1]

    with pytest.raises(KeyboardInterrupt):
        memory.consolidate([(x, y)], forward=interrupted)
    check(before, everything(model))
    assert memory.tasks == 1


def test_also_for_synaptic_intelligence(tmp_path: Any) -> None:
    model, _, x, y = busy()
    memory = limpet.SynapticIntelligence(model, prior_precision=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memory.protect(optimizer, examples=12):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    before = everything(model)
    memory.consolidate()
    memory.penalty()
    str(memory.report())
    memory.forecast()
    memory.save(tmp_path / "memory.safetensors")
    limpet.load(tmp_path / "memory.safetensors", model)
    check(before, everything(model))


def test_also_the_generator_of_a_loader() -> None:
    model, x, y = networks.build("linear")
    generator = torch.Generator().manual_seed(3)
    dataset = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True, generator=generator)
    before = generator.get_state()
    limpet.OnlineLaplace(model).consolidate(loader)
    assert torch.equal(generator.get_state(), before)


def test_hooks_on_gradients_stay_and_are_not_measured() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(40, 3), torch.randint(0, 2, (40,))
    traces = []
    for _ in range(2):
        memory = limpet.OnlineLaplace(model, prior_precision=0.0)
        memory.consolidate([(x, y)])
        assert list(memory.posterior.held) == ["model"]
        traces.append(float(memory.posterior.held["model"].precision.trace()))
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    assert traces[0] == traces[1] > 1
    nn.functional.cross_entropy(model(x), 1 - y).backward()
    assert model.weight.grad is not None and 0 < float(model.weight.grad.abs().max()) < 1.001e-3

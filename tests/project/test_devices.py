"""On every device there is, the same memory as on the CPU; on a device of our own, without a copy too many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import limpet
from networks import NETWORKS, TiedHead, build
from own_device import DEVICE, SUPPORTED, Copies, own_device
from reference import close

STRUCTURES = ["diagonal", "kronecker", "kronecker-sum", "dense"]
DEVICES = [f"cuda:{i}" for i in range(torch.cuda.device_count())] + [str(DEVICE)] * SUPPORTED
needs_own = pytest.mark.skipif(not SUPPORTED, reason="this torch cannot register a backend from Python")
Found = dict[str, Tensor]


def slow(*values: Any) -> list[Any]:
    """Values of a parameter whose tests are left out of the quick run."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture(autouse=True)
def copies() -> Iterator[Copies]:
    with own_device() as counted:
        yield counted


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def data(place: str | torch.device = "cpu", seed: int = 1, likelihood: str = "categorical") -> list[Any]:
    """Two batches of four vectors."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)
    target = {"categorical": y.argmax(1), "bernoulli": (y > 0).float(), "gaussian": y}[likelihood]
    return [(a.to(place), b.to(place)) for a, b in zip(x.split(4), target.split(4), strict=True)]


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "categorical": nn.functional.cross_entropy,
    "bernoulli": nn.functional.binary_cross_entropy_with_logits,
    "gaussian": nn.functional.mse_loss,
}


def train(model: nn.Module, batches: list[Any], optimizer: Any, loss: Any = nn.functional.cross_entropy) -> None:
    device = next(model.parameters()).device
    for x, y in batches:
        optimizer.zero_grad()
        loss(model(x.to(device)), y.to(device)).backward()
        optimizer.step()


def agree(one: Found, other: Found) -> None:
    """Equal to 1e-4: numbers one by one, tensors in the norm."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.device.type == "cpu"
        assert value.isfinite().all(), name
        if value.dtype == torch.float64 and value.dim() == 1:
            assert value.tolist() == pytest.approx(other[name].tolist(), rel=1e-4, abs=1e-7), name
        else:
            close(value, other[name], 1e-4)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


def numbers(*values: float) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("structure", "offload"),
    [("diagonal", False), ("kronecker", False), ("kronecker", True), ("kronecker-sum", False), ("dense", False)],
)
@pytest.mark.parametrize("method", [limpet.OnlineLaplace, limpet.PerTaskLaplace])
def test_devices_follow_the_model(
    device: str, structure: str, offload: bool, method: type[limpet.OnlineLaplace], tmp_path: Path
) -> None:
    found = []
    for place in ("cpu", device):
        model = network().to(place)
        memory = method(model, structure=structure, offload=offload)
        x, y = torch.randn(8, 2, 5, 5, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for _ in range(2):
            with memory.protect(optimizer, examples=8, every=2):
                train(model, [(x, y)] * 3, optimizer)
            memory.consolidate([(x, y)])
            adam = torch.optim.Adam(model.parameters(), lr=1e-4)
            with memory.protect(adam, examples=8, mode="gradient"):
                adam.step()
        assert all(held.mean.device.type == torch.device(place).type for held in memory.posterior.held.values())
        memory.save(tmp_path / "m.safetensors")
        again = limpet.load(tmp_path / "m.safetensors", model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        assert torch.equal(again.penalty(), memory.penalty())
        found.append(memory.penalty().detach().cpu())
    close(found[1], found[0], 1e-4)


def protected_steps(place: str, given: str, structure: str, mode: str, every: int, budget: float | None) -> Found:
    model = small().to(place)
    memory = limpet.OnlineLaplace(model, structure=structure)
    memory.consolidate(data(given), progress=False)
    kind = torch.optim.SGD if mode == "proximal" else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=0.02)
    with memory.protect(optimizer, examples=8, mode=mode, every=every, budget=budget) as protection:
        train(model, data(seed=2) * 3, optimizer)
    return {"weights": weights(model), "penalty": numbers(protection.penalty(), protection.factor)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("structure", ["kronecker", *slow("diagonal", "kronecker-sum", "dense")])
@pytest.mark.parametrize("mode", ["proximal", "gradient"])
@pytest.mark.parametrize(
    ("every", "budget"),
    [(4, None), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, None), (1, 0.01), (4, 0.01)))],
)
def test_protected_steps(device: str, structure: str, mode: str, every: int, budget: float | None) -> None:
    if budget is not None and structure == "kronecker-sum":
        pytest.skip("a Kronecker sum has no budget")
    wanted = protected_steps("cpu", "cpu", structure, mode, every, budget)
    agree(protected_steps(device, device, structure, mode, every, budget), wanted)


def measured(place: str, given: str, likelihood: str, options: dict[str, Any], path: Path) -> Found:
    """What a memory knows after two tasks, and after loading."""
    model = small().to(place)
    memory = limpet.OnlineLaplace(model, likelihood=likelihood, **options)
    counted = memory.count(data(given, likelihood=likelihood))
    memory.consolidate(data(given, likelihood=likelihood), examples=counted, progress=False, probe=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memory.protect(optimizer, examples=8):
        train(model, data(seed=2, likelihood=likelihood), optimizer, LOSSES[likelihood])
    forecast, drift = memory.forecast(), memory.drift(blocks=True)
    found = {"forecast": numbers(forecast, *forecast.blocks.values()), "drift": numbers(drift, drift.standard_error)}
    memory.consolidate(data(given, 2, likelihood), limit=6, progress=False)
    assert "protected" in str(memory.report())
    memory.save(path / "memory.safetensors")
    again = limpet.load(path / "memory.safetensors", model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    assert torch.equal(again.penalty(), memory.penalty())
    found["penalty"] = numbers(memory.penalty().item(), again.drift(), again.forecast())
    x = data(given)[0][0]
    for kind in ("probit", "linearised", "sampled"):
        if kind != "probit" or likelihood != "gaussian":
            drawn = torch.Generator(place).manual_seed(3)
            prediction = memory.predictive(x, link_approximation=kind, generator=drawn)
            found[kind] = prediction.cpu() if isinstance(prediction, Tensor) else prediction.mean.cpu()
    outputs = memory.output_distribution(x, prior_precision="evidence")
    return found | {"outputs": outputs.mean.cpu(), "covariance": outputs.covariance.cpu()}


MEASURED: dict[str, tuple[str, dict[str, Any]]] = {
    "categorical": ("categorical", {}),
    "bernoulli": ("bernoulli", {}),
    "gaussian": ("gaussian", {}),
    "exact, diagonal": ("categorical", {"fisher": "exact", "structure": "diagonal"}),
    "sampled": ("categorical", {"fisher": "sampled", "draws": 2}),
    "sampled bernoulli": ("bernoulli", {"fisher": "sampled"}),
    "sampled gaussian": ("gaussian", {"fisher": "sampled"}),
    "empirical, dense": ("categorical", {"fisher": "empirical", "structure": "dense"}),
    "automatic strength": ("categorical", {"strength": "auto"}),
    "smoothing": ("categorical", {"smoothing": 0.1}),
    "sum, smoothing, automatic": ("categorical", {"structure": "kronecker-sum", "smoothing": 0.1, "strength": "auto"}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", ["cpu", *slow("device")])
@pytest.mark.parametrize("case", ["sampled", *slow(*(case for case in MEASURED if case != "sampled"))])
def test_what_a_memory_measures(device: str, given: str, case: str, tmp_path: Path) -> None:
    wanted = measured("cpu", "cpu", *MEASURED[case], tmp_path)
    agree(measured(device, device if given == "device" else "cpu", *MEASURED[case], tmp_path), wanted)


def repaired(place: str, given: str, structure: str, options: dict[str, Any]) -> Found:
    model = small().to(place)
    memory = limpet.OnlineLaplace(model, structure=structure)
    memory.consolidate(data(given), progress=False, probe=8)
    train(model, data(seed=2) * 4, torch.optim.SGD(model.parameters(), lr=0.5))
    repair = limpet.repair(model, memory, data(given, seed=2), progress=False, **options)
    return {"weights": weights(model), "drift": numbers(memory.drift()), "strength": numbers(repair.strength)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", ["cpu", *slow("device")])
@pytest.mark.parametrize("structure", ["kronecker", *slow("diagonal", "kronecker-sum", "dense")])
@pytest.mark.parametrize("options", [{"tolerance": 0.05}, *slow({"strength": 0.7}, {"budget": 0.01})], ids=str)
def test_repair(device: str, given: str, structure: str, options: dict[str, float]) -> None:
    wanted = repaired("cpu", "cpu", structure, options)
    agree(repaired(device, device if given == "device" else "cpu", structure, options), wanted)


def with_adapters(place: str, given: str = "cpu", **options: Any) -> tuple[limpet.OnlineLaplace, nn.Module]:
    """A memory of a model, and the model with adapters."""
    peft = pytest.importorskip("peft")
    model = small().to(place)
    memory = limpet.OnlineLaplace(model, **options)
    memory.consolidate(data(given), progress=False, probe=8)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0", "2"], init_lora_weights=False)
    return memory, peft.get_peft_model(model, config)


def low_rank(place: str, given: str, structure: str, every: int, budget: float | None) -> Found:
    memory, model = with_adapters(place, given, structure=structure)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with memory.protect(optimizer, examples=8, every=every, budget=budget):
        train(model, data(seed=2) * 3, optimizer)
    found = {"weights": weights(model), "known": numbers(memory.forecast(), memory.drift(), memory.penalty().item())}
    limpet.repair(model, memory, data(given, seed=2), strength=0.5, progress=False)
    return found | {"repaired": numbers(memory.forecast(), memory.drift())}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("structure", "every", "budget"),
    [
        ("kronecker", 1, None),
        *((structure, 4, None) for structure in STRUCTURES),
        *((structure, 1, 0.05) for structure in ("diagonal", "kronecker", "dense")),
    ],
)
def test_adapters(device: str, structure: str, every: int, budget: float | None) -> None:
    agree(low_rank(device, device, structure, every, budget), low_rank("cpu", "cpu", structure, every, budget))


def protected_copies(copies: Copies, prepared: tuple[Any, Any, nn.Module], options: dict[str, Any] | None) -> Copies:
    """The copies of eight steps of an optimizer, after a first one, protected or not."""
    memory, kind, model = prepared
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.01)
    batches, counted = data(DEVICE, seed=2), Copies()
    with nullcontext() if options is None else memory.protect(optimizer, examples=8, **options):
        for step in range(9):
            x, y = batches[step % 2]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            before = replace(copies)
            optimizer.step()
            if step:
                counted.to_host += copies.to_host - before.to_host
                counted.to_device += copies.to_device - before.to_device
    return counted


@needs_own
@pytest.mark.parametrize("structure", ["kronecker", *slow("diagonal", "kronecker-sum", "dense")])
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("how", ["gradient", "proximal", *slow("adapters")])
def test_a_protected_step_copies_nothing(copies: Copies, structure: str, every: int, how: str) -> None:
    """No copy to or from the host beyond those of the optimizer, so the host never waits for the device.

    The exceptions are known: the proximal step of a Kronecker sum is solved by conjugate gradients, which the host
    stops; a budget is solved for on the host; offloaded bases are copied to the device; and a fused optimizer under
    GradScaler is asked whether it skips the step.
    """
    kind = torch.optim.SGD if how == "proximal" else torch.optim.Adam
    if how == "adapters":
        memory, model = with_adapters(str(DEVICE), structure=structure)
    else:
        model = small().to(DEVICE)
        memory = limpet.OnlineLaplace(model, structure=structure)
        memory.consolidate(data(), progress=False)
    plain = protected_copies(copies, (memory, kind, model), None)
    mode = "proximal" if how == "proximal" else "gradient"
    found = protected_copies(copies, (memory, kind, model), {"every": every, "mode": mode})
    if mode == "proximal" and structure == "kronecker-sum":
        assert found.to_host > 0
        found.to_host = 0
    assert found == plain == Copies()


@needs_own
@pytest.mark.parametrize("kind", [torch.optim.SGD, *slow(torch.optim.Adam)])
def test_a_step_with_synaptic_intelligence_copies_nothing(copies: Copies, kind: type[torch.optim.Optimizer]) -> None:
    model = small().to(DEVICE)
    memory = limpet.SynapticIntelligence(model)
    protected_copies(copies, (memory, kind, model), {})
    memory.consolidate(data(), progress=False)
    assert protected_copies(copies, (memory, kind, model), {}) == Copies()


def other_methods(place: str, given: str, method: Any) -> Found:
    model = small().to(place)
    memory = method(model)
    for seed in (1, 2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with memory.protect(optimizer, examples=8):
            train(model, data(seed=seed) * 2, optimizer)
        earlier = {"earlier": [data(given)] * memory.tasks} if method is limpet.ApproximateLaplace else {}
        memory.consolidate(data(given, seed), progress=False, **earlier)
    train(model, data(seed=3), torch.optim.SGD(model.parameters(), lr=0.1))
    return {"weights": weights(model), "known": numbers(memory.penalty().item(), memory.forecast())}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", [limpet.SynapticIntelligence, limpet.ApproximateLaplace])
def test_the_other_methods(device: str, method: Any) -> None:
    agree(other_methods(device, device, method), other_methods("cpu", "cpu", method))


def resumed(place: str, given: str, fisher: str, path: Path) -> Found:
    """A pass that is interrupted after its first batch, and resumed."""
    model = small().to(place)
    memory = limpet.OnlineLaplace(model, fisher=fisher)

    def interrupted() -> Iterator[Any]:
        yield data(given)[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        memory.consolidate(interrupted(), examples=8, checkpoint=path, progress=False)
    memory.consolidate(data(given), examples=8, checkpoint=path, progress=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    return {"penalty": numbers(memory.penalty().item())}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fisher", ["sampled", *slow("exact")])
def test_a_pass_with_a_checkpoint(device: str, fisher: str, tmp_path: Path) -> None:
    wanted = resumed("cpu", "cpu", fisher, tmp_path / "cpu")
    agree(resumed(device, device, fisher, tmp_path / "device"), wanted)


def layers(place: str, given: str, name: str, structure: str) -> Found:
    model, x, y = build(name)
    model, batches = model.to(place), [(x[:3].to(given), y[:3].to(given)), (x[3:].to(given), y[3:].to(given))]
    memory = limpet.OnlineLaplace(model, structure=structure)
    memory.consolidate(batches, progress=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with memory.protect(optimizer, examples=6, mode="gradient"):
        train(model, batches, optimizer)
    # not the forecast itself: the loss curve is measured at random weights drawn in an eigenbasis, which is not unique
    return {"weights": weights(model), "known": numbers(memory.penalty().item(), memory.forecast().quadratic)}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in ("embedding sparse", "lstm")])
def test_layers(device: str, name: str, structure: str) -> None:
    agree(layers(device, "cpu", name, structure), layers("cpu", "cpu", name, structure))


def language(place: str, given: str) -> Found:
    """A language model in small, with padding and ignored labels."""
    torch.manual_seed(0)
    model = TiedHead().to(place)
    tokens = torch.randint(0, 6, (6, 5), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[:, -2:] = -100
    batches = [(tokens.to(given), labels.to(given))]
    memory = limpet.OnlineLaplace(model)
    counted = memory.count(batches)
    memory.consolidate(batches, examples=counted, progress=False, probe=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    return {"known": numbers(counted, memory.penalty().item(), memory.forecast(), memory.drift())}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", ["cpu", *slow("device")])
def test_language_models(device: str, given: str) -> None:
    agree(language(device, device if given == "device" else "cpu"), language("cpu", "cpu"))


@needs_own
def test_mixing_devices_is_an_error() -> None:
    """The device itself."""
    x = torch.ones(2, 3, device=DEVICE)
    assert (x * torch.tensor(2.0)).sum().item() == 12
    for mixed in (lambda: x + torch.ones(3), lambda: torch.ones(4, 2) @ x, lambda: torch.ones(()).add_(x[0, 0])):
        with pytest.raises(RuntimeError, match=r"same device|output"):
            mixed()
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.randn(3, device=DEVICE, generator=torch.Generator())
    with pytest.raises(TypeError, match="convert own:0"):
        x.numpy()

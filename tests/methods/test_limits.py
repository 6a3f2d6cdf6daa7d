"""Strengths at the limit of the number format, and hostile states: what they may hold, and how far they can pull."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import limpet
from limpet.errors import CurvatureError, MemoryFileError
from limpet.io.state import State
from states import changed

STRUCTURES = ["kronecker", "diagonal", "kronecker-sum", "dense"]
LARGEST = 1e18


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batch(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 4, generator=generator).to(dtype), torch.randint(0, 3, (16,), generator=generator)


def trained(model: nn.Module, memory: limpet.Memory, mode: str, steps: int = 3, **options: Any) -> State:
    """Train under protection, and return the state of the memory during training."""
    parameters = list(model.parameters())
    kinds: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "proximal": lambda: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        "gradient": lambda: torch.optim.Adam(parameters, lr=0.01),
    }
    optimizer = kinds[mode]()
    with memory.protect(optimizer, examples=16, mode=mode, **options):
        for i in range(steps):
            x, y = batch(10 + i, parameters[0].dtype)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return memory.state_dict()


# --- strengths -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [LARGEST, 1e9])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_largest_strengths_work(structure: str, strength: float, tmp_path: Path) -> None:
    for prior in (0.0, 1.0):
        model = network()
        memory = limpet.OnlineLaplace(model, strength=strength, structure=structure, prior_precision=prior)
        for seed in range(2):
            memory.consolidate([batch(seed)], progress=False)
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        assert math.isfinite(memory.penalty().item()) and math.isfinite(float(memory.forecast()))
        for mode in ("proximal", "gradient"):
            trained(model, memory, mode)
            assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
        memory.save(tmp_path / "m.safetensors")
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
        assert limpet.load(tmp_path / "m.safetensors", model).penalty().item() == 0.0


@pytest.mark.parametrize("strength", [1.01 * LARGEST, 1e30, 1e38, 1e300])
def test_larger_strengths_are_rejected_by_name(strength: float) -> None:
    with pytest.raises(ValueError, match=r"^strength must be at most 1e\+18, not .*freeze them"):
        limpet.OnlineLaplace(network(), strength=strength)
    with pytest.raises(ValueError, match=r"^prior_precision must be at most"):
        limpet.OnlineLaplace(network(), prior_precision=strength)
    with pytest.raises(ValueError, match=r"^strength must be at most"):
        limpet.SynapticIntelligence(network(), strength=strength)
    memory = limpet.OnlineLaplace(network())
    with pytest.raises(ValueError, match=r"^strength must be at most"):
        memory.strength = strength
    assert memory.strength == 1.0
    state = changed(memory.state_dict(), settings={"strength": strength})
    with pytest.raises(MemoryFileError, match="strength must be at most"):
        limpet.OnlineLaplace(network()).load_state_dict(state)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_curvature_that_overflows_with_its_strength_names_both(structure: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    memory = limpet.OnlineLaplace(model, likelihood="gaussian", strength=LARGEST, structure=structure)
    x, y = batch(0)[0], torch.zeros(16, 3)
    memory.consolidate([(x, y)], progress=False)
    before = memory.state_dict()
    with pytest.raises(CurvatureError, match=r"curvature of 0 times strength 1e\+18 is too large for torch.float32"):
        memory.consolidate([(1e12 * x, y)], progress=False)
    after = memory.state_dict()
    assert after["metadata"] == before["metadata"]
    assert all(torch.equal(after["tensors"][name], tensor) for name, tensor in before["tensors"].items())


# --- hostile states ----------------------------------------------------------------------------------------------


def filled(method: Any = limpet.OnlineLaplace, **options: Any) -> tuple[nn.Sequential, Any]:
    model = network()
    memory = method(model, **options)
    for seed in range(2):
        memory.consolidate([batch(seed)], progress=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
    return model, memory


def with_tensor(state: State, name: str, change: Callable[[Tensor], Tensor]) -> State:
    found = changed(state)
    return {
        "metadata": found["metadata"],
        "tensors": {**found["tensors"], name: change(found["tensors"][name].clone())},
    }


def first_entry(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def rejected(memory: Any, state: State, told: str) -> None:
    fresh = type(memory)(
        memory.model, **({} if isinstance(memory, limpet.SynapticIntelligence) else {"structure": memory.structure})
    )
    before = fresh.state_dict()["metadata"]
    with pytest.raises(MemoryFileError, match=told):
        fresh.load_state_dict(state)
    assert fresh.state_dict()["metadata"] == before


@pytest.mark.parametrize(
    ("structure", "name", "value", "told"),
    [
        ("kronecker", "0/mean", 1e38, "penalty overflows"),
        ("kronecker", "0/precision/eigenvalues", 1e38, "penalty overflows"),
        ("kronecker", "0/precision/eigenvalues", math.inf, "contains inf or nan"),
        ("kronecker", "0/precision/inputs.vectors", 2.0, r"0: the columns of inputs\.vectors are not orthonormal"),
        ("kronecker", "0/precision/outputs.vectors", -2.0, "not orthonormal"),
        ("kronecker", "0/precision/outputs.trace", -1e-3, r"0: outputs\.trace has negative"),
        ("diagonal", "0/precision/diagonal", -1e-30, "0: diagonal has negative"),
        ("diagonal", "0/precision/diagonal", 1e38, "penalty overflows"),
        ("dense", "0/precision/matrix", -1.0, "has negative"),
        ("dense", "0/precision/matrix", 1e38, "penalty overflows"),
        ("kronecker-sum", "0/precision/terms.0.inputs", 1e4, "do not add up"),
    ],
)
def test_hostile_numbers(structure: str, name: str, value: float, told: str) -> None:
    _, memory = filled(structure=structure)
    rejected(memory, with_tensor(memory.state_dict(), name, first_entry(value)), told)


def test_asymmetric_and_indefinite_matrices() -> None:
    _, memory = filled(structure="dense")
    state = memory.state_dict()

    def skewed(tensor: Tensor) -> Tensor:
        tensor[0, 1] += tensor.diagonal().max()
        return tensor

    def indefinite(tensor: Tensor) -> Tensor:
        tensor[0, 1] = tensor[1, 0] = 3 * tensor.diagonal().max()
        return tensor

    rejected(memory, with_tensor(state, "0/precision/matrix", skewed), "matrix is not symmetric")
    rejected(memory, with_tensor(state, "0/precision/matrix", indefinite), "matrix has negative eigenvalues")


def test_numbers_that_overflow_only_in_the_dtype_of_the_model() -> None:
    _, memory = filled()
    state = with_tensor(memory.state_dict(), "0/mean", lambda mean: mean.double().fill_(1e300))
    rejected(memory, state, "0/mean contains inf or nan")


@pytest.mark.parametrize("strength", [1e300, 1e38])
def test_a_hostile_strength_inside_a_block(strength: float) -> None:
    for structure in STRUCTURES:
        _, memory = filled(structure=structure)
        state = memory.state_dict()
        blocks = json.loads(state["metadata"])["blocks"]
        own = blocks[0]["precision"]
        hostile = {"strengths": [strength, 1.0]} if structure == "kronecker-sum" else {"strength": strength}
        for change in (hostile, {"prior": strength}):
            changed_block = {**blocks[0], "precision": {**own, **change}}
            rejected(memory, changed(state, blocks=[changed_block, *blocks[1:]]), "overflows|add up")


def test_a_linear_term_that_the_curvature_does_not_explain() -> None:
    _, memory = filled(limpet.PerTaskLaplace)
    state = memory.state_dict()
    limpet.PerTaskLaplace(memory.model).load_state_dict(state)
    rejected(memory, with_tensor(state, "0/slope", first_entry(1e9)), "0: the linear term is larger")


@pytest.mark.parametrize("mode", ["proximal", "gradient"])
def test_a_control_variate_that_the_curvature_does_not_explain(mode: str) -> None:
    model, memory = filled(limpet.PerTaskLaplace)
    state = trained(model, memory, mode, every=2)
    limpet.PerTaskLaplace(model).load_state_dict(state)
    assert float(state["tensors"]["force/0.weight"].norm()) > 0
    for value, told in ((math.nan, "inf or nan"), (math.inf, "inf or nan"), (1e9, "force/0.weight is larger")):
        rejected(memory, with_tensor(state, "force/0.weight", first_entry(value)), told)


def test_a_budget_of_a_hostile_state() -> None:
    model, memory = filled()
    state = trained(model, memory, "gradient", budget=1e-3, every=2)
    limpet.OnlineLaplace(model).load_state_dict(state)
    running = json.loads(state["metadata"])["proximal"]
    rejected(memory, changed(state, proximal={**running, "multiplier": 300.0}), "multiplier of the budget is out of")
    rejected(memory, changed(state, proximal={**running, "mode": "other"}), "mode must be proximal or gradient")
    rejected(memory, with_tensor(state, "force/0.weight", first_entry(1e30)), "force/0.weight is larger")


def test_residuals_of_half_precision_weights() -> None:
    model = network(torch.bfloat16)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([batch(0, torch.bfloat16)], progress=False)
    state = trained(model, memory, "proximal")
    limpet.OnlineLaplace(model).load_state_dict(state)
    names = [name for name in state["tensors"] if name.startswith("residual/")]
    assert names
    for value, told in ((math.nan, "inf or nan"), (1e3, f"{names[0]} is larger")):
        rejected(memory, with_tensor(state, names[0], first_entry(value)), told)


def test_the_path_of_synaptic_intelligence() -> None:
    model = network()
    memory = limpet.SynapticIntelligence(model)
    state = trained(model, memory, "gradient")
    limpet.SynapticIntelligence(model).load_state_dict(state)
    path, start = "extra/watch.path.0.weight", "extra/watch.start.0.weight"
    for name, value, told in (
        (path, math.nan, "inf or nan"),
        (start, math.inf, "inf or nan"),
        (path, 1e37, r"the path integral of 0\.weight is so large"),
    ):
        rejected(memory, with_tensor(state, name, first_entry(value)), told)
    rejected(memory, changed(state, settings={"watch": {"steps": -1, "examples": 16}}), "steps")
    memory.consolidate()
    state = memory.state_dict()
    rejected(memory, with_tensor(state, "0.weight/precision/diagonal", first_entry(-1.0)), "negative")


def test_probes() -> None:
    model = network()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([batch(0)], progress=False, probe=8)
    state = memory.state_dict()
    names = [name for name in state["tensors"] if name.startswith("extra/probe/")]
    assert len(names) == 2
    for name in names:
        for value in (math.nan, math.inf):
            rejected(memory, with_tensor(state, name, first_entry(value)), "the probe contains inf or nan")
    limpet.OnlineLaplace(model).load_state_dict(with_tensor(state, names[0], first_entry(-math.inf)))


def test_a_proximal_step_never_takes_the_weights_beyond_the_mean() -> None:
    """The bound of `limpet.methods.limits`: whatever the eigenvalues are, the distance from the mean does not grow."""
    _, memory = filled()
    for scale in (1.0, 1e6, 1e25):
        state = with_tensor(memory.state_dict(), "0/precision/eigenvalues", lambda values, s=scale: s * values)
        other = limpet.OnlineLaplace(network())
        other.load_state_dict(state)
        held = other.posterior.held["0"]
        d = torch.randn(held.mean.shape, generator=torch.Generator().manual_seed(0))
        for step in (1e-6, 1.0, 1e6):
            assert float(held.proximal(d, step).norm()) <= float(d.norm()) * (1 + 1e-5)


def test_a_mean_of_denormal_numbers(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1e-45)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(torch.randn(4, 2), torch.tensor([0, 1, 1, 0]))], progress=False)
    memory.save(tmp_path / "m.safetensors")
    assert limpet.load(tmp_path / "m.safetensors", model).tasks == 1

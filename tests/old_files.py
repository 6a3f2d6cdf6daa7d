"""Memory files of every format that was ever released: how they are made, and what they must say for ever.

    python tests/old_files.py       write the files of the present format, where there are none yet

Weights and data come from sines, not from a random generator, so that they are the same with every torch. A file is
never written again: what it says is kept beside it in `expected.json`, and `tests/methods/test_old_files.py` compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import limpet

DATA = Path(__file__).parent / "data"
STRUCTURES = ["diagonal", "kronecker", "kronecker-sum", "dense"]
METHODS: dict[str, Callable[..., Any]] = {
    "online-laplace": limpet.OnlineLaplace,
    "per-task-laplace": limpet.PerTaskLaplace,
    "approximate-laplace": limpet.ApproximateLaplace,
}


def sines(shift: float, *shape: int) -> Tensor:
    """Numbers between -1 and 1 that look like noise."""
    places = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(shift + 1.7 * places * (1 + 0.1 * places)).reshape(shape).float()


class Net(nn.Module):
    """Every kind of block: an embedding, groups, a norm, a linear layer with bias, and a parameter of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.groups = nn.Conv1d(4, 4, 2, groups=2)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.last = nn.Linear(4, 3)
        self.to_weights(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.groups(self.tokens(x).mT).mT.mean(1)
        return self.last(self.scale * torch.tanh(self.norm(h)))  # type: ignore[no-any-return]

    @torch.no_grad()
    def to_weights(self, shift: float) -> None:
        """The weights that a number stands for."""
        for number, parameter in enumerate(self.parameters()):
            parameter.copy_(0.6 * sines(shift + number, *parameter.shape))


class TwoReaders(Net):
    """Two layers with the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 3)
        self.to_weights(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.groups(self.tokens(x).mT).mT.mean(1)))
        return self.last(h) + self.other(h) ** 2  # type: ignore[no-any-return]


def task(number: int) -> list[tuple[Tensor, Tensor]]:
    """Twelve examples of five tokens."""
    tokens = (3 + 3 * sines(number, 12, 5)).long().clamp(0, 5)
    return [(tokens, (1.5 + 1.5 * sines(number + 0.5, 12)).long().clamp(0, 2))]


def laplace(method: str, structure: str, max_factor_size: int = 5, **options: Any) -> limpet.Memory:
    """Two tasks, of different strengths, so that the sums with and without them differ."""
    model = Net()
    memory = METHODS[method](
        model, structure=structure, strength=20.0, prior_precision=0.1, max_factor_size=max_factor_size, **options
    )
    for number in range(2):
        earlier = {"earlier": [task(0)]} if number and method == "approximate-laplace" else {}
        memory.consolidate(task(number), progress=False, **earlier)
        model.to_weights(0.5 + 0.02 * (number + 1))
        memory.strength = 30.0
    return memory  # type: ignore[no-any-return]


def synaptic_intelligence() -> limpet.Memory:
    """One task taken in, and the next in the middle."""
    model = Net()
    memory = limpet.SynapticIntelligence(model, strength=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        with memory.protect(optimizer, examples=12):
            train(model, optimizer, number)
        if not number:
            memory.consolidate()
    return memory


def protecting() -> limpet.Memory:
    """A memory that was kept while it protected, between two proximal maps."""
    memory = laplace("online-laplace", "kronecker")
    optimizer = torch.optim.SGD(memory.model.parameters(), lr=0.01, momentum=0.9)
    protection = memory.protect(optimizer, examples=12, every=4)
    protection.__enter__()
    train(memory.model, optimizer, 2)
    return memory


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Six steps."""
    ((x, y),) = task(number)
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


MADE: dict[str, Callable[[], limpet.Memory]] = {
    f"{method}-{structure}": lambda method=method, structure=structure: laplace(method, structure)  # type: ignore[misc]
    for method in METHODS
    for structure in STRUCTURES
}
MADE |= {"synaptic-intelligence": synaptic_intelligence, "online-laplace-kronecker-protecting": protecting}
MADE |= {
    f"online-laplace-{structure}-in-pieces": lambda structure=structure: laplace("online-laplace", structure, 2)  # type: ignore[misc]
    for structure in ("kronecker", "kronecker-sum")
}


MADE_2: dict[str, Callable[[], limpet.Memory]] = {
    f"{method}-rank-2{'' if dtype is None else '-' + dtype}": lambda method=method, dtype=dtype: laplace(  # type: ignore[misc]
        method, "kronecker", rank=2, storage_dtype=dtype
    )
    for method in METHODS
    for dtype in (None, "float16", "int8")
}


def one_task(model: Callable[[], nn.Module] = Net, **options: Any) -> limpet.Memory:
    """A memory of one task whose eigenvalues are a product, and which names the weights."""
    memory = limpet.OnlineLaplace(model(), strength=20.0, prior_precision=0.1, prior_mean="initial", rank=2, **options)
    memory.consolidate(task(0), progress=False)
    return memory


MADE_2 |= {"online-laplace-rank-2-one-task": one_task, "online-laplace-rank-2-base": one_task}
MADE_3: dict[str, Callable[[], limpet.Memory]] = {
    f"online-laplace-rank-2-same-input{'' if dtype is None else '-' + dtype}": lambda dtype=dtype: one_task(  # type: ignore[misc]
        TwoReaders, storage_dtype=dtype
    )
    for dtype in (None, "float16", "int8")
}
VERSIONS = {1: MADE, 2: MADE_2, 3: MADE_3}


def network_of(path: Path) -> Net:
    """The network that a file was made for."""
    return TwoReaders() if "same-input" in path.name else Net()


def says(path: Path) -> dict[str, Any]:
    """What a file says when it is loaded into a model at stated weights."""
    model = network_of(path)
    memory: Any = limpet.load(path, model)
    model.to_weights(1.5)
    forecast, running = memory.forecast(), memory._proximal_state
    return {
        "method": memory.method,
        "structure": memory.structure,
        "tasks": memory.tasks,
        "examples": memory.examples,
        "bytes": memory.nbytes,
        "penalty": memory.penalty().item(),
        "forecast": float(forecast),
        "blocks": forecast.blocks,
        "steps since the last proximal map": None if running is None else running.count % running.every,
    }


def go_on(path: Path) -> int:
    """Load a file, hold by it, take one more task in; the tasks it then has."""
    model = network_of(path)
    memory: Any = limpet.load(path, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with memory.protect(optimizer, examples=12, every=4):
        train(model, optimizer, 2)
    if memory.method == "synaptic-intelligence":
        memory.consolidate()
    else:
        more: dict[str, Any] = {"earlier": [task(0), task(1)]} if memory.method == "approximate-laplace" else {}
        memory.consolidate(task(2), progress=False, **more)
    return memory.tasks if torch.isfinite(memory.penalty()) else -1


def folder(version: int) -> Path:
    """Where the files of a format are."""
    return DATA / f"format-{version}"


def write() -> None:
    """Make what is not there yet."""
    for version, made in VERSIONS.items():
        folder(version).mkdir(parents=True, exist_ok=True)
        page = folder(version) / "expected.json"
        expected = json.loads(page.read_text()) if page.exists() else {}
        for name, make in made.items():
            path = folder(version) / f"{name}.safetensors"
            if path.exists():
                continue
            make().save(path, **({"base": "owner/model"} if name.endswith("-base") else {}))
            expected[name] = says(path)
            print(f"{path.name}: {path.stat().st_size:,} bytes, penalty {expected[name]['penalty']:.4f}")
        page.write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(write())

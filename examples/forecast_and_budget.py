"""How much is being forgotten, while it happens and without old data; and how to allow so much and no more.

python examples/forecast_and_budget.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import limpet


def task(seed: int, n: int = 2000) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten classes in ten of a hundred directions; every task has the coordinates in an order of its own."""
    g = torch.Generator().manual_seed(0)
    centres, y = torch.randn(10, 10, generator=g), torch.randint(0, 10, (n,), generator=g)
    z = 0.7 * centres[y] + 0.5 * torch.randn(n, 10, generator=g)
    x = z @ torch.randn(10, 100, generator=g) / 10**0.5 + 0.5 * torch.randn(n, 100, generator=g)
    return x[:, torch.randperm(100, generator=torch.Generator().manual_seed(seed))], y


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """One pass in batches of fifty."""
    for rows in torch.randperm(len(x)).split(50):
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


def learn(name: str, strength: float = 1.0, **how: float) -> None:
    """Learn an old task, then a new one; say what is foretold and what is true."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    (x, y), new = task(1), task(2)
    for _ in range(5):
        epoch(model, optimizer, x, y)
    memory = limpet.OnlineLaplace(model, prior_precision=0.0, strength=strength)
    memory.consolidate([(x, y)], progress=False)
    before = cross_entropy(model(x), y).item()  # to compare with: nothing else looks at the old data from here on
    with memory.protect(optimizer, examples=len(new[0]), **how):
        for number in range(5):
            epoch(model, optimizer, *new)
            print(f"  epoch {number + 1}: {memory.forecast()}")
    rise, right = cross_entropy(model(x), y).item() - before, (model(new[0]).argmax(1) == new[1]).float().mean().item()
    print(f"{name}: foretold {float(memory.forecast()):.3f}, true {rise:.3f}; new task {100 * right:.1f} %")


learn("not held", strength=0.0)
learn("held as the Fisher says")
learn("budget of 0.02 nats", budget=0.02)

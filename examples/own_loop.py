"""Five tasks, one after another, in a loop of your own: three more lines keep the first ones.

python examples/own_loop.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import limpet


def blobs(seed: int, n: int = 1000) -> TensorDataset:
    """Ten classes, a blob each, in places of the task's own."""
    g = torch.Generator().manual_seed(seed)
    centres, y = torch.randn(10, 50, generator=g), torch.randint(0, 10, (n,), generator=g)
    return TensorDataset(centres[y] + torch.randn(n, 50, generator=g), y)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, epochs: int = 5) -> None:
    """A training loop, as you have one: nothing in it knows of limpet."""
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def learn(tasks: list[TensorDataset], strength: float) -> list[float]:
    """Accuracy on every task after the last one, in percent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    memory = limpet.OnlineLaplace(model, strength=strength, prior_precision=0.0)  # 1
    for task in tasks:
        loader = DataLoader(task, batch_size=50, shuffle=True)
        with memory.protect(optimizer, examples=len(task)):  # 2: every optimizer.step() now also holds fast
            fit(model, optimizer, loader)
        memory.consolidate(loader, progress=False)  # 3: one pass, and the memory knows the task
    return [100 * float((model(t.tensors[0]).argmax(1) == t.tensors[1]).float().mean()) for t in tasks]


tasks = [blobs(seed) for seed in range(5)]
for name, strength in (("without a memory", 0.0), ("with a memory", 30.0)):
    kept = learn(tasks, strength)
    print(f"{name}: first task {kept[0]:.1f} %, mean of five {sum(kept) / len(kept):.1f} %")

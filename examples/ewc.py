"""Elastic weight consolidation is one line: per-task Laplace with a diagonal precision.

python examples/ewc.py
"""

import torch
from torch import nn

import limpet


def task(seed: int, n: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    """The same ten blobs with their coordinates in another order: permuted MNIST in small."""
    g = torch.Generator().manual_seed(0)
    centres, y = torch.randn(10, 50, generator=g), torch.randint(0, 10, (n,), generator=g)
    x = centres[y] + torch.randn(n, 50, generator=g)
    return x[:, torch.randperm(50, generator=torch.Generator().manual_seed(seed))], y


def learn(strength: float) -> float:
    """Accuracy on the first of five tasks after the last one, in percent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)  # not SGD: the penalty joins the gradient

    ewc = limpet.PerTaskLaplace(model, structure="diagonal", strength=strength, prior_precision=0.0)  # EWC

    for x, y in map(task, range(5)):
        with ewc.protect(optimizer, examples=len(x)):
            for _ in range(5):
                for rows in torch.randperm(len(x)).split(50):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                    optimizer.step()
        ewc.consolidate(list(zip(x.split(100), y.split(100), strict=True)), progress=False)
    x, y = task(0)
    print(f"strength {strength:g}: {ewc.nbytes:,} bytes for {ewc.tasks} tasks")
    return 100 * float((model(x).argmax(1) == y).float().mean())


plain, held = learn(0.0), learn(100.0)
print(f"first task after five: without EWC {plain:.1f} %, with EWC {held:.1f} %")

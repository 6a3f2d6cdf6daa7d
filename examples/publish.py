"""Save a memory beside the weights; somebody else loads both, and goes on without the old data.

python examples/publish.py
"""

import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import nn

import limpet


def blobs(seed: int, n: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten classes, a blob each, in places of the task's own."""
    g = torch.Generator().manual_seed(seed)
    centres, y = torch.randn(10, 50, generator=g), torch.randint(0, 10, (n,), generator=g)
    return centres[y] + torch.randn(n, 50, generator=g), y


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Ten epochs of an ordinary loop."""
    for rows in (rows for _ in range(10) for rows in torch.randperm(len(x)).split(50)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


torch.manual_seed(0)
old, new = blobs(0), blobs(1)
model = nn.Sequential(nn.Linear(50, 40), nn.ReLU(), nn.Linear(40, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
with tempfile.TemporaryDirectory() as folder:
    weights, remembered = str(Path(folder, "model.safetensors")), Path(folder, "memory.safetensors")

    fit(model, optimizer, *old)  # Somebody has the old data,
    memory = limpet.OnlineLaplace(model, strength=30.0, prior_precision=0.0)
    memory.consolidate([old], progress=False)
    save_model(model, weights)  # and publishes the weights
    memory.save(remembered)  # and their memory. On the hub: memory.push_to_hub("user/model")

    for hold in (False, True):  # Somebody else has these two files, and new data.
        load_model(model, weights)
        memory = limpet.load(remembered, model)  # From the hub: limpet.load("hub://user/model", model)
        with memory.protect(optimizer, examples=len(new[0])) if hold else nullcontext():
            fit(model, optimizer, *new)
        kept = 100 * (model(old[0]).argmax(1) == old[1]).float().mean().item()
        print(f"{'with' if hold else 'without'} the memory: {kept:.1f} % of the old task")
    memory.consolidate([new], progress=False)
    memory.save(remembered)  # What came of it can be published again.
    print(f"the file now speaks of {limpet.load(remembered, model).tasks} tasks")

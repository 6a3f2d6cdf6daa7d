"""Five tasks in an ordinary training loop: three more lines keep the network from forgetting the first ones.

python docs/tutorials/own_loop.py
"""

# %% [markdown]
# # Your own loop
#
# You have a PyTorch training loop that works, and tasks that arrive one after another. After each task its data are
# gone. This tutorial adds three lines, shows what they preserve, and inspects what was stored.
#
# First the tasks: ten classes each, one Gaussian cluster per class, with different cluster centres in every task.

# %%
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import limpet


def blobs(seed: int, n: int = 1000) -> TensorDataset:
    """One task."""
    g = torch.Generator().manual_seed(seed)
    centres, y = torch.randn(10, 50, generator=g), torch.randint(0, 10, (n,), generator=g)
    return TensorDataset(centres[y] + torch.randn(n, 50, generator=g), y)


tasks = [blobs(seed) for seed in range(5)]

# %% [markdown]
# Then an ordinary training loop. It does not depend on limpet.


# %%
def fit(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, epochs: int = 5) -> None:
    """Train on one task."""
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def accuracy(model: nn.Module, task: TensorDataset) -> float:
    """In percent."""
    x, y = task.tensors
    return 100 * float((model(x).argmax(1) == y).float().mean())


# %% [markdown]
# Now train on all tasks in sequence. The three additional lines are numbered.
#
# 1. A memory is created from the model. `strength` controls how strongly old tasks are protected; 0 is plain training.
#    The network starts from scratch, so there is no prior worth keeping: `prior_precision=0.0`.
# 2. Inside `protect`, every `optimizer.step()` also applies the penalty. `examples` is the number of examples of the
#    new task, not of batches and not multiplied by epochs: the penalty is divided by it, because the loss is a mean
#    over examples.
# 3. `consolidate` reads the task's data once and adds the task to the memory. Call it while you still have the data.
#    `probe=20` also stores 20 inputs with the outputs of the model, to measure drift on; leave it out to store no data.


# %%
def learn(strength: float) -> tuple[nn.Module, limpet.OnlineLaplace]:
    """All tasks in their order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    memory = limpet.OnlineLaplace(model, strength=strength, prior_precision=0.0)  # 1
    for task in tasks:
        loader = DataLoader(task, batch_size=50, shuffle=True)
        with memory.protect(optimizer, examples=len(task)):  # 2
            fit(model, optimizer, loader)
        memory.consolidate(loader, probe=20, progress=False)  # 3
    return model, memory


for name, strength in (("without a memory", 0.0), ("with a memory", 30.0)):
    model, memory = learn(strength)
    kept = [accuracy(model, task) for task in tasks]
    print(f"{name}: first task {kept[0]:.1f} %, mean of five {sum(kept) / len(kept):.1f} %")

# %% [markdown]
# What does the memory contain? The report lists every block, whether it is protected and, if not, why.

# %%
print(memory.report())

# %% [markdown]
# The memory can be saved to a file and distributed with the weights. Anyone who has both can continue training without
# any of the data. The format is safetensors: loading a file runs no code.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "memory.safetensors"
    memory.save(path)
    again = limpet.load(path, model)
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB, {again.tasks} tasks, {again.examples} examples")

# %% [markdown]
# While the next task trains, the memory measures how far the outputs on its probes have moved, in nats per example.
# `memory.forecast()` predicts the loss of the old tasks from the weights alone, and says when it is not to be trusted.

# %%
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
with memory.protect(optimizer, examples=1000):
    fit(model, optimizer, DataLoader(blobs(5), batch_size=50, shuffle=True), epochs=1)
    print(f"after one epoch of a sixth task: {memory.drift()}")

# %% [markdown]
# Other optimizers work the same way (Adam and its variants get the gradient of the penalty instead of a proximal step),
# and so do closures, gradient scaling, clipping and schedulers. [Another tutorial](strength.py) explains how to choose
# the strength.

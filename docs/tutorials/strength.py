"""Choose how strongly to protect: by a number, automatically from the data, or by a budget.

python docs/tutorials/strength.py
"""

# %% [markdown]
# # Choosing the strength
#
# If the protection is too weak, the network forgets; if it is too strong, the network learns nothing new. The right
# strength is easy to determine afterwards with all old data, but those are not available. There are three ways to do
# without them.
#
# The tasks in this tutorial are similar and yet interfere with each other: ten classes in ten of a hundred directions,
# with the hundred coordinates permuted differently in every task.

# %%
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import limpet

Task = tuple[torch.Tensor, torch.Tensor]


def task(seed: int, n: int = 2000) -> Task:
    """Inputs and labels."""
    g = torch.Generator().manual_seed(0)
    centres, y = torch.randn(10, 10, generator=g), torch.randint(0, 10, (n,), generator=g)
    z = 0.7 * centres[y] + 0.5 * torch.randn(n, 10, generator=g)
    x = z @ torch.randn(10, 100, generator=g) / 10**0.5 + 0.5 * torch.randn(n, 100, generator=g)
    return x[:, torch.randperm(100, generator=torch.Generator().manual_seed(seed))], y


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, data: Task) -> None:
    """One pass in batches of fifty."""
    for rows in torch.randperm(len(data[0])).split(50):
        optimizer.zero_grad()
        cross_entropy(model(data[0][rows]), data[1][rows]).backward()
        optimizer.step()


def loss(model: nn.Module, data: Task) -> float:
    """The mean loss on a task, in nats per example."""
    with torch.no_grad():
        return float(cross_entropy(model(data[0]), data[1]))


def start(strength: float | str = 1.0) -> tuple[nn.Module, torch.optim.Optimizer, limpet.OnlineLaplace]:
    """A network, its optimizer, and its memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 60), nn.ReLU(), nn.Linear(60, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return model, optimizer, limpet.OnlineLaplace(model, strength=strength, prior_precision=0.0)


tasks = [task(seed) for seed in range(1, 6)]

# %% [markdown]
# ## A number, or "auto"
#
# The strength multiplies the curvature of each task. 1 is the Laplace approximation itself; larger values compensate
# for a loss that rises faster than its quadratic approximation. `strength="auto"` measures how much faster, on the
# task's own data, when the task is consolidated. Here we cheat and evaluate on all old tasks to see which strength is
# best.


# %%
def learn_all(strength: float | str) -> tuple[float, limpet.OnlineLaplace]:
    """The mean loss over all tasks after the last one."""
    model, optimizer, memory = start(strength)
    for data in tasks:
        with memory.protect(optimizer, examples=len(data[0])):
            for _ in range(4):
                epoch(model, optimizer, data)
        memory.consolidate([data], progress=False)
    return sum(loss(model, data) for data in tasks) / len(tasks), memory


for strength in (0.0, 0.3, 1.0, 3.0, 10.0, 30.0, 300.0):
    print(f"strength {strength}: mean loss {learn_all(strength)[0]:.3f} nats")
found, memory = learn_all("auto")
print(f"strength auto: mean loss {found:.3f} nats")

# %% [markdown]
# The measurements behind "auto" are stored in the memory: for each task, a few pairs of the increase predicted by the
# quadratic and the measured increase of the loss when the weights are perturbed that far.

# %%
curve = memory.history.tasks[0].curve
for predicted, measured in zip(curve.predicted, curve.measured, strict=True):
    print(f"  predicted {predicted:.4f}, measured {measured:.4f} nats")
print(f"so the first task got the strength {curve.strength:.1f}")

# %% [markdown]
# ## A forecast to watch
#
# The same curves convert any displacement of the weights into nats. `memory.forecast()` is cheap enough to log and
# needs no old data; the true increase is printed next to it. It is an estimate: expect it to be off by a factor of two
# to three, in either direction, on tasks as small as these.

# %%
model, optimizer, memory = start(1.0)
first, second = tasks[:2]
for _ in range(4):
    epoch(model, optimizer, first)
memory.consolidate([first], progress=False)
before = loss(model, first)
with memory.protect(optimizer, examples=len(second[0])):
    for number in range(4):
        epoch(model, optimizer, second)
        true = loss(model, first) - before
        print(f"epoch {number + 1}: foretold {float(memory.forecast()):.3f}, true {true:.3f} nats")

# %% [markdown]
# ## A budget
#
# If you know how much loss is acceptable, set a budget: with `budget=` the strength no longer matters. The penalty is
# just strong enough to keep the forecast within that many nats per example, and zero before that point.

# %%
for budget in (0.005, 0.02, 0.08):
    model, optimizer, memory = start()
    for _ in range(4):
        epoch(model, optimizer, first)
    memory.consolidate([first], progress=False)
    before = loss(model, first)
    with memory.protect(optimizer, examples=len(second[0]), budget=budget):
        for _ in range(4):
            epoch(model, optimizer, second)
    true, new = loss(model, first) - before, loss(model, second)
    print(f"budget {budget}: foretold {float(memory.forecast()):.3f}, true {true:.3f}; new task at {new:.3f} nats")

# %% [markdown]
# ## Which one to use
#
# - Many tasks of the same kind, one network: `strength="auto"`.
# - One published model, one fine-tune: `budget=`, in nats per example (per token, for a language model).
# - Comparing methods, as in papers: numbers, in powers of ten, selected on held-out data. A diagonal needs five to a
#   hundred times the strength of Kronecker factors.
# - A model sharded over many ranks (`fully_shard`): a number; the other two are not supported there.

"""MNIST, then Fashion-MNIST, with one convolutional network and a head for each.

LIMPET_DATA=folder python docs/tutorials/vision.py      # the sets as on the hub: mnist/train-*.parquet, ...
python docs/tutorials/vision.py                         # without them: stripes and blobs that are made here
EXAMPLES=60000 python docs/tutorials/vision.py          # all of them instead of 6000
"""

# %% [markdown]
# # A vision sequence
#
# A small convolutional network learns digits, then clothes, and should still recognize its digits. Each task has its
# own head; the tasks share the body, which is what must be protected.
#
# If `LIMPET_DATA` names a folder with the two data sets (laid out as on the Hugging Face hub), they are read with the
# loader of limpet's own experiments. Otherwise two small synthetic tasks are generated: the orientation of stripes, and
# the position of a blob.

# %%
import os

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import limpet

EXAMPLES = int(os.environ.get("EXAMPLES", "6000"))
Split = tuple[Tensor, Tensor]


def from_the_hub(name: str) -> tuple[Split, Split]:
    """Training and test set, as floats in padded 28 x 28."""
    from limpet.experiments.data import images

    found = []
    for split, most in (("train", EXAMPLES), ("test", 2000)):
        examples = images(name, split)
        found.append(((examples.inputs[:most].float() / 255 - 0.3) / 0.35, examples.labels[:most]))
    return found[0], found[1]


def made_here(name: str) -> tuple[Split, Split]:
    """Stripes of ten directions (for mnist), or a blob in ten places (for fashion_mnist)."""
    g = torch.Generator().manual_seed(len(name))
    y = torch.randint(0, 10, (min(EXAMPLES, 2000) + 1000,), generator=g)
    down, across = torch.meshgrid(torch.linspace(-1, 1, 28), torch.linspace(-1, 1, 28), indexing="ij")
    angle = y[:, None, None] * torch.pi / 10
    if name == "mnist":
        phase = 6.3 * torch.rand(len(y), 1, 1, generator=g)
        x = torch.sin(9 * (across * angle.cos() + down * angle.sin()) + phase)
    else:
        x = 3 * torch.exp(-12 * ((across - 0.6 * (2 * angle).cos()) ** 2 + (down - 0.6 * (2 * angle).sin()) ** 2))
    x = (x + torch.randn(x.shape, generator=g))[:, None]
    return (x[1000:], y[1000:]), (x[:1000], y[:1000])


load = from_the_hub if os.environ.get("LIMPET_DATA") else made_here
tasks = [load(name) for name in ("mnist", "fashion_mnist")]

# %% [markdown]
# The network has no BatchNorm, whose running statistics cannot be protected by a penalty (limpet would warn).


# %%
class Network(nn.Module):
    """Two convolutions, one hidden layer, a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU()),
        )
        self.heads = nn.ModuleList(nn.Linear(64, 10) for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        """The outputs of one head."""
        return self.heads[head](self.body(x))


def accuracy(model: Network, head: int) -> float:
    """On the test set of a task, in percent."""
    x, y = tasks[head][1]
    with torch.no_grad():
        return 100 * float((model(x, head).argmax(1) == y).float().mean())


# %% [markdown]
# The heads are excluded from the memory, `exclude=["heads"]`: each belongs to a single task, and nothing overwrites it
# while the other task trains. `forward` tells `consolidate` which head the batches go through. `strength="auto"`
# determines the strength automatically.


# %%
def learn(hold: bool) -> list[float]:
    """Both tasks, three epochs each."""
    torch.manual_seed(0)
    model = Network()
    memory = limpet.OnlineLaplace(model, exclude=["heads"], strength="auto" if hold else 0.0, prior_precision=0.0)
    for head, ((x, y), _) in enumerate(tasks):
        parameters = [*model.body.parameters(), *model.heads[head].parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
        with memory.protect(optimizer, examples=len(x)):
            for rows in (rows for _ in range(3) for rows in torch.randperm(len(x)).split(50)):
                optimizer.zero_grad()
                cross_entropy(model(x[rows], head), y[rows]).backward()
                optimizer.step()
        if head == 0:
            print(f"  first task, when it is learned: {accuracy(model, 0):.1f} %")
        batches = list(zip(x.split(100), y.split(100), strict=True))
        memory.consolidate(batches, limit=1000, progress=False, forward=lambda m, b, head=head: (m(b[0], head), b[1]))
    return [accuracy(model, head) for head in range(2)]


for name, hold in (("without a memory", False), ("with a memory", True)):
    first, second = learn(hold)
    print(f"{name}: first task {first:.1f} %, second {second:.1f} %")

# %% [markdown]
# `limit=1000` measures the curvature on a thousand examples and scales it up to the whole task, which is enough to
# capture its shape. The output below is for 6000 examples of each of the real data sets.
#
# The five data sets of the paper (MNIST, notMNIST, Fashion-MNIST, SVHN, CIFAR-10) with a LeNet are one command,
# `limpet run vision`, and [the result](../../results/vision/README.md) is within 1.5 points of a separate network for
# each set.

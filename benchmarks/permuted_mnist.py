"""A short permuted-MNIST sequence: what the network still knows after each task, with a memory and without.

    LIMPET_DATA=... python benchmarks/permuted_mnist.py --figure docs/figures/permuted_mnist.png

LIMPET_DATA points at a folder with mnist/train-00000.parquet and mnist/test-00000.parquet, as the Hugging Face hub has
them. The figure needs matplotlib.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import time
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import limpet

BATCH = 250


@cache
def mnist(split: str) -> tuple[Tensor, Tensor]:
    """Images (n, 784) in [0, 1] and labels."""
    from PIL import Image
    from pyarrow import parquet

    table = parquet.read_table(Path(os.environ["LIMPET_DATA"]) / "mnist" / f"{split}-00000.parquet")
    images = [
        np.asarray(Image.open(io.BytesIO(row["bytes"])), dtype=np.uint8).reshape(-1)
        for row in table["image"].to_pylist()
    ]
    return torch.from_numpy(np.stack(images)).float() / 255, torch.tensor(table["label"].to_pylist())


class Permuted:
    """One task: the first is MNIST itself, every other has its own order of the pixels."""

    def __init__(self, number: int) -> None:
        order = torch.randperm(784, generator=torch.Generator().manual_seed(1000 + number))
        self.order = torch.arange(784) if number == 0 else order
        (x, self.y), (test_x, self.test_y) = mnist("train"), mnist("test")
        self.x, self.test_x = x[:, self.order], test_x[:, self.order]

    def batches(self, size: int, order: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """The training set in batches, in the order given."""
        indices = torch.arange(len(self.y)) if order is None else order
        return [(self.x[rows], self.y[rows]) for rows in torch.split(indices, size)]

    def accuracy(self, model: nn.Module) -> float:
        """Percent of the test set."""
        with torch.no_grad():
            return 100 * float((model(self.test_x).argmax(1) == self.test_y).float().mean())


def run(
    tasks: list[Permuted], structure: str | None, strength: float = 1.0, *, epochs: int = 3, seed: int = 0
) -> list[list[float]]:
    """Test accuracy on tasks 1..t after task t, for every t; with no structure, plain SGD."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    memory = None if structure is None else limpet.OnlineLaplace(model, structure=structure, strength=strength)
    accuracies = []
    for number, task in enumerate(tasks):
        steps = epochs * len(task.y) // BATCH
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        with memory.protect(optimizer, examples=len(task.y), every=8) if memory is not None else nullcontext():
            for _ in range(epochs):
                for x, y in task.batches(BATCH, torch.randperm(len(task.y))):
                    optimizer.zero_grad()
                    torch.autograd.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    schedule.step()
        if memory is not None:
            memory.consolidate(task.batches(1000), progress=False)
        accuracies.append([seen.accuracy(model) for seen in tasks[: number + 1]])
    return accuracies


def mean(values: list[float]) -> float:
    """The mean."""
    return sum(values) / len(values)


def draw(results: dict[str, list[list[float]]], path: Path) -> None:
    """Mean accuracy over the tasks seen so far, and accuracy on the first task."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    colours = {"plain SGD": "#9a9a9a", "diagonal": "#d98032", "kronecker": "#1f6f8b"}
    for name, accuracies in results.items():
        colour = next(value for key, value in colours.items() if name.startswith(key))
        ticks = range(1, len(accuracies) + 1)
        style = {"color": colour, "marker": "o", "markersize": 4}
        axes[0].plot(ticks, [mean(row) for row in accuracies], label=name, **style)
        axes[1].plot(ticks, [row[0] for row in accuracies], label=name, **style)
    for axis, title in zip(axes, ("mean of all tasks seen", "the first task"), strict=True):
        axis.set(title=title, xlabel="tasks learned", xticks=list(ticks))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("test accuracy (%)")
    axes[0].legend(frameon=False, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the three ways, print a table, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    start = time.perf_counter()
    tasks = [Permuted(number) for number in range(options.tasks)]
    ways: list[tuple[str, str | None, float]] = [
        ("plain SGD", None, 0.0),
        ("diagonal, strength 10", "diagonal", 10.0),
        ("kronecker, strength 3", "kronecker", 3.0),
    ]
    results = {}
    print("| way | mean of all tasks | each task |\n| --- | --- | --- |")
    for name, structure, strength in ways:
        results[name] = run(tasks, structure, strength, epochs=options.epochs, seed=options.seed)
        last = results[name][-1]
        print(f"| {name} | {mean(last):.1f} | {' '.join(f'{value:.1f}' for value in last)} |")
    versions = f"limpet {limpet.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    settings = f"{options.tasks} tasks, {options.epochs} epochs, seed {options.seed}"
    print(f"\n{settings}; {versions}; {time.perf_counter() - start:.0f} s")
    if options.figure:
        draw(results, options.figure)


if __name__ == "__main__":
    main()

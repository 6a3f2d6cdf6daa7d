"""Real data: five permuted-MNIST tasks, and the network still knows the first."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import limpet
from mnist import Permuted

TASKS, EPOCHS, BATCH = 5, 3, 250


def run(tasks: list[Permuted], structure: str | None, strength: float = 1.0) -> float:
    """Mean test accuracy over all tasks after the last one; with no structure, plain SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    memory = None if structure is None else limpet.OnlineLaplace(model, structure=structure, strength=strength)
    for task in tasks:
        steps = EPOCHS * len(task.y) // BATCH
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        with memory.protect(optimizer, examples=len(task.y), every=8) if memory is not None else nullcontext():
            for _ in range(EPOCHS):
                for x, y in task.batches(BATCH, torch.randperm(len(task.y))):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    schedule.step()
        if memory is not None:
            memory.consolidate(task.batches(1000))
    return sum(task.accuracy(model) for task in tasks) / len(tasks)


@pytest.mark.slow
def test_five_permuted_tasks() -> None:
    tasks = [Permuted(number) for number in range(TASKS)]
    plain = run(tasks, None)
    diagonal = {strength: run(tasks, "diagonal", strength) for strength in (10.0, 30.0, 100.0)}
    kronecker = run(tasks, "kronecker", 3.0)
    print(f"kronecker {kronecker:.2f}, diagonal {diagonal}, plain {plain:.2f}")
    assert kronecker >= 95.5
    assert kronecker >= max(diagonal.values()) + 1.5
    assert kronecker >= plain + 30

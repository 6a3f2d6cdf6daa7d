"""Fine-tune a small network on other images as usual, then repair it: how much of MNIST is retained, at what cost?

    python -m benchmarks repair_mnist                 # all cases that are still missing

A 784-200-200-20 network learns MNIST, and a memory is built from 4,000 of the images. Then it learns permuted MNIST, or
Fashion-MNIST as ten new outputs, with plain Adam, and is repaired. Compared is the test loss on MNIST subject to a test
loss on the new images of at most 1.1 times that of the tuned network: for the best point of the path, for the best
uniform scale, and for repair with its defaults. The data come from the Hugging Face hub, or from LIMPET_DATA.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import limpet
from common import versions
from limpet.experiments import data

RESULTS = common.RESULTS / "repair" / "mnist.jsonl"
CASES = ("permuted", "fashion")
NEW, MEASURED, BATCH, RATE = 20_000, 4_000, 128, 1e-3
STRENGTHS = [10 ** (power / 4) for power in range(-8, 9)]
SCALES = [step / 40 for step in range(41)]
PRICE = 1.1
Data = tuple[Tensor, Tensor]


def images(name: str, split: str) -> Data:
    """All images of a data set as rows, with their labels."""
    inputs, labels = data.images(name, split).batch(slice(None))
    return inputs.flatten(1), labels


def batched(task: Data) -> list[Data]:
    """Batches of 500."""
    return list(zip(*(torch.split(one, 500) for one in task), strict=True))


def fit(model: nn.Module, task: Data, epochs: int, generator: torch.Generator) -> None:
    """Plain Adam."""
    x, y = task
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(x), generator=generator), BATCH):
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(x[rows]), y[rows]))
            optimizer.step()


@torch.no_grad()
def loss(model: nn.Module, task: Data) -> float:
    """The mean loss."""
    return float(F.cross_entropy(model(task[0]), task[1]))


def run(case: str, seed: int) -> dict[str, Any]:
    """One network, tuned and repaired."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    old, old_test = images("mnist", "train"), images("mnist", "test")
    if case == "permuted":
        order = torch.randperm(784, generator=generator)
        both = [(x[:, order], y) for x, y in (old, old_test)]
    else:
        both = [(x, y + 10) for x, y in (images("fashion_mnist", split) for split in ("train", "test"))]
    new, new_test = (both[0][0][:NEW], both[0][1][:NEW]), both[1]
    model = nn.Sequential(
        nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 20)
    )  # fmt: skip
    fit(model, old, 4, generator)
    memory = limpet.OnlineLaplace(model, prior_mean="initial")
    memory.consolidate(batched(old), limit=MEASURED, progress=False)
    before = loss(model, old_test)
    fit(model, new, 2, generator)
    tuned, forgotten = loss(model, new_test), loss(model, old_test)
    begin = time.perf_counter()
    repair = limpet.repair(model, memory, batched(new), limit=MEASURED, progress=False)
    seconds = time.perf_counter() - begin
    default = {"new": loss(model, new_test), "old": loss(model, old_test)}

    def best(points: list[tuple[float, float]]) -> dict[str, float]:
        found: list[dict[str, float]] = []
        for strength, scale in points:
            repair.at(strength, scale)
            losses = {"new": loss(model, new_test), "old": loss(model, old_test)}
            found.append({**losses, "strength": strength, "scale": scale})
        return min((one for one in found if one["new"] <= PRICE * tuned), key=lambda one: one["old"])

    return {
        "case": case,
        "seed": seed,
        "before": {"old": before},
        "tuned": {"new": tuned, "old": forgotten},
        "default": default,
        "best repair": best([(strength, 1.0) for strength in STRENGTHS]),
        "best scale": best([(0.0, scale) for scale in SCALES]),
        "seconds": round(seconds, 2),
        "versions": versions(),
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = common.parse(parser)
    done = {(one["case"], one["seed"]) for one in common.read_records(options.out)}
    for case in CASES:
        for seed in options.seeds:
            if (case, seed) not in done:
                found = run(case, seed)
                print(found, flush=True)
                common.append_record(options.out, found)


if __name__ == "__main__":
    main()

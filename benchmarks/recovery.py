"""Recover the images of a task from its memory, with and without mitigations, and measure what those cost.

    python -m benchmarks recovery --threads 1             # all records that are still missing, then the tables
    python -m benchmarks recovery --tables                # the tables of results/privacy, from the records

The attack knows the memory and the model. N images x of MNIST have the input factor Q, the mean of [x 1] [x 1]^T, in
the memory of a 784-100-10 network. If N is below 785, all images lie in the span of the eigenvectors of Q, and they are
its extreme points among the vectors with pixels in [0, 1] and a last entry of 1: a linear program with a random
objective finds one of them. If the first layer is excluded, its outputs are recovered from the factor of the second
layer in the same way, and the darkest image that gives them is taken.

The cost: a 196-100-10 network learns MNIST at half the resolution, then the same with permuted pixels, protected by a
memory of the first. scipy solves the linear programs. The data come from the Hugging Face hub, or from LIMPET_DATA.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import limpet
from common import versions
from limpet.experiments import data
from limpet.precision.kronecker import Kronecker

FOLDER = common.RESULTS / "privacy"
ATTACKS, COSTS = FOLDER / "attacks.jsonl", FOLDER / "costs.jsonl"
COUNTS = (1, 10, 20, 100, 1000)
SIZES, NEW = (10_000, 60_000), 10_000
STRENGTHS = (1.0, 10.0, 100.0)
DELTA, SECONDS, SAME = 1e-6, 30.0, 0.02
RANK = 50
MITIGATIONS = {
    "none": "none",
    "truncated": f"input factors of rank {RANK}",
    "excluded": "first layer excluded",
    "epsilon 8": f"privacy, epsilon 8, delta {DELTA:g}",
    "epsilon 1": f"privacy, epsilon 1, delta {DELTA:g}",
}
Data = tuple[Tensor, Tensor]


def images(split: str) -> Data:
    """All images of MNIST as rows with pixels in [0, 1], with their labels."""
    examples = data.images("mnist", split)
    return examples.inputs.flatten(1).float() / 255, examples.labels


def network(seed: int, width: int = 784) -> nn.Sequential:
    """A network of two layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 100), nn.ReLU(), nn.Linear(100, 10))


def batched(task: Data) -> list[Data]:
    """Batches of 500."""
    return list(zip(*(torch.split(one, 500) for one in task), strict=True))


def memory_of(model: nn.Sequential, task: Data, mitigation: str) -> limpet.OnlineLaplace:
    """A memory of a task, with one of `MITIGATIONS`."""
    memory = limpet.OnlineLaplace(model, exclude=["0"] if mitigation == "excluded" else [], prior_precision=1e-3)
    budget = limpet.Privacy(float(mitigation.split()[1]), DELTA) if mitigation.startswith("epsilon") else None
    memory.consolidate(batched(task), progress=False, privacy=budget)
    if mitigation == "truncated":
        held = memory.posterior.held
        memory.posterior.held = {name: replace(one, precision=truncated(one.precision)) for name, one in held.items()}
    return memory


def truncated(precision: Any) -> Kronecker:
    """Keep the `RANK` largest eigenvalues of the input factor, and a random basis of the rest."""
    basis, values = precision.inputs, precision.values
    order = basis.trace.argsort(descending=True)
    most, rest = order[:RANK], order[RANK:]
    keep = torch.zeros_like(basis.trace)
    keep[most] = 1
    vectors = basis.vectors.clone()
    vectors[:, rest] = vectors[:, rest] @ torch.linalg.qr(torch.randn(len(rest), len(rest)))[0]
    inputs = replace(basis, vectors=vectors, trace=basis.trace * keep)
    found: Kronecker = replace(
        precision, inputs=inputs, values=values.add(-values.plain * (1 - keep), 1.0, lambda old: old)
    )
    return found


def span(memory: limpet.OnlineLaplace, name: str) -> np.ndarray:
    """The eigenvectors of an input factor with eigenvalues above 1e-6 times the largest, as columns."""
    precision = memory.posterior.held[name].precision
    assert isinstance(precision, Kronecker)
    vectors, trace = precision.inputs.vectors, precision.inputs.trace
    if not isinstance(vectors, Tensor) or float(trace.max()) <= 0:
        return np.zeros((precision.shape[-1], 0))
    order = trace.argsort(descending=True)
    rank = int((trace > 1e-6 * trace.max()).sum())
    return vectors[:, order[:rank]].double().numpy()


def extreme_points(basis: np.ndarray, most: float | None, tries: int, seconds: float) -> list[np.ndarray]:
    """Vectors of the span with entries in [0, most] and a last entry of 1, by linear programs."""
    from scipy.optimize import linprog

    if not basis.shape[1]:
        return []
    if basis.shape[1] == 1:
        return [basis[:-1, 0] / basis[-1, 0]]
    rng, rows, last = np.random.default_rng(0), basis[:-1], basis[-1:]
    used = rows[np.abs(rows).max(1) > 1e-6]
    bounds = [(-used, np.full(len(used), 2e-3))]
    if most is not None:
        bounds.append((used, np.full(len(used), most + 2e-3)))
    left, right = np.vstack([a for a, _ in bounds]), np.concatenate([b for _, b in bounds])
    found, start = [], time.perf_counter()
    for _ in range(tries):
        remaining = seconds - (time.perf_counter() - start)
        if remaining <= 0:
            break
        objective = (rng.normal(size=len(rows)) * (rng.random(len(rows)) < 0.3)) @ rows
        limits = {"time_limit": remaining}
        solved = linprog(
            objective, A_ub=left, b_ub=right, A_eq=last, b_eq=[1.0], bounds=(None, None), options=limits
        )  # fmt: skip
        if solved.status == 0:
            found.append(rows @ solved.x)
    return found


def darkest_images(model: nn.Sequential, hidden: list[np.ndarray], seconds: float) -> list[np.ndarray]:
    """For every vector of activations, the image with the smallest sum of pixels that gives them."""
    from scipy.optimize import linprog

    weight, bias = (p.detach().double().numpy() for p in model[0].parameters())
    found, start = [], time.perf_counter()
    for one in hidden:
        if time.perf_counter() - start > seconds:
            break
        on, slack = one > 1e-2, 2e-3
        left = np.vstack([weight[on], -weight[on], weight[~on]])
        target = one - bias
        right = np.concatenate([target[on] + slack, slack - target[on], -bias[~on] + slack])
        solved = linprog(np.ones(784), A_ub=left, b_ub=right, bounds=(0, 1), options={"time_limit": 5.0})
        if solved.status == 0:
            found.append(solved.x)
    return found


def nearest(found: np.ndarray, true: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every true image, the root mean square to the nearest candidate and the largest correlation with one."""
    if not len(found):
        return np.ones(len(true)), np.zeros(len(true))
    squares = (found**2).mean(1) + (true**2).mean(1)[:, None] - 2 * true @ found.T / 784
    a, b = (one - one.mean(1, keepdims=True) for one in (found, true))
    a, b = (one / np.maximum(np.linalg.norm(one, axis=1, keepdims=True), 1e-12) for one in (a, b))
    return np.sqrt(squares.clip(0).min(1)), (b @ a.T).max(1)


def attack(count: int, mitigation: str, seed: int) -> dict[str, Any]:
    """Attack a memory of the first `count` test images."""
    model, (x, y) = network(seed), images("test")
    true = x[:count].double().numpy()
    start = time.perf_counter()
    memory = memory_of(model, (x[:count], y[:count]), mitigation)
    tries = 1 if count == 1 else max(40, 10 * count)
    if mitigation == "excluded":
        hidden = extreme_points(span(memory, "2"), None, tries, SECONDS / 2)
        found = darkest_images(model, hidden, SECONDS / 2)
    else:
        found = extreme_points(span(memory, "0"), 1.0, tries, SECONDS)
    away, alike = nearest(np.array(found).reshape(-1, 784), true)
    return {
        "count": count,
        "mitigation": mitigation,
        "seed": seed,
        "recovered": int((away < SAME).sum()),
        "alike": int((alike > 0.95).sum()),
        "median distance": round(float(np.median(away)), 4),
        "candidates": len(found),
        "seconds": round(time.perf_counter() - start, 1),
        "versions": versions("scipy"),
    }


def fit(model: nn.Module, task: Data, rate: float, epochs: int, memory: Any, examples: int) -> None:
    """SGD with momentum at a learning rate that falls to zero, protected by a memory if there is one."""
    x, y = task
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    steps = epochs * (len(x) // 100)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)

    def train() -> None:
        for _ in range(epochs):
            for rows in torch.split(torch.randperm(len(x)), 100):
                optimizer.zero_grad()
                torch.autograd.backward(F.cross_entropy(model(x[rows]), y[rows]))
                optimizer.step()
                schedule.step()

    if memory is None:
        train()
    else:
        with memory.protect(optimizer, examples=examples):
            train()


@torch.no_grad()
def accuracy(model: nn.Module, task: Data) -> float:
    """Test accuracy in percent."""
    return 100 * float((model(task[0]).argmax(1) == task[1]).float().mean())


def cost(size: int, seed: int, done: set[str]) -> Iterator[dict[str, Any]]:
    """Learn MNIST, then permuted MNIST with every kind of memory."""
    model = network(seed, 196)
    train, test = ((F.avg_pool2d(x.reshape(-1, 1, 28, 28), 2).flatten(1), y) for x, y in map(images, ("train", "test")))
    order = torch.randperm(196, generator=torch.Generator().manual_seed(seed))
    old = train[0][:size], train[1][:size]
    new, new_test = (train[0][:NEW][:, order], train[1][:NEW]), (test[0][:, order], test[1])
    fit(model, old, 0.1, 5 if size > NEW else 10, None, size)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = accuracy(model, test)
    for mitigation in ("no memory", *MITIGATIONS):
        if mitigation in done:
            continue
        model.load_state_dict(start)
        began = time.perf_counter()
        memory = None if mitigation == "no memory" else memory_of(model, old, mitigation)
        consolidated = time.perf_counter() - began
        for strength in STRENGTHS if memory else (0.0,):
            model.load_state_dict(start)
            torch.manual_seed(seed)
            # the penalty divided by N / strength: the same memory at another strength
            fit(model, new, 0.1, 5, memory, max(1, round(NEW / strength)) if strength else NEW)
            yield {
                "size": size,
                "seed": seed,
                "mitigation": mitigation,
                "strength": strength,
                "before": round(before, 2),
                "old": round(accuracy(model, test), 2),
                "new": round(accuracy(model, new_test), 2),
                "consolidation seconds": round(consolidated, 1),
                "seconds": round(time.perf_counter() - began, 1),
                "versions": versions(),
            }


def tables() -> list[str]:
    """The tables of results/privacy/README.md."""
    attacks, costs = common.read_records(ATTACKS), common.read_records(COSTS)
    rows = [f"| mitigation | {' | '.join(f'N = {count:,}' for count in COUNTS)} |", "| --- |" + " --- |" * len(COUNTS)]
    for name, text in MITIGATIONS.items():
        found = {one["count"]: one for one in attacks if one["mitigation"] == name}
        cells = [f"{found[n]['recovered']} ({found[n]['alike']})" if n in found else "" for n in COUNTS]
        rows.append(f"| {text} | {' | '.join(cells)} |")
    more = ["| N | memory | strength | old task | new task | mean |", "| --- | --- | --- | --- | --- | --- |"]
    for size in SIZES:
        for name, text in {"no memory": "no memory", **MITIGATIONS}.items():
            own = [one for one in costs if one["mitigation"] == name and one["size"] == size]
            if own:
                best = max(own, key=lambda one: one["old"] + one["new"])
                mean = (best["old"] + best["new"]) / 2
                text = "no mitigation" if name == "none" else text
                more.append(
                    f"| {size:,} | {text} | {best['strength']:g} | {best['old']:.1f} | {best['new']:.1f} | {mean:.1f} |"
                )
    return ["\n".join(rows), "\n".join(more)]


def main() -> None:
    """Add the missing records, and print the tables."""
    options = common.parser(__doc__, threads=1)
    options.add_argument("--tables", action="store_true", help="only print the tables")
    options.add_argument("--seed", type=int, default=0)
    asked = common.parse(options)
    if not asked.tables:
        warnings.simplefilter("ignore", limpet.LimpetWarning)
        done = {(one["count"], one["mitigation"]) for one in common.read_records(ATTACKS)}
        for count in COUNTS:
            for mitigation in MITIGATIONS:
                if (count, mitigation) not in done:
                    record = attack(count, mitigation, asked.seed)
                    print(record, flush=True)
                    common.append_record(ATTACKS, record)
        for size in SIZES:
            known = {one["mitigation"] for one in common.read_records(COSTS) if one["size"] == size}
            if not known.issuperset(MITIGATIONS):
                for record in cost(size, asked.seed, known):
                    print(record, flush=True)
                    common.append_record(COSTS, record)
    print("\n\n".join(tables()))


if __name__ == "__main__":
    main()

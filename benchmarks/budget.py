"""Is a budget kept, and what does it cost? A fourth permuted-MNIST task under budgets and at a grid of strengths.

    python -m benchmarks budget                     # three seeds, about 8 minutes
    python -m benchmarks budget --draw              # figure and table, from the stored results

After three tasks, the fourth is learned from the same weights under each budget (0.01, 0.03 and 0.1 nats per example)
and at each strength of a grid. Measured are the true increase of the mean loss on the first three tasks (on 2000
training examples of each) and the test accuracy on the fourth. A budget is compared with the strength that ends at the
same old loss; its accuracy is interpolated between the strengths of the grid.
The data come from the Hugging Face hub, or from the folder in LIMPET_DATA.
"""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import common
import limpet
from common import versions
from learner import Learner
from limpet.experiments.metrics import score
from limpet.experiments.tasks import Lesson
from limpet.experiments.training import TaskTraining

RESULTS = common.RESULTS / "budget"
BUDGETS = (0.01, 0.03, 0.1)
STRENGTHS = (0.02, 0.06, 0.2, 0.6, 2.0, 6.0)
OLD, LOOKED_AT = 3, 2000
SETTINGS: dict[str, Any] = {
    "tasks": OLD + 1,
    "training.epochs": 3,
    "training.batch_size": 100,
    "training.lr": 0.05,
    "memory.every": 16,
    "memory.smoothing": 0.0,
    "memory.prior_precision": 1.0,
    "memory.strength": 3.0,
}


@torch.no_grad()
def old_loss(model: nn.Module, lessons: list[Lesson]) -> float:
    """The mean loss over the old tasks."""
    model.eval()
    losses = []
    for number, lesson in enumerate(lessons):
        rows = torch.randperm(len(lesson.train), generator=torch.Generator().manual_seed(number))[:LOOKED_AT]
        x, y = lesson.train.batch(rows)
        losses.append(float(F.cross_entropy(model(x, lesson.head), y)))
    return float(np.mean(losses))


class Bench(Learner):
    """A network that knows three tasks, and what becomes of it with the fourth."""

    def __init__(self, seed: int) -> None:
        super().__init__("permuted-mnist", {**SETTINGS, "seed": seed})
        self.old = [self.lessons.lesson(i) for i in range(OLD)]
        for number, lesson in enumerate(self.old):
            self._train(self.model, self.method.memory, lesson, number)
            self.method.learned(lesson, lambda: [])
        self.before = old_loss(self.model, self.old)

    def _train(self, model: nn.Module, memory: limpet.Memory, lesson: Lesson, number: int, **options: Any) -> None:
        training = TaskTraining(model, [lesson], self.recipe, number)
        with memory.protect(training.optimizer, examples=training.examples, every=self.recipe.memory.every, **options):
            while not training.done:
                training.epoch(lambda *_: None)

    def fourth(self, *, budget: float | None = None, strength: float | None = None) -> dict[str, float]:
        """Learn the fourth task from where the third ended."""
        model = copy.deepcopy(self.model)
        memory = limpet.OnlineLaplace(model, prior_precision=self.recipe.memory.prior_precision)
        memory.load_state_dict(self.method.memory.state_dict())
        if strength is not None:
            for name, held in memory.posterior.held.items():
                memory.posterior.held[name] = _with_strength(held, strength)
        lesson = self.lessons.lesson(OLD)
        self._train(model, memory, lesson, OLD, budget=budget)
        found = score(model, self.lessons.test(OLD), lesson.head, 1000)
        return {
            "forecast": float(memory.forecast()),
            "rise": old_loss(model, self.old) - self.before,
            "accuracy": found.accuracy,
        }


def _with_strength(held: Any, strength: float) -> Any:
    """The block as if every task had been taken in with this strength."""
    from dataclasses import replace

    values = replace(held.precision.values, mixed=None, strength=strength)
    return replace(held, precision=replace(held.precision, values=values))


def measure(seeds: list[int]) -> dict[str, Any]:
    """Every budget and strength, for every seed."""
    begin, runs = time.perf_counter(), []
    for seed in seeds:
        bench = Bench(seed)
        budgets = {str(b): bench.fourth(budget=b) for b in BUDGETS}
        strengths = {str(s): bench.fourth(strength=s) for s in STRENGTHS}
        runs.append({"seed": seed, "budgets": budgets, "strengths": strengths})
        print(f"seed {seed}: {time.perf_counter() - begin:.0f} s", flush=True)
    return {"versions": versions(), "seconds": round(time.perf_counter() - begin), "runs": runs}


def rows(record: dict[str, Any]) -> list[tuple[int, float, float, float, float, float]]:
    """Seed, budget, forecast, rise, accuracy, and the accuracy of the strength that ends at the same old loss."""
    found = []
    for run in record["runs"]:
        grid = sorted(run["strengths"].values(), key=lambda point: point["rise"])
        rises, accuracies = [p["rise"] for p in grid], [p["accuracy"] for p in grid]
        for budget, point in run["budgets"].items():
            other = float(np.interp(point["rise"], rises, accuracies))
            found.append((run["seed"], float(budget), point["forecast"], point["rise"], point["accuracy"], other))
    return found


def draw(record: dict[str, Any], path: Path) -> None:
    """New accuracy over old loss: the grid of strengths as lines, budgets as points."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for run, color in zip(record["runs"], ("#1f6f8b", "#d98032", "#6a994e"), strict=False):
        grid = sorted(run["strengths"].values(), key=lambda point: point["rise"])
        budgets = run["budgets"]
        left.plot([p["rise"] for p in grid], [p["accuracy"] for p in grid], color=color, linewidth=1, alpha=0.7)
        label = f"budgets, seed {run['seed']}"
        left.scatter(
            [p["rise"] for p in budgets.values()], [p["accuracy"] for p in budgets.values()], color=color, label=label
        )
        right.scatter([float(b) for b in budgets], [p["rise"] for p in budgets.values()], color=color, s=24)
    left.set(xscale="log", xlabel="true rise of the old loss (nats)", ylabel="accuracy on the new task (%)")
    left.set_title("lines: a grid of strengths", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    ends = [min(BUDGETS) * 0.7, max(BUDGETS) * 1.4]
    right.plot(ends, ends, color="black", linewidth=1)
    right.fill_between(ends, [e / 2 for e in ends], [e * 2 for e in ends], color="#eeeeee", zorder=0)
    right.set(xscale="log", yscale="log", xlabel="budget (nats)", ylabel="true rise of the old loss (nats)")
    right.set_title("grey: within a factor of 2", fontsize=10)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = common.parser(__doc__, threads=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = common.parse(parser)
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "permuted-mnist.json"
    if not options.draw:
        path.write_text(json.dumps(measure(options.seeds), indent=1) + "\n")
    record = json.loads(path.read_text())
    draw(record, RESULTS / "budget.png")
    print("| seed | budget | forecast | true rise | accuracy (%) | strength with the same old loss (%) |")
    print("| --- | --- | --- | --- | --- | --- |")
    for seed, budget, forecast, rise, accuracy, other in rows(record):
        print(f"| {seed} | {budget:g} | {forecast:.4f} | {rise:.4f} | {accuracy:.2f} | {other:.2f} |")


if __name__ == "__main__":
    main()

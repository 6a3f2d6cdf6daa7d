"""Which strength, without old data? The loss curve and the marginal likelihood of new tasks, compared with a grid.

    python -m benchmarks strength                                  # permuted MNIST, 5 tasks, about 5 minutes
    python -m benchmarks strength --experiment disjoint-mnist      # about 3 minutes
    python -m benchmarks strength --draw                           # figure and tables, from the stored results

The sequence is learned at every strength of a grid and with strength="auto". For the grid, the log marginal likelihoods
(Laplace evidence) of all tasks after the first are added up, each with the memory of the previous tasks as its prior:

    log p(task | memory) = log p(task | w) - 1/2 (w - m)^T L (w - m) + 1/2 log det L - 1/2 log det (L + F)

with L = prior + strength * sum of F_t. Neither this nor "auto" uses old data; the mean accuracy over all tasks does.
The data come from the Hugging Face hub, or from the folder in LIMPET_DATA.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import common
from common import versions
from learner import Learner
from limpet.experiments.methods import CURVATURE_BATCH, Shuffled, _forward
from limpet.experiments.metrics import score
from limpet.experiments.tasks import Lesson
from limpet.experiments.training import TaskTraining

RESULTS = common.RESULTS / "strength"
GRIDS: dict[str, tuple[float, ...]] = {
    "permuted-mnist": (0.1, 0.3, 1, 2, 3, 5, 10, 30, 100),
    "disjoint-mnist": (1, 10, 100, 300, 1000, 3000, 10000),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "permuted-mnist": {
        "tasks": 5,
        "training.epochs": 2,
        "training.batch_size": 100,
        "training.lr": 0.05,
        "memory.every": 16,
        "memory.smoothing": 0.0,
        "memory.prior_precision": 1.0,
    },
    "disjoint-mnist": {},
}


class Sequence(Learner):
    """All tasks at one strength."""

    def learn(self) -> dict[str, Any]:
        """Mean test accuracy in the end, the strength of every task, and the evidence of all after the first."""
        evidence, strengths = 0.0, []
        for number in range(len(self.lessons)):
            lesson = self.lessons.lesson(number)
            training = TaskTraining(self.model, [lesson], self.recipe, number)
            with self.method.hold(training.optimizer, training.examples):
                while not training.done:
                    training.epoch(lambda *_: None)
            if number:
                evidence += self._evidence(lesson)
            self.method.learned(lesson, lambda: [])
            strengths.append(round(self.method.memory._strength, 3))
        accuracies = [
            score(self.model, self.lessons.test(i), self.lessons.sequence.head(i), 1000).accuracy
            for i in range(len(self.lessons))
        ]
        return {"accuracy": sum(accuracies) / len(accuracies), "strengths": strengths, "evidence": evidence}

    def _evidence(self, lesson: Lesson) -> float:
        """Log p(task | memory), at the weights as they are."""
        memory = self.method.memory
        limit = self.recipe.memory.limit
        fisher = memory._measure(Shuffled(lesson, self.recipe.seed), None, limit, _forward, False)
        value = -log_loss(self.model, lesson) - memory.posterior.penalty().item()
        for held in memory.posterior.held.values():
            after = held.precision
            for term in fisher.terms[held.block.name]:
                after = after.add(term, 1.0)
            value += float(held.precision.log_determinant() - after.log_determinant()) / 2
        return value


@torch.no_grad()
def log_loss(model: nn.Module, lesson: Lesson) -> float:
    """-log p(task | weights)."""
    model.eval()
    order = torch.arange(len(lesson.train))
    batches = lesson.train.batches(CURVATURE_BATCH, order)
    return sum(float(F.cross_entropy(model(x, lesson.head), y, reduction="sum")) for x, y in batches)


def measure(experiment: str, seed: int) -> dict[str, Any]:
    """The grid and "auto"."""
    begin, runs = time.perf_counter(), {}
    for strength in (*GRIDS[experiment], "auto"):
        settings = {**SETTINGS[experiment], "memory.strength": strength, "seed": seed}
        runs[str(strength)] = Sequence(experiment, settings).learn()
        print(f"{strength}: {runs[str(strength)]}, {time.perf_counter() - begin:.0f} s", flush=True)
    return {"versions": versions(), "seconds": round(time.perf_counter() - begin), "seed": seed, "runs": runs}


def draw(records: dict[str, dict[str, Any]], path: Path) -> None:
    """Accuracy over the strength, and where "auto" and the evidence lead."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(records), figsize=(4.6 * len(records), 3.6), layout="constrained", squeeze=False)
    for axis, (experiment, record) in zip(axes[0], records.items(), strict=True):
        grid = {float(s): run for s, run in record["runs"].items() if s != "auto"}
        axis.plot(list(grid), [run["accuracy"] for run in grid.values()], color="#1f6f8b", marker="o", markersize=4)
        axis.axhline(record["runs"]["auto"]["accuracy"], color="#d98032", linestyle="--", label='strength="auto"')
        best = most_likely(record)
        ring = {"s": 110, "facecolors": "none", "edgecolors": "#6a994e", "zorder": 3, "label": "greatest evidence"}
        axis.scatter([best], [grid[best]["accuracy"]], **ring)
        axis.set(xscale="log", xlabel="strength", ylabel="mean accuracy (%)", title=experiment)
        axis.legend(frameon=False, loc="lower right")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def most_likely(record: dict[str, Any]) -> float:
    """The strength of the grid whose evidence is the greatest."""
    grid = {float(s): run["evidence"] for s, run in record["runs"].items() if s != "auto"}
    return max(grid, key=lambda strength: grid[strength])


def main() -> None:
    parser = common.parser(__doc__, threads=1)
    parser.add_argument("--experiment", choices=list(GRIDS), default="permuted-mnist")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = common.parse(parser)
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not options.draw:
        path = RESULTS / f"{options.experiment}.json"
        path.write_text(json.dumps(measure(options.experiment, options.seed), indent=1) + "\n")
    kept = {name: RESULTS / f"{name}.json" for name in GRIDS}
    records = {name: json.loads(path.read_text()) for name, path in kept.items() if path.exists()}
    draw(records, RESULTS / "strength.png")
    for experiment, record in records.items():
        print(f"\n{experiment}, seed {record['seed']}; the greatest evidence is that of {most_likely(record):g}\n")
        print("| strength | mean accuracy (%) | log evidence per task |")
        print("| --- | --- | --- |")
        for strength, run in record["runs"].items():
            tasks = len(run["strengths"]) - 1
            shown = ", ".join(f"{s:.3g}" for s in run["strengths"]) if strength == "auto" else ""
            label = f"auto ({shown})" if shown else strength
            evidence = "" if shown else f"{run['evidence'] / tasks:.0f}"
            print(f"| {label} | {run['accuracy']:.2f} | {evidence} |")


if __name__ == "__main__":
    main()

"""How accurate is the forecast? Compare it with the true increase of the old loss, at several points of every task.

    python -m benchmarks forecast                                   # permuted MNIST, about 5 minutes
    python -m benchmarks forecast --experiment vision --tasks 5     # about 20 minutes
    python -m benchmarks forecast --draw                            # figure and numbers, from the stored results

A pair consists of `memory.forecast()` while task t + 1 is learned, and the true increase of the mean loss on tasks 1 to
t since the end of task t, on 2000 training examples of each. Strengths below, at and above 1 produce small and large
increases. The pairs are stored in results/forecast/*.json, from which all figures are made.
The data come from the Hugging Face hub, or from the folder in LIMPET_DATA.
"""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import common
from common import versions
from learner import Learner
from limpet.errors import LimpetWarning, NotProtectedWarning
from limpet.experiments.data import Examples
from limpet.experiments.training import TaskTraining

RESULTS = common.RESULTS / "forecast"
MOMENTS = (0.02, 0.1, 0.3, 0.6, 1.0)
"""When a pair is taken, as a share of a task's training."""

LOOKED_AT = 2000
SETTINGS: dict[str, dict[str, Any]] = {
    "permuted-mnist": {"training.epochs": 2, "training.batch_size": 100, "training.lr": 0.05, "memory.every": 16},
    "vision": {"training.epochs": 1},
}
PLAIN: dict[str, Any] = {"memory.smoothing": 0.0, "memory.prior_precision": 1.0}
"""The Laplace approximation itself."""


class Watched(Learner):
    """A sequence of tasks, looked at while it is learned."""

    def __init__(self, experiment: str, settings: dict[str, Any]) -> None:
        super().__init__(experiment, settings)
        self.old: list[tuple[Examples, int]] = []
        self.pairs: list[dict[str, Any]] = []

    def learn(self) -> None:
        """All tasks; before each one that is not the first, what the old ones cost is noted."""
        for number in range(len(self.lessons)):
            lesson = self.lessons.lesson(number)
            training = TaskTraining(self.model, [lesson], self.recipe, number)
            total = self.recipe.training.epochs * training.updates_per_epoch
            moments = {max(round(share * total), 1) for share in MOMENTS[:-1]}
            before = self._outputs()

            def look(done: int, _: int, number: int = number, training: TaskTraining = training) -> None:
                update = training.position.epoch * training.updates_per_epoch + done
                if number and update in moments:  # noqa: B023
                    self._note(number, update / total, before)  # noqa: B023

            with self.method.hold(training.optimizer, training.examples):
                while not training.done:
                    training.epoch(look)
            if number:
                self._note(number, 1.0, before)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NotProtectedWarning)
                self.method.learned(lesson, lambda: [])
            order = torch.randperm(len(lesson.train), generator=torch.Generator().manual_seed(number))
            self.old.append((lesson.train.take(order[:LOOKED_AT]), lesson.head))

    @torch.no_grad()
    def _outputs(self) -> list[tuple[Tensor, Tensor]]:
        """Log probabilities and labels of the old tasks."""
        self.model.eval()
        found = []
        for examples, head in self.old:
            parts = [(self.model(x, head).log_softmax(1), y) for x, y in examples.batches(500)]
            found.append((torch.cat([one for one, _ in parts]), torch.cat([y for _, y in parts])))
        self.model.train()
        return found

    def _note(self, task: int, share: float, before: list[tuple[Tensor, Tensor]]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LimpetWarning)
            forecast = self.method.memory.forecast()
        pairs = list(zip(before, self._outputs(), strict=True))
        rises = [float(F.nll_loss(now, y) - F.nll_loss(then, y)) for (then, y), (now, _) in pairs]
        drifts = [float(F.kl_div(now, then, log_target=True, reduction="batchmean")) for (then, _), (now, _) in pairs]
        found: dict[str, Any] = {
            "forecast": float(forecast),
            "quadratic": forecast.quadratic,
            "rise": float(np.mean(rises)),
        }
        found |= {"forecast_drift": forecast.drift, "drift": float(np.mean(drifts)), "trusted": forecast.trusted}
        self.pairs.append({"task": task, "at": share, **found})


def measure(experiment: str, tasks: int, strengths: list[float], seed: int) -> dict[str, Any]:
    """All pairs of an experiment, and how they came about."""
    begin, runs = time.perf_counter(), []
    for strength in strengths:
        settings = {**SETTINGS[experiment], **PLAIN, "tasks": tasks, "memory.strength": strength, "seed": seed}
        watched = Watched(experiment, settings)
        watched.learn()
        runs.append({"strength": strength, "pairs": watched.pairs})
        print(f"strength {strength:g}: {len(watched.pairs)} pairs")
    wall = round(time.perf_counter() - begin)
    return {
        "experiment": experiment,
        "tasks": tasks,
        "seed": seed,
        "versions": versions(),
        "seconds": wall,
        "runs": runs,
    }


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's: the correlation of the ranks."""
    return float(np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1])


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """How well the pairs agree."""
    pairs = [pair for run in record["runs"] for pair in run["pairs"]]
    rise, forecast, quadratic = (np.array([pair[key] for pair in pairs]) for key in ("rise", "forecast", "quadratic"))
    shown = {"pairs": float(len(pairs))}
    if "drift" in pairs[0]:
        drift, said = (np.array([pair[key] for pair in pairs]) for key in ("drift", "forecast_drift"))
        trusted = np.array([pair["trusted"] for pair in pairs])
        shown |= {
            "trusted (%)": 100 * float(trusted.mean()),
            "lost more than 2.5 times the forecast, trusted (%)": 100
            * float(np.mean((rise > 2.5 * forecast) & trusted)),
            "drift: median relative error": float(np.median(np.abs(said - drift) / drift)),
            "drift: median measured / forecast": float(np.median(drift / said)),
            "drift: within a factor of 2.5 (%)": 100 * float(np.mean(np.abs(np.log(drift / said)) < np.log(2.5))),
        }
    return shown | {
        "rank correlation": rank_correlation(forecast, rise),
        "median relative error": float(np.median(np.abs(forecast - rise) / np.abs(rise))),
        "median measured / forecast": float(np.median(rise / forecast)),
        "pairs with a rise above the forecast (%)": 100 * float(np.mean(rise > forecast)),
        "measured / forecast, 5 % of the pairs below": float(np.quantile(rise / forecast, 0.05)),
        "measured / forecast, 5 % of the pairs above": float(np.quantile(rise / forecast, 0.95)),
        "rank correlation, quadratic alone": rank_correlation(quadratic, rise),
        "median relative error, quadratic alone": float(np.median(np.abs(quadratic - rise) / np.abs(rise))),
        "median measured / quadratic": float(np.median(rise / quadratic)),
    }


def table(records: list[dict[str, Any]]) -> str:
    """The numbers of all experiments."""
    found = {record["experiment"]: numbers(record) for record in records}
    lines = [f"| | {' | '.join(found)} |", f"| --- | {' | '.join('---' for _ in found)} |"]
    for key in max(found.values(), key=len):
        cells = (f"{values[key]:.3g}" if key in values else "" for values in found.values())
        lines.append(f"| {key} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Forecast against measurement."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(records), figsize=(4.6 * len(records), 4.2), squeeze=False, layout="constrained")
    for record, axis in zip(records, axes[0], strict=True):
        shown = [pair for run in record["runs"] for pair in run["pairs"] if pair["rise"] > 0]
        ends = [0.7 * min(pair["rise"] for pair in shown), 1.4 * max(pair["rise"] for pair in shown)]
        axis.plot(ends, ends, color="black", linewidth=1, label="as forecast")
        axis.fill_between(
            ends, [e / 2 for e in ends], [e * 2 for e in ends], color="#eeeeee", zorder=0, label="within a factor of 2"
        )
        axis.scatter(
            [p["quadratic"] for p in shown], [p["rise"] for p in shown], s=9, color="#bbbbbb", label="quadratic alone"
        )
        for run, color in zip(record["runs"], ("#d98032", "#1f6f8b", "#6a994e"), strict=False):
            points = [pair for pair in run["pairs"] if pair["rise"] > 0]
            axis.scatter(
                [p["forecast"] for p in points],
                [p["rise"] for p in points],
                s=16,
                color=color,
                label=f"forecast, strength {run['strength']:g}",
            )
        axis.set(
            xscale="log", yscale="log", xlabel="forecast (nats per example)", ylabel="measured increase of the old loss"
        )
        axis.set_title(record["experiment"], fontsize=11)
        axis.legend(frameon=False, fontsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = common.parser(__doc__, threads=1)
    parser.add_argument("--experiment", choices=list(SETTINGS), default="permuted-mnist")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.2, 1.0, 3.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = common.parse(parser)
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not options.draw:
        record = measure(options.experiment, options.tasks, options.strengths, options.seed)
        (RESULTS / f"{options.experiment}.json").write_text(json.dumps(record, indent=1) + "\n")
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    draw(records, RESULTS / "forecast.png")
    print(table(records))


if __name__ == "__main__":
    main()

"""Two tasks in a row with `memory.protect` and its rivals: training, what is done after it, and what is measured.

Used by protect_sentences and protect_vision. Every run is recorded when it ends, so an interrupted command resumes with
the next one. During plain and protected training the forecast, the drift on the memory's probe and the true increase of
the old loss are recorded at several steps.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import common
import limpet
from common import versions
from limpet.forgetting.drift import Drift, measured_drift
from limpet.forgetting.probe import Probe
from limpet.forgetting.repair import Repair
from limpet.methods.restore import restored
from repair_figures import markdown, spread
from two_tasks import Batch, scale_update

PROBE = 100
REPLAYED, REPLAY_BATCH = 0.05, 4  # share of the old data that is kept, and how many of them join each batch
DISTILLATION, L2 = 1.0, 0.1  # weight of the KL divergence; half the factor of |w - before|^2
MOMENTS = (2, 5, 10, 20, 30, 45, 60, 100, 150)
BUDGETS = (0.01, 0.03, 0.1)
SCALE = 0.6
SCALED, REPAIRED = f"plain, then times {SCALE}", "plain, then repair"
AFTER = (SCALED, REPAIRED, *(f"budget {budget}" for budget in BUDGETS))
ENERGY = 0.99
SMALL = f"protect, energy {ENERGY}"
BOTH = "distillation and protect"
RUNS = ("plain", *AFTER, "protect", "replay", "distillation", BOTH, "l2-sp", SMALL)


class Rivals:
    """What one seed needs: the network that has learned the first task, its head, and its memory.

    Args:
        experiment: The network, the two tasks as batches, and how they are learned and measured.
    """

    def __init__(self, experiment: Any) -> None:
        self.experiment, self.seed, self.model = experiment, experiment.seed, experiment.model
        self.old, self.new = experiment.train
        experiment.learn_first()
        begin = time.perf_counter()
        self.memory = limpet.OnlineLaplace(self.model, strength="auto", prior_mean="initial", exclude=["classifier"])
        self.memory.consolidate(experiment.train[self.old], limit=experiment.measured, probe=PROBE, progress=False)
        self.seconds = time.perf_counter() - begin
        self.head = copy.deepcopy(self.model.classifier)
        self.teacher = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.start = copy.deepcopy(self.model.state_dict())
        self.plain: tuple[str, dict[str, Tensor]] | None = None  # rate and weights of the last plain training
        self.repairs: dict[str, Repair] = {}  # the last one, by rate
        self.before = self.experiment.scores(self.old, self.head)
        self.consolidated_before = self._consolidated_loss()
        self.slope = self._slope()
        self.test_probe = self.probe_of(self.experiment.test[self.old])

    def restart(self) -> None:
        """The network after the first task, with a new head."""
        self.model.load_state_dict(self.start)
        torch.manual_seed(1000 + self.seed)
        self.model.classifier.reset_parameters()

    def old_logits(self, model: Any, batch: Any) -> Tensor:
        """The outputs of the first task, through its own head."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits: Tensor = self.head(self.experiment.features(model, inputs))
        return logits

    @torch.no_grad()
    def _consolidated_loss(self) -> float:
        """The mean loss on the first six batches that the memory was measured on."""
        mode = self.model.training
        self.model.eval()
        found = [
            float(F.cross_entropy(self.old_logits(self.model, batch), batch["labels"]))
            for batch in self.experiment.train[self.old][:6]
        ]
        self.model.train(mode)
        return statistics.mean(found)

    @torch.no_grad()
    def probe_of(self, batches: Iterable[Batch]) -> Probe:
        """A probe of other examples of the first task, with the outputs of the network before the second."""
        inputs = [{name: value for name, value in batch.items() if name != "labels"} for batch in batches]
        outputs = [self.old_logits(self.teacher, batch) for batch in inputs]
        return Probe(inputs, [limpet.Categorical().summary(each, None) for each in outputs])

    def drift_on(self, probe: Probe) -> Drift:
        """The drift on other examples of the first task."""
        return measured_drift(self.model, [probe], limpet.Categorical(), self.through_old_head)

    def _slope(self) -> dict[str, Tensor]:
        """The gradient of the mean loss on the same batches."""
        self.model.eval()
        parameters = {name: p for name, p in self.model.named_parameters() if "classifier" not in name}
        batches = self.experiment.train[self.old][:6]
        losses = [F.cross_entropy(self.old_logits(self.model, batch), batch["labels"]) for batch in batches]
        found = torch.autograd.grad(torch.stack(losses).mean(), list(parameters.values()), allow_unused=True)
        return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}

    @torch.no_grad()
    def moment(self, step: int) -> dict[str, Any]:
        """What the memory says at the current weights, and what is true there."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", limpet.LimpetWarning)
            forecast = self.memory.forecast()
        drift = self.memory.drift(forward=self.through_old_head)
        weights = dict(self.model.named_parameters())
        found = {
            "forecast": float(forecast),
            "forecast_drift": forecast.drift,
            "quadratic": forecast.quadratic,
            "slope": sum(float((g * (weights[name] - self.start[name])).sum()) for name, g in self.slope.items()),
            "drift": float(drift),
            "rise": self._consolidated_loss() - self.consolidated_before,
        }
        rounded = {name: None if value is None else float(f"{value:.4g}") for name, value in found.items()}
        return {"step": step, "trusted": forecast.trusted, **rounded}

    def through_old_head(self, model: Any, batch: Any) -> tuple[Tensor, None]:
        """The `forward` of the memory's probe."""
        return self.old_logits(model, batch), None

    def extra(self, what: str) -> Any:
        """The further loss of a rival."""
        generator = torch.Generator().manual_seed(self.seed)
        if what == "replay":
            pool = self.experiment.train[self.old][: round(REPLAYED * len(self.experiment.train[self.old]))]

            def replay(model: Any, _: Batch) -> Tensor:
                batch = pool[int(torch.randint(0, len(pool), (), generator=generator))]
                rows = torch.randperm(len(batch["labels"]), generator=generator)[:REPLAY_BATCH]
                some = {name: value[rows] for name, value in batch.items()}
                return F.cross_entropy(self.old_logits(model, some), some["labels"])

            return replay
        if what in ("distillation", BOTH):

            def distillation(model: Any, batch: Batch) -> Tensor:
                with torch.no_grad():
                    target = self.old_logits(self.teacher, batch).log_softmax(1)
                own = self.old_logits(model, batch).log_softmax(1)
                return DISTILLATION * F.kl_div(own, target, log_target=True, reduction="batchmean")

            return distillation
        before = {name: value for name, value in self.teacher.named_parameters() if "classifier" not in name}

        def pulled(model: Any, _: Batch) -> Tensor:
            weights = dict(model.named_parameters())
            return torch.stack([L2 * (weights[name] - value).square().sum() for name, value in before.items()]).sum()

        return pulled if what == "l2-sp" else None

    def run(self, what: str, rate: str) -> dict[str, Any]:
        """Train with one method, or do something after plain training, and measure the end."""
        if what in AFTER:
            return self._after_training(what, rate)
        self.restart()
        lr, steps = self.experiment.rates[rate]
        moments: list[dict[str, float]] = []

        def after(step: int) -> None:
            if what in ("plain", "protect") and step in MOMENTS:
                moments.append(self.moment(step))

        memory = self._small() if what == SMALL else self.memory if what in ("protect", BOTH) else None
        begin = time.perf_counter()
        self.experiment.fit(self.model, self.new, lr, steps, memory, extra=self.extra(what), after=after)
        seconds = time.perf_counter() - begin
        if what == "plain":
            self.plain = rate, copy.deepcopy(self.model.state_dict())
        size = {} if memory is None else {"bytes": memory.nbytes}
        return self.point(what, rate, seconds, moments=moments, end=self.moment(steps), **size)

    def _small(self) -> limpet.OnlineLaplace:
        """The memory with as many eigenvectors of every factor as hold a part of its trace."""
        memory = restored(self.memory.state_dict(), self.model)
        assert isinstance(memory, limpet.OnlineLaplace)
        memory.compress(energy=ENERGY, progress=False)
        return memory

    def _after_training(self, what: str, rate: str) -> dict[str, Any]:
        """Scale or repair the update of plain training."""
        lr, steps = self.experiment.rates[rate]
        self.restart()
        if self.plain is None or self.plain[0] != rate:
            self.experiment.fit(self.model, self.new, lr, steps)
            self.plain = rate, copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.plain[1])
        begin = time.perf_counter()
        if what == SCALED:
            scale_update(self.model, self.start, self.plain[1], SCALE)
        else:
            if rate not in self.repairs:
                data, measured = self.experiment.train[self.new], self.experiment.measured
                self.repairs = {rate: limpet.repair(self.model, self.memory, data, limit=measured, progress=False)}
            if what == REPAIRED:
                self.repairs[rate].at(1.0)
            else:
                self.repairs[rate].within_budget(float(what.split()[1]))
        return self.point(what, rate, time.perf_counter() - begin, end=self.moment(steps))

    def point(self, what: str, rate: str, seconds: float, **facts: Any) -> dict[str, Any]:
        """Accuracy and loss on both tasks, where the model is now."""
        new, old = (
            self.experiment.scores(self.new, self.model.classifier),
            self.experiment.scores(self.old, self.head),
        )
        point = {"seed": self.seed, "rate": rate, "what": what, "new": new, "old": old, "before": self.before}
        drift = self.drift_on(self.test_probe)
        point["drift_test"] = [round(float(drift), 5), round(drift.standard_error, 5)]
        return point | {"seconds": round(seconds, 1), **facts, "versions": versions("transformers")}


def table(points: list[dict[str, Any]], rate: str, columns: tuple[str, str]) -> str:
    """Accuracy on both tasks of every method at one learning rate, over the seeds."""
    rows = []
    for what in dict.fromkeys(point["what"] for point in points):
        some = [point for point in points if point["what"] == what and point["rate"] == rate]
        if some:
            cells = [spread((p["new"][0] for p in some), 1), spread((p["old"][0] - p["before"][0] for p in some), 1)]
            drifts = [spread((p["end"]["drift"] for p in some), 3), spread((p["drift_test"][0] for p in some), 3)]
            rows.append([what, *cells, *drifts, f"{statistics.mean(p['seconds'] for p in some):.0f}", str(len(some))])
    return markdown(["", *columns, "drift", "drift, other examples", "seconds", "seeds"], rows)


def summary(points: list[dict[str, Any]]) -> str:
    """How well forecasts and budgets were kept, in one sentence each."""
    moments = [m for p in points for m in p.get("moments", ()) if m["drift"] > 0 and m["forecast_drift"]]
    ratios = sorted(m["drift"] / m["forecast_drift"] for m in moments)
    close = sum(1 / 2.5 <= ratio <= 2.5 for ratio in ratios) / len(ratios)
    lines = [
        f"Drift over forecast.drift at {len(ratios)} moments: {ratios[0]:.2g} to {ratios[-1]:.2g}, "
        f"{statistics.median(ratios):.2g} in the median, {close:.0%} within a factor of 2.5, "
        f"{sum(m['trusted'] for m in moments)} trusted."
    ]
    for budget in BUDGETS:
        found = [p for p in points if p["what"] == f"budget {budget}"]
        over = sorted(p["drift_test"][0] / budget for p in found)
        if over:
            high = sum(ratio > 1.5 for ratio in over)
            lines.append(
                f"Drift on other examples over the budget of {budget}: {over[0]:.2f} to {over[-1]:.2f}, "
                f"{high} of {len(over)} above 1.5."
            )
    return "\n".join(lines)


def run_all(
    options: argparse.Namespace, make: Callable[[int], Any], rates: Iterable[str], columns: tuple[str, str]
) -> None:
    """Run what is missing, and print the tables.

    Args:
        options: The options of the command line.
        make: The experiment of a seed.
        rates: The learning rates.
        columns: Titles of the columns with the accuracies.
    """
    for seed in [] if options.draw else options.seeds:
        done = {(p["seed"], p["rate"], p["what"]) for p in common.read_records(options.out)}
        missing = [(r, w) for r in options.rates for w in options.runs if (seed, r, w) not in done]
        rivals = Rivals(make(seed)) if missing else None
        for rate, what in missing:
            assert rivals is not None
            point = rivals.run(what, rate)
            print({name: value for name, value in point.items() if name not in ("versions", "moments")}, flush=True)
            common.append_record(options.out, point)
    found = common.read_records(options.out)
    for rate in rates:
        print(f"\n{rate}:\n\n{table(found, rate, columns)}")
    print(f"\n{summary(found)}")


def parser(description: str | None, rates: Iterable[str], out: Path) -> argparse.ArgumentParser:
    """The options that all comparisons have."""
    found = common.parser(description)
    found.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    found.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    found.add_argument("--rates", nargs="+", choices=list(rates), default=list(rates))
    found.add_argument("--out", type=Path, default=out)
    found.add_argument("--draw", action="store_true", help="measure nothing")
    return found

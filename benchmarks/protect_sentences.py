"""Fine-tune a sentence encoder on a second task with `memory.protect` and its rivals: what is retained, at what cost?

    python -m benchmarks protect_sentences --model M --reviews R.csv          # all runs that are still missing
    python -m benchmarks protect_sentences --draw                             # the tables, from the stored results

The tasks, data and training are those of repair_sentences: sentiment of short reviews, then word order with a new head,
all weights, AdamW, at three learning rates. Protection uses the lines of the README and nothing else. Every run is
recorded when it ends, so an interrupted command resumes with the next one. During plain and protected training the
forecast, the drift on the memory's probe and the true increase of the old loss are recorded at several steps.
M is a folder or a name on the hub; R has the columns text, label and source ("imdb" or "rotten_tomatoes").
"""

from __future__ import annotations

import copy
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import limpet
from common import versions
from repair_figures import markdown, spread
from repair_sentences import MEASURED, NEW, OLD, Experiment
from sentences import Batch

RESULTS = common.RESULTS / "protect" / "sentences.jsonl"
RATES = {"3e-5": (3e-5, 60), "1e-4": (1e-4, 60), "2e-4": (2e-4, 30)}  # learning rate and steps
PROBE = 100
REPLAYED, REPLAY_BATCH = 0.05, 4  # share of the old data that is kept, and how many of them join each batch
DISTILLATION, L2 = 1.0, 0.1  # weight of the KL divergence; half the factor of |w - before|^2
MOMENTS = (2, 5, 10, 20, 30, 45, 60)
SCALE = 0.6
RUNS = ("plain", "protect", "replay", "distillation", "l2-sp")


class Rivals:
    """What one seed needs: the encoder that has learned the first task, its head, and its memory."""

    def __init__(self, model: str, reviews: Path, seed: int) -> None:
        self.seed = seed
        self.experiment = Experiment(model, reviews, seed)
        self.model = self.experiment.model
        self.experiment.fit(self.model, OLD, 1e-4, 2 * len(self.experiment.train[OLD]))
        begin = time.perf_counter()
        self.memory = limpet.OnlineLaplace(self.model, strength="auto", prior_mean="initial", exclude=["classifier"])
        self.memory.consolidate(self.experiment.train[OLD], limit=MEASURED, probe=PROBE, progress=False)
        self.seconds = time.perf_counter() - begin
        self.head = copy.deepcopy(self.model.classifier)
        self.teacher = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.start = copy.deepcopy(self.model.state_dict())
        self.before = self.experiment.scores(OLD, self.head)
        self.consolidated_before = self._consolidated_loss()

    def restart(self) -> None:
        """The encoder after the first task, with a new head."""
        self.model.load_state_dict(self.start)
        torch.manual_seed(1000 + self.seed)
        self.model.classifier = nn.Linear(self.model.config.hidden_size, 2)

    def old_logits(self, model: Any, batch: Any) -> Tensor:
        """The outputs of the first task, through its own head."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits: Tensor = self.head(model.bert(**inputs).pooler_output)
        return logits

    @torch.no_grad()
    def _consolidated_loss(self) -> float:
        """The mean loss on the first 96 texts that the memory was measured on."""
        mode = self.model.training
        self.model.eval()
        found = [
            float(F.cross_entropy(self.old_logits(self.model, batch), batch["labels"]))
            for batch in self.experiment.train[OLD][:6]
        ]
        self.model.train(mode)
        return statistics.mean(found)

    def moment(self, step: int) -> dict[str, float]:
        """Forecast, drift and the true increase of the old loss at the current weights."""
        forecast = self.memory.forecast()
        drift = self.memory.drift(forward=lambda model, batch: (self.old_logits(model, batch), None))
        rise = self._consolidated_loss() - self.consolidated_before
        found = {"step": step, "forecast": float(forecast), "quadratic": forecast.quadratic, "drift": float(drift)}
        return {name: round(value, 6) for name, value in {**found, "rise": rise}.items()}

    def extra(self, what: str) -> Any:
        """The further loss of a rival."""
        generator = torch.Generator().manual_seed(self.seed)
        if what == "replay":
            pool = self.experiment.train[OLD][: round(REPLAYED * len(self.experiment.train[OLD]))]

            def replay(model: Any, _: Batch) -> Tensor:
                batch = pool[int(torch.randint(0, len(pool), (), generator=generator))]
                rows = torch.randperm(len(batch["labels"]), generator=generator)[:REPLAY_BATCH]
                some = {name: value[rows] for name, value in batch.items()}
                return F.cross_entropy(self.old_logits(model, some), some["labels"])

            return replay
        if what == "distillation":

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

    def run(self, what: str, rate: str) -> list[dict[str, Any]]:
        """Train with one method, and give its points: the end, and for plain training what is done afterwards."""
        self.restart()
        lr, steps = RATES[rate]
        moments: list[dict[str, float]] = []

        def after(step: int) -> None:
            if what in ("plain", "protect") and step in MOMENTS:
                moments.append(self.moment(step))

        begin = time.perf_counter()
        memory = self.memory if what == "protect" else None
        self.experiment.fit(self.model, NEW, lr, steps, memory, extra=self.extra(what), after=after)
        points = [self.point(what, rate, time.perf_counter() - begin, moments=moments, end=self.moment(steps))]
        if what == "plain":
            tuned = copy.deepcopy(self.model.state_dict())
            for name, value in self.model.state_dict().items():
                if "classifier" not in name and value.is_floating_point():
                    value.copy_(self.start[name] + SCALE * (value - self.start[name]))
            points.append(self.point(f"plain, then times {SCALE}", rate, 0.0, end=self.moment(steps)))
            self.model.load_state_dict(tuned)
            begin = time.perf_counter()
            limpet.repair(self.model, self.memory, self.experiment.train[NEW], limit=MEASURED, progress=False)
            points.append(self.point("plain, then repair", rate, time.perf_counter() - begin, end=self.moment(steps)))
        return points

    def point(self, what: str, rate: str, seconds: float, **facts: Any) -> dict[str, Any]:
        """Accuracy and loss on both tasks, where the model is now."""
        new, old = (
            self.experiment.scores(NEW, self.model.classifier),
            self.experiment.scores(OLD, self.head),
        )
        point = {"seed": self.seed, "rate": rate, "what": what, "new": new, "old": old, "before": self.before}
        return point | {"seconds": round(seconds, 1), **facts, "versions": versions("transformers")}


def table(points: list[dict[str, Any]], rate: str) -> str:
    """Accuracy on both tasks of every method at one learning rate, over the seeds."""
    rows = []
    for what in dict.fromkeys(point["what"] for point in points):
        some = [point for point in points if point["what"] == what and point["rate"] == rate]
        if some:
            cells = [spread((p["new"][0] for p in some), 1), spread((p["old"][0] - p["before"][0] for p in some), 1)]
            drift = spread((p["end"]["drift"] for p in some), 3)
            rows.append([what, *cells, drift, f"{statistics.mean(p['seconds'] for p in some):.0f}", str(len(some))])
    return markdown(["", "word order %", "change of sentiment", "drift", "seconds", "seeds"], rows)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--reviews", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    parser.add_argument("--rates", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = common.parse(parser)
    for seed in [] if options.draw else options.seeds:
        done = {(p["seed"], p["rate"], p["what"]) for p in common.read_records(options.out)}
        missing = [(r, w) for r in options.rates for w in options.runs if (seed, r, w) not in done]
        rivals = Rivals(options.model, options.reviews, seed) if missing else None
        for rate, what in missing:
            assert rivals is not None
            for point in rivals.run(what, rate):
                print({name: value for name, value in point.items() if name not in ("versions", "moments")}, flush=True)
                common.append_record(options.out, point)
    found = common.read_records(options.out)
    for rate in RATES:
        print(f"\n{rate}:\n\n{table(found, rate)}")


if __name__ == "__main__":
    main()

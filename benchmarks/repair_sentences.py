"""Fine-tune a sentence encoder on a second task as usual, then repair it: is the first task restored, at what cost?

    python -m benchmarks repair_sentences --model M --reviews R.csv      # all seeds that are still missing

The encoder learns to classify short reviews as positive or negative; a memory is built from a part of these reviews.
Then it learns, with a new head and without protection, whether the words of a text are in their original order: all
weights are trained, with AdamW, at a learning rate at which much is forgotten and at one at which nearly everything is.
`limpet.repair` is compared with scaling the update (WiSE-FT) and with training under `memory.protect` instead. Points
are recorded when they are measured, and an incomplete seed is run again.
M is a folder or a name on the hub; R has the columns text, label and source ("imdb" or "rotten_tomatoes").
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import common
import limpet
from common import versions
from sentences import TASKS, texts, tokenized
from two_tasks import TwoTasks, scale_update

RESULTS = common.RESULTS / "repair" / "sentences.jsonl"
OLD, NEW = TASKS[1], TASKS[2]
TRAIN, TEST = {OLD: 800, NEW: 480}, {OLD: 300, NEW: 200}
EPOCHS, OLD_LR = 2, 1e-4
MEASURED, PROBE = 200, 100  # examples of a task that its curvature and its drift are measured on
RATES = {"1e-4": (1e-4, 60), "2e-4": (2e-4, 30)}  # learning rate and steps of the second task
STRENGTHS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SCALES = (0.8, 0.6, 0.4, 0.2)
TOLERANCES = (0.01, 0.02, 0.05)


class Experiment(TwoTasks):
    """The encoder, the two tasks as batches, and the encoder that has learned the first.

    Args:
        model: Folder or name of the encoder.
        reviews: File with the texts.
        seed: Seed of the texts and of the training.
        old: The first task.
    """

    max_norm = 1.0

    def __init__(self, model: str, reviews: Path, seed: int, old: str = OLD) -> None:
        self.seed = seed
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        size = max(TRAIN[name] + TEST[name] for name in TRAIN)
        found = texts(reviews, 2 * size, seed)
        # the texts of the second task are not those of the first
        halves = {OLD: found[old][:size], NEW: found[NEW][size:]}
        split = {
            name: (halves[name][: TEST[name]], halves[name][TEST[name] : TEST[name] + TRAIN[name]]) for name in TRAIN
        }
        self.test = {name: tokenized(self.tokenizer, test) for name, (test, _) in split.items()}
        self.train = {name: tokenized(self.tokenizer, train) for name, (_, train) in split.items()}
        torch.manual_seed(seed)
        self.model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=2)

    def learned(self) -> tuple[nn.Module, limpet.Memory]:
        """Learn the first task and make the memory of it; gives its head."""
        self.fit(self.model, OLD, OLD_LR, EPOCHS * len(self.train[OLD]))
        # repair does not look at the strength, which is for the run with `protect`
        memory = limpet.OnlineLaplace(self.model, strength="auto", prior_mean="initial", exclude=["classifier"])
        memory.consolidate(self.train[OLD], limit=MEASURED, probe=PROBE, progress=False)
        return copy.deepcopy(self.model.classifier), memory

    @torch.no_grad()
    def scores(self, name: str, head: nn.Module) -> tuple[float, float]:
        """Accuracy in per cent, and the mean loss, with a task's own head."""
        self.model.eval()
        kept, self.model.classifier = self.model.classifier, head
        right, total, count = 0, 0.0, 0
        for batch in self.test[name]:
            logits: Tensor = self.model(**{k: v for k, v in batch.items() if k != "labels"}).logits
            right += int((logits.argmax(1) == batch["labels"]).sum())
            total += float(F.cross_entropy(logits, batch["labels"], reduction="sum"))
            count += len(batch["labels"])
        self.model.classifier = kept
        return round(100 * right / count, 2), round(total / count, 4)


def run(options: argparse.Namespace, seed: int, record: Any) -> None:
    """All runs of one seed; each point goes to `record` as a dictionary."""
    experiment = Experiment(options.model, options.reviews, seed)
    head, memory = experiment.learned()
    model = experiment.model
    start = copy.deepcopy(model.state_dict())
    before = experiment.scores(OLD, head)

    def restart() -> None:
        model.load_state_dict(start)
        torch.manual_seed(1000 + seed)
        model.classifier = nn.Linear(model.config.hidden_size, 2)

    for rate, (lr, steps) in RATES.items():
        restart()
        experiment.fit(model, NEW, lr, steps)

        def keep(what: str, at: float, seconds: float = 0.0, strength: float | None = None, rate: str = rate) -> None:
            new, old = experiment.scores(NEW, model.classifier), experiment.scores(OLD, head)
            point = {"seed": seed, "rate": rate, "what": what, "at": at, "new": new, "old": old, "before": before}
            point |= {"strength": strength, "forecast": round(float(memory.forecast()), 5)}
            point |= {"seconds": round(seconds, 1), "versions": versions("transformers")}
            record(point)

        keep("tuned", 0.0)
        begin = time.perf_counter()
        repair = limpet.repair(
            model, memory, experiment.train[NEW], limit=MEASURED, tolerance=TOLERANCES[0], progress=False
        )
        took = time.perf_counter() - begin
        for tolerance in TOLERANCES:
            repair.within_tolerance(tolerance)
            keep("tolerance", tolerance, took, repair.strength)
        for strength in STRENGTHS:
            repair.at(strength)
            keep("repair", strength)
        repair.undo()
        tuned = copy.deepcopy(model.state_dict())
        for scale in SCALES:
            scale_update(model, start, tuned, scale)
            keep("scale", scale)
        restart()
        experiment.fit(model, NEW, lr, steps, memory, mode="gradient")
        keep("protect", memory.history.tasks[0].curve.strength)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--reviews", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = common.parse(parser)
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def kept() -> list[dict[str, Any]]:
        return common.read_records(options.out)

    def record(point: dict[str, Any]) -> None:
        print({name: value for name, value in point.items() if name != "versions"}, flush=True)
        common.append_record(options.out, point)

    size = len(RATES) * (2 + len(STRENGTHS) + len(SCALES) + len(TOLERANCES))
    for seed in options.seeds:
        points = kept()
        if sum(point["seed"] == seed for point in points) < size:
            others = [point for point in points if point["seed"] != seed]
            options.out.write_text("".join(json.dumps(point) + "\n" for point in others))
            run(options, seed, record)


if __name__ == "__main__":
    main()

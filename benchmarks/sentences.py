"""A sentence encoder learns three classification tasks in sequence: how much of the first ones is retained?

    python -m benchmarks sentences --model M --reviews R.csv         # all runs that are still missing
    python -m benchmarks sentences --draw                            # the tables, from the stored results

Is a long review (IMDB) positive? Is a short one (Rotten Tomatoes)? Are the words of a text in their original order?
Every task has a head of its own, and the whole network except its embeddings is trained, with AdamW: without protection
("plain"), with `memory.protect` as it is by default, which repairs the model after every task ("protect"), the same
with the new head as it was trained ("protect, refit off"), and with a penalty in the gradients ("penalty"). Each run is
recorded when it ends, so an interrupted command resumes with the next one.
M is a folder or a name on the hub; R has the columns text, label and source ("imdb" or "rotten_tomatoes").
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import common
import limpet
from common import versions

RESULTS = common.RESULTS / "sentences" / "sequences.jsonl"
TASKS = ("imdb", "rotten_tomatoes", "order of words")
RUNS = ("plain", "protect", "protect, refit off", "penalty")
RATES = ("3e-5", "1e-4", "2e-4")
LENGTH, BATCH = 48, 16
MEASURED, PROBE = 200, 100  # examples of a task that its curvature and its drift are measured on
Batch = dict[str, Tensor]


def tokenized(tokenizer: Any, pairs: list[tuple[str, int]]) -> list[Batch]:
    """Texts with labels as batches.

    Args:
        tokenizer: The tokenizer of the encoder.
        pairs: The texts, each with its label.

    Returns:
        The batches.
    """
    batches = []
    for start in range(0, len(pairs), BATCH):
        some = pairs[start : start + BATCH]
        told = tokenizer(
            [text for text, _ in some], truncation=True, max_length=LENGTH, padding=True, return_tensors="pt"
        )
        batches.append({**told, "labels": torch.tensor([label for _, label in some])})
    return batches


def texts(path: Path, count: int, seed: int) -> dict[str, list[tuple[str, int]]]:
    """So many texts of every task, half of them of each label."""
    csv.field_size_limit(sys.maxsize)
    found: dict[tuple[str, int], list[str]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault((row["source"], int(row["label"])), []).append(row["text"].replace("<br />", " "))
    generator = torch.Generator().manual_seed(seed)
    tasks: dict[str, list[tuple[str, int]]] = {}
    for source in TASKS[:2]:
        both = [found[source, label] for label in (0, 1)]
        picks = [torch.randperm(len(one), generator=generator)[: count // 2].tolist() for one in both]
        tasks[source] = [(both[label][i], label) for pair in zip(*picks, strict=True) for label, i in enumerate(pair)]
    shuffled = []
    for number, (text, _) in enumerate(tasks["rotten_tomatoes"]):
        words = text.split()
        label = number // 2 % 2  # bad and good texts come in turns, and as many of both are to be shuffled
        order = torch.randperm(len(words), generator=generator).tolist() if label else range(len(words))
        shuffled.append((" ".join(words[i] for i in order), label))
    tasks[TASKS[2]] = shuffled
    return tasks


class Experiment:
    """The encoder, and the tasks as batches. `blocks` of the encoder train, the last ones; all where it is None."""

    def __init__(
        self,
        model: str,
        reviews: Path,
        train: int,
        test: int,
        *,
        tasks: tuple[str, ...] = TASKS,
        blocks: int | None = None,
        seed: int = 0,
    ) -> None:
        self.source, self.tasks, self.blocks, self.seed = model, tasks, blocks, seed
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model, truncation_side="left")
        self.train: dict[str, list[Batch]] = {}
        self.test: dict[str, list[Batch]] = {}
        for name, pairs in texts(reviews, train + test, seed).items():
            self.train[name], self.test[name] = (
                tokenized(self.tokenizer, pairs[test:]),
                tokenized(self.tokenizer, pairs[:test]),
            )
        self.examples = train

    def fresh(self) -> Any:
        """The encoder as it was published, with a new head for two classes."""
        torch.manual_seed(self.seed)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(self.source, num_labels=2)
        model.base_model.embeddings.requires_grad_(False)
        if self.blocks is not None:
            model.base_model.encoder.layer[: -self.blocks].requires_grad_(False)
        return model

    @staticmethod
    def memory(model: Any) -> limpet.OnlineLaplace:
        """The memory of the README."""
        return limpet.OnlineLaplace(model, strength="auto", prior_mean="initial", exclude=["classifier"])

    @staticmethod
    def optimizer(model: Any, rate: float) -> torch.optim.Optimizer:
        """A new head, and an optimizer for the parameters that train."""
        model.classifier.reset_parameters()
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)

    def consolidate(self, memory: limpet.Memory, name: str) -> None:
        """Add a task to the memory."""
        memory.consolidate(self.train[name], limit=MEASURED, examples=self.examples, probe=PROBE)

    def run(self, what: str, rate: float, epochs: int) -> dict[str, Any]:
        """The accuracy on every task after each one, and the drift of the earlier ones on their probes."""
        model = self.fresh()
        memory = None
        if what != "plain":
            memory = self.memory(model)
        heads: dict[str, dict[str, Tensor]] = {}
        found: dict[str, Any] = {"accuracy": [], "drift": []}
        begin = time.perf_counter()
        for name in self.tasks:
            optimizer = self.optimizer(model, rate)
            with self._protected(memory, optimizer, what):
                self.fit(model, optimizer, name, epochs)
            heads[name] = {key: tensor.clone() for key, tensor in model.classifier.state_dict().items()}
            found["accuracy"].append(self.accuracies(model, heads))
            if memory is not None:
                found["drift"].append(round(float(memory.drift()), 4) if memory.probes else None)
                if name != self.tasks[-1]:
                    self.consolidate(memory, name)
            print(f"{what} at {rate}, after {name}: {found}", flush=True)
        return found | {"seconds": round(time.perf_counter() - begin)}

    def _protected(self, memory: limpet.Memory | None, optimizer: Any, what: str) -> AbstractContextManager[Any]:
        if memory is None:
            return nullcontext()
        if what == "penalty":
            return memory.protect(optimizer, examples=self.examples, mode="gradient", every=4)
        refit = None if what == "protect" else {"refit": False}
        return memory.protect(optimizer, examples=self.examples, repair=refit)

    def fit(self, model: Any, optimizer: Any, name: str, epochs: int) -> None:
        """Train the model on a task."""
        model.train()
        generator = torch.Generator().manual_seed(self.seed)
        batches = self.train[name]
        steps = epochs * len(batches)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        for _ in range(epochs):
            for i in torch.randperm(len(batches), generator=generator).tolist():
                optimizer.zero_grad()
                torch.autograd.backward(F.cross_entropy(outputs(model, batches[i]), batches[i]["labels"]))
                optimizer.step()
                rate.step()

    def accuracies(self, model: Any, heads: dict[str, dict[str, Tensor]]) -> list[float]:
        """The accuracy on every task that has a head, in percent."""
        return [self._accuracy(model, name, head) for name, head in heads.items()]

    @torch.no_grad()
    def _accuracy(self, model: Any, name: str, head: dict[str, Tensor]) -> float:
        """The accuracy on a task, through its own head."""
        model.eval()
        current = {key: tensor.clone() for key, tensor in model.classifier.state_dict().items()}
        model.classifier.load_state_dict(head)
        right = total = 0
        for batch in self.test[name]:
            right += int((outputs(model, batch).argmax(1) == batch["labels"]).sum())
            total += len(batch["labels"])
        model.classifier.load_state_dict(current)
        return round(100 * right / total, 2)


def outputs(model: Any, batch: Batch) -> Tensor:
    """The logits of a batch."""
    logits: Tensor = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    return logits


def table(runs: list[dict[str, Any]], rate: str) -> str:
    """The accuracy after all tasks, and in brackets when the task had just been learned: means over seeds."""
    lines = [f"| run | {' | '.join(TASKS)} | largest loss | seconds | seeds |", f"|{' --- |' * (len(TASKS) + 4)}"]
    for what in dict.fromkeys([*RUNS, *(run["what"] for run in runs)]):  # earlier ones, too
        same = [run for run in runs if run["what"] == what and run["rate"] == rate]
        if not same:
            continue
        cells = []
        for number in range(len(TASKS)):
            last, first = (statistics.mean(run["accuracy"][row][number] for run in same) for row in (-1, number))
            cells.append(f"{last:.1f} ({first:.1f})")
        cells.append(f"{max(map(largest_loss, same)):.1f}")
        seconds = statistics.mean(run["seconds"] for run in same)
        lines.append(f"| {what} | {' | '.join(cells)} | {seconds:.0f} | {len(same)} |")
    return "\n".join(lines)


def largest_loss(run: dict[str, Any]) -> float:
    """By how many points the accuracy on an earlier task fell at most, from when it was learned to the end."""
    matrix = run["accuracy"]
    return float(max(matrix[number][number] - last for number, last in enumerate(matrix[-1][:-1])))


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--reviews", type=Path)
    parser.add_argument("--train", type=int, default=800)
    parser.add_argument("--test", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", choices=RATES, default=RATES)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = common.parse(parser)
    sizes = {name: getattr(options, name) for name in ("train", "test", "epochs")}
    for seed in [] if options.draw else options.seeds:
        done = {(p["seed"], p["rate"], p["what"]) for p in common.read_records(options.out)}
        missing = [(rate, what) for rate in options.rates for what in options.runs if (seed, rate, what) not in done]
        if not missing:
            continue
        experiment = Experiment(options.model, options.reviews, options.train, options.test, seed=seed)
        for rate, what in missing:
            found = experiment.run(what, float(rate), options.epochs)
            record = {"seed": seed, "rate": rate, "what": what, **found, **sizes, "versions": versions("transformers")}
            common.append_record(options.out, record)
    for rate in RATES:
        print(f"\n{rate}:\n\n{table(common.read_records(options.out), rate)}")


if __name__ == "__main__":
    main()

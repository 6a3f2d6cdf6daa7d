"""A sentence encoder learns three questions about texts, one after another, with one head: what is left of the first?

    python benchmarks/sentences.py --model M --reviews R.csv         # a few minutes
    python benchmarks/sentences.py --draw                            # the table, from what was kept

Is a long review (IMDB) a good one? Is a short one (Rotten Tomatoes)? Are the words of a text in their order? The whole
network but its embeddings trains, by AdamW, with nothing held and with a memory whose strength is "auto". M is a folder
or a name on the hub; R has the columns text, label and source ("imdb" or "rotten_tomatoes").
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import limpet

RESULTS = Path(__file__).parents[1] / "results" / "sentences"
TASKS = ("imdb", "rotten_tomatoes", "order of words")
LENGTH, BATCH, LR = 48, 16, 5e-5
Batch = dict[str, Tensor]


def texts(path: Path, count: int) -> dict[str, list[tuple[str, int]]]:
    """So many texts of every task, half of them of each label."""
    csv.field_size_limit(sys.maxsize)
    found: dict[tuple[str, int], list[str]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault((row["source"], int(row["label"])), []).append(row["text"].replace("<br />", " "))
    generator = torch.Generator().manual_seed(0)
    tasks: dict[str, list[tuple[str, int]]] = {}
    for source in TASKS[:2]:
        both = [found[source, label] for label in (0, 1)]
        picks = [torch.randperm(len(one), generator=generator)[: count // 2].tolist() for one in both]
        tasks[source] = [(both[label][i], label) for pair in zip(*picks, strict=True) for label, i in enumerate(pair)]
    shuffled = []
    for number, (text, _) in enumerate(tasks["rotten_tomatoes"]):
        words = text.split()
        order = torch.randperm(len(words), generator=generator).tolist() if number % 2 else range(len(words))
        shuffled.append((" ".join(words[i] for i in order), number % 2))
    tasks[TASKS[2]] = shuffled
    return tasks


class Experiment:
    """The encoder with one head, and the three tasks as batches."""

    def __init__(self, model: str, reviews: Path, train: int, test: int) -> None:
        self.source = model
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self.train: dict[str, list[Batch]] = {}
        self.test: dict[str, list[Batch]] = {}
        for name, pairs in texts(reviews, train + test).items():
            self.train[name], self.test[name] = self._batches(pairs[test:]), self._batches(pairs[:test])
        self.examples = train

    def _batches(self, pairs: list[tuple[str, int]]) -> list[Batch]:
        batches = []
        for start in range(0, len(pairs), BATCH):
            some = pairs[start : start + BATCH]
            told = self.tokenizer(
                [text for text, _ in some], truncation=True, max_length=LENGTH, padding=True, return_tensors="pt"
            )
            batches.append({**told, "labels": torch.tensor([label for _, label in some])})
        return batches

    def run(self, held: bool, epochs: int) -> dict[str, Any]:
        """The accuracy on every task after each one."""
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(self.source, num_labels=2)
        model.base_model.embeddings.requires_grad_(False)
        memory = limpet.OnlineLaplace(model, strength="auto", prior_precision=1e-3, prior_mean="initial")
        matrix, begin = [], time.perf_counter()
        for name in TASKS:
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)
            with memory.protect(optimizer, examples=self.examples) if held else nullcontext():
                self._fit(model, optimizer, self.train[name], epochs)
            if held:
                memory.consolidate(self.train[name], limit=min(self.examples, 400), examples=self.examples)
            matrix.append([self._accuracy(model, self.test[other]) for other in TASKS])
            print(f"{'held' if held else 'plain'}, after {name}: {matrix[-1]}", flush=True)
        return {"accuracy": matrix, "seconds": round(time.perf_counter() - begin)}

    def _fit(self, model: Any, optimizer: Any, batches: list[Batch], epochs: int) -> None:
        model.train()
        generator = torch.Generator().manual_seed(1)
        steps = epochs * len(batches)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        for _ in range(epochs):
            for i in torch.randperm(len(batches), generator=generator).tolist():
                optimizer.zero_grad()
                inputs = {key: value for key, value in batches[i].items() if key != "labels"}
                torch.autograd.backward(F.cross_entropy(model(**inputs).logits, batches[i]["labels"]))
                optimizer.step()
                rate.step()

    @torch.no_grad()
    def _accuracy(self, model: Any, batches: list[Batch]) -> float:
        model.eval()
        right = total = 0
        for batch in batches:
            inputs = {key: value for key, value in batch.items() if key != "labels"}
            right += int((model(**inputs).logits.argmax(1) == batch["labels"]).sum())
            total += len(batch["labels"])
        return round(100 * right / total, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--reviews", type=Path)
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--test", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "runs.json"
    if not options.draw:
        experiment = Experiment(options.model, options.reviews, options.train, options.test)
        runs = {name: experiment.run(name == "held", options.epochs) for name in ("plain", "held")}
        versions = {"limpet": limpet.__version__, "torch": torch.__version__, "python": platform.python_version()}
        sizes = {"train": options.train, "test": options.test, "epochs": options.epochs}
        path.write_text(json.dumps({"versions": versions, **sizes, "runs": runs}, indent=1) + "\n")
    record = json.loads(path.read_text())
    print(f"| after all three | {' | '.join(TASKS)} | mean | seconds |\n|{' --- |' * (len(TASKS) + 3)}")
    for name, run in record["runs"].items():
        last = run["accuracy"][-1]
        shown = " | ".join(f"{value:.1f}" for value in (*last, sum(last) / len(last)))
        print(f"| {name} | {shown} | {run['seconds']} |")


if __name__ == "__main__":
    main()

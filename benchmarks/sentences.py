"""A sentence encoder learns three classification tasks in sequence: how much of the first is retained?

    python -m benchmarks sentences --model M --reviews R.csv         # all runs that are still missing
    python -m benchmarks sentences --draw                            # the table, from the stored results

Is a long review (IMDB) positive? Is a short one (Rotten Tomatoes)? Are the words of a text in their original order?
Each task has two outputs of its own, and the whole network except its embeddings is trained, with AdamW: without
protection, with a memory whose penalty has several strengths, and with `protect` as it is by default, which repairs the
model after every task. Each run is recorded when it ends, so an interrupted command resumes
with the next one.
M is a folder or a name on the hub; R has the columns text, label and source ("imdb" or "rotten_tomatoes").
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable
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

RESULTS = common.RESULTS / "sentences"
TASKS = ("imdb", "rotten_tomatoes", "order of words")
RUNS: dict[str, float | str | None] = {  # name: how strongly the memory holds
    "plain": None,
    "protect": "auto",
    'strength "auto"': "auto",
    "strength 300": 300.0,
    "strength 1000": 1000.0,
}
PENALTY = 'strength "auto"'  # the run whose memory chooses its strength, but adds a penalty to the gradients
LENGTH, BATCH, LR = 48, 16, 1e-4
MEASURED = 400  # examples of a task that its curvature is measured on
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
        """The encoder as it was published, with two new outputs for every task."""
        torch.manual_seed(self.seed)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(self.source, num_labels=2 * len(TASKS))
        model.base_model.embeddings.requires_grad_(False)
        if self.blocks is not None:
            model.base_model.encoder.layer[: -self.blocks].requires_grad_(False)
        return model

    def run(self, strength: float | str | None, epochs: int, mode: str = "auto") -> dict[str, Any]:
        """The accuracy on every task after each one, learned with a memory of this strength or with none."""
        model, memory = self.fresh(), None
        if strength is not None:
            memory = limpet.OnlineLaplace(model, strength=strength, prior_precision=1e-3, prior_mean="initial")
        matrix, begin = [], time.perf_counter()
        for name in self.tasks:
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)
            with nullcontext() if memory is None else self._protected(memory, optimizer, name, mode):
                self._fit(model, optimizer, name, epochs)
            matrix.append([self._accuracy(model, other) for other in self.tasks])
            print(f"strength {strength}, after {name}: {matrix[-1]}", flush=True)
            if memory is not None and name != self.tasks[-1]:
                limit = min(self.examples, MEASURED)
                memory.consolidate(self.train[name], limit=limit, examples=self.examples, forward=answers(name))
        strengths = [task.curve.strength for task in memory.history.tasks] if memory and strength == "auto" else []
        return {"accuracy": matrix, "strengths": strengths, "seconds": round(time.perf_counter() - begin)}

    def _protected(self, memory: limpet.Memory, optimizer: Any, name: str, mode: str) -> AbstractContextManager[Any]:
        options: dict[str, Any] = {"examples": self.examples, "every": 4, "mode": mode}
        if memory.tasks and mode == "auto" and memory.strength == "auto":
            # the outputs of this task alone, which the recorded inputs would not tell
            options |= {"batches": self.train[name], "repair": {"forward": answers(name)}}
        return memory.protect(optimizer, **options)

    def _fit(self, model: Any, optimizer: Any, name: str, epochs: int) -> None:
        model.train()
        generator = torch.Generator().manual_seed(self.seed)
        batches = self.train[name]
        steps = epochs * len(batches)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        for _ in range(epochs):
            for i in torch.randperm(len(batches), generator=generator).tolist():
                optimizer.zero_grad()
                torch.autograd.backward(F.cross_entropy(outputs(model, batches[i], name), batches[i]["labels"]))
                optimizer.step()
                rate.step()

    @torch.no_grad()
    def _accuracy(self, model: Any, name: str) -> float:
        model.eval()
        right = total = 0
        for batch in self.test[name]:
            right += int((outputs(model, batch, name).argmax(1) == batch["labels"]).sum())
            total += len(batch["labels"])
        return round(100 * right / total, 2)


def outputs(model: Any, batch: Batch, name: str) -> Tensor:
    """The two outputs of a task."""
    first = 2 * TASKS.index(name)
    logits: Tensor = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    return logits[:, first : first + 2]


def answers(name: str) -> Callable[[Any, Batch], tuple[Tensor, Tensor]]:
    """What a memory asks of a batch: the outputs of a task, and the labels."""
    return lambda model, batch: (outputs(model, batch, name), batch["labels"])


def table(runs: dict[str, Any]) -> str:
    """The accuracy after all tasks, and in brackets when the task had just been learned."""
    lines = [f"| run | {' | '.join(TASKS)} | mean | seconds |", f"|{' --- |' * (len(TASKS) + 3)}"]
    for name, run in runs.items():
        matrix = run["accuracy"]
        shown = " | ".join(f"{last:.1f} ({matrix[i][i]:.1f})" for i, last in enumerate(matrix[-1]))
        lines.append(f"| {name} | {shown} | {sum(matrix[-1]) / len(TASKS):.1f} | {run['seconds']} |")
    return "\n".join(lines)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--reviews", type=Path)
    parser.add_argument("--train", type=int, default=800)
    parser.add_argument("--test", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), help="these runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "runs.json")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = common.parse(parser)
    path: Path = options.out
    record = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    if not options.draw:
        setting = {name: getattr(options, name) for name in ("train", "test", "epochs", "seed")}
        if record["runs"] and any(record[name] != value for name, value in setting.items()):
            parser.error(f"{path} has runs of other sizes: name another file with --out, or remove it")
        record = {"versions": versions("transformers"), **setting, "runs": record["runs"]}
        path.parent.mkdir(parents=True, exist_ok=True)
        experiment = Experiment(options.model, options.reviews, options.train, options.test, seed=options.seed)
        for name in options.only or RUNS:
            if name not in record["runs"]:
                mode = "gradient" if name == PENALTY else "auto"
                record["runs"][name] = experiment.run(RUNS[name], options.epochs, mode)
                path.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record["runs"]))


if __name__ == "__main__":
    main()

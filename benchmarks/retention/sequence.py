"""Suite "sequence": an encoder learns four classification tasks, one after another, each with a head of its own.

Is a long review (IMDB) positive? Is a short one (Rotten Tomatoes)? Are the words of a text in their original order? Is
a text German or French? The first task is the same for all methods; from the second on, a method acts in every task. A
method that acts after training has one setting, that is chosen like the others.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import limpet
from fine_tuning import read
from limpet.io.atomic import atomic_write
from limpet.protection.recorder import InputRecorder
from repair_figures import markdown
from retention.classifier import Batch, Classification
from retention.compare import Interval, paired
from retention.during import METHODS as DURING
from retention.method import After, During
from retention.pair import Pair
from retention.report import PLAIN, Results, Row, needs
from retention.training import DIAGONAL
from sentences import MEASURED, PROBE, TASKS, texts, tokenized

LANGUAGE = "language"
LANGUAGES = ("german", "french")
WORDS = 25  # in a text of the task "language"
TRAINED, TESTED, EPOCHS, REPLAYED = 480, 240, 2, 4
ORDERS = {
    "development": (TASKS[1], TASKS[2]),
    "reviews first": (*TASKS, LANGUAGE),
    "reviews last": (LANGUAGE, TASKS[2], TASKS[1], TASKS[0]),
}
PAIRS = {name: Pair("reviews", LANGUAGES, rate=1e-4) for name in ORDERS}


def languages(paths: list[Path], count: int, seed: int) -> list[tuple[str, int]]:
    """So many pieces of these texts, with the number of the text as label, as many of each and in turns."""
    generator, found = torch.Generator().manual_seed(seed), []
    for label, path in enumerate(paths):
        words = read(path).split()
        starts = torch.randperm(len(words) // WORDS, generator=generator)[: count // len(paths)] * WORDS
        found.append([(" ".join(words[start : start + WORDS]), label) for start in starts.tolist()])
    return [pair for some in zip(*found, strict=True) for pair in some]


def logits(model: Any, batch: Batch, head: Any) -> Tensor:
    """The outputs through a head, which is not necessarily that of the model."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    found: Tensor = head(model.dropout(model.base_model(**inputs).pooler_output))
    return found


class Stage(Classification):
    """One task, after others.

    Args:
        sequence: The sequence.
        number: The number of the task in it.
        teacher: The network before.
        heads: The heads of the tasks before.
        memory_file: The memory of the tasks before; it is made after the first.
    """

    def __init__(self, sequence: Sequence, number: int, teacher: Any, heads: dict[str, Any], memory_file: Path) -> None:
        task = sequence.tasks[number]
        self.new, self.earlier = sequence.train_batches[task], sequence.train_batches
        steps = EPOCHS * len(self.new)
        super().__init__(sequence.work, Pair(task, steps=steps, rate=sequence.rate), sequence.seed)
        self.examples, self.teacher, self.heads = TRAINED, teacher, heads
        self.stage, self.memory_file = 1 + number, memory_file
        self._batches: list[Any] = []

    def freeze(self, model: Any) -> Any:
        model.requires_grad_(True).base_model.embeddings.requires_grad_(False)
        return model

    def distilled(self, model: Any, batch: Batch, outputs: Tensor) -> Tensor:
        total = torch.zeros(())
        for head in self.heads.values():
            with torch.no_grad():
                before = logits(self.teacher, batch, head).log_softmax(1)
            now = logits(model, batch, head).log_softmax(1)
            total = total + F.kl_div(now, before, log_target=True, reduction="batchmean")
        return total

    def old_loss(self, model: Any, share: float) -> Tensor:
        """From a pool that has as many examples of every task before."""
        task = list(self.heads)[int(torch.randint(0, len(self.heads), (), generator=self.draws))]
        batches, kept = self.earlier[task], max(round(share * TRAINED / len(self.heads)), 1)
        whole = len(batches[0]["labels"])
        number = int(torch.randint(0, -(-kept // whole), (), generator=self.draws))
        size = min(kept - number * whole, len(batches[number]["labels"]))
        rows = torch.randperm(size, generator=self.draws)[:REPLAYED]
        some = {name: value[rows] for name, value in batches[number].items()}
        return F.cross_entropy(logits(model, some, self.heads[task]), some["labels"], reduction="sum")

    def memory(self, model: Any) -> Any:
        return limpet.load(self.memory_file, model)

    def diagonal_memory(self, model: Any) -> Any:
        return self.memory(model)

    def recorded(self) -> list[Any]:
        return self._batches

    def learned(self, during: During, value: float, stored: Path | None) -> tuple[Any, float]:
        """Learn this task.

        Args:
            during: The method.
            value: The value of its setting.
            stored: A file for what is learned, to be used again.

        Returns:
            The network after it, and the CPU seconds.
        """
        model = self.fresh(during, value)
        if stored is None or not stored.exists():
            begin, recorder = time.process_time(), InputRecorder(model)
            recorder.start()
            self.fit(model, during, value)
            recorder.stop()
            self._batches, seconds = recorder.batches, time.process_time() - begin
            if stored is not None:
                with atomic_write(stored) as temporary:
                    found = {"weights": model.state_dict(), "batches": self._batches, "seconds": seconds}
                    torch.save(found, temporary)
            return model.eval(), seconds
        found = torch.load(stored, weights_only=True)
        model.load_state_dict(found["weights"])
        self._batches = found["batches"]
        return model.eval(), found["seconds"]

    def move(self, model: Any, method: After) -> None:
        """Apply a method that acts after training."""
        with method.path(self, model) as go:
            go(method.settings[0])
            moved = copy.deepcopy(model.state_dict())
        model.load_state_dict(moved)

    def remember(self, model: Any, **settings: Any) -> None:
        """Add this task to the memory of those before."""
        if not self.memory_file.exists():
            chosen = {"strength": "auto", "prior_mean": "initial", "exclude": ["classifier"], **settings}
            memory: Any = limpet.OnlineLaplace(model, **chosen)
        else:
            memory = self.memory(model)
        memory.consolidate(self.new, limit=MEASURED, examples=TRAINED, probe=PROBE, progress=False)
        memory.save(self.memory_file)


class Sequence:
    """An order of tasks and a seed.

    Args:
        options: The command line.
        name: The name of the order.
        pair: How tasks are learned.
        seed: The seed, also of the texts.
    """

    def __init__(self, options: argparse.Namespace, name: str, pair: Pair, seed: int) -> None:
        self.source, self.name, self.seed = options.model, name, seed
        self.work: Path = options.work
        self.tasks, self.rate = ORDERS[name], pair.rate
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.source, truncation_side="left")
        found = texts(Path(options.texts["reviews"]), TRAINED + TESTED, seed)
        found[LANGUAGE] = languages([Path(options.texts[one]) for one in LANGUAGES], TRAINED + TESTED, seed)
        self.train_batches = {task: tokenized(tokenizer, found[task][TESTED:]) for task in self.tasks}
        self.test_batches = {task: tokenized(tokenizer, found[task][:TESTED]) for task in self.tasks}

    def stored(self, _: str) -> bool:
        """Only the tasks that `_stored` names are used again, and they are learned if they are missing."""
        return True

    def train(self, method: During, value: float) -> dict[str, Any]:
        """Learn all tasks with a method.

        Returns:
            The record: after every task, for every task so far, a string with 1 for each right answer; and CPU seconds
            without those of the first task and of measuring.
        """
        return {"value": value, **self._learn(method, value, None, DIAGONAL if method.memory else None)}

    def move(self, method: After, trained: str, _: float) -> dict[str, Any]:
        """Learn all tasks, with a method that acts after each of them.

        Returns:
            The record, as for `train`.
        """
        return self._learn(DURING[trained], DURING[trained].fixed, method, {} if method.memory else None)

    def _learn(
        self, during: During, value: float, after: After | None, remembered: dict[str, Any] | None
    ) -> dict[str, Any]:
        model, heads, right, seconds = self._published(), dict[str, Any](), [], 0.0
        with TemporaryDirectory(dir=self.work) as folder:  # of its own, because several processes may share `work`
            for number, task in enumerate(self.tasks):
                teacher = model.eval().requires_grad_(False)
                stage = Stage(self, number, teacher, dict(heads), Path(folder) / "memory.safetensors")
                acting = during if heads else DURING["plain"]
                model, training = stage.learned(acting, value, self._stored(number, acting))
                if heads:
                    begin = time.process_time()
                    if after is not None:
                        stage.move(model, after)
                    seconds += training + time.process_time() - begin
                heads[task] = copy.deepcopy(model.classifier).requires_grad_(False)
                right.append([self._right(model, name, head) for name, head in heads.items()])
                if remembered is not None and number + 1 < len(self.tasks):
                    begin = time.process_time()
                    stage.remember(model, **remembered)
                    seconds += time.process_time() - begin
                print(f"{during.name}, {after and after.name}: {[one.count('1') for one in right[-1]]}", flush=True)
        return {"seconds": round(seconds), "right": right}

    def _published(self) -> Any:
        torch.manual_seed(self.seed)
        return transformers.AutoModelForSequenceClassification.from_pretrained(self.source, num_labels=2)

    def _stored(self, number: int, during: During) -> Path | None:
        """A file for a task that is learned the same way by all methods that act afterwards: the first two."""
        if number > 1 or during.name != "plain":
            return None
        return self.work / f"plain {', '.join(self.tasks[: number + 1])} {self.seed}.pt"

    @torch.no_grad()
    def _right(self, model: Any, task: str, head: Any) -> str:
        found = [logits(model, batch, head).argmax(1) == batch["labels"] for batch in self.test_batches[task]]
        return "".join("01"[one] for one in torch.cat(found).tolist())


def accuracies(record: dict[str, Any], stage: int = -1) -> list[float]:
    """The accuracy on every task after one of them, in percent."""
    return [100 * one.count("1") / len(one) for one in record["right"][stage]]


def largest_loss(record: dict[str, Any]) -> float:
    """By how many points the accuracy on a task fell at most, from when it was learned to the end."""
    learned = [accuracies(record, stage)[stage] for stage in range(len(record["right"]))]
    return max(one - last for one, last in zip(learned[:-1], accuracies(record), strict=False))


def best(results: Results) -> dict[str, float]:
    """By method, the setting with the highest mean accuracy at the end.

    Args:
        results: The results of the development order.

    Returns:
        The settings.
    """
    found: dict[str, tuple[float, float]] = {}
    for row, runs in results.runs.items():
        if row.value is not None:
            mean = float(np.mean([accuracies(run) for run in runs.values()]))
            name = row.method or row.trained
            found[name] = max(found.get(name, (0.0, 0.0)), (mean, row.value))
    return {name: value for name, (_, value) in found.items()}


def table(results: Results) -> str:
    """One row for each method: accuracies at the end, and by how much it is better than plain training.

    Args:
        results: The results of an order.

    Returns:
        The table.
    """
    header = ["", "beside the new data", "mean accuracy at the end, %", "minus plain training", "when learned, %",
              "largest loss", "seconds", "seeds"]  # fmt: skip
    return markdown(header, [_row(results, row) for row in results.runs])


def _row(results: Results, row: Row) -> list[str]:
    seeds = results.seeds(row)
    runs = [results.runs[row][seed] for seed in seeds]
    learned = [accuracies(run, stage)[stage] for run in runs for stage in range(len(run["right"]))]
    return [
        row.name if row != PLAIN else "plain",
        needs(row),
        f"{np.mean([accuracies(run) for run in runs]):.1f}",
        "" if row == PLAIN else "{0.mean:+.1f} +- {0.error:.1f}".format(difference(results, row)),
        f"{np.mean(learned):.1f}",
        f"{max(map(largest_loss, runs)):.1f}",
        f"{np.mean([run['seconds'] for run in runs]):.0f}",
        str(len(seeds)),
    ]


def difference(results: Results, row: Row) -> Interval:
    """By how many points the mean accuracy at the end differs from that of plain training."""
    return paired({seed: _rows(results, row, seed) - _rows(results, PLAIN, seed) for seed in results.seeds(row)})


def _rows(results: Results, row: Row, seed: int) -> Any:
    """100 for every right answer at the end, 0 for the others."""
    return np.array([100.0 * int(one) for one in "".join(results.runs[row][seed]["right"][-1])])

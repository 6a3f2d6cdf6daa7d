"""A language model that learns a text with LoRA: how it is trained by a method, or moved afterwards, and measured."""

from __future__ import annotations

import argparse
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

import limpet
from fine_tuning import BATCH, HELD_OUT, NEW_BLOCKS, adamw, adapted, blocks, distilled, fresh, loss
from limpet.forgetting.repair import Repair
from limpet.integrations.causal_lm import consolidate_lm
from limpet.methods.laplace import REPAIRED_WITH
from limpet.protection.recorder import InputRecorder
from retention.compare import RATIOS
from retention.method import After, During

KEPT = 0.05
"""Size of the pool for replay, relative to the number of new rows."""

NEAR = (0.98 * RATIOS[0], 1.02 * RATIOS[-1])
"""What takes long is measured where the new loss is in this range, as a multiple of that of plain training."""


@dataclass(frozen=True)
class Pair:
    """What is learned, and how.

    Attributes:
        new: The name of the text to learn.
        others: The names of texts that the model is to keep its loss on.
        steps: Number of steps.
        rate: Largest learning rate.
        moments: Steps at which a training run is measured.
    """

    new: str
    others: tuple[str, ...] = ()
    steps: int = 300
    rate: float = 2e-3
    moments: tuple[int, ...] = (100, 150, 200, 250, 300)


class LanguageBench(ABC):
    """A pair and a seed: the text to learn, the model before, and how it is trained, moved and measured.

    Args:
        options: The command line.
        name: The name of the pair.
        pair: What is learned.
        seed: The seed of the training.
    """

    pool: Tensor
    """Old rows for replay."""

    def __init__(self, options: argparse.Namespace, name: str, pair: Pair, seed: int) -> None:
        self.source, self.work, self.name, self.pair, self.seed = options.model, options.work, name, pair, seed
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.source)
        text = self.text(options, pair.new, NEW_BLOCKS + HELD_OUT, seed=1)
        self.new_test, self.new = text[:HELD_OUT], text[HELD_OUT:]
        self.examples = self.new[:, 1:].numel()
        self.teacher = fresh(self.source).eval().requires_grad_(False)
        self._generator = torch.Generator().manual_seed(100 + seed)

    def text(self, options: argparse.Namespace, name: str, rows: int, seed: int) -> Tensor:
        """Rows of a text, from all over it."""
        return blocks(self.tokenizer, [Path(options.texts[name])], rows, seed)

    @abstractmethod
    def remembered(self) -> tuple[Tensor, Tensor]:
        """Rows of what the model knew, for a memory, and others for its probe."""

    @abstractmethod
    def lost(self, model: Any, *, everything: bool) -> dict[str, Any]:
        """Measure what the model has lost: "lost", on every row of a test set; if asked, also what takes long."""

    def rehearsed(self) -> list[Tensor] | None:
        """Rows for self-rehearsal; None if the model is to draw samples."""
        return None

    @property
    def memories(self) -> Path:
        """The beginning of the names of memory files."""
        return Path(self.work / "memory")

    # what methods use

    def distilled(self, batch: Tensor, outputs: Tensor) -> Tensor:
        """KL(before || now) per token, on rows of the new text."""
        return distilled(self.teacher, batch, outputs)

    def old_loss(self, model: Any, share: float) -> Tensor:
        """The loss on one old row."""
        count = max(round(share * NEW_BLOCKS), 1)
        row = self.pool[torch.randint(0, count, (1,), generator=self._generator)]
        found: Tensor = model(input_ids=row, labels=row).loss
        return found

    def memory(self, model: Any, structure: str = "kronecker", strength: float | None = None) -> Any:
        """A memory of the model before, made once."""
        path = Path(f"{self.memories}-{structure}.safetensors")
        if not path.exists():
            plain, begin = fresh(self.source), time.perf_counter()
            plain.get_input_embeddings().requires_grad_(False)
            rows, probe = (torch.split(some, BATCH) for some in self.remembered())
            consolidate_lm(plain, rows, probe=probe, structure=structure, strength=1.0).save(path)
            print(f"{path}: {time.perf_counter() - begin:.0f} s, {path.stat().st_size / 1e6:.0f} MB", flush=True)
        found: Any = limpet.load(path, model)
        if strength is not None:
            found.strength = strength
        return found

    def repaired(self, model: Any, **options: Any) -> Repair:
        """The model after a repair with the inputs that `memory.protect` would have recorded."""
        rows = torch.tensor(json.loads((self._folder("plain") / "recorded.json").read_text()))
        batches = [{"input_ids": part} for part in torch.split(rows, BATCH)]
        limit = min(self.examples, REPAIRED_WITH)
        return limpet.repair(model, self.memory(model), batches, examples=self.examples, limit=limit, **options)

    # what is run

    def fresh(self, method: During, value: float) -> Any:
        """The model before training, with what trains."""
        torch.manual_seed(self.seed)
        model = fresh(self.source)
        return adapted(model) if method.wrapped is None else method.wrapped(model, value)

    def _folder(self, name: str) -> Path:
        return Path(self.work / f"{self.name} {self.seed} {name}")

    def train(self, method: During, value: float) -> dict[str, Any]:
        """Train with a method; the adapter is kept.

        Returns:
            The record: its curve over steps, seconds without those of measuring, and so on.
        """
        trained, pair = self.fresh(method, value), self.pair
        optimizer, schedule = adamw(trained, pair.rate * method.rate(value), pair.steps)
        generator = torch.Generator().manual_seed(2 + self.seed)
        extra = None if method.extra is None else method.extra(self, trained, value)
        recorder, curve, paused = InputRecorder(trained), [], 0.0
        before = {"before": self.measured(trained, everything=True)} if method.name == "plain" else {}
        begin = time.perf_counter()
        trained.train()
        with method.protect(self, trained, optimizer, value), self._recording(recorder, method.name == "plain"):
            for step in range(1, pair.steps + 1):
                rows = self.new[torch.randint(0, len(self.new), (BATCH,), generator=generator)]
                optimizer.zero_grad()
                found = trained(input_ids=rows, labels=rows)
                torch.autograd.backward(found.loss + (0.0 if extra is None else extra(rows, found.logits)))
                optimizer.step()
                schedule.step()
                if step in pair.moments:
                    start = time.perf_counter()
                    curve.append({"step": step, **self.measured(trained, everything=step == pair.steps)})
                    print(f"{method.name} {value}: {_short(curve[-1])}", flush=True)
                    paused += time.perf_counter() - start
        seconds = time.perf_counter() - begin - paused
        if method.wrapped is None:
            trained.save_pretrained(self._folder(method.name))
        if method.name == "plain":
            rows = torch.cat([batch["input_ids"] for batch in recorder.batches])
            (self._folder("plain") / "recorded.json").write_text(json.dumps(rows.tolist()))
        return {"value": value, "seconds": round(seconds), "curve": curve, **before}

    @contextmanager
    def _recording(self, recorder: InputRecorder, wanted: bool) -> Iterator[None]:
        if wanted:
            recorder.start()
        yield
        recorder.stop()

    def move(self, method: After, trained: str, plain: float) -> dict[str, Any]:
        """Apply a method to a trained model.

        Args:
            method: The method.
            trained: The name of the method that it was trained with.
            plain: The new loss of plain training.

        Returns:
            The record: its curve, and seconds without those of measuring.
        """
        model = peft.PeftModel.from_pretrained(fresh(self.source), self._folder(trained))
        curve, seconds, begin = [], 0.0, time.perf_counter()
        for at in method.points(self, model):
            seconds += time.perf_counter() - begin
            curve.append(at | self.measured_near(model, plain))
            print(f"{trained}, then {method.name}: {_short(curve[-1])}", flush=True)
            begin = time.perf_counter()
        return {"seconds": round(seconds), "curve": curve}

    def measured_near(self, model: Any, plain: float) -> dict[str, Any]:
        """The same, with what takes long if the new loss is near that of plain training."""
        found = self.measured(model, everything=False)
        near = NEAR[0] <= found["new"] / plain <= NEAR[1]
        return found | (self.lost(model, everything=True) if near else {})

    def measured(self, model: Any, *, everything: bool) -> dict[str, Any]:
        """The loss on the new text, and what is lost."""
        mode = model.training
        model.eval()
        found = {"new": round(loss(model, self.new_test), 5), **self.lost(model, everything=everything)}
        model.train(mode)
        return found


def _short(point: dict[str, Any]) -> dict[str, Any]:
    return point | {"lost": round(sum(point["lost"]) / len(point["lost"]), 4)}

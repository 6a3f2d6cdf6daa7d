"""Suite "drift": a language model learns a text with LoRA; how far does it move on everything else?

SmolLM2-135M-Instruct, LoRA of rank 8 on all linear layers, AdamW. Its loss on other texts, and KL(before || now) per
token on samples of the model before, which no method has seen.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import common
import limpet
from common import versions
from language import BATCH, HELD_OUT, LENGTH, LINEAR, NEW_BLOCKS, RANK, blocks, loss
from limpet.forgetting.repair import Repair
from limpet.integrations.causal_lm import consolidate_lm, self_samples
from limpet.methods.laplace import REPAIRED_WITH
from limpet.protection.recorder import InputRecorder
from repair_language import fresh
from retention.after import METHODS as AFTER
from retention.compare import RATIOS
from retention.during import METHODS as DURING
from retention.method import After, During

MEMORY_TOKENS, PROBE_ROWS, TEST_ROWS, OTHER_ROWS = 12_000, 120, 60, 318
SAMPLE_SEEDS = {"memory": 0, "probe": 1, "test": 2}
NEAR = (0.98 * RATIOS[0], 1.02 * RATIOS[-1])
"""Other texts are measured where the new loss is in this range, as a multiple of that of plain training."""


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
    others: tuple[str, ...]
    steps: int = 300
    rate: float = 2e-3
    moments: tuple[int, ...] = (100, 150, 200, 250, 300)


PAIRS = {
    "development": Pair("french", ("reviews",), steps=100, moments=(60, 80, 100)),
    "german": Pair("german", ("reviews", "speeches", "english")),
    "speeches": Pair("speeches", ("reviews", "german", "english")),
    "german, high rate": Pair("german", ("reviews", "speeches", "english"), rate=1e-2),
}


class Bench:
    """A pair and a seed: the texts, the model before, and what a trained model is measured on.

    Args:
        options: The command line.
        pair: The name of the pair.
        seed: The seed of the training.
    """

    def __init__(self, options: argparse.Namespace, pair: str, seed: int) -> None:
        self.source, self.work, self.name, self.pair, self.seed = options.model, options.work, pair, PAIRS[pair], seed
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.source)
        text = self._text(options, self.pair.new, NEW_BLOCKS + HELD_OUT, seed=1)
        self.new_test, self.new = text[:HELD_OUT], text[HELD_OUT:]
        kept = round(0.05 * NEW_BLOCKS)
        others = {name: self._text(options, name, OTHER_ROWS + kept, seed=0) for name in self.pair.others}
        self.others = {name: rows[:OTHER_ROWS] for name, rows in others.items()}
        pools = torch.stack([rows[OTHER_ROWS:] for rows in others.values()], 1).flatten(0, 1)  # in turns
        self.pool = pools[:kept]
        self.generator = torch.Generator().manual_seed(100 + seed)
        self.teacher = fresh(self.source).eval().requires_grad_(False)
        self.test = self.samples("test", TEST_ROWS)
        self.before = torch.cat([self._log_probabilities(self.teacher, rows) for rows in torch.split(self.test, BATCH)])
        self.examples = self.new[:, 1:].numel()

    def _text(self, options: argparse.Namespace, name: str, rows: int, seed: int) -> Tensor:
        return blocks(self.tokenizer, [Path(options.texts[name])], rows, seed)

    def samples(self, which: str, rows: int) -> Tensor:
        """Samples of the model before, drawn once and kept."""
        path = self.work / f"samples-{which}.json"
        if not path.exists():
            drawn = self_samples(self.teacher, rows * (LENGTH - 1), length=LENGTH, seed=SAMPLE_SEEDS[which])
            path.write_text(json.dumps(drawn.tolist()))
        return torch.tensor(json.loads(path.read_text()))[:rows]

    @staticmethod
    @torch.no_grad()
    def _log_probabilities(model: Any, rows: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=rows, use_cache=False).logits[:, :-1]
        return logits.log_softmax(-1)

    # what methods use

    def distilled(self, batch: Tensor, outputs: Tensor) -> Tensor:
        """KL(before || now) per token, on rows of the new text."""
        with torch.no_grad():
            before = self.teacher(input_ids=batch, use_cache=False).logits.log_softmax(-1)
        now = outputs.log_softmax(-1)
        return F.kl_div(now.flatten(0, 1), before.flatten(0, 1), log_target=True, reduction="batchmean")

    def old_loss(self, model: Any, share: float) -> Tensor:
        """The loss on one row of other texts."""
        count = max(round(share * NEW_BLOCKS), 1)
        row = self.pool[torch.randint(0, count, (1,), generator=self.generator)]
        found: Tensor = model(input_ids=row, labels=row).loss
        return found

    def memory(self, model: Any, structure: str = "kronecker", strength: float | None = None) -> Any:
        """The memory of the model's own samples, made once, with a probe of others."""
        path = self.work / f"memory-{structure}.safetensors"
        if not path.exists():
            plain = fresh(self.source)
            plain.get_input_embeddings().requires_grad_(False)
            rows = torch.split(self.samples("memory", MEMORY_TOKENS // (LENGTH - 1)), BATCH)
            probe = torch.split(self.samples("probe", PROBE_ROWS), BATCH)
            consolidate_lm(plain, rows, probe=probe, structure=structure, strength=1.0).save(path)
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
        if method.wrapped is not None:
            return method.wrapped(fresh(self.source), value)
        config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LINEAR, task_type="CAUSAL_LM")
        return peft.get_peft_model(fresh(self.source), config)

    def _folder(self, name: str, value: float | None = None) -> Path:
        return Path(self.work / " ".join(map(str, (self.name, self.seed, name, *([] if value is None else [value])))))

    def train(self, method: During, value: float) -> dict[str, Any]:
        """Train with a method; the adapter is kept.

        Returns:
            The record: its curve over steps, seconds without those of measuring, and so on.
        """
        trained, pair = self.fresh(method, value), self.pair
        parameters = [p for p in trained.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=pair.rate * method.rate(value), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / 10, 1) * (1 - step / pair.steps) + 0.02
        )
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
            found = self.measured(model, everything=False)
            if NEAR[0] <= found["new"] / plain <= NEAR[1]:
                found |= self.on_others(model)
            curve.append(at | found)
            print(f"{trained}, then {method.name}: {_short(curve[-1])}", flush=True)
            begin = time.perf_counter()
        return {"seconds": round(seconds), "curve": curve}

    def measured(self, model: Any, *, everything: bool) -> dict[str, Any]:
        """The loss on the new text and the divergence on every sample; if asked, the loss on other texts."""
        drift = []
        mode = model.training
        model.eval()
        for rows, before in zip(torch.split(self.test, BATCH), torch.split(self.before, BATCH), strict=True):
            now = self._log_probabilities(model, rows)
            drift += (before.exp() * (before - now)).sum(-1).mean(-1).tolist()
        found: dict[str, Any] = {"new": round(loss(model, self.new_test), 5), "drift": [round(one, 5) for one in drift]}
        if everything:
            found |= self.on_others(model)
        model.train(mode)
        return found

    def on_others(self, model: Any) -> dict[str, Any]:
        """The loss on other texts, per token."""
        return {"others": {name: round(loss(model, rows), 5) for name, rows in self.others.items()}}


def _short(point: dict[str, Any]) -> dict[str, Any]:
    return point | {"drift": round(sum(point["drift"]) / len(point["drift"]), 4)}


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a record unique."""
    return tuple(record.get(name) for name in ("pair", "seed", "trained", "method", "value"))


def run(options: argparse.Namespace) -> None:
    """All records that are still missing, one run each."""
    options.work.mkdir(parents=True, exist_ok=True)
    for pair in options.pairs:
        for seed in options.seeds:
            _run(options, pair, seed)


def _run(options: argparse.Namespace, pair: str, seed: int) -> None:
    bench: Bench | None = None
    done = {key(record): record for record in common.read_records(options.out)}
    wanted: list[tuple[str, str, float | None]] = []
    for name in options.methods:
        if name in AFTER:
            wanted += [(trained, name, None) for trained in AFTER[name].after]
        else:
            wanted += [(name, "", value) for value in _values(DURING[name], development=pair == "development")]
    for trained, after, value in wanted:
        now: dict[str, Any] = {"pair": pair, "seed": seed, "trained": trained, "method": after, "value": value}
        if key(now) in done:
            continue
        bench = bench or Bench(options, pair, seed)
        if after:
            plain = done[key(now | {"trained": "plain", "method": "", "value": 0.0})]["curve"][-1]["new"]
            found = bench.move(AFTER[after], trained, plain)
        else:
            found = bench.train(DURING[trained], float(value or 0.0))
        record = now | found | {"versions": versions("transformers", "peft")}
        common.append_record(options.out, record)
        done[key(record)] = record


def _values(method: During, *, development: bool) -> tuple[float, ...]:
    return method.candidates if development and method.candidates else (chosen(method),)


def chosen(method: During) -> float:
    """The value of its setting that was chosen on the development pair; 0 if there is nothing to choose."""
    if method.candidates and method.chosen is None:
        raise SystemExit(f"{method.name}: run the development pair first, and set `chosen`")
    return 0.0 if method.chosen is None else method.chosen

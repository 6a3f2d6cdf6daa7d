"""Fine-tune a language model as usual, then repair it: how much drift is undone, at what cost on the new text?

    python -m benchmarks repair_language train  --model M --new C.html --kind lora --seed 0
    python -m benchmarks repair_language memory --model M --source self
    python -m benchmarks repair_language repair --model M --new C.html --old A.txt B.csv --kind lora --seed 0

The model learns the new text with LoRA on all linear layers (kind "lora"), or by training all weights except the
vocabulary matrix (kind "full"), with AdamW and without protection. Adapters and checkpoints are written in the formats
of peft and transformers. Kind "merged" is "lora" with the adapters merged into the weights before the repair, so that
the repaired update may have any rank. A memory is built from samples of the model itself (source "self") or from old
text (source "text"). Then the model is repaired at several strengths, and for comparison its update is scaled. Losses
are in nats per token on held-out text; drift is KL(before || after) per token on samples that no memory has seen. Every
point is recorded as soon as it is measured, so an interrupted command resumes with the next one.

M is a folder or a name on the hub; texts are .txt, .html (tags are removed), or .csv (the column "text").
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

import common
import limpet
from common import versions
from fine_tuning import (
    BATCH,
    HELD_OUT,
    LENGTH,
    MEMORY_TOKENS,
    NEW_BLOCKS,
    adamw,
    adapted,
    blocks,
    fresh,
    loss,
    stored_samples,
)
from limpet.forgetting.drift import measured_drift
from limpet.forgetting.probe import Probe
from limpet.integrations.causal_lm import consolidate_lm

RESULTS = common.RESULTS / "repair"
SAMPLES = {  # rows, seed
    "probe": (120, 1),
    "test": (40, 2),
    "budget": (120, 3),
    "memory": (MEMORY_TOKENS // (LENGTH - 1), 0),
}
CURVATURE_TOKENS = 7_500  # of which a fifth is held out
STRENGTHS = (0.3, 1.0, 3.0, 10.0)
SCALED = ((1.0, 0.85),)
SCALES = (0.7, 0.55, 0.4, 0.25)
TOLERANCE, BUDGETS = 0.02, (0.3, 0.15, 0.08)

STEPS = {"lora": 300, "full": 100}
RATES = {"lora": 2e-3, "full": 1e-4}


def train(options: argparse.Namespace) -> None:
    """Fine-tune, and write the adapter or the checkpoint with a record of the run beside it."""
    folder: Path = options.work / f"{options.kind}-{options.seed}"
    if (folder / "run.json").exists():
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    text = blocks(tokenizer, options.new, NEW_BLOCKS + HELD_OUT, seed=1)
    new_test, new = text[:HELD_OUT], text[HELD_OUT:]
    torch.manual_seed(options.seed)
    model = fresh(options.model)
    if options.kind == "lora":
        trained = adapted(model)
    else:
        trained = model
        model.get_input_embeddings().requires_grad_(False)
    steps = STEPS[options.kind]
    optimizer, rate = adamw(trained, RATES[options.kind], steps)
    generator = torch.Generator().manual_seed(2 + options.seed)
    before, begin = loss(trained, new_test), time.perf_counter()
    trained.train()
    for step in range(steps):
        rows = new[torch.randint(0, len(new), (BATCH,), generator=generator)]
        optimizer.zero_grad()
        found = trained(input_ids=rows, labels=rows).loss
        torch.autograd.backward(found)
        optimizer.step()
        rate.step()
        if step % 20 == 0:
            print(f"{folder.name} step {step}: {found.item():.3f}, {time.perf_counter() - begin:.0f} s", flush=True)
    seconds = time.perf_counter() - begin
    trained.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    record = {
        "kind": options.kind,
        "seed": options.seed,
        "steps": steps,
        "learning_rate": RATES[options.kind],
        "new_before": before,
        "new_tuned": loss(trained, new_test),
        "seconds": round(seconds),
        "versions": versions("transformers", "peft"),
    }
    (folder / "run.json").write_text(json.dumps(record, indent=1) + "\n")
    print(record, flush=True)


def samples(options: argparse.Namespace, which: str) -> Tensor:
    """The model's own samples, drawn once and kept."""
    rows, seed = SAMPLES[which]
    return stored_samples(options.model, options.work / f"samples-{which}.json", rows, seed)


def remembered(options: argparse.Namespace) -> None:
    """Make a memory, with a probe of the model's samples."""
    path = options.work / f"memory-{options.source}.safetensors"
    if path.exists():
        return
    if options.source == "self":
        rows = samples(options, "memory")
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        rows = blocks(tokenizer, options.old, MEMORY_TOKENS // (LENGTH - 1) + HELD_OUT, seed=0)[HELD_OUT:]
    probe = torch.split(samples(options, "probe"), BATCH)
    model, begin = fresh(options.model), time.perf_counter()
    model.get_input_embeddings().requires_grad_(False)
    memory = consolidate_lm(
        model, torch.split(rows, BATCH), probe=probe, strength=1.0, checkpoint=path.with_suffix(".pass")
    )
    memory.save(path)
    print(f"{path}: {memory.examples} tokens, {time.perf_counter() - begin:.0f} s, {memory.nbytes / 1e9:.2f} GB")


@torch.no_grad()
def exact_probe(model: Any, batches: list[dict[str, Tensor]]) -> Probe:
    """What the model says to these inputs, with all of its vocabulary."""
    logits = [model(**batch, use_cache=False).logits[:, :-1] for batch in batches]
    return Probe(batches, [limpet.Categorical().summary(one, None) for one in logits])


class Bench:
    """A tuned model, what it is measured on, and where the points go."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        text = blocks(tokenizer, options.new, NEW_BLOCKS + HELD_OUT, seed=1)
        self.new_test, self.new = text[:HELD_OUT], text[HELD_OUT:]
        self.old_test = blocks(tokenizer, options.old, HELD_OUT, seed=0)
        self.probe = self._probe("test")
        folder = options.work / f"{'full' if options.kind == 'full' else 'lora'}-{options.seed}"
        self.model: Any = fresh(str(folder) if options.kind == "full" else options.model)
        if options.kind != "full":
            self.model = peft.PeftModel.from_pretrained(self.model, folder)
        if options.kind == "merged":
            self.model = self.model.merge_and_unload()
        self.path = RESULTS / "language.jsonl"
        self.done = {_key(one) for one in common.read_records(self.path)}

    def _probe(self, which: str) -> Probe:
        rows = samples(self.options, which)
        return exact_probe(fresh(self.options.model), [{"input_ids": part} for part in torch.split(rows, BATCH)])

    def point(self, what: str, at: float, scale: float = 1.0, **facts: Any) -> None:
        """Measure where the model is now, and keep it."""
        options = self.options
        found: dict[str, Any] = {"kind": options.kind, "seed": options.seed, "source": options.source, "what": what}
        found |= {"at": at, "scale": scale, **facts}
        found["new"], found["old"] = loss(self.model, self.new_test), loss(self.model, self.old_test)
        drift = measured_drift(self.model, [self.probe], limpet.Categorical())
        found |= {"drift": float(drift), "drift_error": drift.standard_error}
        found["versions"] = versions("transformers", "peft")
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in found.items() if k != "versions"}, flush=True)
        common.append_record(self.path, found)

    def run(self) -> None:
        """All points of one tuned model that are not there yet."""
        options = self.options
        first = options.source == "self" and options.kind != "merged"
        if options.source == "self":
            self._point("tuned", 0.0)
        memory = limpet.load(options.work / f"memory-{options.source}.safetensors", self.model)
        assert isinstance(memory, limpet.Memory)
        rows = self.new[: CURVATURE_TOKENS // (LENGTH - 1)]
        batches = [{"input_ids": part} for part in torch.split(rows, BATCH)]
        tokens = self.new[:, 1:].numel()
        begin = time.perf_counter()
        repair = limpet.repair(self.model, memory, batches, examples=tokens, tolerance=TOLERANCE)
        seconds = round(time.perf_counter() - begin)
        self._point("tolerance", TOLERANCE, seconds=seconds, strength=repair.strength)
        for strength in STRENGTHS:
            self._point("repair", strength, move=lambda s=strength: repair.at(s))
        for strength, scale in SCALED:
            self._point("repair", strength, scale, move=lambda s=strength, c=scale: repair.at(s, c))
        if not first:
            return
        for scale in SCALES:
            self._point("scale", scale, move=lambda c=scale: repair.at(0.0, c))
        if options.seed != 0 or options.kind != "lora":
            return
        self.probe = self._probe("budget")  # more of them, to tell a budget that is kept from chance
        for budget in BUDGETS:
            self._point("budget", budget, move=lambda b=budget: repair.undo().within_budget(b))
        repair.undo()

    def _point(self, what: str, at: float, scale: float = 1.0, move: Any = None, **facts: Any) -> None:
        options = self.options
        if (options.kind, options.seed, options.source, what, at, scale) in self.done:
            return
        moved = None if move is None else move()
        if moved is not None:
            facts |= {"strength": moved.strength}
        self.point(what, at, scale, **facts)


def _key(found: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(found[name] for name in ("kind", "seed", "source", "what", "at", "scale"))


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("stage", choices=["train", "memory", "repair"])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--new", type=Path, nargs="+", default=[])
    parser.add_argument("--old", type=Path, nargs="+", default=[])
    parser.add_argument("--work", type=Path, default=Path("repair"), help="where models and memories are kept")
    parser.add_argument("--source", choices=["self", "text"], default="self")
    parser.add_argument("--kind", choices=[*STEPS, "merged"], default="lora")
    parser.add_argument("--seed", type=int, default=0)
    options = common.parse(parser)
    options.work.mkdir(parents=True, exist_ok=True)
    if options.stage == "train":
        train(options)
    elif options.stage == "memory":
        remembered(options)
    else:
        Bench(options).run()


if __name__ == "__main__":
    main()

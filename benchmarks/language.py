"""Fine-tune a language model on new text: how much does it forget, and what does protection cost?

    python -m benchmarks language --model M --old A.txt B.csv --new C.html     # all runs that are still missing
    python -m benchmarks language --draw                                       # figure and table, from stored results

A memory of the model is built from a sample of the old text (per-token Fisher, sampled labels). Then the new text is
learned with LoRA on all linear layers of the blocks, or by training the last blocks themselves: without protection,
with the memory at several strengths, with decay towards the initial weights, and with a diagonal Fisher of the
adapters' own parameters. Each run is recorded in results/language/trials.jsonl when it ends, so an interrupted command
resumes with the next one. Losses are in nats per token, on text that neither the memory nor the training has seen.

M is a folder or a name on the hub; texts are .txt, .html (tags are removed), or .csv (the column "text").
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import common
import limpet
from common import versions
from fine_tuning import (
    BATCH,
    HELD_OUT,
    LENGTH,
    LINEAR,
    MEMORY_TOKENS,
    NEW_BLOCKS,
    adamw,
    adapted,
    blocks,
    fresh,
    loss,
)
from limpet.model import Block, discover

RESULTS = common.RESULTS / "language"
STEPS, LOOKS = 60, (0, 5, 10, 20, 30, 45, 60)
LR, LAST_LR, LAST_BLOCKS = 2e-3, 3e-4, 2
RUNS: dict[str, tuple[str, str, float]] = {  # name: what trains, what holds, how strongly
    "plain": ("adapters", "nothing", 0.0),
    "l2 10": ("adapters", "l2", 10.0),
    "l2 100": ("adapters", "l2", 100.0),
    "l2 1000": ("adapters", "l2", 1000.0),
    "factors 10": ("adapters", "factors", 10.0),
    "factors 100": ("adapters", "factors", 100.0),
    "factors 1000": ("adapters", "factors", 1000.0),
    "factors 10000": ("adapters", "factors", 10_000.0),
    "kronecker 1": ("adapters", "kronecker", 1.0),
    "kronecker 10": ("adapters", "kronecker", 10.0),
    "kronecker 100": ("adapters", "kronecker", 100.0),
    "kronecker 1000": ("adapters", "kronecker", 1000.0),
    "kronecker auto": ("adapters", "auto", 0.0),
    "budget 0.02": ("adapters", "budget", 0.02),
    "budget 0.05": ("adapters", "budget", 0.05),
    "last plain": ("last", "nothing", 0.0),
    "last kronecker 10": ("last", "kronecker", 10.0),
}

SHRUNK = (0.95, 0.9, 0.85, 0.8, 0.7)
COMMON = "kronecker 100"  # the run whose end all others are compared at


class OnFactors(limpet.OnlineLaplace):
    """The memory of the adapters' own parameters, as if they were any others: what EWC does with them."""

    def _planned(self, also: Any = ()) -> list[Block]:
        return discover(self.model, self.exclude, also, through_adapters=False)


class Experiment:
    """The model, the texts, and every run from the same start."""

    def __init__(self, model: str, old: list[Path], new: list[Path], folder: Path) -> None:
        self.source, self.folder = model, folder
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        sample = blocks(self.tokenizer, old, MEMORY_TOKENS // (LENGTH - 1) + HELD_OUT, seed=0)
        self.old_test, self.old_sample = sample[:HELD_OUT], sample[HELD_OUT:]
        text = blocks(self.tokenizer, new, NEW_BLOCKS + HELD_OUT, seed=1)
        self.new_test, self.new = text[:HELD_OUT], text[HELD_OUT:]

    def memory(self, model: nn.Module, strength: float | None) -> limpet.Memory:
        """The memory of the old text, made once; without a strength, at the one that `"auto"` would have given it."""
        path = self.folder / "memory.safetensors"
        if not path.exists():
            plain = fresh(self.source)
            for name, parameter in plain.named_parameters():
                parameter.requires_grad_(any(f".{layer}." in name for layer in LINEAR))
            memory = limpet.OnlineLaplace(plain, prior_precision=1e-3, prior_mean="initial")
            begin = time.perf_counter()
            batches = [{"input_ids": part} for part in torch.split(self.old_sample, BATCH)]
            memory.consolidate(batches, checkpoint=self.folder / "pass.safetensors")
            took, size = time.perf_counter() - begin, memory.nbytes / 1e9
            print(f"memory of {memory.examples} tokens: {took:.0f} s, {size:.2f} GB", flush=True)
            memory.save(path)
        loaded = limpet.load(path, model)
        assert isinstance(loaded, limpet.Memory)
        strength = loaded.history.tasks[0].curve.strength if strength is None else strength
        for name, held in loaded.posterior.held.items():
            precision: Any = held.precision
            values = replace(precision.values, mixed=None, strength=strength)
            loaded.posterior.held[name] = replace(held, precision=replace(precision, values=values))
        return loaded

    def run(self, name: str) -> dict[str, Any]:
        """One way to learn the new text: losses on both texts along the way."""
        trains, holds, strength = RUNS[name]
        torch.manual_seed(0)
        model = fresh(self.source)
        if trains == "adapters":
            trained = adapted(model)
        else:
            last = [f"layers.{model.config.num_hidden_layers - 1 - i}." for i in range(LAST_BLOCKS)]
            for key, parameter in model.named_parameters():
                parameter.requires_grad_(any(part in key for part in last) and any(f".{one}." in key for one in LINEAR))
            trained = model
        memory, protect = self._held(trained, holds, strength)
        optimizer, rate = adamw(trained, LR if trains == "adapters" else LAST_LR, STEPS, rest=0.05)
        trained.train()
        generator = torch.Generator().manual_seed(2)
        points, seconds = [], 0.0
        with protect(optimizer):
            for step in range(STEPS + 1):
                if step in LOOKS:
                    points.append(self._look(step, trained, memory))
                    print(f"{name}: {points[-1]}", flush=True)
                begin = time.perf_counter()
                rows = self.new[torch.randint(0, len(self.new), (BATCH,), generator=generator)]
                optimizer.zero_grad()
                torch.autograd.backward(trained(input_ids=rows, labels=rows).loss)
                optimizer.step()
                rate.step()
                seconds += time.perf_counter() - begin
        if holds == "budget":  # which is kept when the body ends
            points.append(self._look(STEPS + 1, trained, memory))
        record = {"name": name, "points": points, "seconds_per_step": seconds / (STEPS + 1)}
        if name == "plain":
            record["shrunk"] = self._shrunk(trained)
        return record | {"versions": versions("transformers", "peft")}

    @torch.no_grad()
    def _shrunk(self, trained: nn.Module) -> list[dict[str, float]]:
        """What the adapters do when they are made smaller afterwards, as a budget makes them, but without a memory."""
        found, before = [], 1.0
        for factor in SHRUNK:
            for key, parameter in trained.named_parameters():
                if "lora_B" in key:
                    parameter.mul_(factor / before)
            before = factor
            found.append({"factor": factor, **self._look(STEPS + 1, trained, None)})
        return found

    def _look(self, step: int, trained: nn.Module, memory: limpet.Memory | None) -> dict[str, float]:
        found = {"step": step, "old": loss(trained, self.old_test), "new": loss(trained, self.new_test)}
        return found | {"forecast": float(memory.forecast()) if memory is not None and memory.tasks else 0.0}

    def _held(
        self, trained: Any, holds: str, strength: float
    ) -> tuple[limpet.Memory | None, Callable[[Any], AbstractContextManager[Any]]]:
        if holds == "nothing":
            return None, lambda _: nullcontext()
        memory: limpet.Memory
        budget = strength if holds == "budget" else None
        if holds in ("kronecker", "auto", "budget"):
            memory = self.memory(trained, {"auto": None, "budget": 1.0}.get(holds, strength))
        elif holds == "l2":
            memory = limpet.OnlineLaplace(trained, prior_precision=strength, prior_mean="initial", structure="diagonal")
        else:
            memory = OnFactors(trained, strength=strength, prior_precision=0.0, structure="diagonal")
            batches = [{"input_ids": part} for part in torch.split(self.old_sample, BATCH)]
            memory.consolidate(batches)
        tokens = self.new.numel()
        return memory, lambda optimizer: memory.protect(optimizer, examples=tokens, mode="gradient", budget=budget)


def draw(records: dict[str, dict[str, Any]], path: Path) -> None:
    """What is lost of the old text over what is gained of the new one."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    colors = {"plain": "#555555", "l2": "#d98032", "factors": "#6a994e", "kronecker": "#1f6f8b", "last": "#8b3d6b"}
    colors["budget"] = "#b8a11f"
    for name, record in records.items():
        points = record["points"]
        kind, _, strength = name.rpartition(" ")
        same = sorted(RUNS[other][2] for other in records if other.rpartition(" ")[0] == kind)
        alpha = (1 + same.index(RUNS[name][2])) / len(same) if strength != "auto" and strength else 1.0
        axis.plot(
            [p["new"] for p in points],
            [p["old"] - points[0]["old"] for p in points],
            marker="o",
            markersize=3,
            linewidth=1.8,
            alpha=alpha,
            linestyle="--" if "last" in name else ":" if "auto" in name else "-",
            color=colors[name.partition(" ")[0]],
            label=name,
        )
    axis.set(xlabel="loss on the new text (nats per token)", ylabel="rise of the loss on the old text (nats per token)")
    axis.invert_xaxis()
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def table(records: dict[str, dict[str, Any]]) -> str:
    """The end of every run, and what the old text had lost when the new one was where COMMON ends."""
    common = records[COMMON]["points"][-1]["new"]
    columns = "run", "new text", "old text", "rise", f"rise when the new text is at {common:.3f}", "forecast"
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for name, record in records.items():
        points = record["points"]
        first, last = points[0], points[-1]
        fallen = sorted((point["new"], point["old"] - first["old"]) for point in points if point["step"] <= STEPS)
        there = float(np.interp(common, [new for new, _ in fallen], [rise for _, rise in fallen]))
        shown = f"{there:+.3f}" if fallen[0][0] <= common else "not reached"
        numbers = f"{last['new']:.3f} | {last['old']:.3f} | {last['old'] - first['old']:+.3f} | {shown}"
        lines.append(f"| {name} | {numbers} | {last['forecast']:.3f} |")
        for point in record.get("shrunk", ()):
            numbers = f"{point['new']:.3f} | {point['old']:.3f} | {point['old'] - first['old']:+.3f}"
            lines.append(f"| {name}, then times {point['factor']:g} | {numbers} | | |")
    return "\n".join(lines)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--old", type=Path, nargs="+", default=[])
    parser.add_argument("--new", type=Path, nargs="+", default=[])
    parser.add_argument("--work", type=Path, default=Path("language"), help="where the memory is kept")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), help="these runs")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = common.parse(parser)
    options.work.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "trials.jsonl"
    records = {record["name"]: record for record in common.read_records(path)}
    if not options.draw:
        experiment = Experiment(options.model, options.old, options.new, options.work)
        for name in options.only or RUNS:
            if name not in records:
                records[name] = {"name": name, **experiment.run(name)}
                common.append_record(path, records[name])
    records = {name: records[name] for name in RUNS if name in records}
    draw(records, RESULTS / "trade-off.png")
    print(table(records))


if __name__ == "__main__":
    main()

"""How small may a memory of a language model be? Repair with memories of several ranks, compared at equal new loss.

    python -m benchmarks repair_language train  --model M --new C.html --kind lora --seed 0      # and seeds 1, 2
    python -m benchmarks repair_language memory --model M --source self
    python -m benchmarks memory_ranks --model M --new C.html --seeds 0 1 2
    python -m benchmarks memory_ranks --model M --new C.html --time                              # of a protected step
    python -m benchmarks memory_ranks --draw                                                     # tables, figure

The fine-tuned models and the complete memory are those of repair_language. The memory is compressed to every rank, and
saved without the published weights. One more memory of rank 128 is made by a pass of its own over the same samples,
which sums sketches of the long factors. Each tuned model is repaired with each file at several strengths, with one
curvature of the new text for all of them. Drift is KL(before || after) per token on samples that no memory has seen.
Memories are compared at equal loss on the held-out new text: loss and log drift are fitted by quadratics in the log
strength, and the drift is compared at the losses that the complete memory has at strength 1 and 3. Every point is
recorded as soon as it is measured, so an interrupted command resumes with the next one. With --time, LoRA steps of 4 x
64 tokens under a penalty (`mode="gradient"`) alternate with plain ones, and the medians are compared (`tokens.cost`).
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

import common
import limpet
from common import versions
from fine_tuning import BATCH, HELD_OUT, LENGTH, NEW_BLOCKS, blocks, fresh, loss
from limpet.forgetting.drift import measured_drift
from limpet.forgetting.repair import Measures
from limpet.forgetting.repair_paths import solve
from limpet.integrations.causal_lm import consolidate_lm
from limpet.methods.repair_pass import RepairOptions, new_fisher
from repair_figures import markdown, spread
from repair_language import CURVATURE_TOKENS, exact_probe, samples
from tokens import cost

RESULTS = common.RESULTS / "memory"
COMPLETE = "complete"
MEMORIES: dict[str, dict[str, Any]] = {
    **{f"rank {rank}": {"rank": rank} for rank in (8, 16, 32, 64, 96, 128, 256, 512)},
    "rank 176, int8": {"rank": 176, "storage_dtype": "int8"},
    "59 MB of curvature, int8": {"max_bytes": "59MB", "storage_dtype": "int8"},
}
OWN_PASS = "rank 128, own pass"
ALL = (COMPLETE, *MEMORIES, OWN_PASS)
FORMER = ("rank 128, int8 throughout", "by energy to 58 MB, int8")
"""Recorded before the leading columns were stored in float16, and before ranks for a number of bytes fell with the root
of the size: each factor then held the same part of its trace. They cannot be made any more."""
STRENGTHS = (0.3, 0.6, 1.0, 2.0, 3.0, 6.0)
COMPARED = (1.0, 3.0)
FITTED = (0.3, 9.0)
"""Smallest and largest strength at which the fitted curves are used."""


def file_of(options: argparse.Namespace, name: str) -> Path:
    """The file of a memory; a compressed one is made from the complete one."""
    complete: Path = options.work / "memory-self.safetensors"
    if name == COMPLETE:
        return complete
    path: Path = options.work / f"memory-{name.replace(', ', '-').replace(' ', '-')}.safetensors"
    if not path.exists():
        model, begin = fresh(options.model), time.perf_counter()
        model.get_input_embeddings().requires_grad_(False)
        if name == OWN_PASS:
            rows, probe = (torch.split(samples(options, which), BATCH) for which in ("memory", "probe"))
            memory = consolidate_lm(model, rows, probe=probe, strength=1.0, rank=128, storage_dtype="float16")
        else:
            memory = limpet.load(complete, model)  # type: ignore[assignment]
            memory.compress(**MEMORIES[name])
        memory.save(path, base="HuggingFaceTB/SmolLM2-135M-Instruct")
        print(f"{name}: {path.stat().st_size / 1e6:.1f} MB, {time.perf_counter() - begin:.0f} s", flush=True)
    return path


class Bench:
    """One tuned model, the curvature of the new text, and what it is measured on."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self.options, self.seed = options, seed
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        text = blocks(tokenizer, options.new, NEW_BLOCKS + HELD_OUT, seed=1)
        self.new_test, self.new = text[:HELD_OUT], text[HELD_OUT:]
        rows = torch.split(samples(options, "test"), BATCH)
        base = fresh(options.model)
        self.weights = base.num_parameters()
        self.probe = exact_probe(base, [{"input_ids": part} for part in rows])
        self.model: Any = peft.PeftModel.from_pretrained(base, options.work / f"lora-{seed}")
        rows = torch.split(self.new[: CURVATURE_TOKENS // (LENGTH - 1)], BATCH)
        batches = [{"input_ids": part} for part in rows]
        self.fisher = new_fisher(self.memory(COMPLETE), batches, RepairOptions(examples=self.new[:, 1:].numel()))

    def memory(self, name: str) -> limpet.OnlineLaplace:
        memory = limpet.load(file_of(self.options, name), self.model)
        assert isinstance(memory, limpet.OnlineLaplace)
        return memory

    def run(self, name: str, missing: list[float]) -> None:
        """The missing points of one memory."""
        memory, size = self.memory(name), file_of(self.options, name).stat().st_size
        begin = time.perf_counter()
        repair = solve(memory.posterior, self.fisher, Measures(forecast=lambda: math.nan))
        seconds = round(time.perf_counter() - begin)
        for strength in missing:
            repair.at(strength)
            drift = measured_drift(self.model, [self.probe], limpet.Categorical())
            found = {"seed": self.seed, "memory": name, "strength": strength, "bytes": size, "weights": self.weights}
            found |= {"new": round(loss(self.model, self.new_test), 5), "drift": round(float(drift), 5)}
            found |= {"drift_error": round(drift.standard_error, 5), "solve_seconds": seconds}
            print(found, flush=True)
            common.append_record(self.options.out, found | {"versions": versions("transformers", "peft")})
        repair.undo()


def steps(options: argparse.Namespace, rounds: int) -> None:
    """Time LoRA steps under the penalty of the complete memory, and of one of rank 128."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    rows = blocks(tokenizer, options.new, NEW_BLOCKS, seed=1)
    for name in (COMPLETE, "rank 128"):
        found = cost(fresh(options.model), file_of(options, name), rows, rounds)
        ratios = {what: round(value, 4) for what, value in found.items()}
        record = {"memory": name, **ratios, "rounds": rounds, "versions": versions("transformers", "peft")}
        common.append_record(options.out.with_name("steps.jsonl"), record)


def step_table(points: list[dict[str, Any]]) -> str:
    """Ratios of a protected step to a plain one."""
    names = [name for name in points[0] if name.startswith("every ")]
    lines = [[p["memory"], *(f"{p[name]:.3f}" for name in names), f"{p['plain']:.2f}"] for p in points]
    return markdown(["memory", *(f"penalty {name}" for name in names), "a plain step, s"], lines)


def fitted(points: list[dict[str, Any]], seed: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Quadratics in the logarithm of the strength: of the new loss, and of the logarithm of the drift."""
    own = [p for p in points if (p["seed"], p["memory"]) == (seed, name)]
    at = np.log([p["strength"] for p in own])
    return np.polyfit(at, [p["new"] for p in own], 2), np.polyfit(at, np.log([p["drift"] for p in own]), 2)


def at_equal_loss(points: list[dict[str, Any]], seed: int, name: str, strength: float) -> float:
    """The drift of a memory, divided by that of the complete one, at the new loss that the complete one has there."""
    (loss_of, drift_of), (own_loss, own_drift) = (fitted(points, seed, which) for which in (COMPLETE, name))
    wanted, at = np.polyval(loss_of, math.log(strength)), np.log(np.geomspace(*FITTED, 10_000))
    below = at[np.polyval(own_loss, at) <= wanted]  # the loss rises with the strength, but a parabola may turn
    nearest = below[-1] if len(below) else at[0]
    return math.exp(np.polyval(own_drift, nearest) - np.polyval(drift_of, math.log(strength)))


def ratios(points: list[dict[str, Any]]) -> dict[str, dict[float, list[float]]]:
    """For every memory and compared strength, the ratio of each seed at which all strengths were measured."""
    counts = Counter((p["seed"], p["memory"]) for p in points)
    whole = {key for key, count in counts.items() if count == len(STRENGTHS)}
    seeds = sorted({seed for seed, name in whole if name == COMPLETE})
    return {
        name: {s: [at_equal_loss(points, seed, name, s) for seed in seeds if (seed, name) in whole] for s in COMPARED}
        for name in (*ALL, *FORMER)
        if any((seed, name) in whole for seed in seeds)
    }


def table(points: list[dict[str, Any]]) -> str:
    """Sizes and ratios of the drift over all seeds."""
    sizes, rows = {p["memory"]: p for p in points}, []
    for name, found in ratios(points).items():
        size = sizes[name]["bytes"]
        cells = [name, f"{size / 1e6:.1f}", f"{size / (2 * sizes[name]['weights']):.2f}"]
        rows.append([*cells, *(spread(found[s], 2) for s in COMPARED), str(len(found[COMPARED[0]]))])
    compared = (f"drift / complete, at strength {s:g}" for s in COMPARED)
    heads = ["memory", "MB", "/ bfloat16 weights", *compared, "seeds"]
    return markdown(heads, rows)


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Draw the ratios over the size of the file."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    sizes, found = {p["memory"]: p["bytes"] / 1e6 for p in points}, ratios(points)
    weights = 2 * points[0]["weights"] / 1e6
    figure, axes = plt.subplots(1, len(COMPARED), figsize=(9.5, 3.8), sharey=True)
    kinds = {"float16": ("#1f6f8b", "o"), "int8": ("#d98032", "s"), "former": ("#999999", "x")}
    for ax, strength in zip(axes, COMPARED, strict=True):
        seen = set()
        for name, each in found.items():
            if name == COMPLETE:
                continue
            kind = "former" if name in FORMER else "int8" if "int8" in name else "float16"
            color, marker = kinds[kind]
            mean, values = statistics.mean(each[strength]), each[strength]
            bars = [[mean - min(values)], [max(values) - mean]]
            label = {"float16": "ranks, float16", "int8": "8 bits", "former": "former designs"}[kind]
            ax.errorbar(sizes[name], mean, bars, fmt=marker, color=color, label=None if kind in seen else label)
            seen.add(kind)
        ax.axhline(1.0, color="black", linewidth=0.8)
        ax.axhspan(0.95, 1.05, color="black", alpha=0.06)
        ax.axvline(weights / 4, color="black", linewidth=0.8, linestyle=":")
        ax.set(xscale="log", xlim=(10, 400), xlabel="file, MB", title=f"at the loss of strength {strength:g}")
        ax.annotate(
            "a quarter of\nthe weights",
            (weights / 4, 1.9),
            ha="right",
            fontsize=8,
            xytext=(-4, 0),
            textcoords="offset points",
        )
        ax.set_xticks([10, 30, 100, 300], ["10", "30", "100", "300"])
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("drift after repair, relative")
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--new", type=Path, nargs="+", default=[])
    parser.add_argument("--work", type=Path, default=Path("repair"), help="where models and memories are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--memories", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--out", type=Path, default=RESULTS / "ranks.jsonl")
    parser.add_argument("--time", action="store_true", help="only measure the time of a step")
    parser.add_argument("--rounds", type=int, default=12, help="of --time")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = common.parse(parser)
    if options.time:
        steps(options, options.rounds)
        print(step_table(common.read_records(options.out.with_name("steps.jsonl"))))
        return
    done = {(p["seed"], p["memory"], p["strength"]) for p in common.read_records(options.out)}
    for seed in [] if options.draw else options.seeds:
        bench = None
        for name in options.memories:
            if missing := [s for s in STRENGTHS if (seed, name, s) not in done]:
                bench = bench or Bench(options, seed)
                bench.run(name, missing)
    points = common.read_records(options.out)
    print(table(points))
    if options.draw:
        draw(points, options.out.with_name("drift.png"))
    if timed := common.read_records(options.out.with_name("steps.jsonl")):
        print(f"\n{step_table(timed)}")


if __name__ == "__main__":
    main()

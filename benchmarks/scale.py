"""Cost of a memory of a large language model, by `limpet.planning.plan`: computed from shapes, without allocation.

    python -m benchmarks scale            print the tables and insert them into docs/scale.md
    python -m benchmarks scale --check    check that the document is up to date

The sizes of the architectures are those of the published models: Llama-3.2-1B from its config.json on the hub
(meta-llama/Llama-3.2-1B), Llama-2-7B from Touvron et al. 2023, "Llama 2: Open foundation and fine-tuned chat models",
and its config.json, Llama-3-8B and Llama-3-70B from Grattafiori et al. 2024, "The Llama 3 herd of models", table 3,
SmolLM2-135M from its config.json (HuggingFaceTB/SmolLM2-135M). Measured values are read from the files in which they
were recorded.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import common
from limpet.methods.memory import MAX_FACTOR_SIZE
from limpet.planning.load import Load
from limpet.planning.plan import Plan, plan
from limpet.planning.table import in_bytes, percent
from ranks import BATCHES, EVERY, RESULTS, TASKS, deep

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "scale.md"
RANKS = (8, 64, 512)
TOKENS = 131_072
"""Of a training step on all ranks: 64 sequences of 2,048."""

PASS = 20_000
"""Tokens of a consolidate, as `limpet consolidate` takes by default."""

LORA = 16
NOT_THERE = "–"  # noqa: RUF001
LONGER = 8192
EVERY_SIDE = 28_672  # but those of vocabularies
VOCABULARY = ("model.embed_tokens", "lm_head")
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    "Llama-2-7B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 11_008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32_000,
        "tie_word_embeddings": False,
    },
    "Llama-3-70B": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "intermediate_size": 28_672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    },
}
LLAMA_8B: dict[str, Any] = {**MODELS["Llama-3-70B"], "hidden_size": 4096, "num_hidden_layers": 32}
LLAMA_8B |= {"intermediate_size": 14_336, "num_attention_heads": 32}
FACTOR_RANK = 128
FOUR_BITS = 0.5 + 4 / 64
"""Bytes of a weight in NF4: 4 bits, and a scale in float32 for every 64 weights (Dettmers et al. 2023, "QLoRA")."""

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}
Line = Sequence[str]


@cache
def model(name: str) -> nn.Module:
    """The model on the meta device, its weights in bfloat16 (SmolLM2's in float32, as it was measured)."""
    small = name == "SmolLM2-135M"
    config = transformers.LlamaConfig(**{**MODELS, "SmolLM2-135M": SMOLLM2, "Llama-3-8B": LLAMA_8B}[name])
    config.dtype = torch.float32 if small else torch.bfloat16
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return,no-untyped-call]


@cache
def planned(name: str, vocabulary: bool = False, **settings: Any) -> Plan:
    """The plan of one of these models, its vocabulary left out unless asked for."""
    exclude = [] if vocabulary else VOCABULARY
    return plan(model(name), **{"tokens": TOKENS, "tasks": 2, "exclude": exclude, **settings})


def memory() -> list[Line]:
    """Bytes of the memory, in all and on the fullest rank."""
    settings: dict[str, dict[str, Any]] = {
        "diagonal": {"structure": "diagonal"},
        f"kronecker, pieces to {MAX_FACTOR_SIZE:,}": {},
        "the same, bases in float16 at rest": {"storage_dtype": "float16"},
        "the same, with the vocabulary": {"storage_dtype": "float16", "vocabulary": True},
        f"kronecker, pieces to {LONGER:,}": {"max_factor_size": LONGER},
        "kronecker, every side whole": {"max_factor_size": EVERY_SIDE},
    }
    lines: list[Line] = [("model", "memory", "in all", *(f"fullest of {ranks}" for ranks in RANKS))]
    for name in MODELS:
        weights = sum(parameter.nbytes for parameter in model(name).parameters())
        for number, (what, options) in enumerate(settings.items()):
            one = planned(name, **options)
            sharded = [in_bytes(one.on(ranks).sharded.memory) for ranks in RANKS]
            first = "" if number else f"{name} ({in_bytes(weights)} of weights)"
            lines.append((first, what, in_bytes(one.nbytes), *sharded))
    return lines


def small() -> list[Line]:
    """QLoRA with a memory of truncated factors, on one GPU; and the same memory beside a sharded model in bfloat16."""
    heads = ("base in 4 bits", "memory", "in 8 bits", "file", "adapters, AdamW", "protection", "in all")
    lines: list[Line] = [("model", *heads, "sharded, fullest of 8", "of 64")]
    for name in ("Llama-3.2-1B", "Llama-3-8B", "Llama-3-70B"):
        options: dict[str, Any] = {"tasks": 1, "rank": LORA, "factor_rank": FACTOR_RANK, "storage_dtype": "float16"}
        found = planned(name, quantized=True, **options)
        eight_bits = planned(name, quantized=True, **{**options, "storage_dtype": "int8"})
        own = sum(row.shape[-1] * row.shape[-2] for row in found.rows)
        weights = sum(parameter.numel() for parameter in model(name).parameters())
        base = FOUR_BITS * own + 2 * (weights - own)
        # adapters and their gradients in float32, and two moments
        adapters = 16 * sum(row.trained // 2 for row in found.rows)
        numbers = (base, found.nbytes, eight_bits.nbytes, sum(row.file for row in found.rows), adapters)
        in_all = base + found.nbytes + adapters + found.replicated.ready
        sharded = (planned(name, **options).on(ranks).sharded.memory for ranks in (8, 64))
        cells = (*numbers, found.replicated.ready, in_all, *sharded)
        lines.append((name, *(in_bytes(number) for number in cells)))
    return lines


WAYS: dict[str, dict[str, Any]] = {
    "all weights, one task": {"tasks": 1},
    "all weights, more tasks": {"tasks": 2},
    f"LoRA of rank {LORA}, one task": {"tasks": 1, "rank": LORA},
    f"LoRA of rank {LORA}, more tasks": {"tasks": 2, "rank": LORA},
}


def step() -> list[Line]:
    """What protection adds to the operations of a training step."""
    lines: list[Line] = [
        (
            "model",
            "trained",
            "one rank",
            *(f"replicated on {ranks}" for ranks in RANKS),
            *(f"sharded on {ranks}" for ranks in RANKS),
        )
    ]
    for name in MODELS:
        for number, (what, options) in enumerate(WAYS.items()):
            plans = [planned(name, **options).on(ranks) for ranks in (1, *RANKS)]
            cells = [percent(found.share_of_step(found.replicated)) for found in plans]
            cells += [
                NOT_THERE if found.adapters else percent(found.share_of_step(found.sharded)) for found in plans[1:]
            ]
            lines.append(("" if number else name, what, *cells))
    return lines


def sent() -> list[Line]:
    """Bytes that a rank sends where the memory is sharded."""
    lines: list[Line] = [("model", "in", *(f"fullest of {ranks}" for ranks in RANKS))]
    for name in MODELS:
        one = planned(name)
        for number, (what, field) in enumerate(
            {"a protected step": "sent_step", "a batch of a pass": "sent_batch"}.items()
        ):
            cells = [in_bytes(getattr(one.on(ranks).sharded, field)) for ranks in RANKS]
            lines.append(("" if number else name, what, *cells))
    return lines


def consolidate() -> list[Line]:
    """What taking a task in costs."""
    lines: list[Line] = [
        (
            "model",
            "a token of the pass",
            "the update",
            *(f"on the fullest of {ranks}" for ranks in RANKS),
            "peak, one rank",
            *(f"fullest of {ranks}" for ranks in RANKS),
        )
    ]
    for name in MODELS:
        one = planned(name)
        shards = [one.on(ranks) for ranks in RANKS]
        updates = [
            _tokens(one.in_tokens(one.replicated)),
            *(_tokens(found.in_tokens(found.sharded)) for found in shards),
        ]
        peaks = [in_bytes(one.replicated.peak), *(in_bytes(found.sharded.peak) for found in shards)]
        lines.append((name, f"{_of_the_pass(one):.2f}", *updates, *peaks))
    return lines


def stream() -> list[Line]:
    """A stream of tasks: what stays, and what grows."""
    name = next(iter(MODELS))
    lines: list[Line] = [
        (
            "tasks",
            "memory, kronecker",
            "kronecker-sum",
            "added to a step, kronecker",
            "kronecker-sum",
            "all consolidates together",
        )
    ]
    for tasks in (1, 10, 100, 1000, 10_000):
        ours, growing = (planned(name, tasks=tasks, structure=s) for s in ("kronecker", "kronecker-sum"))
        once = PASS * _of_the_pass(ours) + ours.in_tokens(ours.replicated)
        steps = (percent(found.share_of_step(found.replicated)) for found in (ours, growing))
        lines.append((f"{tasks:,}", in_bytes(ours.nbytes), in_bytes(growing.nbytes), *steps, _tokens(tasks * once)))
    return lines


def measured() -> list[Line]:
    """Plans against what was measured at small size, from the files where it stands."""
    language = (ROOT / "results" / "language" / "README.md").read_text()
    ratios = json.loads((ROOT / "results" / "language" / "tokens.json").read_text())["step"]
    overhead = (ROOT / "benchmarks" / "overhead.md").read_text()

    def ratio(what: str) -> float:
        return float(re.findall(rf"^\| {re.escape(what)} \| ([\d.]+) \|", overhead, flags=re.M)[0])

    gigabytes = re.findall(r"memory\s+takes \d+ minutes and ([\d.]+) GB", language)[0]
    lora = planned("SmolLM2-135M", rank=8, tasks=1, tokens=256)
    with torch.device("meta"):
        mlp = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    one, two = (plan(mlp, tasks=tasks, tokens=250) for tasks in (1, 2))
    proximal = plan(mlp, tasks=1, tokens=250, mode="proximal")

    def added(found: Plan, every: int = 1) -> str:
        return percent(found.share_of_step(found.replicated) / every)

    results, overheads, tasks = "results/language", "benchmarks/overhead.md", "results/permuted-mnist-50"
    fifty = (ROOT / tasks / "README.md").read_text()
    lines: list[Line] = [
        ("what", "plan", "measured", "where"),
        (
            "SmolLM2-135M: bytes of the memory, without the vocabulary",
            in_bytes(planned("SmolLM2-135M", tasks=1).nbytes),
            f"{gigabytes} GB",
            results,
        ),
        (
            "the same by LoRA of rank 8, 256 tokens a step: added to a step",
            added(lora),
            percent(ratios["every step"] - 1),
            results,
        ),
        ("with `every=4`", added(lora, 4), percent(ratios["every 4 steps"] - 1), results),
    ]
    for structure, strength in (("kronecker", "2"), ("kronecker", "auto"), ("diagonal", "10")):
        kept = plan(mlp, structure=structure, tasks=50, auto_strength=strength == "auto").nbytes
        row = re.findall(rf"^\| online-laplace/{structure} \| {strength} \|.*\| ([\d.]+ MB) \|", fifty, flags=re.M)[0]
        lines.append(
            (f"MLP: bytes of the memory of fifty tasks, {structure}, strength {strength}", in_bytes(kept), row, tasks)
        )
    for what, plan_says in (
        ("MLP: protected step, gradient", added(one)),
        ("MLP: protected step, gradient, memory of two tasks", added(two)),
        ("MLP: protected step, proximal, every=8", added(proximal, 8)),
    ):
        lines.append((f"{what}: added to a step of 250 examples", plan_says, percent(ratio(what) - 1), overheads))
    what = "MLP: curvature pass, sampled"
    lines.append((f"{what}: times forward and backward", f"{_of_the_pass(one):.2f}", f"{ratio(what):.2f}", overheads))
    return lines


def ranks() -> list[Line]:
    """What real ranks kept, held and sent at most (results/ranks/costs.json), each with what its plan says."""
    runs = json.loads((RESULTS / "costs.json").read_text())["runs"]
    gradient, proximal, seldom = "gradient, every=1", "proximal, every=1", f"proximal, every={EVERY}"
    told: dict[str, tuple[Callable[[dict[str, Any]], float], Callable[[Load], float] | None]] = {
        "memory": (lambda one: one["bytes"], lambda load: load.memory),
        f"peak of a consolidate, task {TASKS}": (lambda one: one["peaks"][-1], lambda load: load.peak),
        "more while it protects, gradient mode": (lambda one: one[gradient]["peak"], lambda load: load.ready),
        "sent in a protected step": (lambda one: one[gradient]["sent"], lambda load: load.sent_step),
        "the same, proximal": (lambda one: one[proximal]["sent"], lambda load: load.sent_step),
        f"the same, proximal with `every={EVERY}`": (lambda one: one[seldom]["sent"], None),
        "sent with a batch of a pass": (
            lambda one: one["consolidate"]["reduced"] / BATCHES,
            lambda load: load.sent_batch,
        ),
        "sent in a consolidate besides": (lambda one: one["consolidate"]["swapped"], lambda load: load.sent_task),
    }
    with torch.device("meta"):
        network = deep()
    plans = [plan(network, tasks=TASKS, ranks=run["ranks"]) for run in runs]
    loads = [found.replicated if found.ranks == 1 else found.sharded for found in plans]
    counts = [f"{run['ranks']} {'rank' if run['ranks'] == 1 else 'ranks'}" for run in runs]
    lines: list[Line] = [("the fullest rank", *(cell for count in counts for cell in (count, "plan")))]
    for what, (measured, foreseen) in told.items():
        cells = []
        for run, load in zip(runs, loads, strict=True):
            cells += [in_bytes(max(map(measured, run["each"]))), in_bytes(foreseen(load)) if foreseen else ""]
        lines.append((what, *cells))
    return lines


def speed() -> list[Line]:
    """A consolidate on one rank and on two (results/ranks/speed.json)."""
    found = json.loads((RESULTS / "speed.json").read_text())
    one, two = (f"{statistics.median(seconds):.2f}" for seconds in found["seconds"].values())
    return [("", "one rank", "two ranks", "ratio"), ("seconds of a consolidate", one, two, f"{found['ratio']:.2f}")]


def _of_the_pass(found: Plan) -> float:
    """The operations of a token in a pass, in those of a token of training.

    A label drawn for it takes a forward pass and a backward pass that goes to the outputs of the layers and not into
    the weights: 4 of the 6 parts of training; the sums come on top.
    """
    return (4 * found.parameters + sum(row.per_token for row in found.rows)) / (6 * found.parameters)


def _tokens(number: float) -> str:
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


TABLES: dict[str, Callable[[], list[Line]]] = {
    table.__name__: table for table in (memory, small, step, sent, consolidate, stream, measured, ranks, speed)
}


def markdown(lines: list[Line]) -> str:
    """A table."""
    header, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rest))


def main() -> None:
    """Print the tables and put them in their places."""
    parser = common.parser(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = common.parse(parser)
    tables = {name: markdown(table()) for name, table in TABLES.items()}
    for name, table in tables.items():
        print(f"{name}\n\n{table}\n")
    text = DOCUMENT.read_text()
    if not options.check:
        DOCUMENT.write_text(common.with_tables(text, tables))
    elif common.with_tables(text, tables) != text:
        sys.exit("docs/scale.md is not what this prints: run python -m benchmarks scale")


if __name__ == "__main__":
    main()

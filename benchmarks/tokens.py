"""How many tokens do the factors of a language model need, and what does a protected LoRA step cost?

    python -m benchmarks tokens --model M --text A.txt --memory memory.safetensors
    python -m benchmarks tokens --draw                    # figure and numbers, from the stored results

The error of a factor is the relative distance, in the Frobenius norm, between the factor from N tokens and the factor
from all other tokens: two samples that share no text. The layers are those of the first, the middle and the last block.
A step is a step of AdamW on rank-8 adapters of all linear layers, with 4 sequences of 64 tokens. Protected and plain
steps alternate, and their medians are compared; with every=4 the gradient of the penalty is recomputed every fourth
step. The memory is one that benchmarks/language.py built for the same model.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import common
import limpet
from fine_tuning import BATCH, LENGTH, adapted, blocks
from language import RESULTS
from limpet.curvature import FisherPass, Structure
from limpet.model import discover
from limpet.precision import KroneckerTerm

TOKENS = (500, 1000, 2000, 4000, 8000)
KINDS = ("q_proj", "down_proj")
LAZY = 4


def factors(model: Any, rows: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Q and H, per token, of the layers that train."""
    one = FisherPass(model, discover(model), limpet.Categorical(), Structure("kronecker", 4096), fisher="sampled")
    found = one.run([{"input_ids": part} for part in torch.split(rows, BATCH)])
    terms = {name: term for name, (term,) in found.terms.items() if isinstance(term, KroneckerTerm)}
    pairs = {name: term.factors() for name, term in terms.items()}
    return {name: (q, h / found.examples) for name, (q, h) in pairs.items()}


def errors(model: Any, rows: Tensor) -> list[dict[str, Any]]:
    """The error of every factor at every number of tokens."""
    layers = model.config.num_hidden_layers
    wanted = [f"layers.{i}." for i in (0, layers // 2, layers - 1)]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(w in name for w in wanted) and any(f".{kind}." in name for kind in KINDS))
    most = max(TOKENS) // (LENGTH - 1)
    reference = factors(model, rows[most:])
    found = []
    for tokens in TOKENS:
        sample = factors(model, rows[: tokens // (LENGTH - 1)])
        for name, pair in sample.items():
            off = [float((a - b).norm() / b.norm()) for a, b in zip(pair, reference[name], strict=True)]
            found.append({"tokens": tokens, "layer": name, "inputs": round(off[0], 4), "gradients": round(off[1], 4)})
        print(f"{tokens} tokens: {found[-1]}", flush=True)
    return found


def cost(model: Any, memory: Path, rows: Tensor, rounds: int) -> dict[str, float]:
    """The time of a protected step over that of the plain one before it: medians over rounds."""
    model.requires_grad_(True)
    trained = adapted(model)
    held = limpet.load(memory, trained)
    parameters = [p for p in trained.parameters() if p.requires_grad]
    free, bound = (torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0) for _ in range(2))
    trained.train()

    def step(number: int, optimizer: torch.optim.Optimizer) -> float:
        begin = time.perf_counter()
        part = rows[BATCH * number : BATCH * (number + 1)]
        optimizer.zero_grad()
        torch.autograd.backward(trained(input_ids=part, labels=part).loss)
        optimizer.step()
        return time.perf_counter() - begin

    plain: list[float] = []
    ratios: dict[str, list[float]] = {"every step": [], f"every {LAZY} steps": []}
    for (name, found), every in zip(ratios.items(), (1, LAZY), strict=True):
        with held.protect(bound, examples=10_000, every=every):
            for number in range(rounds + 1):
                plain.append(step(2 * number, free))
                some = [step((2 * number + 1 + i) % (len(rows) // BATCH), bound) for i in range(every)]
                found.append(statistics.mean(some) / plain[-1])
                print(f"{name}: {found[-1]:.3f} times {plain[-1]:.2f} s", flush=True)
    medians = {name: statistics.median(found[1:]) for name, found in ratios.items()}  # the first one warms up
    return {"plain": statistics.median(plain), **medians}


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Errors over tokens, on logarithmic scales."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    names = sorted({row["layer"] for row in found})
    titles = {"inputs": "Q, of the inputs", "gradients": "H, of the gradients"}
    for axis, (kind, title) in zip(axes, titles.items(), strict=True):
        for name in names:
            some = [row for row in found if row["layer"] == name]
            x, y = [row["tokens"] for row in some], [row[kind] for row in some]
            axis.plot(x, y, marker="o", markersize=3, label=name)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        axis.set_xticks(TOKENS, [f"{tokens:,}" for tokens in TOKENS], minor=False)
        axis.set_xticks([], minor=True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("relative error")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=7, ncols=3, loc="outside lower center")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=Path, nargs="+", default=[])
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = common.parse(parser)
    path = RESULTS / "tokens.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    if not options.draw:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        rows = blocks(tokenizer, options.text, 2 * max(TOKENS) // (LENGTH - 1), seed=3)
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        if options.memory is not None:
            record["step"] = cost(model, options.memory, rows, options.rounds)
            model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        record["errors"] = errors(model, rows)
        path.write_text(json.dumps(record, indent=1) + "\n")
    draw(record["errors"], RESULTS / "tokens.png")
    for tokens in TOKENS:
        some = [row for row in record["errors"] if row["tokens"] == tokens]
        mean = {kind: statistics.mean(row[kind] for row in some) for kind in ("inputs", "gradients")}
        print(f"{tokens} tokens: error of Q {mean['inputs']:.3f}, of H {mean['gradients']:.3f}")
    if "step" in record:
        usual = record["step"].pop("plain")
        told = ", ".join(f"{ratio:.3f} (penalty {name})" for name, ratio in record["step"].items())
        print(f"a protected step takes {told} times a plain one of {usual:.2f} s")


if __name__ == "__main__":
    main()

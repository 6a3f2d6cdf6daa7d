"""How much of a factor do the eigenvectors from a sketch hold? Factors of a language model, against the exact ones.

    python -m benchmarks sketches --model M --work repair

The factors of six layers are summed in full over 4,096 tokens of the model's own samples (those of repair_language),
with labels sampled from the model. Printed is the part of the trace that 128 exact eigenvectors hold, and, as a part of
that, what 128 eigenvectors from sketches of several widths hold: from one random sketch, as the pass takes it, and from
a second one along the eigenvectors that a first sketch of a quarter of the data gives.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import common
from common import versions
from fine_tuning import BATCH, fresh
from limpet.precision.linalg import symmetric_eigen
from limpet.precision.sketch import Sketch
from limpet.precision.spiked import Spiked
from repair_figures import markdown
from repair_language import samples

RESULTS = common.RESULTS / "memory" / "sketches.jsonl"
LAYERS = (
    "0.self_attn.o_proj",
    "3.mlp.gate_proj",
    "3.mlp.down_proj",
    "20.self_attn.q_proj",
    "20.mlp.down_proj",
    "28.mlp.up_proj",
)
ROWS, FIRST, RANK, WIDTHS = 64, 16, 128, (160, 192, 256, 384)


def factors(options: argparse.Namespace) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors of every side, after the first rows and after all of them, in float64."""
    model = fresh(options.model)
    total: dict[str, Tensor] = {}

    def add(name: str, rows: Tensor) -> None:
        flat = rows.detach().flatten(0, -2).double()
        total[name] = total.get(name, 0) + flat.mT @ flat

    def watch(name: str) -> Any:
        def hook(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            add(f"{name}, in", inputs[0])
            output.register_hook(lambda gradient: add(f"{name}, out", gradient))  # type: ignore[no-untyped-call]

        return hook

    for name in LAYERS:
        model.get_submodule(f"model.layers.{name}").register_forward_hook(watch(name))
    generator, early = torch.Generator().manual_seed(0), {}
    for number, rows in enumerate(torch.split(samples(options, "memory")[:ROWS], BATCH)):
        if number == FIRST // BATCH:
            early = {name: matrix.clone() for name, matrix in total.items()}
        logits = model(input_ids=rows).logits.flatten(0, 1)
        labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).squeeze(1)
        torch.autograd.backward(F.cross_entropy(logits, labels, reduction="sum"))
        model.zero_grad()
    return {name: (early[name], total[name]) for name in total}


def sketched(matrix: Tensor, width: int) -> Spiked:
    """The matrix as a pass would recover it."""
    sketch = Sketch.zeros((), len(matrix), width, matrix)
    return Sketch(matrix @ sketch.omega, matrix.diagonal()).recovered()


def held(matrix: Tensor, vectors: Tensor) -> float:
    """The part of the trace in a span."""
    return float((vectors * (matrix @ vectors)).sum())


def two_stages(early: Tensor, matrix: Tensor, width: int) -> Tensor:
    """Leading eigenvectors from a second sketch along those of the first rows."""
    first = sketched(early, width)
    along = first.columns
    product = along * (first.weights + first.shift) + (matrix - early) @ along
    values, turn = symmetric_eigen(along.mT @ product)
    half = product @ (turn / values.clamp_min(1e-12 * values[-1]).sqrt())
    return torch.linalg.svd(half, full_matrices=False)[0][:, :RANK]  # type: ignore[no-any-return]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--work", type=Path, default=Path("repair"), help="where samples are kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = common.parse(parser)
    known = {p["factor"]: p for p in common.read_records(options.out)}
    if not known:
        for name, (early, matrix) in factors(options).items():
            values, vectors = symmetric_eigen(matrix)
            exact = held(matrix, vectors[:, -RANK:])
            point: dict[str, Any] = {
                "factor": name,
                "size": len(matrix),
                "exact": round(exact / float(values.sum()), 4),
            }
            for width in WIDTHS:
                one = held(matrix, sketched(matrix, width).top_eigen(RANK)[1])
                two = held(matrix, two_stages(early, matrix, width))
                point |= {f"{width}": round(one / exact, 4), f"{width}, two stages": round(two / exact, 4)}
            known[name] = point
            common.append_record(options.out, point | {"versions": versions("transformers")})
    names = [name for name in next(iter(known.values())) if name != "versions"]
    print(markdown(names, [[str(point[name]) for name in names] for point in known.values()]))


if __name__ == "__main__":
    main()

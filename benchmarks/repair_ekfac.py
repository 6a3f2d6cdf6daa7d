"""Does a repair of a language model improve with the exact diagonal of both curvatures (EKFAC)?

    python -m benchmarks repair_ekfac --model M --text french=A.html reviews=B.csv --work retention --rows 32
    python -m benchmarks repair_ekfac --draw

A repair works in the generalized eigenbases of two Kronecker-factored curvatures (`limpet.precision.kronecker_pencil`),
which take the positions of a sequence for independent. Here the diagonals of both curvatures in these bases are
measured with gradients of whole sequences, with sampled targets, and used instead: as they are ("diagonal"), or only
their sums over every block ("trace"). The model, its memory and the data are those of the suite "drift" of
`retention`, whose folder `--work` is used; plain training has to be there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import common
from common import versions
from limpet.forgetting import repair_paths
from limpet.precision.kronecker_pencil import KroneckerPencil
from repair_figures import markdown
from retention.compare import decoded
from retention.drift import PAIRS, DriftBench

RESULTS = common.RESULTS / "repair" / "ekfac.jsonl"
STRENGTHS = (0.3, 1.0, 3.0, 10.0)
SHARE = 0.1
"""Weight of the Kronecker diagonal in a measured one, which keeps it away from zero."""

Paths = dict[str, KroneckerPencil]


def gradients(model: Any, rows: Tensor, names: Iterable[str], seed: int) -> Iterator[dict[str, Tensor]]:
    """For every row, the gradient of its summed loss with targets sampled from the model, by parameter."""
    generator = torch.Generator().manual_seed(seed)
    wanted = {name: dict(model.named_parameters())[f"{name}.weight"] for name in names}
    model.requires_grad_(False).eval()
    for weight in wanted.values():
        weight.requires_grad_(True)
    for row in rows:
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        targets = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).squeeze(-1)
        loss = F.cross_entropy(logits, targets, reduction="sum")
        found = torch.autograd.grad(loss, list(wanted.values()))
        yield dict(zip(wanted, found, strict=True))


@torch.no_grad()
def squares(path: KroneckerPencil, gradient: Tensor) -> Tensor:
    """The squared entries of U^T G V."""
    return path.outputs.into_dual(path.inputs.into_dual(gradient).mT).mT.square()


def diagonals(model: Any, rows: Tensor, paths: Paths, seed: int) -> dict[str, Tensor]:
    """The mean over rows of the squared gradient of a row, in the bases of every block."""
    total: dict[str, Tensor] = {}
    for number, found in enumerate(gradients(model, rows, paths, seed), 1):
        for name, gradient in found.items():
            square = squares(paths[name], gradient) / len(rows)
            total[name] = total[name] + square if name in total else square
        if number % 8 == 0:
            print(f"{number} of {len(rows)} rows", flush=True)
    return total


def solved(bench: DriftBench, model: Any) -> tuple[Any, Paths]:
    """The repair of a tuned model, and the closed-form path of every block."""
    paths: Paths = {}
    original = repair_paths._path

    def kept(one: Any, fisher: Any) -> Any:
        path = original(one, fisher)
        assert isinstance(path, KroneckerPencil) and path.exact
        paths[one.block.name] = path
        return path

    with mock.patch.object(repair_paths, "_path", kept):
        return bench.repaired(model, strength=0.0), paths


def table(points: Sequence[dict[str, Any]]) -> str:
    """New loss and drift of every variant and strength, and the drift over that of Kronecker factors at this loss.

    Between its strengths, the logarithm of the drift of Kronecker factors is interpolated linearly in the new loss.
    """
    curve = sorted((p["new"], math.log(p["drift"])) for p in points if p.get("what") == "kronecker")
    losses, logs = zip(*curve, strict=True)
    rows = []
    for p in points:
        if "what" in p:
            inside = losses[0] <= p["new"] <= losses[-1]
            ratio = f"{p['drift'] / math.exp(np.interp(p['new'], losses, logs)):.2f}" if inside else "outside"
            rows.append([p["what"], f"{p['strength']:g}", f"{p['new']:.3f}", f"{p['drift']:.4f}", ratio])
    return markdown(["diagonal", "strength", "new loss", "drift", "drift / kronecker, at this loss"], rows)


def main() -> None:
    parser = common.parser(__doc__, threads=1)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--text", nargs="+", default=[], metavar="NAME=FILE", help=".txt, .html or .csv")
    parser.add_argument("--work", type=Path, default=Path("retention"), help="where models and memories are kept")
    adapted = [name for name, pair in PAIRS.items() if not pair.full]
    parser.add_argument("--pair", choices=adapted, default="development", help="what is learned")
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--rows", type=int, default=64, help="rows that a diagonal is measured on")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = common.parse(parser)
    if options.draw:
        print(table(common.read_records(options.out)))
        return
    options.texts = dict(one.split("=", 1) for one in options.text)
    bench = DriftBench(options, options.pair, PAIRS[options.pair], options.seed)
    model = bench.trained("plain")
    repair, paths = solved(bench, model)
    old_rows, _ = bench.remembered()
    old_tokens, new_tokens = old_rows[:, 1:].numel(), bench.examples
    per_row = old_rows.shape[1] - 1
    old = diagonals(bench.teacher, old_rows[: options.rows], paths, options.seed)
    merged = bench.trained("plain").merge_and_unload()
    order = torch.randperm(len(bench.new), generator=torch.Generator().manual_seed(options.seed))
    new = diagonals(merged, bench.new[order[: options.rows]], paths, options.seed + 1)
    kronecker = {name: path.old_values for name, path in paths.items()}
    variants: dict[str, dict[str, Tensor]] = {"kronecker": kronecker, "trace": {}, "diagonal": {}}
    ratios: dict[str, tuple[float, float]] = {}
    for name, product in kronecker.items():
        o, n = old.pop(name) * (old_tokens / per_row), new.pop(name) * (new_tokens / per_row)
        ratios[name] = float(o.sum() / product.sum()), float(n.mean())
        variants["trace"][name] = product * (ratios[name][0] / ratios[name][1])
        variants["diagonal"][name] = (o + SHARE * product) / (n + SHARE)
    record = {"pair": options.pair, "seed": options.seed, "rows": options.rows}
    record |= {"versions": versions("transformers", "peft")}
    common.append_record(options.out, {**record, "ratios": {k: [round(x, 4) for x in v] for k, v in ratios.items()}})
    for what, values in variants.items():
        for name, path in paths.items():
            path.old_values = values[name]
        for strength in STRENGTHS:
            repair.at(strength)
            found = bench.measured(model)
            point = {"new": found["new"], "drift": round(float(decoded(found["lost"]).mean()), 5)}
            print({"what": what, "strength": strength, **point}, flush=True)
            common.append_record(options.out, {**record, "what": what, "strength": strength, **point})


if __name__ == "__main__":
    main()

"""Which ranks should the factors of a memory have, for a given number of bytes? A repair of one layer.

    python -m benchmarks rank_rule --model M --new C.html --work repair --layer 2

The fine-tuned model and the complete memory are those of repair_language. For every factor of the layer alone and every
rank, the closed-form repair X of `limpet.precision.pencil` is computed with that factor truncated, at strength 3, and

    J(X) = 1/2 |X - D|^2_N + strength/2 |X|^2_O

is evaluated with the complete memory O: what truncation costs is J(X) - min J. Between the ranks that were computed its
logarithm is interpolated. Rules are compared by the sum of this cost over the layer at equal bytes, where layers with
the same input count its factor once: the same rank for all factors, ranks that fall with a power of the size n, ranks
that hold the same part of the trace, and the best ranks, which a rule cannot know.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import common
from limpet.forgetting.displacement import displacements
from limpet.posterior.whole_parameters import whole_parameters
from limpet.precision import Kronecker
from limpet.precision.basis import Basis
from limpet.precision.pencil import Damping, damped
from limpet.precision.same_factor import same_factors
from memory_ranks import COMPLETE, Bench
from repair_figures import markdown

RANKS = (16, 32, 64, 96, 128, 192, 256, 384)
UNIFORM = (96, 128, 176, 224)
POWERS = (0.25, 0.5, 0.75, 1.0)
STRENGTH = 3.0


@dataclass
class Side:
    """One factor: its size, its normalized spectrum in descending order, the first factor equal to it, and its cost."""

    size: int
    spectrum: np.ndarray
    first: str
    cost: dict[int, float] = field(default_factory=dict)

    def costs(self) -> np.ndarray:
        """The cost of every rank from 0 to the size."""
        known = sorted(self.cost)
        logs = [math.log(max(self.cost[rank], 1e-12)) for rank in known]
        found = np.exp(np.interp(np.arange(self.size + 1), [*known, self.size], [*logs, logs[-1] - 3]))
        found[self.size - 1 :] = 0.0
        return found

    def rank_of(self, energy: float) -> int:
        """The smallest rank that holds a part of the trace."""
        return int((self.spectrum.cumsum() < energy).sum()) + 1


def complete(basis: Basis) -> Tensor:
    """The eigenvectors of a complete basis."""
    assert isinstance(basis.columns, Tensor)
    return basis.columns.double()


def truncated(values: Tensor, rank: int) -> Tensor:
    """Eigenvalues, with all but the largest replaced by their mean."""
    rest = values.argsort(descending=True)[rank:]
    return values.index_fill(0, rest, float(values[rest].mean()))


def joint_basis(vectors: Tensor, values: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """S and V with V^T N V = I and V^T O V = diag(s), of O = vectors diag(values) vectors^T."""
    root = torch.linalg.cholesky(new)
    half = torch.linalg.solve_triangular(root, vectors * values.sqrt(), upper=False)
    s, w = torch.linalg.eigh(half @ half.mT)
    return s, torch.linalg.solve_triangular(root.mT, w, upper=True)


def measure(precision: Kronecker, factors: tuple[Tensor, Tensor], moved: Tensor) -> list[dict[int, float]]:
    """The cost of the ranks of the input and of the output factor of a block."""
    amounts, moved = Damping(), moved.double()
    olds = [(complete(basis), basis.trace.double()) for basis in (precision.inputs, precision.outputs)]
    total = float(precision.values.plain.double().sum() / (olds[0][1].sum() * olds[1][1].sum()))
    olds[1] = (olds[1][0], olds[1][1] * total)
    news = [damped(factor.double(), amounts.new) for factor in factors]
    floors = [amounts.old * float(values.mean()) for _, values in olds]
    wholes = [(v * (t + floor)) @ v.mT for (v, t), floor in zip(olds, floors, strict=True)]

    def objective(bases: list[tuple[Tensor, Tensor]]) -> float:
        (s, v), (t, u) = bases
        inner = (u.mT @ news[1]) @ moved @ (news[0] @ v)
        x = u @ (inner / (1 + STRENGTH * t.unsqueeze(-1) * s)) @ v.mT
        gap = x - moved
        return float(STRENGTH * (x * (wholes[1] @ x @ wholes[0])).sum() + (gap * (news[1] @ gap @ news[0])).sum()) / 2

    best = [joint_basis(v, t + floor, new) for (v, t), floor, new in zip(olds, floors, news, strict=True)]
    least, found = objective(best), []
    for side, ((v, t), floor, new) in enumerate(zip(olds, floors, news, strict=True)):
        costs = {}
        for rank in RANKS:
            if rank < len(t) - 1:
                cut = joint_basis(v, truncated(t, rank) + floor, new)
                costs[rank] = objective([cut, best[1]] if side == 0 else [best[0], cut]) - least
        found.append(costs)
    return found


def sides_of(options: argparse.Namespace) -> dict[str, Side]:
    """The factors of a layer, with their costs."""
    bench = Bench(options, options.seed)
    memory = bench.memory(COMPLETE)
    held = {name: one for name, one in memory.posterior.held.items() if f".layers.{options.layer}." in f".{name}"}
    all_moved = displacements(whole_parameters(memory.posterior), held)
    moved = {one.block.name: sum(one.parts[1:], one.parts[0]) for one in all_moved}
    blocks = {name: one.precision for name, one in held.items() if isinstance(one.precision, Kronecker)}
    same = same_factors({name: precision.inputs for name, precision in blocks.items()})
    found: dict[str, Side] = {}
    for name, precision in blocks.items():
        (term,) = bench.fisher.terms[name]
        costs = measure(precision, term.factors(), moved[name])  # type: ignore[union-attr]
        for which, basis, cost in zip(("inputs", "outputs"), (precision.inputs, precision.outputs), costs, strict=True):
            spectrum = basis.trace.double().sort(descending=True).values
            first = f"{same.get(name, name) if which == 'inputs' else name}.{which}"
            found[f"{name}.{which}"] = Side(len(spectrum), (spectrum / spectrum.sum()).numpy(), first, cost)
        print(name, json.dumps([{rank: round(cost, 4) for rank, cost in each.items()} for each in costs]), flush=True)
    return found


def stored(sides: dict[str, Side], ranks: dict[str, int]) -> int:
    """Numbers that are stored."""
    return sum(side.size * min(ranks[name], side.size) for name, side in sides.items() if side.first == name)


def largest(sides: dict[str, Side], limit: int, ranks: Callable[[float], dict[str, int]], top: float) -> dict[str, int]:
    """The ranks at the largest level that fits, by bisection."""
    low, high = 0.0, top
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if stored(sides, ranks(middle)) <= limit else (low, middle)
    return ranks(low)


def by_power(sides: dict[str, Side], power: float, level: float) -> dict[str, int]:
    """Ranks that fall with a power of the size."""
    return {name: max(int(level / side.size**power), 1) for name, side in sides.items()}


def best(sides: dict[str, Side], price: float) -> dict[str, int]:
    """The ranks that minimize the cost plus a price per number; factors that are equal have equal ranks."""
    found = {}
    for name, side in sides.items():
        group = [other.costs() for other in sides.values() if other.first == side.first]
        found[name] = max(int((np.sum(group, 0) + price * side.size * np.arange(side.size + 1)).argmin()), 1)
    return found


def table(sides: dict[str, Side]) -> str:
    """The cost of every rule at the size of several uniform ranks."""
    costs = {name: side.costs() for name, side in sides.items()}

    def total(ranks: dict[str, int]) -> str:
        return f"{sum(costs[name][min(rank, sides[name].size)] for name, rank in ranks.items()):.2f}"

    rows = []
    for uniform in UNIFORM:
        limit = stored(sides, dict.fromkeys(sides, uniform))
        rules = [dict.fromkeys(sides, uniform)]
        rules += [largest(sides, limit, partial(by_power, sides, power), 1e8) for power in POWERS]
        rules.append(largest(sides, limit, lambda part: {n: s.rank_of(part) for n, s in sides.items()}, 1.0))
        rules.append(largest(sides, limit, lambda c: best(sides, 1e-3 / max(c, 1e-12)), 1e6))
        rows.append([str(uniform), *map(total, rules)])
    powers = [f"rank ~ n^-{power:g}" for power in POWERS]
    return markdown(["bytes of rank", "the same rank", *powers, "the same part of the trace", "the best ranks"], rows)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--new", type=Path, nargs="+", default=[])
    parser.add_argument("--work", type=Path, default=Path("repair"), help="where models and memories are kept")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layer", type=int, default=2)
    print(table(sides_of(common.parse(parser))))


if __name__ == "__main__":
    main()

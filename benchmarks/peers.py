"""Compare limpet with other curvature libraries: cost and correctness.

    python -m benchmarks peers              print the table, under 3 minutes of processor time
    python -m benchmarks peers --write      and store it in results/peers

Time is that of one pass over the data, relative to a forward and backward pass over the same data right before it, in
processor seconds of one thread; medians over rounds that cycle through all libraries. Errors are relative, in the
Frobenius norm, for the block of the one layer that a column is about, on networks small enough to compute the dense
Fisher. Each error is given twice: compared with the dense Fisher of the same kind, and compared with the approximation
itself, computed explicitly, so that no library is blamed for the error of K-FAC.
"""

from __future__ import annotations

import copy
import json
import re
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import common
from common import peak, versions
from overhead import lenet, mlp
from peer_cases import CASES, Case, dense_fisher, own_forms
from peer_libraries import PEERS, Batches, MisfitError, Peer, installed, places

RESULTS = common.RESULTS / "peers"
PART = 16
"""Examples in a batch of the small networks."""

ENOUGH = 1.0
"""Seconds after which a library is timed no more, if it had three rounds."""

OFF = 0.01
"""A block that is further than this from its own form is not that form."""


# --- how right -----------------------------------------------------------------------------------------------------


def relative(a: Tensor, b: Tensor) -> float:
    """The relative error in the Frobenius norm."""
    return float((a - b).norm() / b.norm())


def asked(peer: Peer, model: nn.Module, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """A library's matrix over all parameters of its own copy of the model."""
    theirs = copy.deepcopy(model).to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    batches = list(zip(torch.split(x, PART), torch.split(y, PART), strict=True))
    return peer.matrix(peer.measure(theirs, batches, peer.kinds[0]), theirs).double()


def judged(peer: Peer, case: Case) -> dict[str, Any]:
    """The errors of a library's block, and its trace against the true one; or what it says when it refuses."""
    model, x, y = case.build()
    where = places(model)
    rows = torch.cat([where[name].flatten() for name in case.parameters])
    fisher = dense_fisher(model, x, y, peer.kinds[0])[rows][:, rows]
    matrix, word = None, {}
    for dtype in (torch.float64, torch.float32):  # one of them takes no other than float32
        try:
            matrix = asked(peer, model, x, y, dtype)[rows][:, rows]
            break
        except MisfitError as error:
            return {"misfit": str(error)}
        except Exception as error:  # what a library raises is its own affair; it is what we want to know
            first = next(iter(str(error).splitlines()), "")
            word = {"refuses": f"{type(error).__name__}: {first}".removesuffix(": ")}
    if matrix is None:
        return word
    forms = own_forms(peer.form, case, model, x, fisher)
    if peer.rescaled:
        matrix = matrix * (matrix * forms[0]).sum() / matrix.square().sum()
    nearest = min(relative(matrix, form) for form in forms)
    return {"dense": relative(matrix, fisher), "form": nearest, "trace": float(matrix.trace() / fisher.trace())}


# --- what it costs -------------------------------------------------------------------------------------------------


def bare(model: nn.Module, batches: Batches) -> None:
    """Forward and backward."""
    for x, y in batches:
        model.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x), y))


def seconds(run: Callable[[], object]) -> float:
    """Of processor time: what else the machine does hardly matters."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def costs(peers: list[Peer], network: Callable[[], nn.Module], batches: Batches, rounds: int) -> dict[str, Any]:
    """For every library: time against the bare run on the same data, bytes kept, bytes at the peak of one batch."""
    torch.manual_seed(0)
    model = network().eval()
    data = {
        peer.name: [(x[: peer.few], y[: peer.few]) for x, y in batches[: 1 if peer.few else None]] for peer in peers
    }
    own = {peer.name: copy.deepcopy(model) for peer in peers}  # some leave hooks behind
    found: dict[str, Any] = {}
    for peer in peers:  # the first call of anything is slow, so this is not timed
        most, result = peak(partial(peer.measure, own[peer.name], data[peer.name][:1], peer.kinds[0]))
        kept = sum(leaf.nbytes for leaf in tree_leaves(peer.kept(result)) if isinstance(leaf, Tensor))
        found[peer.name] = {"time": {kind: [] for kind in peer.kinds}, "kept": kept, "peak": most}
    spent: defaultdict[tuple[str, str], float] = defaultdict(float)
    for done in range(rounds):
        for peer in peers:
            for kind, ratios in found[peer.name]["time"].items():
                if done >= 3 and spent[peer.name, kind] > ENOUGH:
                    continue
                base = seconds(partial(bare, model, data[peer.name]))
                taken = seconds(partial(peer.measure, own[peer.name], data[peer.name], kind))
                spent[peer.name, kind] += taken
                ratios.append(taken / base)
    for one in found.values():
        one["time"] = {kind: statistics.median(ratios) for kind, ratios in one["time"].items()}
    return found


# --- the table -----------------------------------------------------------------------------------------------------


def available() -> list[Peer]:
    """The libraries that are installed."""
    return [peer for peer in PEERS if installed(peer.package)]


def measure(rounds: int) -> dict[str, Any]:
    """All numbers."""
    begin, peers = time.perf_counter(), available()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    errors = {peer.name: {case.name: judged(peer, case) for case in CASES} for peer in peers}
    torch.manual_seed(0)
    vectors = [(torch.randn(250, 784), torch.randint(0, 10, (250,))) for _ in range(20)]
    images = [(torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))) for _ in range(2)]
    found = {"MLP": costs(peers, mlp, vectors, rounds), "LeNet": costs(peers, lenet, images, rounds)}
    packages = ["curvlinops-for-pytorch", "nngeometry", "laplace-torch", "backpack-for-pytorch", "asdfghjkl"]
    used = {**versions(), **{package: installed(package) for package in packages}}
    wall = round(time.perf_counter() - begin)
    return {"versions": used, "rounds": rounds, "seconds": wall, "costs": found, "errors": errors}


def number(value: float) -> str:
    """An error in two digits; rounding is none."""
    return "0" if value < 1e-5 else f"{value:.2g}"


def short(value: float) -> str:
    """No more digits than mean something."""
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def table(record: dict[str, Any]) -> str:
    """The numbers as one Markdown table, with what was refused and how everybody was asked below it."""
    columns = ["time, MLP", "time, LeNet", "kept, MB", "peak, MB", *(case.name for case in CASES)]
    lines = [f"| | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    said: dict[str, int] = {}
    peers = {peer.name: peer for peer in PEERS}
    for name, errors in record["errors"].items():
        cost = [record["costs"][network][name] for network in ("MLP", "LeNet")]
        cells = [" / ".join(short(ratio) for ratio in one["time"].values()) for one in cost]
        cells += [" / ".join(short(one[what] / 1e6) for one in cost) for what in ("kept", "peak")]
        for found in errors.values():
            word = found.get("refuses") or found.get("misfit")
            if word is None:
                cell = f"{number(found['dense'])} / {number(found['form'])}"
                cells.append(f"**{cell}**" if found["form"] > OFF else cell)
            else:
                mark = said.setdefault(word, len(said) + 1)
                cells.append(f"{'refuses' if 'refuses' in found else 'misfit'} [{mark}]")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    settings = [f"- {name}: {peers[name].setting}" for name in record["errors"]]
    refused = [f"{mark}. `{word}`" for word, mark in said.items()]
    used = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    text = [*lines, "", "What they say:", "", *refused, "", "How they were asked:", "", *settings, ""]
    return "\n".join([*text, f"{used}; one thread, medians of 3 to {record['rounds']} rounds."])


def main() -> None:
    """Measure and print."""
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="keep the numbers in results/peers")
    options = common.parse(parser)
    record = measure(options.rounds)
    text = table(record)
    print(f"{text}\n\n{record['seconds']} s")
    if options.write:
        (RESULTS / "peers.json").write_text(json.dumps(record, indent=1) + "\n")
        page = RESULTS / "README.md"
        between = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.S)
        page.write_text(between.sub(lambda _: f"\n{text}\n\n", page.read_text()))


if __name__ == "__main__":
    main()

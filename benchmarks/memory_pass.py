"""Time and peak of making a memory of a language model: complete factors, and factors of a rank, side by side.

    python -m benchmarks memory_pass --model M --work repair --ranks -1 0 128 --rows 24 190
    python -m benchmarks memory_pass --model M --work repair --ranks 0 --rows 190 --former CHECKOUT
    python -m benchmarks memory_pass --draw

Every memory is made in a process of its own, from the samples of repair_language in batches of 4 x 64 tokens. "Pass"
is the curvature pass with its factors, "update" adds them to the memory, "curve" measures the loss curve; all are CPU
seconds of one thread, which another process on the machine changes little. The peak is the largest resident set size,
beside that of the process before the pass, which has the libraries and the weights. Rank 0 stands for complete factors,
rank -1 for no memory: one forward and one backward pass of the same batches. With --former, the library is that of
another checkout: commit 03165b5 is the last one before truncated factors.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import common
from common import versions
from fine_tuning import BATCH, fresh
from limpet.curvature.fisher_pass import FisherPass
from limpet.integrations.causal_lm import consolidate_lm
from limpet.methods.laplace import Laplace
from repair_figures import markdown
from repair_language import samples

RESULTS = common.RESULTS / "memory" / "pass.jsonl"
PHASES: dict[str, tuple[type, str]] = {
    "pass": (FisherPass, "run"),
    "update": (Laplace, "_add_task"),
    "curve": (Laplace, "_measure_curve"),
}


NAMES = {-1: "none: forward and backward", 0: "complete"}
FORMER = "complete, before truncated factors"


def timed(function: Callable[..., Any], phase: str, seconds: dict[str, float]) -> Callable[..., Any]:
    """The function, which adds the CPU time that it takes to a phase."""

    def run(*arguments: Any, **options: Any) -> Any:
        begin = time.process_time()
        try:
            return function(*arguments, **options)
        finally:
            seconds[phase] = seconds.get(phase, 0.0) + time.process_time() - begin

    return run


def resident() -> float:
    """Resident set size in GB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e9


def measure(options: argparse.Namespace, rank: int, rows: int) -> dict[str, Any]:
    """Make one memory, in this process."""
    seconds: dict[str, float] = {}
    for phase, (owner, name) in PHASES.items():
        setattr(owner, name, timed(getattr(owner, name), phase, seconds))
    model = fresh(options.model)
    model.get_input_embeddings().requires_grad_(False)
    batches = torch.split(samples(options, "memory")[:rows], BATCH)
    with torch.no_grad():
        model(input_ids=batches[0])  # reads the weights, which are mapped from a file
    before, begin = resident(), time.process_time()
    size = 0
    if rank >= 0:
        chosen: dict[str, Any] = {"rank": rank} if rank else {}
        size = consolidate_lm(model, batches, strength=1.0, progress=False, **chosen).nbytes
    else:
        seconds |= dict.fromkeys(PHASES, 0.0)
        for batch in batches:
            model.zero_grad()
            model(input_ids=batch, labels=batch).loss.backward()
    total = time.process_time() - begin
    found = {phase: round(value, 1) for phase, value in {**seconds, "total": total}.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    sizes = {"before_gb": round(before, 2), "peak_gb": round(peak, 2), "memory_mb": round(size / 1e6)}
    return {"rank": rank, "rows": rows, "seconds": found, **sizes, "versions": versions("transformers")}


def table(points: list[dict[str, Any]]) -> str:
    """One line for every memory, with ratios to that of complete factors from as many rows, of today and of before."""
    lines = []
    for p in points:
        ratios: list[list[str]] = []
        for former in (False, True):
            same = [w for w in points if (w["rank"], w["rows"], "former" in w) == (0, p["rows"], former)]
            ratios.append([f"{of(p) / of(w):.2f}" for w in same for of in (_total, _peak, _added)] or [""] * 3)
        name = FORMER if "former" in p else NAMES.get(p["rank"], f"rank {p['rank']}")
        cells = [name, str(p["rows"]), *(f"{p['seconds'][phase]:.0f}" for phase in (*PHASES, "total"))]
        times, peaks, added = zip(*ratios, strict=True)
        lines.append([*cells, *times, f"{p['peak_gb']:.2f}", *peaks, *added])
    seconds = [f"{phase}, s" for phase in (*PHASES, "total")]
    both = ["/ complete", "/ before"]
    return markdown(
        ["factors", "sequences", *seconds, *both, "peak, GB", *both, "without libraries, / complete", both[1]], lines
    )


def _total(point: dict[str, Any]) -> float:
    return float(point["seconds"]["total"])


def _peak(point: dict[str, Any]) -> float:
    return float(point["peak_gb"])


def _added(point: dict[str, Any]) -> float:
    """The peak beyond what the process had before: libraries and weights."""
    return float(point["peak_gb"] - point["before_gb"])


def main() -> None:
    parser = common.parser(__doc__, threads=1)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--work", type=Path, default=Path("repair"), help="where samples are kept")
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 128])
    parser.add_argument("--rows", type=int, nargs="+", default=[24, 190])
    parser.add_argument("--former", type=Path, metavar="CHECKOUT", help="measure the library of another checkout")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--one", type=int, nargs=2, metavar=("RANK", "ROWS"), help=argparse.SUPPRESS)
    options = common.parse(parser)
    if options.one:
        print(json.dumps(measure(options, *options.one)))
        return
    if options.former is not None and not (options.former / "src" / "limpet").is_dir():
        raise SystemExit(f"{options.former} is no checkout of limpet: it has no src/limpet")
    former = {} if options.former is None else {"former": True}
    environment = dict(os.environ) | ({"PYTHONPATH": str(options.former / "src")} if former else {})
    done = {(p["rank"], p["rows"]) for p in common.read_records(options.out) if ("former" in p) == bool(former)}
    wanted = [(rank, rows) for rows in options.rows for rank in options.ranks if (rank, rows) not in done]
    for rank, rows in [] if options.draw else wanted:
        chosen = ["--model", str(options.model), "--work", str(options.work), "--threads", str(options.threads)]
        command = [sys.executable, "-m", "benchmarks", "memory_pass", *chosen, "--one", str(rank), str(rows)]
        told = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        common.append_record(options.out, json.loads(told.splitlines()[-1]) | former)
    print(table(common.read_records(options.out)))


if __name__ == "__main__":
    main()

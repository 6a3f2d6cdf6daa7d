"""Distributed training: what each rank stores and sends, and the speedup. No datasets needed.

    python -m benchmarks ranks              # both, about 5 minutes
    python -m benchmarks ranks costs        # bytes stored, allocated, sent on 1, 2, 4 ranks: results/ranks/costs.json
    python -m benchmarks ranks speed        # a consolidation on 2 ranks and on 1: results/ranks/speed.json

The processes are real ones, started by torchrun, with gloo and one thread each. `costs`: a network of 17 layers,
sharded by fully_shard (unsharded on one rank); three tasks, then protected steps. `speed`: a transformer that every
rank holds in full; its memory is built by rank 0 alone and by both ranks with half of the data each, alternating in one
run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import common
import limpet
from common import versions

RESULTS = common.RESULTS / "ranks"
RANKS = (1, 2, 4)
TASKS, BATCHES, EVERY = 3, 2, 4


# --- bytes ---------------------------------------------------------------------------------------------------------


WIDTH, PAIRS = 384, 8


def deep() -> nn.Sequential:
    """Layers of two shapes, with next to no activations beside their weights."""
    pairs = [(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh()) for _ in range(PAIRS)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair), nn.Linear(WIDTH, 4))


class Resident:
    """Bytes of this process in memory, as Linux counts them: the most while the body ran, beyond those at its start.

    Large tensors have pages of their own, which go when they go, if the allocator is told so (`ALLOCATOR`).
    """

    def __enter__(self) -> Resident:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._start = self._read("VmRSS")
        return self

    def __exit__(self, *exception: object) -> None:
        self.peak = self._read("VmHWM") - self._start

    def _read(self, what: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Sent:
    """Bytes that this rank hands to the collectives of a memory: to other ranks, by all-to-all and by reduce."""

    def __init__(self) -> None:
        self.swapped = 0
        self.reduced = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """While the body runs."""
        swap, reduce = dist.all_to_all_single, dist.reduce

        def swapped(into: Tensor, out: Tensor, here: list[int], there: list[int]) -> Any:
            self.swapped += out.element_size() * sum(n for to, n in enumerate(there) if to != dist.get_rank())
            return swap(into, out, here, there)

        def reduced(tensor: Tensor, to: int) -> Any:
            self.reduced += tensor.nbytes * (to != dist.get_rank())
            return reduce(tensor, to)

        dist.all_to_all_single, dist.reduce = swapped, reduced  # type: ignore[assignment]
        try:
            yield
        finally:
            dist.all_to_all_single, dist.reduce = swap, reduce


def costs() -> dict[str, Any]:
    """What this rank keeps, has in memory at most, and sends."""
    torch.manual_seed(0)
    model = _in_pieces(deep())
    first = limpet.OnlineLaplace(model, fisher="sampled")
    for _ in range(2):  # what is loaded once is loaded, and a second task is the first to multiply in float64
        _consolidate(first)
    del first
    memory = limpet.OnlineLaplace(model, fisher="sampled")
    peaks = []
    for _ in range(TASKS):
        kept, consolidate = memory.nbytes, Sent()
        with Resident() as resident, consolidate.counted():
            _consolidate(memory)
        peaks.append(kept + resident.peak)
    told: dict[str, Any] = {"bytes": memory.nbytes, "peaks": peaks}
    told["consolidate"] = {"swapped": consolidate.swapped, "reduced": consolidate.reduced}
    for mode, every in (("gradient", 1), ("proximal", 1), ("proximal", EVERY)):
        optimizer, steps = torch.optim.SGD(model.parameters(), lr=1e-3), Sent()
        F.cross_entropy(model(torch.randn(4, WIDTH)), torch.randint(0, 4, (4,))).backward()  # type: ignore[no-untyped-call]
        with Resident() as resident, memory.protect(optimizer, examples=100, mode=mode, every=every), steps.counted():
            for _ in range(every):
                optimizer.step()
        told[f"{mode}, every={every}"] = {"peak": resident.peak, "sent": steps.swapped / every}
        optimizer.zero_grad()
    return told


def _in_pieces(model: nn.Sequential) -> nn.Module:
    """The model under fully_shard, where there are several ranks."""
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        for part in (*model, model):
            if any(True for _ in part.parameters()):
                fully_shard(part)
    return model


def _consolidate(memory: limpet.OnlineLaplace) -> None:
    batches = [(torch.randn(4, WIDTH), torch.randint(0, 4, (4,))) for _ in range(BATCHES)]
    memory.consolidate(batches, progress=False)


# --- time ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """One layer of a transformer over short sequences."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        after: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return after


class Transformer(nn.Module):
    """Reads sequences of numbers and says which of ten kinds they are."""

    def __init__(self, width: int = 96, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.read = nn.Linear(8, width)
        self.layers = nn.Sequential(*(Attention(width, heads) for _ in range(layers)))
        self.say = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.say(self.layers(self.read(x)).mean(1))
        return found


EXAMPLES, LENGTH, BATCH = 4096, 32, 64


def speed(rounds: int) -> dict[str, Any]:
    """A consolidate by rank 0 alone, then by all ranks together, in turns."""
    torch.manual_seed(0)
    model = Transformer()
    x, y = torch.randn(EXAMPLES, LENGTH, 8), torch.randint(0, 10, (EXAMPLES,))
    rank, size = dist.get_rank(), dist.get_world_size()

    def consolidated(first: int, step: int) -> limpet.OnlineLaplace:
        batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(first * BATCH, EXAMPLES, step * BATCH)]
        memory = limpet.OnlineLaplace(model, fisher="sampled")
        memory.consolidate(batches, progress=False)
        return memory

    def timed(action: Callable[[], Any]) -> tuple[float, Any]:
        dist.barrier()
        begin = time.perf_counter()
        found = action()
        dist.barrier()
        return time.perf_counter() - begin, found

    def alone() -> limpet.OnlineLaplace | None:
        with limpet.distributed.alone():
            return consolidated(0, 1) if rank == 0 else None

    seconds: dict[str, list[float]] = {"1": [], str(size): []}
    for number in range(rounds + 1):  # the first one warms up
        one_takes, one = timed(alone)
        all_take, together = timed(lambda: consolidated(rank, size))
        if number:
            seconds["1"].append(one_takes)
            seconds[str(size)].append(all_take)
    ratios = [many / single for single, many in zip(*seconds.values(), strict=True)]
    error = 0.0 if one is None else max(_error(one, together))
    load = [round(value, 2) for value in os.getloadavg()]
    return {"seconds": seconds, "ratio": statistics.median(ratios), "ratios": ratios, "error": error, "load": load}


def _error(one: limpet.OnlineLaplace, other: limpet.OnlineLaplace) -> Iterator[float]:
    """How far the precisions of two memories are apart, block by block, on a vector."""
    for name, held in one.posterior.held.items():
        v = torch.randn(held.mean.shape, generator=torch.Generator().manual_seed(0))
        expected, found = held.precision.apply(v), other.posterior.held[name].precision.apply(v)
        yield float((found - expected).norm() / expected.norm())


# --- many processes ------------------------------------------------------------------------------------------------


def on_ranks(ranks: int, job: str, *words: str, timeout: float = 1200) -> list[dict[str, Any]]:
    """What every rank has to tell of a job, in their order. Whatever happens, no process of theirs is left."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launcher, __file__, job, *words, "--into", folder]
        environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            told, _ = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        found = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        if not all(path.exists() for path in found):  # gloo may abort when they take leave; what counts is the files
            raise RuntimeError(f"{job} on {ranks} ranks ended before it had measured:\n{told}")
        return [json.loads(path.read_text()) for path in found]


def work(job: str, rounds: int, into: Path) -> None:
    """What one of the processes does."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    several = int(os.environ["WORLD_SIZE"]) > 1
    if several:
        dist.init_process_group("gloo")
    told = costs() if job == "costs" else speed(rounds)
    (into / f"{os.environ['RANK']}.json").write_text(json.dumps(told))
    if several:
        dist.destroy_process_group()


def measured_costs(ranks: int) -> dict[str, Any]:
    """The costs of every rank."""
    return {"ranks": ranks, "each": on_ranks(ranks, "costs")}


def measured_speed(rounds: int) -> dict[str, Any]:
    """Seconds of one rank and of two."""
    return max(on_ranks(2, "speed", "--rounds", str(rounds)), key=lambda told: float(told["error"]))


def main() -> None:
    """Measure, print and keep."""
    parser = common.parser(__doc__)
    parser.add_argument("job", nargs="?", choices=["costs", "speed"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # where a process that was started here writes
    options = common.parse(parser)
    if options.into is not None:
        work(options.job, options.rounds, options.into)
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    for job in (options.job,) if options.job else ("costs", "speed"):
        if job == "costs":
            record: dict[str, Any] = {"runs": [measured_costs(ranks) for ranks in RANKS]}
        else:
            record = measured_speed(options.rounds)
            seconds = ", ".join(f"{statistics.median(s):.2f} s on {n}" for n, s in record["seconds"].items())
            print(f"{seconds}; ratio {record['ratio']:.3f}, error {record['error']:.1e}, load average {record['load']}")
        (RESULTS / f"{job}.json").write_text(json.dumps({"versions": versions(), **record}, indent=1) + "\n")


if __name__ == "__main__":
    main()

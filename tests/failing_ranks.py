"""What every rank does in tests of failures: `python -m torch.distributed.run --nproc-per-node N failing_ranks.py ...`.

failing_ranks.py every replicated|sharded [STRIDE]   an exception on every rank before every collective (or every
                                                     STRIDE-th): all ranks raise the same, and can go on
failing_ranks.py differ                              ranks whose settings, weights, batches or calls differ
failing_ranks.py interrupted                         exceptions that no LimpetError is, in loaders and layers
failing_ranks.py killed replicated|sharded RANK      kill -9 of a rank in the middle of a pass
failing_ranks.py late                                a rank that does not come
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import limpet
from limpet.distributed import ReplicatedBatches, failure
from many_ranks import say

Batches = list[tuple[Tensor, Tensor]]


def network(kind: str, seed: int = 0, between: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh() if between is None else between, nn.Linear(5, 3))
    if kind == "sharded":
        fully_shard(model[0])
        fully_shard(model[2])
        fully_shard(model)
    return model


def data(rank: int, count: int = 2) -> Batches:
    seed = torch.Generator().manual_seed(rank)
    return [(torch.randn(4, 4, generator=seed), torch.randint(0, 3, (4,), generator=seed)) for _ in range(count)]


def whole_life(kind: str, rank: int, path: Path) -> list[Any]:
    """All operations that communicate. What is given back are the numbers of a good run."""
    model = network(kind)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate(data(rank), progress=False)
    for mode in ("proximal", "gradient") if kind == "sharded" else ("proximal",):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with memory.protect(optimizer, examples=8, mode=mode):
            F.cross_entropy(model(data(0)[0][0]), data(0)[0][1]).backward()
            optimizer.step()
    memory.consolidate(ReplicatedBatches(data(0, 3)), checkpoint=path.with_name("pass"), progress=False)
    if kind == "sharded":
        memory.save(path)
        memory.load_state_dict(memory.state_dict())
        memory = limpet.load(path, model)
    else:
        limpet.repair(moved(model), memory, data(rank), progress=False)
    return [memory.tasks, memory.examples, float(memory.forecast())]


def moved(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    return model


class InjectedError(Exception):
    """Not an error of the library."""


def inject(before: int, life: Callable[[], Any]) -> Any:
    """Run it with an exception before one of its meetings; return what it raised, or its result."""
    count, real = 0, failure.meet

    def meet(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == before:
            raise InjectedError(f"before {count}")
        return real(*args, **options)

    with patch.object(failure, "meet", meet):
        try:
            return life()
        except limpet.RankError as error:
            return error


def gathered(value: Any) -> list[Any]:
    """By the default process group, which has to be in step."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def every(kind: str, rank: int, size: int, stride: int = 1) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(gathered(folder)[0]) / "memory.safetensors"
        count, good = counted(lambda: whole_life(kind, rank, path))
        slowest, injections = 0.0, 0
        for failing in range(size):
            for number in range(1 + failing % stride, count + 1, stride):
                before = time.monotonic()
                raised = inject(number if rank == failing else 0, lambda: whole_life(kind, rank, path))
                assert isinstance(raised, limpet.RankError), (rank, failing, number, raised)
                assert raised.rank == failing and f"rank {failing}: InjectedError: before {number}" in str(raised)
                assert isinstance(raised.__cause__, InjectedError) == (rank == failing), (rank, failing, number)
                assert len(set(gathered(str(raised)))) == 1
                slowest, injections = max(slowest, time.monotonic() - before), injections + 1
        assert whole_life(kind, rank, path) == good
        assert slowest < 60
        dist.barrier()
    if rank == 0:
        say(f"{kind} on {size}: {injections} injections at {count} collectives, slowest {slowest:.1f} s")


def counted(life: Callable[[], Any]) -> tuple[int, Any]:
    """The number of meetings of a good run, the same on all ranks, and its result."""
    calls: list[str] = []
    real = failure.meet

    def meet(*args: Any, **options: Any) -> Any:
        calls.append(args[1])
        return real(*args, **options)

    with patch.object(failure, "meet", meet):
        result = life()
    assert all(other == calls for other in gathered(calls))
    return len(calls), result


def message(life: Callable[[], Any]) -> str:
    """What all ranks raise, after a check that it is the same and that they can go on."""
    try:
        life()
        raised = "nothing"
    except limpet.LimpetError as error:
        raised = f"{type(error).__name__}: {error}"
    assert len(set(gathered(raised))) == 1, gathered(raised)
    return raised


def differ(rank: int, size: int) -> None:
    def consolidated(batches: Any = None, seed: int = 0, frozen: bool = False, **settings: Any) -> None:
        limit = settings.pop("limit", None)
        memory = limpet.OnlineLaplace(network("replicated", seed).requires_grad_(not frozen), **settings)
        memory.consolidate(data(rank) if batches is None else batches, limit=limit, progress=False)

    def other_calls() -> None:
        memory = limpet.OnlineLaplace(network("sharded"))
        memory.consolidate(data(rank), progress=False)
        if rank == 1:
            memory.forecast()
        else:
            memory.state_dict()

    def other_numbers() -> None:
        ranks = limpet.distributed.current()
        assert ranks is not None
        with limpet.distributed.together("counting", ranks):
            ranks.numbers(*range(1 + rank // (size - 1)))

    odd = rank == 1
    replicated = data(0)[::-1] if odd else data(0)
    cases: dict[str, Callable[[], Any]] = {
        "strength": lambda: consolidated(strength=2.0 if odd else 1.0),
        "structure": lambda: consolidated(structure="diagonal" if odd else "kronecker"),
        "limit": lambda: consolidated(limit=6 if odd else 5),
        "weights": lambda: consolidated(seed=int(odd)),
        "kind of batches": lambda: consolidated(ReplicatedBatches(data(0)) if odd else data(0)),
        "order of batches": lambda: consolidated(ReplicatedBatches(replicated)),
        "calls": other_calls,
        "numbers": other_numbers,
        "the same error": lambda: consolidated([]),
        "nothing": consolidated,
    }
    for name, life in cases.items():
        told = message(life)
        if rank == 0:
            say(f"{name}: {told}")


def interrupted(rank: int, size: int) -> None:
    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        yield data(rank)[0]
        if rank == 1:
            raise ValueError("row 7")

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            if rank == 1 and self.calls == 3:
                raise KeyError("in a layer")
            return x

    def layer(kind: str) -> None:
        limpet.OnlineLaplace(network(kind, between=Layer())).consolidate(data(rank, 4), progress=False)

    def loader(kind: str) -> None:
        memory = limpet.OnlineLaplace(network(kind))
        memory.consolidate(data(rank), progress=False)
        before = memory.state_dict()["metadata"]
        try:
            memory.consolidate(broken(), progress=False)
        finally:
            assert memory.tasks == 1 and memory.state_dict()["metadata"] == before

    for kind in ("replicated", "sharded"):
        for where, life in (("loader", loader), ("layer", layer)):
            start = time.monotonic()
            told = message(lambda life=life, kind=kind: life(kind))
            assert time.monotonic() - start < 60
            if rank == 0:
                say(f"{where}, {kind}: {told}")


def killed(kind: str, dies: int, rank: int) -> None:
    def forward(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == dies and calls == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch[0]), batch[1]

    calls = 0
    memory = limpet.OnlineLaplace(network(kind))
    start = time.monotonic()
    try:
        memory.consolidate(data(rank, 4), forward=forward, progress=False)
    except limpet.RankError as error:
        seconds = time.monotonic() - start
        assert "\n" not in str(error) and error.rank == dies and error.__cause__ is None, error
        again = time.monotonic()
        try:
            memory.consolidate(data(rank), progress=False)
        except limpet.RankError as same:
            assert str(same) == str(error) and time.monotonic() - again < 5
        say(f"rank {rank} after {'less' if seconds < 30 else 'more'} than 30 s: {error}")
    os._exit(0)


def late(rank: int) -> None:
    limpet.distributed.set_timeout(2)
    memory = limpet.OnlineLaplace(network("replicated"))
    memory.consolidate(data(rank), progress=False)
    if rank == 1:
        time.sleep(9)
    try:
        memory.consolidate(data(rank), progress=False)
    except limpet.RankError as error:
        say(f"rank {rank}: {error}")
    if rank == 0:
        time.sleep(6)  # it hosts the store, in which the other one reads what happened
    os._exit(0)


def main(arguments: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    what, *words = arguments
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    if what == "every":
        every(words[0], rank, size, int((words[1:] or ["1"])[0]))
    elif what == "killed":
        killed(words[0], int(words[1]), rank)
    elif what == "late":
        late(rank)
    else:
        {"differ": differ, "interrupted": interrupted}[what](rank, size)
    say(f"rank {rank} is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

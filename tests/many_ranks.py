"""What every rank does in tests of many processes: `python -m torch.distributed.run --nproc-per-node N many_ranks.py`.

many_ranks.py pass FOLDER        curvature of many networks, one file each, written by rank 0
many_ranks.py train FOLDER       fifty protected steps under DistributedDataParallel
many_ranks.py outputs FOLDER     steps with outputs compared, under DistributedDataParallel
many_ranks.py adapters FOLDER    protected steps of adapters, with the base in pieces (fully_shard)
many_ranks.py wrong              one rank's data are wrong
many_ranks.py keep FOLDER        the memory of a model in pieces, in the middle of a protection, in three ways
many_ranks.py reload FOLDER      what `keep` kept, on another number of ranks, kept again
many_ranks.py stoppable FOLDER replicated|sharded nobody|one|all
                                 a pass that is written down after every batch, in which somebody is killed
many_ranks.py bytes FOLDER       what a rank keeps of a deep network, and the most it has while it consolidates
many_ranks.py curves FOLDER      loss curves of a model in pieces: strength "auto" and smoothing
many_ranks.py single FOLDER      a model that is sharded over one rank
many_ranks.py pass-sharded, train-sharded FOLDER    the same with models in pieces (fully_shard)
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import limpet
import networks
import sharded_adapters
from limpet.curvature import FisherPass
from limpet.curvature.checkpoint import Checkpoint
from limpet.errors import RankError
from limpet.methods.repair_pass import probe_information
from live_bytes import LiveBytes

NETWORKS = ["linear", "conv2d", "transformer", "attention", "embedding", "batch norm 1d", "direct parameter"]
STRUCTURES = ["kronecker", "diagonal"]
FISHERS = ["exact", "sampled"]


def networks_on(size: int) -> list[str]:
    """All on up to two ranks, and on more, where processes share cores, those that differ the most."""
    return NETWORKS if size <= 2 else ["linear", "transformer", "embedding"]


def say(line: str) -> None:
    """Print it at once, so that the lines of several processes do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def is_sharded(model: nn.Module, size: int) -> nn.Module:
    """The model under fully_shard: each of its parts, and the whole."""
    if size > 1:
        scalars = {parameter for parameter in model.parameters() if not parameter.dim()}  # fully_shard takes none
        for part in model.children():
            if any(True for _ in part.parameters()):
                fully_shard(part)
        fully_shard(model, ignored_params=scalars)
    return model


def shards(x: Tensor, y: Tensor, rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Uneven ones: rank 0 has the most, and of four ranks the last has nothing."""
    ends = [0, 9, 19, 24, 24] if size == 4 else [0, *(24 * (i + 2) // (size + 1) for i in range(size))]
    rows = slice(ends[rank], ends[rank + 1])
    return list(zip(x[rows].split(5), y[rows].split(5), strict=True)) if rows.start < rows.stop else []


def passes(folder: Path, rank: int, size: int, *, sharded: bool = False) -> None:
    """The memories of two tasks, of every network and structure."""
    for name in networks_on(size):
        for structure, fisher in itertools.product(STRUCTURES, FISHERS):
            model, x, y = networks.build(name)
            model = is_sharded(model, size) if sharded else model
            max_factor_size = 4 if fisher == "sampled" else 4096  # so that sides in pieces are among them
            memory = limpet.OnlineLaplace(model, structure=structure, fisher=fisher, max_factor_size=max_factor_size)
            # all rows differ: equal ones have draws of their own, which depend on the rank
            x = torch.cat([x, x.roll(1, 1), x, x.roll(1, 1)])
            y = torch.cat([y, (y + 1) % 3, (y + 1) % 3, (y + 2) % 3])
            for data in ((x, y), (x.flip(0), y)):
                memory.consolidate(shards(*data, rank, size), progress=False)
            if rank == 0 or sharded:
                memory.save(folder / f"{name}-{structure} {fisher}.safetensors")


def train(folder: Path, rank: int, size: int, *, sharded: bool = False) -> None:
    """Every rank takes its part of the same global batches."""
    torch.manual_seed(0)
    runs: list[tuple[str, int, float | None]] = [("proximal", 1, None), ("proximal", 4, None)]
    runs += [("gradient", 1, None), ("gradient", 3, None)]
    runs += [("proximal", 1, 0.05), ("gradient", 1, 0.05)] if sharded else []
    runs += [("repair", 1, None)] if sharded else [("repair", 1, None), ("repair, new head", 1, None)]
    for mode, every, budget in runs:
        new_head = mode.endswith("head")  # a small one, which a probe stores
        width = 24 if new_head else 10
        deeper = [nn.Linear(width, width), nn.Tanh()] if new_head else []
        model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), *deeper, nn.Linear(width, 3)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                seed = torch.Generator().manual_seed(parameter.numel())
                parameter.copy_(torch.randn(parameter.shape, generator=seed))
        x = torch.randn(80, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        y = torch.randint(0, 3, (80,), generator=torch.Generator().manual_seed(2))
        net: nn.Module = model
        if size > 1:
            net = is_sharded(model, size) if sharded else DistributedDataParallel(model)
        memory = limpet.OnlineLaplace(net, strength=4.0, exclude=["4"] if new_head else [])
        memory.consolidate([(x[rank::size], y[rank::size])], probe=80, progress=False)
        if new_head:
            model[4].weight.data.neg_()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        options: dict[str, Any] = {"mode": mode.partition(",")[0], "every": every, "budget": budget}
        if options["mode"] == "repair":  # the ranks have different numbers of batches
            new = x.flip(0)[rank::size].split(10 if rank else 3), y[rank::size].split(10 if rank else 3)
            options |= {"batches": list(zip(*new, strict=True)), "repair": {"strength": 1.0}}
        with memory.protect(optimizer, examples=80, **options) as protection:
            for step in range(50):
                rows = torch.arange(8 * (step % 10), 8 * (step % 10) + 8)[rank::size]
                optimizer.zero_grad()
                F.cross_entropy(net(x.flip(0)[rows]), y[rows]).backward()
                optimizer.step()
        tensors = {name: whole(p) for name, p in model.named_parameters()}
        if protection.repair is not None:
            loss = protection.repair.measured().loss
            assert protection.repair.refitted == ("4" if new_head else None)
            tensors["new loss"] = torch.tensor(loss, dtype=torch.float64)
        tensors["forecast"] = torch.tensor(memory.forecast().quadratic, dtype=torch.float64)
        tensors["information"] = torch.tensor(probe_information(memory), dtype=torch.float64)
        if sharded or size == 1:  # of all examples, in another order; every replica has a probe of its own
            tensors["drift"] = torch.tensor(float(memory.drift()), dtype=torch.float64)
        if rank == 0:
            save_file(tensors, folder / f"{mode}-{every}-{budget}.safetensors")


def never(_: Tensor) -> None:
    """A hook of the user, who has not called backward."""
    raise AssertionError("a hook on a gradient was called")


def curves(folder: Path, rank: int, size: int) -> None:
    """Tasks with strength "auto": two in which all labels occur, one in which one never does, and two with smoothing.

    The sizes are such that the curves are measured on the same examples, whatever the number of ranks.
    """
    tensors = {}
    for name, labels, rows, size_of_batch in (("auto", 3, 96, 4), ("unseen", 2, 2816, 16), ("smoothing", 3, 96, 8)):
        torch.manual_seed(0)
        model = is_sharded(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double(), size)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
            parameter.register_post_accumulate_grad_hook(never)  # such as an optimizer in the backward pass
        memory = limpet.OnlineLaplace(model, strength="auto", fisher="exact", smoothing=0.01 * (name == "smoothing"))
        for task in range(1 if name == "unseen" else 2):
            x = torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(task))
            y = torch.arange(rows) % labels
            batches = list(zip(x.split(size_of_batch), y.split(size_of_batch), strict=True))
            # with smoothing all rows of a batch are measured at the same weights, so the ranks divide every batch
            divided = [(a[rank::size], b[rank::size]) for a, b in batches]
            memory.consolidate(divided if name == "smoothing" else batches[rank::size], progress=False)
        for number, record in enumerate(memory.history.tasks):
            for kind, curve in (("loss", record.curve), ("coherent", record.coherent)):
                if (name, kind) == ("smoothing", "coherent"):
                    continue  # it depends on which rows are in a batch
                assert curve is not None
                assert (name == "unseen") == (record.curve == record.coherent)
                points = [*curve.predicted, *curve.measured]
                tensors[f"{name}/{number}/{kind}"] = torch.tensor(points, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        fresh = memory.forecast(batches[rank::size], curvature="fresh")
        found = [float(fresh), *(value for _, value in sorted(fresh.blocks.items()))]
        tensors[f"{name}/fresh"] = torch.tensor(found, dtype=torch.float64)
        assert all(p._post_accumulate_grad_hooks for p in model.parameters())  # type: ignore[attr-defined]
        assert all(bool((whole(p.grad) == 2).all()) and p.requires_grad for p in model.parameters())
        memory.save(folder / f"{name}.safetensors")
        if name == "auto":
            tensors |= probed_and_compressed(memory, model, batches[rank::size])
    if rank == 0:
        save_file(tensors, folder / "curves.safetensors")


def probed_and_compressed(memory: limpet.OnlineLaplace, model: nn.Module, own: list[Any]) -> dict[str, Tensor]:
    """A probe that is added, and the forecasts of a memory that is compressed in several ways, one after the other."""

    def scale(by: float) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(by)

    assert re.search("has moved since|RankError", raised_by(lambda: memory.add_probe(own)))
    assert not memory.probes
    scale(1 / 1.1)
    memory.add_probe(own)
    scale(1.1)
    tensors = {"drift": torch.tensor(float(memory.drift()), dtype=torch.float64)}
    assert memory.probes[0].rows == 96 and tensors["drift"] > 0
    for target in ({"max_bytes": 1400.0}, {"bytes_per_weight": 7.0}, {"energy": 0.6}, {"rank": 1}):
        ranks = memory.compress(**target, storage_dtype=None, progress=False)  # type: ignore[arg-type]
        assert list(ranks) == memory.posterior.names == ["0", "2"]
        tensors[f"{target}/ranks"] = torch.tensor(list(ranks.values()), dtype=torch.float64)
        blocks = memory.forecast().blocks
        tensors[f"{target}/forecast"] = torch.tensor([blocks[name] for name in sorted(blocks)], dtype=torch.float64)
    assert "pass a larger target" in raised_by(lambda: memory.compress(max_bytes=9, progress=False))
    return tensors


def single(folder: Path) -> None:
    """A model that is sharded over one rank, as on a machine with one GPU, beside one that is not."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ends = []
    for pieces in (1, 2):  # `is_sharded` leaves a model for one rank alone
        torch.manual_seed(0)
        x, y = torch.randn(96, 6, dtype=torch.float64), torch.arange(96) % 3
        model, again = (
            is_sharded(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double(), pieces) for _ in range(2)
        )
        memory = limpet.OnlineLaplace(model, strength="auto")
        memory.consolidate([(x, y)], probe=96, progress=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        with memory.protect(optimizer, examples=96) as protection:
            for _ in range(10):
                optimizer.zero_grad()
                F.cross_entropy(model(-x), y).backward()
                optimizer.step()
        assert memory.sharded == (pieces == 2) and protection.repair is not None and protection.repair.strength > 0
        memory.save(folder / "single.safetensors")
        loaded = limpet.load(folder / "single.safetensors", again)
        assert loaded.sharded == memory.sharded
        if memory.sharded:
            fail_while_consolidating(memory, [(x, y)], loaded)
        ends.append({name: whole(p) for name, p in model.named_parameters()})
        ends[-1]["drift"] = torch.tensor(float(memory.drift()))
    assert all(torch.allclose(tensor, ends[1][name], rtol=1e-9) for name, tensor in ends[0].items())
    dist.destroy_process_group()


def raised_by(action: Any) -> str:
    """What the action raises."""
    try:
        action()
    except (RuntimeError, limpet.LimpetError) as error:
        return str(error)
    raise AssertionError("nothing was raised")


def fail_while_consolidating(memory: limpet.OnlineLaplace, batches: list[Any], other: Any) -> None:
    """A failed update leaves a memory as it was; one whose means could not all be replaced is not used any more."""
    before = dict(memory.posterior.held)
    for method, failed in (("methods.limits._fits", memory), ("posterior.Posterior.recenter", other)):
        with patch(f"limpet.{method}", side_effect=RuntimeError("interrupted")):
            assert raised_by(lambda failed=failed: failed.consolidate(batches, progress=False)) == "interrupted"
    assert all(memory.posterior.held[name] is held for name, held in before.items()) and memory.tasks == 1
    for use in (other.forecast, lambda: other.save("unused"), lambda: other.consolidate(batches, progress=False)):
        assert "load it from its file" in raised_by(use)


def transformer(size: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network of several blocks, in pieces."""
    model, x, y = networks.build("transformer")
    return is_sharded(model, size), x, y


def keep(folder: Path, rank: int, size: int) -> None:
    """Saved inside `protect`, so that what a proximal step carries on is saved, too."""
    model, x, y = transformer(size)
    memory = limpet.PerTaskLaplace(model, strength=3.0, max_factor_size=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    memory.consolidate([(x, y)], progress=False)
    for task in range(2):
        with memory.protect(optimizer, examples=6, every=4):
            for _ in range(6):
                optimizer.zero_grad()
                F.cross_entropy(model(x.flip(1)), y).backward()
                optimizer.step()
            if task == 1:
                memory.save(folder / "memory.safetensors")
                dcp.save({"model": model, "memory": memory}, checkpoint_id=folder / "now")
                dcp.async_save({"memory": memory}, checkpoint_id=folder / "later").result()
        memory.consolidate([(x.flip(0), y)], progress=False)


def reload(folder: Path, rank: int, size: int) -> None:
    for name in ("memory.safetensors", "now", "later"):
        model, _, _ = transformer(size)
        limpet.load(folder / name, model).save(folder / f"{name} on {size}.safetensors")


def stoppable(folder: Path, kind: str, dies: str, rank: int, size: int) -> None:
    """With kill -9, in the middle, once: the last rank, or every one."""
    model, x, y = networks.build("transformer")
    if kind == "sharded":
        model = is_sharded(model, size)
    x, y = torch.cat([x, x.flip(1), x + 1, x - 1]), torch.cat([y, y.flip(0), y, y])
    batches = list(zip(x.split(2), y.split(2), strict=True))[:-1]  # eleven: in the end a rank has nothing left
    killed, calls = folder / "killed", 0
    taken: set[int] = set()
    write = Checkpoint.save

    def noted(checkpoint: Checkpoint, one_pass: FisherPass) -> None:
        taken.update(one_pass.done)
        write(checkpoint, one_pass)

    def forward(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += torch.is_grad_enabled()  # the pass, not what looks at the loss after it
        if calls == 4 and (dies == "all" or (dies == "one" and rank == size - 1 and not killed.exists())):
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch[0]), batch[1]

    memory = limpet.OnlineLaplace(model, fisher="exact")
    shared = limpet.distributed.ReplicatedBatches(batches)
    # the calls of the coherent curve are not those of the pass
    unmeasured = patch("limpet.forgetting.measurement.coherent_curve", return_value=None)
    with patch.object(Checkpoint, "SECONDS", 0.0), patch.object(Checkpoint, "save", noted), unmeasured:
        memory.consolidate(shared, forward=forward, checkpoint=folder / "pass.safetensors", progress=False)
    if rank == 0 or kind == "sharded":
        memory.save(folder / "memory.safetensors")
    say(f"rank {rank} made {calls} calls")
    assert taken <= set(range(len(batches))), f"rank {rank} wrote that it took {taken}"


def measure_bytes(folder: Path, rank: int, size: int) -> None:
    """Three tasks; activations are next to nothing beside the weights."""
    torch.manual_seed(0)
    layers = [layer for _ in range(24) for layer in (nn.Linear(96, 96), nn.Tanh())]
    model = is_sharded(nn.Sequential(*layers, nn.Linear(96, 4)), size)
    pieces = sum(limpet.distributed.local(p).nbytes for p in model.parameters())
    told: dict[str, Any] = {"pieces": pieces}
    for name, options in (("complete", {}), ("truncated", {"rank": 8})):
        memory, peaks = limpet.OnlineLaplace(model, fisher="sampled", **options), []
        for _ in range(3 if name == "complete" else 2):
            with LiveBytes() as live:
                memory.consolidate([(torch.randn(4, 96), torch.randint(0, 4, (4,)))] * 2, progress=False)
            peaks.append(live.peak)
        held = memory.posterior.held.values()
        means, block = sum(one.mean.nbytes for one in held), max(one.nbytes for one in held)
        told[name] = {"bytes": memory.nbytes, "peaks": peaks, "means": means, "block": block}
    (folder / f"{rank} of {size}.json").write_text(json.dumps(told))


def whole(parameter: Any) -> Tensor:
    """A parameter in one piece."""
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def callback(folder: Path, rank: int, size: int) -> None:
    """The callback of transformers with a sharded memory: it logs, it writes one file, it goes on from it."""
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from limpet.integrations.transformers import MemoryCallback

    model, x, y = transformer(size)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, y)], progress=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    arguments, state = TrainingArguments(output_dir=str(folder), use_cpu=True), TrainerState(global_step=3)
    state.is_world_process_zero = rank == 0
    control, held = TrainerControl(), MemoryCallback(memory, examples=6)
    for _ in range(2):  # the second time from the file of the first
        held.on_train_begin(arguments, state, control, model=model, optimizer=optimizer)
        F.cross_entropy(model(x.flip(1)), y).backward()
        optimizer.step()
        logs = {"loss": 1.0}
        held.on_log(arguments, state, control, logs=logs)
        held.on_save(arguments, state, control)
        held.close(finished=True)
    assert logs.keys() == {"loss", "memory_forecast", "memory_forecast_trusted"} and logs["memory_forecast"] > 0
    dist.barrier()
    model, _, _ = transformer(size)
    assert limpet.load(folder / "checkpoint-3", model).tasks == 1


def reduced(rank: int) -> None:
    """Whole numbers stay whole beside floats, above what float32 can count."""
    ranks = limpet.distributed.current()
    assert ranks is not None
    sums = {"a": torch.full((2,), rank + 0.5), "count": torch.tensor(2**24 + rank), "b": torch.ones(1) * rank}
    found = ranks.reduce(sums, 1)
    if rank == 1:
        assert found is not None and list(found) == list(sums)
        assert found["count"].dtype == torch.int64 and int(found["count"]) == 2**25 + 1
        assert found["a"].tolist() == [2.0, 2.0] and found["b"].tolist() == [1.0]
    else:
        assert found is None


def outputs(folder: Path, rank: int, size: int) -> None:
    """Distillation and rehearsal on any number of ranks, each with its share of the rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y, old = torch.randn(12, 8, 5), torch.randint(0, 3, (12, 8)), torch.randn(64, 5)
    trained = DistributedDataParallel(model) if size > 1 else model
    distillation = limpet.Distillation(trained)
    distillation.consolidate()
    rehearsal = limpet.SelfRehearsal(trained, batch_size=8 // size, forward=lambda model, batch: (model(batch), None))
    rehearsal.consolidate([old], held_out=0)
    assert rehearsal.rehearsed is not None and len(rehearsal.rehearsed.batches) == 8 * size
    order = [next(rehearsal.compared(step, ())).batch for step in range(8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with distillation.protect(optimizer, every=2) as first:
        for rows, labels in zip(x[:, rank::size], y[:, rank::size], strict=True):
            optimizer.zero_grad()
            F.cross_entropy(trained(rows), labels).backward()
            optimizer.step()
    assert first.penalised == 6
    distilled = {name: p.detach().clone() for name, p in distillation.model.named_parameters()}
    with rehearsal.protect(optimizer) as second:
        for rows, labels in zip(x[:8, rank::size], y[:8, rank::size], strict=True):
            optimizer.zero_grad()
            F.cross_entropy(trained(rows), labels).backward()
            optimizer.step()
    assert second.penalised == 8
    ranks = limpet.distributed.current()
    if ranks is not None:  # every row is rehearsed once in an epoch, on one rank
        seen = torch.cat(ranks.gather(torch.cat(order)))
        assert {tuple(row) for row in seen.tolist()} == {tuple(row) for row in old.tolist()}
        weights = ranks.gather([p.detach() for p in model.parameters()])
        assert all(torch.equal(a, b) for some in weights for a, b in zip(some, weights[0], strict=True))
    if rank == 0:
        save_file(distilled, folder / "distilled.safetensors")


def wrong(rank: int) -> None:
    """All ranks hear of it, and none waits."""
    model, x, y = networks.build("linear")
    if rank == 1:
        x = torch.full_like(x, float("nan"))
    memory = limpet.OnlineLaplace(model)
    try:
        memory.consolidate([(x, y)], progress=False)
    except RankError as error:
        say(f"rank {rank} heard: {error}")
    with limpet.distributed.alone():
        if rank == 0:
            memory.consolidate([(x, y)], progress=False)
            say(f"alone: {memory.examples}")


def job(what: str, rest: list[str], rank: int, size: int) -> None:
    """Run one job of the list above."""
    jobs: dict[str, Any] = {
        "pass": lambda: passes(Path(rest[0]), rank, size),
        "train": lambda: train(Path(rest[0]), rank, size),
        "stoppable": lambda: stoppable(Path(rest[0]), rest[1], rest[2], rank, size),
        "bytes": lambda: measure_bytes(Path(rest[0]), rank, size),
        "keep": lambda: keep(Path(rest[0]), rank, size),
        "reload": lambda: reload(Path(rest[0]), rank, size),
        "pass-sharded": lambda: passes(Path(rest[0]), rank, size, sharded=True),
        "train-sharded": lambda: train(Path(rest[0]), rank, size, sharded=True),
        "curves": lambda: curves(Path(rest[0]), rank, size),
        "single": lambda: single(Path(rest[0])),
        "wrong": lambda: wrong(rank),
        "callback": lambda: callback(Path(rest[0]), rank, size),
        "reduced": lambda: reduced(rank),
        "outputs": lambda: outputs(Path(rest[0]), rank, size),
        "adapters": lambda: sharded_adapters.run(Path(rest[0]), rank, size),
    }
    jobs[what]()


def connect() -> None:
    """Join the other ranks.

    torchrun keeps one store over its restarts, in which gloo would find the addresses of processes that are gone, so
    every attempt has keys of its own. Without torchrun the first rank is the store.
    """
    host, port, rank, size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    attempt, timeout = os.environ.get("TORCHELASTIC_RESTART_COUNT"), timedelta(seconds=60)
    hosted = attempt is None and rank == "0"
    tcp = dist.TCPStore(host, int(port), int(size), is_master=hosted, timeout=timeout)
    store = dist.PrefixStore(f"attempt {attempt}", tcp)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(size), timeout=timeout)


def main(arguments: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    what, *rest = arguments
    several = "RANK" in os.environ
    if several:
        connect()
    rank, size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    job(what, rest, rank, size)
    say(f"rank {rank} is done")
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

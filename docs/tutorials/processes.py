"""Two processes: replicated (DistributedDataParallel), then sharded (fully_shard), with checkpoints.

torchrun --nproc-per-node 2 docs/tutorials/processes.py
"""

# %% [markdown]
# # Distributed training
#
# Under torchrun, code that uses limpet stays the same. limpet uses the process group that the training has initialized,
# every rank calls the same methods with its own share of the data, and the memory covers the data of all ranks
# (replicated or sharded, like the model). This page runs on two processes of one CPU:
#
# ```bash
# torchrun --nproc-per-node 2 processes.py
# ```

# %%
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import limpet


def blobs(seed: int, n: int = 1000) -> tuple[Tensor, Tensor]:
    """Ten classes, a blob each, in places of the task's own."""
    g = torch.Generator().manual_seed(seed)
    centres, y = torch.randn(10, 50, generator=g), torch.randint(0, 10, (n,), generator=g)
    return centres[y] + torch.randn(n, 50, generator=g), y


def network() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 10))


def own_batches(seed: int, size: int = 25) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of a task, as a DistributedSampler would give it."""
    x, y = (tensor[dist.get_rank() :: dist.get_world_size()] for tensor in blobs(seed))
    yield from zip(x.split(size), y.split(size), strict=True)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, epochs: int = 5) -> None:
    """An ordinary loop."""
    for x, y in (batch for _ in range(epochs) for batch in own_batches(seed)):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def accuracy(model: nn.Module, seed: int) -> float:
    """On all of a task, in percent."""
    x, y = blobs(seed)
    with torch.no_grad():
        return 100 * float((model(x).argmax(1) == y).float().mean())


def say(text: str) -> None:
    """By the first rank alone."""
    if dist.get_rank() == 0:
        print(text, flush=True)


# %% [markdown]
# ## Replicated
#
# With DistributedDataParallel every rank has the whole model and the whole memory. `consolidate` sums over the ranks;
# shares may be uneven or even empty. `examples` is the number for the whole task, over all ranks. Wrap anything that a
# single rank does on its own in `with limpet.distributed.alone():`.


# %%
def replicated() -> None:
    """Three tasks."""
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.02, momentum=0.9)
    memory = limpet.OnlineLaplace(parallel, strength=30.0, prior_precision=0.0)
    for seed in range(3):
        with memory.protect(optimizer, examples=1000):
            fit(parallel, optimizer, seed)
        memory.consolidate(list(own_batches(seed)), progress=False)
    say(f"replicated: first task {accuracy(model, 0):.1f} %, memory of {memory.examples} examples on each rank")
    with limpet.distributed.alone():
        if dist.get_rank() == 0:
            print(f"rank 0 alone: {memory.nbytes} bytes", flush=True)


# %% [markdown]
# ## Sharded
#
# With `fully_shard` (FSDP2) the model is sharded, and so is the memory: each block is owned by one rank. A rank that
# has a shard of a block owned by another rank sends it to the owner, which applies the penalty and returns the result.
# The calls are the same.
#
# If every rank can read all batches in the same order, wrap them in `limpet.distributed.ReplicatedBatches(batches)`.
# The ranks then take turns, and a pass with `checkpoint=` that was killed can resume on a different number of ranks.


# %%
def pieces() -> nn.Module:
    """The network under fully_shard."""
    model = network()
    for part in model:
        if any(True for _ in part.parameters()):
            fully_shard(part)
    fully_shard(model)
    return model


def sharded(folder: Path) -> None:
    """Two tasks, then a checkpoint."""
    model = pieces()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    memory = limpet.OnlineLaplace(model, strength=30.0, prior_precision=0.0)
    for seed in range(2):
        with memory.protect(optimizer, examples=1000):
            fit(model, optimizer, seed)
        x, y = blobs(seed)
        batches = list(zip(x.split(50), y.split(50), strict=True))
        memory.consolidate(
            limpet.distributed.ReplicatedBatches(batches),
            checkpoint=folder / f"pass-{seed}.safetensors",
            progress=False,
        )
    whole = torch.tensor(float(memory.nbytes))
    dist.all_reduce(whole)
    say(f"in pieces: rank 0 keeps {memory.nbytes} of {int(whole)} bytes")
    dcp.save({"model": model, "memory": memory}, checkpoint_id=folder / "checkpoint")
    memory.save(folder / "memory.safetensors")


# %% [markdown]
# ## Checkpoints
#
# A memory is a `Stateful`: it can be saved with torch.distributed.checkpoint next to the model and restored on any
# number of ranks. `limpet.load` accepts the checkpoint folder as well as the single file that `memory.save` writes,
# which is also the one to publish.


# %%
def resumed(folder: Path) -> None:
    """The third task, by others."""
    model = pieces()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    model.load_state_dict(state["model"])
    memory = limpet.load(folder / "checkpoint", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    with memory.protect(optimizer, examples=1000):
        fit(model, optimizer, 2)
    kept = accuracy(model, 0)  # a forward pass of a model in pieces is for all ranks together
    say(f"resumed: {memory.tasks} tasks known, first task {kept:.1f} % after a third")


def main() -> None:
    """All of it, on as many ranks as torchrun started."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(where)
    replicated()
    sharded(Path(where[0]))
    resumed(Path(where[0]))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(where[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %% [markdown]
# On the command line, `torchrun --nproc-per-node 8 -m limpet consolidate ...` creates the memory of a language model on
# all ranks. [Scale](../scale.md) shows what a memory costs on a given number of ranks.

"""What a memory of a model will cost, before anybody allocates it: `limpet plan` on the command line.

    from limpet.planning.plan import plan

    print(plan(model, ranks=8))

The model may stand on the meta device: shapes are all that is looked at. The formulas of one block are in
`limpet.planning.block_cost`; here they are added up, for two ways to be on several ranks:

- replicated, as with DistributedDataParallel: every rank has the whole memory and does all of the work; a protected
  step sends nothing, a consolidate all-reduces the sums once, 2 (N - 1) / N of them from each of N ranks.
- sharded, under fully_shard: every block is owned by one rank (`limpet.distributed.assignment`). In a protected step
  the owner gets what it lacks of the block's weights and sends back what comes of them: with w bytes of weights in its
  own blocks among W in all, a rank sends w (N - 1) / N and its pieces of the others' blocks, (W - w) / N; in the mean
  2 W (N - 1) / N^2. With every batch of a pass the sums of each block go to its owner, and in a consolidate the
  weights three times.

The peak of a consolidate is the largest of a few moments, apart from what the network's own passes hold. Replicated:

    the update  the memory as it was, the sums of all blocks, what is made anew of the blocks so far, and the room to
                work in for one more
    the curve   the memory as it is now, the sums, and four times the weights (displacements there and back, by
                parameter, and the weights put aside) or, while one block is pushed, twice and six times that block;
                with auto_strength it is a trial that is looked at, beside the memory as it was

Sharded, where a rank has sums and memory of its own blocks alone, and no curve is measured:

    the pass    the memory as it was, the sums, and those of a block in one batch, on their way to its owner
    the way     the memory as it was, the sums, and the weights of the blocks as they are brought to their owner: the
                rank's pieces of all, the others' of its own, and those put together
    the update  as above, but that a block's sums and brought weights are dropped when it is done

While it protects, gradient mode keeps the gradients with the penalty in them, proximal mode the displacements of all
blocks; sharded, both hold what comes and goes. To all of it the room of one block is added.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from limpet.curvature import MOST_PIECES, Structure
from limpet.deprecation import renamed_arguments
from limpet.distributed.assignment import share
from limpet.errors import LimpetError, UnsupportedError, positive_whole
from limpet.methods.checks import check_model, excluded_names
from limpet.methods.memory import MAX_FACTOR_SIZE
from limpet.model import PER_SAMPLE, Block, discover, named_parameters, unwrapped
from limpet.model.adapters import adapted_parameters
from limpet.planning.block_cost import BlockCost, CostModel
from limpet.posterior.summary import aligned
from limpet.precision import STRUCTURES
from limpet.precision.storage import DTYPES

MODES = ("gradient", "proximal")
STORAGE_DTYPES = (None, *DTYPES)


class Load(NamedTuple):
    """What one rank bears: bytes, and operations. `a | b` is the larger of each."""

    memory: int = 0
    peak: int = 0  # during a consolidate
    ready: int = 0  # more, while it protects
    sent_step: int = 0
    sent_task: int = 0  # once in a consolidate,
    sent_batch: int = 0  # and with every batch of its pass
    step: int = 0
    update: int = 0

    def __or__(self, other: Load) -> Load:
        return Load(*map(max, self, other))


@dataclass(frozen=True)
class Plan:
    """`rows` is the data, a row a block; `str(plan)` the table: largest blocks first, equal ones together."""

    title: str
    ranks: int
    tokens: int
    parameters: int
    mode: str
    adapters: bool
    auto_strength: bool
    notes: tuple[str, ...]
    rows: tuple[BlockCost, ...]

    def on(self, ranks: int) -> Plan:
        """The same memory on so many ranks."""
        owners = share({row.block: row.size for row in self.rows}, ranks)
        return replace(self, ranks=ranks, rows=tuple(replace(row, owner=owners[row.block]) for row in self.rows))

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, as `memory.nbytes` will say."""
        return _total(self.rows, "bytes")

    @property
    def training(self) -> int:
        """Operations of a training step on all ranks: 6 x parameters x tokens, 4 where only adapters learn."""
        return (4 if self.adapters else 6) * self.parameters * self.tokens

    @cached_property
    def replicated(self) -> Load:
        """What every rank bears that has the whole memory."""
        rows, gradient = self.rows, self.mode == "gradient"
        sums, room = _total(rows, "sums"), max(row.room for row in rows)
        more = _total(rows, "ready") + _total(rows, "trained") if gradient else _total(rows, "weights")
        sent = 2 * sums * (self.ranks - 1) // self.ranks
        return self._load(rows) | Load(peak=self._curve(), ready=more + room, sent_task=sent)

    def _curve(self) -> int:
        """What is held while a task's curve is measured."""
        rows, weights = self.rows, _total(self.rows, "weights")
        beside = _total(rows, "before") - weights if self.auto_strength else _total(rows, "lasting")
        known = beside + sum(row.fresh + row.sums + row.eigenvectors for row in rows)
        pushed = max(4 * weights, 2 * weights + 6 * max(row.weights for row in rows))
        return known + max(pushed, 7 * max(row.eigenvectors for row in rows))

    @cached_property
    def sharded(self) -> Load:
        """The most that any rank bears where the blocks are shared out."""
        own: list[list[BlockCost]] = [[] for _ in range(self.ranks)]
        for row in self.rows:
            own[row.owner].append(row)
        most = Load()
        for rows in own:
            most |= self._load(rows, dropped=True) | self._on_the_way(rows)
        return most

    def _on_the_way(self, rows: Sequence[BlockCost]) -> Load:
        """What goes between a rank that owns these blocks and the others, and is held meanwhile."""
        sums, trained, whole = (_total(self.rows, name) for name in ("sums", "trained", "whole"))
        own_sums, own_trained, own_whole = (_total(rows, name) for name in ("sums", "trained", "whole"))
        handed_over = max(2 * max(row.sums for row in self.rows), max((3 * row.sums for row in rows), default=0))
        brought = whole // self.ranks + 2 * own_whole
        given_back = own_whole + _total(rows, "laid_out") + trained // self.ranks
        room = max((row.room for row in rows), default=0)
        ready = _total(rows, "ready") if self.mode == "gradient" else 0
        return Load(
            peak=_total(rows, "before") + own_sums + max(handed_over, brought),
            ready=ready + own_whole + _total(rows, "weights") + max(room, given_back),
            sent_step=(own_trained * (self.ranks - 2) + trained) // self.ranks,
            sent_task=3 * (whole - own_whole) // self.ranks,
            sent_batch=sums - own_sums,
        )

    def _load(self, rows: Sequence[BlockCost], dropped: bool = False) -> Load:
        """What these blocks come to on one rank; where `dropped`, sums and brought weights go block by block."""
        held = peak = _total(rows, "before") + _total(rows, "sums") + dropped * _total(rows, "whole")
        for row in rows:
            peak = max(peak, held + row.weights + row.work)
            held += row.fresh - dropped * (row.sums - row.term + row.whole)
        memory, step, update = (_total(rows, name) for name in ("bytes", "step", "update"))
        return Load(memory=memory, peak=peak, step=step, update=update)

    def share_of_step(self, load: Load) -> float:
        """The operations that protection adds to a step, as a share of training's, which all ranks split."""
        return load.step * self.ranks / self.training

    def in_tokens(self, load: Load) -> float:
        """How many tokens all ranks train on with the operations that it costs to take a task in."""
        return load.update * self.ranks * self.tokens / self.training

    def __str__(self) -> str:
        return self.table()

    def table(self, most: int | None = None) -> str:
        """Every kind of block, or the largest so many of them; and what it comes to in all."""
        cells: list[tuple[str, ...]] = [
            ("block", "blocks", "shape", "structure", "bytes", "of all", "operations a step", "and a task")
        ]
        together = _equal_ones_together(self.rows)
        for name, rows in together[:most]:
            own, first = _total(rows, "bytes"), rows[0]
            shape, of_all = "x".join(map(str, first.shape)), percent(own / self.nbytes)
            operations = (f"{_total(rows, what):.2g}" for what in ("step", "update"))
            cells.append((name, str(len(rows)), shape, first.structure, in_bytes(own), of_all, *operations))
        left = [row for _, rows in together[most:] for row in rows] if most is not None else []
        rest = [f"and {len(left)} smaller blocks, {in_bytes(_total(left, 'bytes'))} together"] if left else []
        notes = [f"note: {note}" for note in self.notes]
        if self.adapters and self.ranks > 1:
            notes.append("note: adapters are held where every rank has the whole model, not under fully_shard")
        return "\n".join([self.title, *aligned(cells), *rest, "", *aligned(self.totals()), *notes])

    def totals(self) -> list[tuple[str, ...]]:
        """What it comes to, in words: a line each, with a column for every way to be on these ranks."""
        loads = {"one process": self.replicated}
        if self.ranks > 1:
            fullest = f"sharded, the fullest of {self.ranks}"
            loads = {"replicated, every rank": self.replicated, fullest: self.sharded}
        lines = {
            "memory": [in_bytes(load.memory) for load in loads.values()],
            "peak of a consolidate, without activations": [in_bytes(load.peak) for load in loads.values()],
            "more while it protects": [in_bytes(load.ready) for load in loads.values()],
            "sent in a protected step": [in_bytes(load.sent_step) for load in loads.values()],
            "sent in a consolidate": [in_bytes(load.sent_task) for load in loads.values()],
            "and with every batch of its pass": [in_bytes(load.sent_batch) for load in loads.values()],
            "protection adds to a training step": [percent(self.share_of_step(load)) for load in loads.values()],
            "taking a task in, once it is summed": [f"{load.update:.2g} operations" for load in loads.values()],
            "as many operations as training on": [f"{self.in_tokens(load):,.0f} tokens" for load in loads.values()],
        }
        if self.ranks == 1:
            lines = {name: line for name, line in lines.items() if not name.startswith(("sent", "and with"))}
        return [("in all", *loads), *((name, *line) for name, line in lines.items())]


@renamed_arguments(max_side="max_factor_size", at_rest="storage_dtype")
def plan(
    model: nn.Module,
    *,
    structure: str = "kronecker",
    ranks: int = 1,
    tasks: int = 10,
    tokens: int = 4096,
    mode: str = "gradient",
    rank: int | None = None,
    max_factor_size: int = MAX_FACTOR_SIZE,
    storage_dtype: str | None = None,
    auto_strength: bool = False,
    exclude: Iterable[str | nn.Module | nn.Parameter] = (),
) -> Plan:
    """What a memory of `model` costs after so many `tasks`. Only shapes are looked at: it may be on the meta device.

    `tokens` are the examples (times positions) of one step on all ranks together. With `rank`, every linear layer but
    the head trains through low-rank adapters of that rank; a model that has adapters is planned with its own. With
    at_rest="float16" (or "bfloat16") bases take two bytes a number, and all else what it takes. With `auto_strength`
    tasks have different strengths, as strength="auto" finds them. What only a pass can find out is not foreseen: layers
    that are used in a way that their hooks do not see become diagonals.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    >>> print(plan(model, tokens=250))
    Sequential, 79,510 parameters: kronecker, 10 tasks, gradient mode, 250 tokens a step
    block  blocks  shape    structure  bytes    of all  operations a step  and a task
    -----  ------  -------  ---------  -------  ------  -----------------  ----------
    0      1       100x785  kronecker  3.14 MB  98 %    2.8e+08            7.4e+09
    2      1       10x101   kronecker  49.7 kB  1.6 %   4.5e+05            1.6e+07
    <BLANKLINE>
    in all                                      one process
    ------------------------------------------  ------------------
    memory                                      3.19 MB
    peak of a consolidate, without activations  33.2 MB
    ...
    """
    whole = {"ranks": ranks, "tasks": tasks, "tokens": tokens, "max_side": max_factor_size}
    _check(structure, mode, storage_dtype, whole if rank is None else {**whole, "rank": rank})
    check_model(model)
    model = unwrapped(model)
    blocks = discover(model, excluded_names(model, exclude))
    adapters = _adapters(model, blocks, rank)
    if adapters and mode == "proximal":
        raise UnsupportedError("adapters have no closed proximal map: plan with mode='gradient'")
    if rank is not None:
        blocks = [block for block in blocks if block.name in adapters]
    counting = CostModel(Structure(structure, max_factor_size), tasks, mode, storage_dtype, auto_strength)
    parameters = named_parameters(model)
    rows = [counting.row(b, parameters[b.parameters[0]].dtype, adapters.get(b.name)) for b in blocks]
    if not rows:
        raise LimpetError("there is nothing to remember: every parameter of the model is frozen or in exclude=[...]")
    count = sum(parameter.numel() for parameter in parameters.values())
    told = [f"{structure}, {tasks} {'task' if tasks == 1 else 'tasks'}, {mode} mode, {tokens:,} tokens a step"]
    if adapters:
        told.append(f"adapters of rank {'/'.join(map(str, sorted(set(adapters.values()))))}")
    alone = Plan(
        f"{type(model).__name__}, {count:,} parameters: {', '.join(told)}",
        1,
        tokens,
        count,
        mode,
        bool(adapters),
        auto_strength,
        tuple(_notes(blocks, counting.structure, parameters)),
        tuple(rows),
    )
    return alone.on(ranks)


def _check(structure: str, mode: str, storage_dtype: str | None, whole: Mapping[str, int]) -> None:
    choices: dict[str, tuple[Any, Collection[Any]]] = {
        "structure": (structure, STRUCTURES),
        "mode": (mode, MODES),
        "storage_dtype": (storage_dtype, STORAGE_DTYPES),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r}")
    for name, number in whole.items():
        positive_whole(name, number)


def _adapters(model: nn.Module, blocks: Sequence[Block], rank: int | None) -> dict[str, int]:
    """The rank of the adapters of every block that trains through some."""
    parameters, adapted = named_parameters(model), adapted_parameters(model)
    if rank is None:
        ranks = {
            block.name: sum(one.left.shape[1] for name in block.parameters for one in adapted.get(parameters[name], ()))
            for block in blocks
        }
        return {name: found for name, found in ranks.items() if found}
    if adapted:
        raise LimpetError("this model has adapters already and is planned with them: leave rank= out")
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    weight = None if head is None else getattr(head, "weight", None)
    linear = [block for block in blocks if block.kind == "linear" and parameters[block.parameters[0]] is not weight]
    if not linear:
        raise LimpetError("the model has no linear layer that adapters of that rank could go around: leave rank= out")
    return {block.name: rank for block in linear}


def _notes(blocks: Sequence[Block], structure: Structure, parameters: Mapping[str, nn.Parameter]) -> Iterable[str]:
    """What the numbers do not say of themselves."""
    long = [b.name for b in blocks if b.factored and max(b.shape[-2:]) > structure.max_factor_size]
    if long and structure.name.startswith("kronecker"):
        kept = f"in pieces, or as a diagonal above {MOST_PIECES * structure.max_factor_size:,} (max_factor_size)"
        yield f"{_few(long, 'blocks')} longer than {structure.max_factor_size:,} on a side, which is kept {kept}"
    direct = [block.name for block in blocks if block.kind == PER_SAMPLE]
    if direct:
        yield f"{_few(direct, 'blocks')} in no layer that limpet knows: an exact diagonal, example by example"
    held = {name for block in blocks for name in block.parameters}
    left = [name for name in parameters if name not in held]
    if left:
        yield f"{_few(left, 'parameters')} not in the memory: frozen, excluded, or trained through adapters"


def _few(names: Sequence[str], what: str) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{len(names)} {what} (such as {names[0]}) are"


def _equal_ones_together(rows: Sequence[BlockCost]) -> list[tuple[str, list[BlockCost]]]:
    """Rows that differ in the numbers of their names alone, as one name with stars; most bytes first."""
    found: dict[Any, list[BlockCost]] = {}
    for row in rows:
        found.setdefault((re.sub(r"\d+", "*", row.block), row.shape, row.structure), []).append(row)
    named = [(name if len(some) > 1 else some[0].block, some) for (name, _, _), some in found.items()]
    return sorted(named, key=lambda one: -_total(one[1], "bytes"))


def _total(rows: Iterable[BlockCost], name: str) -> int:
    return sum(getattr(row, name) for row in rows)


def percent(share: float) -> str:
    """A share for people.

    >>> percent(0.00123), percent(0.123), percent(12.3)
    ('0.12 %', '12 %', '1,230 %')
    """
    return f"{100 * share:,.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.2g} %"


def in_bytes(number: float) -> str:
    """Bytes for people.

    >>> in_bytes(0), in_bytes(4321), in_bytes(8.4e9)
    ('nothing', '4.32 kB', '8.4 GB')
    """
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.{3 if number / size < 999.5 else 4}g} {unit}"
    return f"{number:.0f} bytes" if number else "nothing"

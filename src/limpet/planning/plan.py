"""Estimate what a memory of a model will cost, before it is computed (`limpet plan` on the command line).

    from limpet.planning.plan import plan

    print(plan(model, ranks=8))

The model may be on the meta device: only shapes are used. The formulas for one block are in
`limpet.planning.block_shape`; this module sums them for two ways to distribute a memory over N ranks:

- replicated, as with DistributedDataParallel: every rank has the whole memory and does all of the work. A protected
  step sends nothing; a consolidation all-reduces the accumulated sums once, for which each rank sends 2 (N - 1) / N of
  their size.
- sharded, under fully_shard: every block is owned by one rank (`limpet.distributed.assignment`). In a protected step,
  the owner receives the missing shards of the block's weights and sends back the results: with w bytes of weights in
  its own blocks out of W in total, a rank sends w (N - 1) / N and its shards of the other blocks, (W - w) / N; on
  average 2 W (N - 1) / N^2. With every batch of a curvature pass, the sums of each block are sent to its owner, and in
  a consolidation the weights are sent three times.

The peak of a consolidation is the maximum over its phases, not counting the forward and backward passes of the network.
Replicated:

    update      the memory before the task, the sums of all blocks, the updated part of the blocks so far, and the
                workspace for the current block
    loss curve  the memory after the task, the sums (except of a first task, which are in the memory), two times the
                weights (displacements, and displaced weights) and two times the largest block, or the weights and six
                times that block while displacements are drawn (seven times if it is truncated); with auto_strength, a
                trial memory is evaluated next to the previous one

Sharded, where a rank has the sums and the memory of its own blocks only, and no loss curve is measured (with
auto_strength one is, which is not counted, as a note says):

    pass        the memory before the task, the sums, and the sums of one block for one batch, in transit to its owner
    forecast    the memory before the task, the sums, and what the forecast of one block takes, with its weights
    update      as above, except that the weights of one block are gathered, its sums are freed after its update, and
                the new means are left out: they replace those of before, block by block, once all ranks have succeeded

During protection, gradient mode keeps the gradients including the penalty, and proximal mode the displacements of all
blocks; if sharded, both also hold what is sent and received. The workspace of one block is added in all cases.
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
from limpet.precision.storage import DTYPES, EIGHT_BITS

MODES = ("gradient", "proximal")
STORAGE_DTYPES = (None, *DTYPES, EIGHT_BITS)


UNCOUNTED = (
    'sharded, the loss curve that strength="auto" measures is not counted: allow for a second memory and its sums'
)


class Load(NamedTuple):
    """The load of one rank, in bytes and operations. `a | b` is the elementwise maximum.

    Attributes:
        memory: Bytes of the memory.
        peak: Peak bytes during a consolidation.
        ready: Additional bytes during protection.
        sent_step: Bytes sent in a protected step.
        sent_task: Bytes sent once in a consolidation.
        sent_batch: Bytes sent with every batch of its curvature pass.
        step: Operations that protection adds to a step.
        update: Operations of the update with a task, after its curvature pass.
    """

    memory: int = 0
    peak: int = 0
    ready: int = 0
    sent_step: int = 0
    sent_task: int = 0
    sent_batch: int = 0
    step: int = 0
    update: int = 0

    def __or__(self, other: Load) -> Load:
        return Load(*map(max, self, other))


@dataclass(frozen=True)
class Plan:
    """The estimated cost of a memory, as returned by `plan`.

    `str(plan)` is a table with the largest blocks first and equal blocks grouped.

    Attributes:
        title: A one-line description of the model and the settings.
        ranks: The number of ranks.
        tokens: The number of tokens per training step on all ranks together.
        parameters: The number of parameters of the model.
        mode: The mode of protection, "gradient" or "proximal".
        adapters: Whether the model is trained through LoRA adapters.
        auto_strength: Whether the tasks have different strengths.
        notes: Remarks on blocks that are represented in a special way, or not at all.
        rows: The cost of every block.
    """

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
        """Return the plan of the same memory for another number of ranks.

        Args:
            ranks: The number of ranks.

        Returns:
            The plan, with blocks assigned to these ranks.
        """
        owners = share({row.block: row.size for row in self.rows}, ranks)
        return replace(self, ranks=ranks, rows=tuple(replace(row, owner=owners[row.block]) for row in self.rows))

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, equal to `memory.nbytes` of an unsharded memory."""
        return _total(self.rows, "bytes")

    @property
    def training(self) -> int:
        """Operations of a training step on all ranks: 6 x parameters x tokens, or 4 x if only adapters are trained."""
        return (4 if self.adapters else 6) * self.parameters * self.tokens

    @cached_property
    def replicated(self) -> Load:
        """The load of every rank if the memory is replicated."""
        rows, gradient = self.rows, self.mode == "gradient"
        sums, room = _total(rows, "sums"), max(row.room for row in rows)
        more = _total(rows, "ready") + _total(rows, "trained") if gradient else _total(rows, "weights")
        sent = 2 * sums * (self.ranks - 1) // self.ranks
        return self._load(rows) | Load(peak=self._curve(), ready=more + room, sent_task=sent)

    def _curve(self) -> int:
        """Bytes held while the loss curve of a task is measured."""
        rows, weights = self.rows, _total(self.rows, "weights")
        beside = _total(rows, "before") - weights if self.auto_strength else _total(rows, "lasting")
        first = all(row.before == row.weights for row in rows) and not self.auto_strength
        known = beside + sum(row.fresh + row.eigenvectors for row in rows) + (0 if first else _total(rows, "sums"))
        most = max((6 + row.truncated) * row.weights for row in rows)
        pushed = max(2 * weights + 2 * max(row.weights for row in rows), weights + most)
        return known + max(pushed, 7 * max(row.eigenvectors for row in rows))

    @cached_property
    def sharded(self) -> Load:
        """The maximum load of any rank if the memory is sharded."""
        own: list[list[BlockCost]] = [[] for _ in range(self.ranks)]
        for row in self.rows:
            own[row.owner].append(row)
        most = Load()
        for rows in own:
            most |= self._load(rows, sharded=True) | self._exchange(rows)
        return most

    def _exchange(self, rows: Sequence[BlockCost]) -> Load:
        """The communication of a rank that owns these blocks, and the bytes held during it."""
        sums, trained, whole = (_total(self.rows, name) for name in ("sums", "trained", "whole"))
        own_sums, own_trained, own_whole = (_total(rows, name) for name in ("sums", "trained", "whole"))
        in_transit = max(row.sums for row in self.rows)
        gathered = max((row.whole * 3 for row in rows), default=0)  # received, put together, and the shards for others
        forecast = max((row.whole + row.forecast for row in rows), default=0)
        given_back = own_whole + _total(rows, "laid_out") + trained // self.ranks
        room = max((row.room for row in rows), default=0)
        ready = _total(rows, "ready") if self.mode == "gradient" else 0
        return Load(
            peak=_total(rows, "before") + own_sums + max(in_transit, gathered, forecast),
            ready=ready + own_whole + _total(rows, "weights") + max(room, given_back),
            sent_step=(own_trained * (self.ranks - 2) + trained) // self.ranks,
            sent_task=3 * (whole - own_whole) // self.ranks,
            sent_batch=sums - own_sums,
        )

    def _load(self, rows: Sequence[BlockCost], sharded: bool = False) -> Load:
        """The load of these blocks on one rank; if `sharded`, one block's weights are gathered, and its sums freed."""
        held = peak = _total(rows, "before") + _total(rows, "sums")
        for row in rows:
            peak = max(peak, held + row.weights + row.work + sharded * row.whole)
            held += row.fresh - sharded * (row.mean + row.sums - row.term)
        peak = max(peak, held + sharded * max((3 * row.whole for row in rows), default=0))
        memory, step, update = (_total(rows, name) for name in ("bytes", "step", "update"))
        return Load(memory=memory, peak=peak, step=step, update=update)

    def share_of_step(self, load: Load) -> float:
        """The operations that protection adds to a step, relative to each rank's share of the training operations."""
        return load.step * self.ranks / self.training

    def in_tokens(self, load: Load) -> float:
        """The number of tokens that could be trained on with the operations of the update with a task."""
        return load.update * self.ranks * self.tokens / self.training

    def __str__(self) -> str:
        return self.table()

    def table(self, most: int | None = None) -> str:
        """Format the plan as a table of its blocks, followed by the totals.

        Args:
            most: The maximum number of block groups to list, largest first. Lists all by default.

        Returns:
            The table.
        """
        cells: list[tuple[str, ...]] = [
            ("block", "blocks", "shape", "structure", "bytes", "of all", "operations a step", "and a task")
        ]
        groups = _group_equal(self.rows)
        for name, rows in groups[:most]:
            own, first = _total(rows, "bytes"), rows[0]
            shape, of_all = "x".join(map(str, first.shape)), percent(own / self.nbytes)
            operations = (f"{_total(rows, what):.2g}" for what in ("step", "update"))
            cells.append((name, str(len(rows)), shape, first.structure, in_bytes(own), of_all, *operations))
        left = [row for _, rows in groups[most:] for row in rows] if most is not None else []
        rest = [f"and {len(left)} smaller blocks, {in_bytes(_total(left, 'bytes'))} in total"] if left else []
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([self.title, *aligned(cells), *rest, "", *aligned(self.totals()), *notes])

    def totals(self) -> list[tuple[str, ...]]:
        """The rows of the table of totals, with a column for each way to distribute the memory over the ranks."""
        loads = {"one process": self.replicated}
        if self.ranks > 1:
            fullest = f"sharded, largest of {self.ranks} ranks"
            loads = {"replicated, every rank": self.replicated, fullest: self.sharded}
        lines = {
            "memory": [in_bytes(load.memory) for load in loads.values()],
            "its file, without published weights": [in_bytes(_total(self.rows, "file"))] * len(loads),
            "peak of a consolidate, without activations": [in_bytes(load.peak) for load in loads.values()],
            "additional during protection": [in_bytes(load.ready) for load in loads.values()],
            "sent in a protected step": [in_bytes(load.sent_step) for load in loads.values()],
            "sent in a consolidate": [in_bytes(load.sent_task) for load in loads.values()],
            "sent with every batch of its pass": [in_bytes(load.sent_batch) for load in loads.values()],
            "protection adds to a training step": [percent(self.share_of_step(load)) for load in loads.values()],
            "update with a task, after its pass": [f"{load.update:.2g} operations" for load in loads.values()],
            "which costs as much as training on": [f"{self.in_tokens(load):,.0f} tokens" for load in loads.values()],
        }
        if self.ranks == 1:
            lines = {name: line for name, line in lines.items() if not name.startswith("sent")}
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
    factor_rank: int | None = None,
    max_factor_size: int = MAX_FACTOR_SIZE,
    storage_dtype: str | None = None,
    auto_strength: bool = False,
    quantized: bool = False,
    exclude: Iterable[str | nn.Module | nn.Parameter] = (),
) -> Plan:
    """Estimate what a memory of a model will cost, from the shapes of its parameters.

    What only a curvature pass can detect is not accounted for: layers that are used in a way their hooks do not see
    become diagonal.

    Args:
        model: The model, which may be on the meta device. If it has LoRA adapters, they are taken into account.
        structure: The structure of the memory: "diagonal", "kronecker", "kronecker-sum" or "dense".
        ranks: The number of ranks.
        tasks: The number of tasks consolidated.
        tokens: The number of tokens (examples times positions) per training step on all ranks together.
        mode: The mode of protection, "gradient" or "proximal".
        rank: Assume LoRA adapters of this rank on every linear layer except the head.
        factor_rank: The `rank` of the memory: how many eigenvectors it keeps of each factor. By default all.
        max_factor_size: The size above which a Kronecker factor is block-diagonal.
        storage_dtype: "float16" or "bfloat16" to store the eigenbases with two bytes per number, and with a
            `factor_rank` "int8". By default, they are stored in the dtype of the computation.
        auto_strength: Whether the tasks have different strengths, as with strength="auto".
        quantized: Whether the weights of layers with adapters are quantized (QLoRA), so that there is no mean of them.
        exclude: Names, modules or parameters to exclude from the memory.

    Returns:
        The plan.

    Raises:
        ValueError: If an option has an invalid value.
        UnsupportedError: If a block is too large for a dense structure, or adapters are planned with mode="proximal".
        LimpetError: If there is nothing to protect, or `rank` does not apply to the model.

    Examples:
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
        its file, without published weights         2.87 MB
        peak of a consolidate, without activations  25.8 MB
        ...
    """
    whole = {"ranks": ranks, "tasks": tasks, "tokens": tokens, "max_factor_size": max_factor_size}
    given = {name: number for name, number in (("rank", rank), ("factor_rank", factor_rank)) if number is not None}
    _check(structure, mode, storage_dtype, {**whole, **given})
    if storage_dtype == EIGHT_BITS and factor_rank is None:
        raise ValueError("storage_dtype='int8' is for truncated factors: pass factor_rank= as well")
    check_model(model)
    model = unwrapped(model)
    blocks = discover(model, excluded_names(model, exclude))
    adapters = _adapters(model, blocks, rank)
    if quantized and not adapters:
        raise LimpetError("quantized weights train through adapters: pass rank=, or a model that has adapters")
    if adapters and mode == "proximal":
        raise UnsupportedError("adapters have no closed-form proximal step: plan with mode='gradient'")
    if rank is not None:
        blocks = [block for block in blocks if block.name in adapters]
    shapes = Structure(structure, max_factor_size, rank=factor_rank)
    counting = CostModel(shapes, tasks, mode, storage_dtype, auto_strength, quantized)
    parameters = named_parameters(model)
    rows = [counting.row(b, parameters[b.parameters[0]].dtype, adapters.get(b.name)) for b in blocks]
    if not rows:
        raise LimpetError("there is nothing to protect: every parameter of the model is frozen or in exclude=[...]")
    count = sum(parameter.numel() for parameter in parameters.values())
    settings = [f"{structure}, {tasks} {'task' if tasks == 1 else 'tasks'}, {mode} mode, {tokens:,} tokens a step"]
    if factor_rank is not None:
        settings.append(f"factors of rank {factor_rank}")
    if adapters:
        settings.append(f"adapters of rank {'/'.join(map(str, sorted(set(adapters.values()))))}")
    if quantized:
        settings.append("quantized base")
    alone = Plan(
        f"{type(model).__name__}, {count:,} parameters: {', '.join(settings)}",
        1,
        tokens,
        count,
        mode,
        bool(adapters),
        auto_strength,
        tuple(_notes(blocks, counting.structure, parameters)) + ((UNCOUNTED,) if auto_strength and ranks > 1 else ()),
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
    """The rank of the adapters of every block that is trained through adapters."""
    parameters, adapted = named_parameters(model), adapted_parameters(model)
    if rank is None:
        ranks = {
            block.name: sum(one.left.shape[1] for name in block.parameters for one in adapted.get(parameters[name], ()))
            for block in blocks
        }
        return {name: found for name, found in ranks.items() if found}
    if adapted:
        raise LimpetError("the model already has adapters, which the plan takes into account: omit rank=")
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    weight = None if head is None else getattr(head, "weight", None)
    linear = [block for block in blocks if block.kind == "linear" and parameters[block.parameters[0]] is not weight]
    if not linear:
        raise LimpetError("the model has no linear layer to add adapters to: omit rank=")
    return {block.name: rank for block in linear}


def _notes(blocks: Sequence[Block], structure: Structure, parameters: Mapping[str, nn.Parameter]) -> Iterable[str]:
    """Remarks on blocks that are represented in a special way, or not at all."""
    sides = {block.name: structure.sides(block) for block in blocks if block.factored}
    long = [name for name, one in sides.items() if _is_cut(one)]
    if long and structure.name.startswith("kronecker"):
        limit = f"{MOST_PIECES * structure.max_factor_size:,} (max_factor_size)"
        long_side = f"{_few(long, 'blocks')} longer than {structure.max_factor_size:,} on a side"
        yield f"{long_side}, whose factor is block-diagonal, or diagonal above {limit}"
    direct = [block.name for block in blocks if block.kind == PER_SAMPLE]
    if direct:
        yield f"{_few(direct, 'blocks')} not in a supported layer: an exact diagonal is computed, per sample"
    covered = {name for block in blocks for name in block.parameters}
    left = [name for name in parameters if name not in covered]
    if left:
        yield f"{_few(left, 'parameters')} not in the memory: frozen, excluded, or trained through adapters"


def _is_cut(sides: Mapping[str, Any]) -> bool:
    """Whether a factor of a block is split, or diagonal because it is too long to be split."""
    return any(sides[f"{side}_sizes"] is None or len(sides[f"{side}_sizes"]) > 1 for side in ("inputs", "outputs"))


def _few(names: Sequence[str], what: str) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{len(names)} {what} (such as {names[0]}) are"


def _group_equal(rows: Sequence[BlockCost]) -> list[tuple[str, list[BlockCost]]]:
    """Group rows that differ only in the numbers in their names, under a name with asterisks; most bytes first."""
    found: dict[Any, list[BlockCost]] = {}
    for row in rows:
        found.setdefault((re.sub(r"\d+", "*", row.block), row.shape, row.structure), []).append(row)
    named = [(name if len(some) > 1 else some[0].block, some) for (name, _, _), some in found.items()]
    return sorted(named, key=lambda one: -_total(one[1], "bytes"))


def _total(rows: Iterable[BlockCost], name: str) -> int:
    return sum(getattr(row, name) for row in rows)


def percent(share: float) -> str:
    """Format a fraction as a percentage.

    Examples:
        >>> percent(0.00123), percent(0.123), percent(12.3)
        ('0.12 %', '12 %', '1,230 %')
    """
    return f"{100 * share:,.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.2g} %"


def in_bytes(number: float) -> str:
    """Format a number of bytes with a unit.

    Examples:
        >>> in_bytes(0), in_bytes(4321), in_bytes(8.4e9)
        ('nothing', '4.32 kB', '8.4 GB')
    """
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.{3 if number / size < 999.5 else 4}g} {unit}"
    return f"{number:.0f} bytes" if number else "nothing"

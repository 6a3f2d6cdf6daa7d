"""Estimate what a memory of a model will cost, before it is computed (`limpet plan` on the command line).

    from limpet.planning.plan import plan

    print(plan(model, ranks=8))

The model may be on the meta device: only shapes are used. The formulas for one block are in
`limpet.planning.block_shape`, and those for a rank in `limpet.planning.load`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

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
from limpet.planning.load import Load, replicated_load, sharded_load, total
from limpet.planning.table import blocks_table, in_bytes, percent
from limpet.posterior.summary import aligned
from limpet.precision import STRUCTURES
from limpet.precision.storage import DTYPES, EIGHT_BITS

MODES = ("gradient", "proximal")
STORAGE_DTYPES = (None, *DTYPES, EIGHT_BITS)


UNCOUNTED = (
    'sharded, the loss curve that strength="auto" measures is not counted: allow for a second memory and its sums'
)


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
        return total(self.rows, "bytes")

    @property
    def training(self) -> int:
        """Operations of a training step on all ranks: 6 x parameters x tokens, or 4 x if only adapters are trained."""
        return (4 if self.adapters else 6) * self.parameters * self.tokens

    @cached_property
    def replicated(self) -> Load:
        """The load of every rank if the memory is replicated."""
        return replicated_load(self.rows, self.ranks, self.mode, auto_strength=self.auto_strength)

    @cached_property
    def sharded(self) -> Load:
        """The maximum load of any rank if the memory is sharded."""
        return sharded_load(self.rows, self.ranks, self.mode)

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
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([self.title, *blocks_table(self.rows, most), "", *aligned(self.totals()), *notes])

    def totals(self) -> list[tuple[str, ...]]:
        """The rows of the table of totals, with a column for each way to distribute the memory over the ranks."""
        loads = {"one process": self.replicated}
        if self.ranks > 1:
            fullest = f"sharded, largest of {self.ranks} ranks"
            loads = {"replicated, every rank": self.replicated, fullest: self.sharded}
        lines = {
            "memory": [in_bytes(load.memory) for load in loads.values()],
            "its file, without published weights": [in_bytes(total(self.rows, "file"))] * len(loads),
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

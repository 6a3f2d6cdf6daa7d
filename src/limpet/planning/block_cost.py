"""Cost of one block of a memory in bytes and operations, under given settings; `block_shape` has the formulas."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from limpet.curvature import Structure
from limpet.model import Block
from limpet.planning.block_shape import BlockShape
from limpet.precision.reflections import leading_columns
from limpet.precision.storage import EIGHT_BITS, Storage


@dataclass(frozen=True)
class BlockCost:
    """Cost of one block, in bytes and operations (of matrix products, two per multiply-add).

    Attributes:
        block: The name of the block.
        kind: The kind of its layer.
        shape: Its shape.
        structure: Its structure, and which sides are diagonal or block-diagonal.
        whole: Bytes of its weights, in the dtype of the model.
        weights: Bytes of its weights in the dtype of the memory.
        mean: Bytes of its mean.
        bytes: Bytes of its memory.
        file: Bytes in a file that names published weights instead of containing the mean.
        before: Bytes of its memory before the last task.
        lasting: Bytes of its memory that the last task leaves unchanged: the earlier terms of kronecker-sum.
        fresh: Bytes that are recomputed in every task.
        sums: Bytes accumulated by a curvature pass.
        work: Bytes of workspace for the update with a task.
        forecast: Bytes of workspace for the forecast of a sharded model.
        eigenvectors: Bytes of the eigenvectors of a dense matrix, which are cached once they have been computed.
        trained: Bytes of what a training step changes: the weights, or their adapters.
        ready: Additional bytes that gradient mode caches during protection.
        room: Bytes of workspace for protection in a step.
        laid_out: Bytes copied to send the block back from its owner, because a weight and its bias are not contiguous.
        step: Operations that protection adds to a step.
        update: Operations of the update with a task, after its curvature pass.
        per_token: Operations of the curvature pass per token.
        size: Numbers stored after one task, by which blocks are assigned to ranks.
        truncated: Whether a factor is truncated.
        owner: The rank that owns the block in a sharded memory.
    """

    block: str
    kind: str
    shape: tuple[int, ...]
    structure: str
    whole: int
    weights: int
    mean: int
    bytes: int
    file: int
    before: int
    lasting: int
    fresh: int
    sums: int
    work: int
    forecast: int
    eigenvectors: int
    trained: int
    ready: int
    room: int
    laid_out: int
    step: int
    update: int
    per_token: int
    size: int
    truncated: bool = False
    owner: int = 0

    @property
    def term(self) -> int:
        """Bytes of the accumulated factors that become part of the memory: the newest term of kronecker-sum."""
        return self.bytes - self.lasting - self.fresh


@dataclass(frozen=True)
class CostModel:
    """Computes the cost of blocks under given settings.

    Args:
        structure: The structure of the memory.
        tasks: The number of tasks consolidated.
        mode: The mode of protection, "gradient" or "proximal".
        storage_dtype: The dtype in which eigenbases are stored, or None for that of the computation.
        auto_strength: Whether the tasks have different strengths, as with strength="auto".
        quantized: Whether the weights of layers with adapters are quantized, and so are not stored as a mean.
    """

    structure: Structure
    tasks: int
    mode: str
    storage_dtype: str | None
    auto_strength: bool
    quantized: bool = False

    def row(self, block: Block, dtype: torch.dtype, rank: int | None) -> BlockCost:
        """Compute the cost of one block.

        Args:
            block: The block.
            dtype: The dtype of its weights.
            rank: The rank of its adapters, or None without adapters.

        Returns:
            The cost.

        Raises:
            UnsupportedError: If the block is too large for a dense structure.
        """
        shape = BlockShape.of(block, self.structure)
        if shape.structure == "dense":  # raises the same error as a curvature pass if too large
            self.structure.accumulator(block, torch.zeros((), dtype=dtype, device="meta"))
        width = torch.promote_types(dtype, torch.float32).itemsize
        weights = width * shape.numbers
        term = width * sum(map(sum, shape.terms()))
        lasting, asked = (self.tasks - 1) * term, width * shape.eigenvectors()
        mean = 0 if self.quantized and rank is not None else weights
        before, fresh = (mean + self._kept(shape, tasks, width) for tasks in (self.tasks - 1, self.tasks))
        if rank is not None:
            step, trained = shape.adapters(self.tasks, rank), rank * (shape.out + shape.in_ - shape.bias)
        else:
            step = shape.gradient(self.tasks) if self.mode == "gradient" else shape.proximal(self.tasks)
            trained = shape.numbers
        return BlockCost(
            block=block.name,
            kind=block.kind,
            shape=tuple(block.shape),
            structure=shape.described,
            whole=dtype.itemsize * shape.numbers,
            weights=weights,
            mean=mean,
            bytes=fresh + lasting + term,
            file=fresh - mean + lasting + term - width * self._derived(shape),
            before=before + lasting + asked * (self.tasks > 1 and not self.auto_strength),
            lasting=lasting,
            fresh=fresh,
            sums=width * sum(shape.sums().values()),
            work=round(8 * shape.work(self.tasks, self.auto_strength)),
            forecast=0 if self.tasks == 1 else weights * shape.forecast(),
            eigenvectors=asked,
            trained=dtype.itemsize * trained,
            ready=0 if rank is not None else width * shape.multiplied_out(self.tasks),
            room=0 if rank is not None else weights * (4 if self.mode == "gradient" else 3),
            laid_out=dtype.itemsize * shape.numbers * (shape.bias > 0),
            step=step,
            update=shape.update(self.tasks, self.auto_strength),
            per_token=shape.per_token(),
            size=self.structure.size(block),
            truncated=bool(shape.ranks),
        )

    def _derived(self, shape: BlockShape) -> int:
        """Numbers that a file does not contain, because they follow from others: eigenvalues only after one task."""
        kept = shape.kept(self.tasks, self.auto_strength)
        known = ("triangle", "eigenvalues") if shape.ranks and self.tasks == len(shape.products) == 1 else ("triangle",)
        return sum(numbers for name, numbers in kept.items() if name.endswith(known))

    def _kept(self, shape: BlockShape, tasks: int, width: int) -> int:
        """Bytes of the precision, without the terms of kronecker-sum."""
        rest = Storage(self.storage_dtype)
        two_bytes = width if rest.of_complete is None else rest.of_complete.itemsize
        eight_bits = self.storage_dtype == EIGHT_BITS
        each = {"vectors": two_bytes, "reflections": 1 if eight_bits else two_bytes}
        kept = shape.kept(tasks, self.auto_strength)
        # beyond one byte for every number: the second one of the leading columns, and the scales of the others
        firsts = {side: leading_columns(r) for side, r in shape.ranks.items()}
        more = sum(shape.lengths[side] * first + 4 * (shape.ranks[side] - first) for side, first in firsts.items())
        return (shape.groups * more if eight_bits and kept else 0) + sum(
            numbers * next((size for part, size in each.items() if f".{part}" in name), width)
            for name, numbers in kept.items()
        )

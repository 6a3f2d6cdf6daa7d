"""Displacements of blocks from the mean of the memory, split into the block's own parameters and its adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from limpet.model import PER_SAMPLE, Block
from limpet.model.low_rank import LowRank
from limpet.posterior import BlockPosterior, Posterior
from limpet.posterior.whole_parameters import WholeParameters, whole_parameters
from limpet.precision.pencil import truncated


@dataclass(frozen=True)
class Displacement:
    """The displacement w - mean of one block, as a sum over the block's own parameters and its adapters.

    Attributes:
        held: The posterior of the block.
        parameters: The block's own parameters.
        parts: Tensors in the shape of the block that add up to w - mean: one for its own parameters if `base`, then
            one for each adapter.
        columns: The columns that may move.
        base: Whether the block's own parameters have a separate part. A frozen weight with adapters has none: its
            difference from the mean is included in the part of the first adapter, since only adapters may change.
        adapters: The adapters whose update is not zero.
        offset: The difference of the frozen weight from the mean, which the first adapter has to compensate.
        written: Which of the block's own parameters a repair changes.
    """

    held: BlockPosterior
    parameters: Sequence[nn.Parameter]
    parts: list[Tensor]
    columns: slice
    base: bool
    adapters: Sequence[LowRank]
    offset: Tensor | None
    written: Sequence[bool]

    @property
    def block(self) -> Block:
        """The block, its parameters viewed as one matrix."""
        return self.held.block

    def values(self, shares: Sequence[Tensor], cut: Sequence[tuple[Tensor, Tensor]]) -> dict[nn.Parameter, Tensor]:
        """Compute the parameter values that give the block a new displacement.

        Args:
            shares: The part of the new displacement for each of `parts`, in the shape of the block. May be empty if
                only adapters change.
            cut: Low-rank factors (left, right) of the update of each adapter, over the columns that may move.

        Returns:
            The new value of every parameter that changes.
        """
        found: dict[nn.Parameter, Tensor] = {}
        for adapter, (left, right) in zip(self.adapters, cut, strict=True):
            found.update(adapter.written(left, right[:, : adapter.right.shape[1]]))
        if any(self.written):
            own = shares[0] if self.base else torch.zeros_like(self.held.mean)
            every = torch.stack(list(shares)).sum(0)
            adapted = {id(adapter.weight) for adapter in self.adapters}
            # adapters do not change a bias, so the bias itself takes all parts of its displacement
            for parameter, wanted, mean, alone, total in zip(
                self.parameters, self.written, *map(self.block.split, (self.held.mean, own, every)), strict=True
            ):
                if wanted:
                    found[parameter] = mean + (alone if id(parameter) in adapted else total)
        return found

    @property
    def changed(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters that a repair changes."""
        yield from (p for p, wanted in zip(self.parameters, self.written, strict=True) if wanted)
        for adapter in self.adapters:
            yield from (adapter.a, adapter.b)


@torch.no_grad()
def displacements(whole: WholeParameters, held: Mapping[str, BlockPosterior]) -> Iterator[Displacement]:
    """Iterate over the blocks that training has moved.

    A weight that equals the mean when the mean is cast to its dtype has not moved, nor has one whose adapters are zero.

    Args:
        whole: The parameters of the blocks.
        held: The posteriors of the blocks, by name.

    Yields:
        The displacement of each block that has moved.
    """
    for one in held.values():
        found = _displacement(one, [whole.parameters[name] for name in one.block.parameters], whole.adapted)
        if found is not None:
            yield found


def displacements_from_memory(posterior: Posterior) -> Iterator[Displacement]:
    """Iterate over the blocks of consolidated tasks that training has moved from the memory's mean.

    Args:
        posterior: The posterior. In a sharded model this is a collective.

    Yields:
        The displacement of each block that has moved.
    """
    held = {name: one for name, one in posterior.held.items() if one.tasks}
    yield from displacements(whole_parameters(posterior), held)


def _displacement(
    held: BlockPosterior, own: Sequence[nn.Parameter], adapted: Mapping[nn.Parameter, Sequence[LowRank]]
) -> Displacement | None:
    """Compute the displacement of one block; None if it has not moved."""
    block, means = held.block, held.block.split(held.mean)
    active = [(i, a) for i, p in enumerate(own) for a in adapted.get(p, ()) if a.left.any() and a.right.any()]
    frozen = {i for i, _ in active if not own[i].requires_grad}
    moved = [not torch.equal(p, mean.to(p.dtype)) for p, mean in zip(own, means, strict=True)]

    def placed(tensors: Mapping[int, Tensor]) -> Tensor:
        return block.matrix([tensors.get(i, torch.zeros_like(mean)) for i, mean in enumerate(means)])

    apart = {i: own[i].to(held.mean) - means[i] for i, m in enumerate(moved) if m}
    written = [m and i not in frozen for i, m in enumerate(moved)]
    parts = [placed({i: adapter.added(own[i].shape).to(held.mean)}) for i, adapter in active]
    if frozen and apart:
        parts[0] = parts[0] + placed(apart)
    elif apart:
        parts.insert(0, placed(apart))
    if not parts:
        return None
    which = sorted({*apart, *(i for i, _ in active)})
    starts = [sum(block.widths[:i]) for i in range(len(own) + 1)]
    offset = {i: d for i, d in apart.items() if i in frozen}
    return Displacement(
        held,
        own,
        parts,
        slice(starts[which[0]], starts[which[-1] + 1]),
        base=len(parts) > len(active),
        adapters=[adapter for _, adapter in active],
        offset=placed(offset) if offset else None,
        written=written,
    )


def cut_to_rank(x: Tensor, adapter: LowRank, rank: int) -> tuple[Tensor, Tensor]:
    """Truncate the update of an adapter to a rank, for a per-sample block, which has no Kronecker factors as a metric.

    Args:
        x: The update, in the shape of the block.
        adapter: The adapter.
        rank: The rank to truncate to.

    Returns:
        Factors (left, right) of the truncated update.
    """
    return truncated(x.reshape(adapter.left.shape[0], adapter.right.shape[1]), rank)


def is_direct(block: Block) -> bool:
    """Whether the curvature of the block is measured from per-sample gradients."""
    return block.kind == PER_SAMPLE

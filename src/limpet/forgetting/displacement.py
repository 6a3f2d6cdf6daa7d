"""What training has moved: the displacement of each block from the memory's mean, and by which parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from limpet.model import PER_SAMPLE, Block, named_parameters
from limpet.model.adapters import LowRank, adapted_parameters
from limpet.posterior import BlockPosterior
from limpet.precision.pencil import truncated


@dataclass(frozen=True)
class Displacement:
    """One block that has moved: w - mean as the sum of what its own parameters and its adapters have moved it by.

    Attributes:
        held: What the memory knows of the block.
        parameters: The block's own parameters.
        parts: Tensors in the shape of the block that add up to w - mean: that of its own parameters, if `base`, then
            one for each adapter.
        columns: Those that may move.
        base: Whether the own parameters have a part to themselves. A frozen weight under adapters has none: what it
            differs from the mean by is in the first adapter's part, since only adapters may change.
        adapters: The adapters that add something.
        offset: What the frozen weight differs from the mean by, which the first adapter has to make up for.
        written: Which of the own parameters are written.
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
        """The parameters as one matrix."""
        return self.held.block

    def values(self, shares: Sequence[Tensor], cut: Sequence[tuple[Tensor, Tensor]]) -> dict[nn.Parameter, Tensor]:
        """The parameters' values that give the block another displacement.

        Args:
            shares: Each part's share of it, in the shape of the block; not needed where only adapters change.
            cut: For each adapter, factors of what it adds, over the columns that may move.

        Returns:
            A tensor for every parameter that changes.
        """
        found: dict[nn.Parameter, Tensor] = {}
        for adapter, (left, right) in zip(self.adapters, cut, strict=True):
            found.update(adapter.written(left, right[:, : adapter.right.shape[1]]))
        if any(self.written):
            own = shares[0] if self.base else torch.zeros_like(self.held.mean)
            every = torch.stack(list(shares)).sum(0)
            adapted = {id(adapter.weight) for adapter in self.adapters}
            # no adapter reaches a bias, so all shares of it go to the bias itself
            for parameter, wanted, mean, alone, total in zip(
                self.parameters, self.written, *map(self.block.split, (self.held.mean, own, every)), strict=True
            ):
                if wanted:
                    found[parameter] = mean + (alone if id(parameter) in adapted else total)
        return found

    @property
    def changed(self) -> Iterator[nn.Parameter]:
        """The parameters that a repair changes."""
        yield from (p for p, wanted in zip(self.parameters, self.written, strict=True) if wanted)
        for adapter in self.adapters:
            yield from (adapter.a, adapter.b)


@torch.no_grad()
def displacements(model: nn.Module, held: Mapping[str, BlockPosterior]) -> Iterator[Displacement]:
    """The blocks that training has moved, one after another.

    A weight that equals the mean in its own dtype has not moved, and an adapter that adds nothing moves nothing.
    """
    parameters, adapted = named_parameters(model), adapted_parameters(model)
    for one in held.values():
        found = _displacement(one, [parameters[name] for name in one.block.parameters], adapted)
        if found is not None:
            yield found


def _displacement(
    held: BlockPosterior, own: Sequence[nn.Parameter], adapted: Mapping[nn.Parameter, Sequence[LowRank]]
) -> Displacement | None:
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
    """Factors of a direct block's share, which has no sides to take a metric from."""
    return truncated(x.reshape(adapter.left.shape[0], adapter.right.shape[1]), rank)


def is_direct(block: Block) -> bool:
    """Whether the block is measured example by example."""
    return block.kind == PER_SAMPLE

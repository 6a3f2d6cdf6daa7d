"""What training has moved: the displacement of each block from the memory's mean, and by which parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from limpet.curvature import DIRECT, Block, named_parameters
from limpet.layers.adapters import LowRank, adapted_parameters
from limpet.posterior import Held
from limpet.precision.pencil import truncated


@dataclass(frozen=True)
class Displacement:
    """One block that has moved: w - mean as the sum of what its own parameters and its adapters have moved it by."""

    held: Held
    parameters: Sequence[nn.Parameter]
    parts: list[Tensor]  # of the block's own parameters first, where they have moved, then of each adapter
    columns: slice  # that may move
    base: bool  # the block's own parameters have moved
    adapters: Sequence[LowRank]

    @property
    def block(self) -> Block:
        """The parameters as one matrix."""
        return self.held.block

    def written(self, shares: Sequence[Tensor], cut: Sequence[tuple[Tensor, Tensor]]) -> dict[nn.Parameter, Tensor]:
        """The parameters' values that give the block another displacement.

        Args:
            shares: In the shape of the block, that of its own parameters, if they have moved.
            cut: For each adapter, left and right factors of its share, over the columns that may move.

        Returns:
            A tensor for every parameter that changes.
        """
        found: dict[nn.Parameter, Tensor] = {}
        whole = self.held.mean + shares[0] if self.base else None
        for adapter, (left, right) in zip(self.adapters, cut, strict=True):
            width = adapter.right.shape[1]
            if whole is not None and right.shape[1] > width:  # what an adapter cannot move goes to the bias itself
                whole = whole.clone()
                whole[..., width:] += left @ right[:, width:]
            found.update(adapter.written(left, right[:, :width]))
        if whole is not None:
            found.update(zip(self.parameters, self.block.split(whole), strict=True))
        return found


@torch.no_grad()
def displacements(model: nn.Module, held: Mapping[str, Held]) -> Iterator[Displacement]:
    """The blocks that training has moved, one after another.

    A weight that is what its dtype makes of the mean has not moved.
    """
    parameters, adapted = named_parameters(model), adapted_parameters(model)
    for one in held.values():
        own = [parameters[name] for name in one.block.parameters]
        means = [mean.to(p.dtype) for mean, p in zip(one.block.split(one.mean), own, strict=True)]
        moved = [not torch.equal(p, mean) for p, mean in zip(own, means, strict=True)]
        adapters = [(i, adapter) for i, p in enumerate(own) for adapter in adapted.get(p, ())]
        parts = []
        if any(moved):
            kept = [
                p.to(one.mean) if m else mean for p, mean, m in zip(own, one.block.split(one.mean), moved, strict=True)
            ]
            parts.append(one.block.matrix(kept) - one.mean)
        for i, adapter in adapters:
            added = [torch.zeros(p.shape, dtype=one.mean.dtype, device=one.mean.device) for p in own]
            added[i] = adapter.added(own[i].shape).to(one.mean)
            parts.append(one.block.matrix(added))
            moved[i] = True
        if parts:
            starts = [sum(one.block.widths[:i]) for i in range(len(own) + 1)]
            which = [i for i, m in enumerate(moved) if m]
            columns = slice(starts[which[0]], starts[which[-1] + 1])
            yield Displacement(one, own, parts, columns, len(parts) > len(adapters), [a for _, a in adapters])


def cut_to_rank(x: Tensor, adapter: LowRank, rank: int) -> tuple[Tensor, Tensor]:
    """Factors of a direct block's share, which has no sides to take a metric from."""
    return truncated(x.reshape(adapter.left.shape[0], adapter.right.shape[1]), rank)


def is_direct(block: Block) -> bool:
    """Whether the block is measured example by example."""
    return block.kind == DIRECT

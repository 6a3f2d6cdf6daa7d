"""Sharded parameters (DTensor), as `fully_shard` (FSDP2) makes them, and how they reach the rank that owns a block.

The memory of a block is kept whole by one rank, its owner (`limpet.distributed.assignment`), and everything that needs
the block's weights is computed there: their shards are sent to the owner, and the results are sent back as shards. All
blocks go in one all-to-all, so a rank sends its own shards and receives what it owns, never the whole model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from limpet.distributed.process_group import Ranks
from limpet.errors import UnsupportedError


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. Who has none need not import what they are."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, without a graph; it shares the memory of what it is a piece of."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        piece: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return piece


def shard_like(parameter: Tensor, piece: Tensor) -> Tensor:
    """A piece as the same kind of tensor that the parameter is."""
    piece = piece.to(parameter.device, parameter.dtype)
    if not is_sharded(parameter):
        return piece
    from torch.distributed.tensor import DTensor

    whole: Any = parameter
    return DTensor.from_local(
        piece, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


@dataclass(frozen=True)
class Layout:
    """Where the pieces of a tensor are: rank r has `spans[r]` of dimension `dim`, or, where that is None, all of it.

    Ranks on different `lines` have copies of one another.
    """

    shape: torch.Size
    dtype: torch.dtype
    dim: int | None
    spans: tuple[tuple[int, int], ...]
    lines: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, name: str, tensor: Any, ranks: int) -> Layout:
        """How a parameter lies on the ranks."""
        if not is_sharded(tensor):
            whole = (0, tensor.shape[0] if tensor.dim() else 1)
            return cls(tensor.shape, tensor.dtype, None, (whole,) * ranks, tuple((rank,) for rank in range(ranks)))
        mesh, placements = tensor.device_mesh, tensor.placements
        cut = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
        if len(cut) > 1 or not all(placements[i].is_shard() for i in cut) or mesh.mesh.numel() != ranks:
            raise UnsupportedError(
                f"{name} lies on the processes as {placements} on a mesh of {tuple(mesh.mesh.shape)}: limpet follows "
                "fully_shard over all processes, on a mesh of one dimension, or of two that copies in the other"
            )
        places = [tuple((mesh.mesh == rank).nonzero()[0].tolist()) for rank in range(ranks)]
        if not cut:
            return cls(tensor.shape, tensor.dtype, None, ((0, tensor.shape[0]),) * ranks, tuple(places))
        dim, parts = placements[cut[0]].dim, mesh.mesh.shape[cut[0]]
        length = tensor.shape[dim]
        each = -(-length // parts)
        spans = tuple((min(p[cut[0]] * each, length), min((p[cut[0]] + 1) * each, length)) for p in places)
        lines = tuple(tuple(x for i, x in enumerate(place) if i != cut[0]) for place in places)
        return cls(tensor.shape, tensor.dtype, dim, spans, lines)

    def sends(self, rank: int, owner: int) -> bool:
        """Whether the owner has its whole tensor from this rank, too."""
        return rank == owner if self.dim is None else self.lines[rank] == self.lines[owner]

    def piece_shape(self, rank: int) -> torch.Size:
        """The shape of a rank's piece."""
        if self.dim is None:
            return self.shape
        start, stop = self.spans[rank]
        return torch.Size([stop - start if i == self.dim else size for i, size in enumerate(self.shape)])

    def cut_out(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's piece of a whole tensor."""
        if self.dim is None:
            return whole
        start, stop = self.spans[rank]
        return whole.narrow(self.dim, start, stop - start)

    def joined(self, pieces: Mapping[int, Tensor]) -> Tensor:
        """The whole tensor of the pieces by rank."""
        if self.dim is None:
            return next(iter(pieces.values()))
        return torch.cat([pieces[rank] for rank in sorted(pieces, key=lambda rank: self.spans[rank])], self.dim)


class Exchange:
    """Brings pieces to their owners, and gives them back. Every method is a collective."""

    def __init__(self, ranks: Ranks, parameters: Mapping[str, Tensor], owners: Mapping[str, int]) -> None:
        self.ranks, self.owners = ranks, owners
        self.layouts = {name: Layout.of(name, parameters[name], ranks.size) for name in sorted(owners)}
        self.devices = {name: parameters[name].device for name in self.layouts}

    @property
    def own(self) -> list[str]:
        """The parameters whose blocks this rank keeps."""
        return [name for name in self.layouts if self.owners[name] == self.ranks.rank]

    def bring(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole of every tensor that this rank owns. `tensors` are in pieces as the parameters of their names."""
        names, rank, size = sorted(tensors), self.ranks.rank, self.ranks.size
        sent = [
            [local(tensors[n]) for n in names if self.owners[n] == to and self.layouts[n].sends(rank, to)]
            for to in range(size)
        ]
        owned = [name for name in names if self.owners[name] == rank]
        shapes = [
            [self.layouts[n].piece_shape(source) for n in owned if self.layouts[n].sends(source, rank)]
            for source in range(size)
        ]
        received = [iter(pieces) for pieces in self._swap(sent, shapes, names)]
        found: dict[str, Tensor] = {}
        for name in owned:
            layout = self.layouts[name]
            pieces = {source: next(received[source]) for source in range(size) if layout.sends(source, rank)}
            found[name] = layout.joined(pieces)
        return found

    def give(self, whole: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """This rank's piece of every tensor in `names`; `whole` has those that this rank owns."""
        names, rank, size = sorted(names), self.ranks.rank, self.ranks.size
        sent = [[self.layouts[n].cut_out(whole[n], to) for n in names if self.owners[n] == rank] for to in range(size)]
        shapes = [
            [self.layouts[n].piece_shape(rank) for n in names if self.owners[n] == source] for source in range(size)
        ]
        received = [iter(pieces) for pieces in self._swap(sent, shapes, names)]
        return {name: next(received[self.owners[name]]) for name in names}

    def _swap(self, sent: list[list[Tensor]], shapes: list[list[torch.Size]], names: list[str]) -> list[list[Tensor]]:
        """One all-to-all of many tensors, in the dtype of their parameters: to every rank those of its list."""
        if not names:
            return [[] for _ in shapes]
        dtype = reduce(torch.promote_types, (self.layouts[name].dtype for name in names))
        device = self.devices[names[0]]
        flat = [piece.to(device, dtype).reshape(-1) for pieces in sent for piece in pieces]
        out = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        here = [sum(shape.numel() for shape in some) for some in shapes]
        into = torch.empty(sum(here), dtype=dtype, device=device)
        dist.all_to_all_single(into, out, here, [sum(piece.numel() for piece in pieces) for pieces in sent])
        found = []
        for some, part in zip(shapes, torch.split(into, here), strict=True):
            parts = torch.split(part, [shape.numel() for shape in some])
            found.append([piece.reshape(shape) for piece, shape in zip(parts, some, strict=True)])
        return found

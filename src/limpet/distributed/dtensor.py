"""Exchange of sharded parameters (DTensors from `fully_shard`, FSDP2) with the ranks that own their blocks.

The memory of a block is stored unsharded on one rank, its owner (`limpet.distributed.assignment`), and everything that
needs the block's weights is computed there: their shards are sent to the owner, and the results are sent back as
shards. All blocks are exchanged in one all-to-all, so a rank sends its own shards and receives the blocks it owns,
never the whole model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from limpet.distributed.process_group import Ranks
from limpet.errors import UnsupportedError


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. Does not import `torch.distributed.tensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_fsdp_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to this module itself. Does not import `torch.distributed.fsdp`."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and fsdp.FSDPModule in type(module).__mro__


def reshard(model: nn.Module) -> None:
    """Free the parameters that `fully_shard` has gathered and would use again, such as those of the root.

    After a forward pass without a backward pass, the root of a sharded model keeps its gathered parameters, and has
    these instead of DTensors. Does nothing for other models.

    Args:
        model: The model.
    """
    for module in model.modules():
        if is_fsdp_unit(module):
            module.reshard()  # type: ignore[operator]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, detached and sharing its storage.

    Args:
        tensor: A DTensor or a plain tensor.

    Returns:
        The local shard, or the whole tensor if it is not a DTensor.
    """
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return shard


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor as a whole, detached. For a DTensor this is a collective."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        found: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
        return found


def shard_like(parameter: Tensor, piece: Tensor) -> Tensor:
    """Wrap a local shard in the same kind of tensor as a parameter.

    Args:
        parameter: The parameter whose device, dtype and, if it is a DTensor, placements are used.
        piece: This rank's shard.

    Returns:
        A DTensor if the parameter is one, and a plain tensor otherwise.
    """
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
    """How a tensor is distributed over the ranks.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: Its dtype.
        dim: The sharded dimension, or None if every rank has the whole tensor.
        spans: The range of `dim` that each rank has.
        lines: The replica group of each rank: its mesh coordinates without the sharded mesh dimension. Ranks with
            equal coordinates together hold one copy of the tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    dim: int | None
    spans: tuple[tuple[int, int], ...]
    lines: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, name: str, tensor: Any, ranks: int) -> Layout:
        """Determine the layout of a parameter.

        Args:
            name: The name of the parameter, for error messages.
            tensor: The parameter.
            ranks: The number of ranks.

        Returns:
            The layout.

        Raises:
            UnsupportedError: If the parameter is sharded along several mesh dimensions or not over all ranks.
        """
        if not is_sharded(tensor):
            whole = (0, tensor.shape[0] if tensor.dim() else 1)
            return cls(tensor.shape, tensor.dtype, None, (whole,) * ranks, tuple((rank,) for rank in range(ranks)))
        mesh, placements = tensor.device_mesh, tensor.placements
        cut = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
        if len(cut) > 1 or not all(placements[i].is_shard() for i in cut) or mesh.mesh.numel() != ranks:
            raise UnsupportedError(
                f"{name} has placements {placements} on a mesh of shape {tuple(mesh.mesh.shape)}, which is not "
                "supported: use fully_shard over all ranks, on a 1-D mesh or on a 2-D mesh that replicates along the "
                "other dimension"
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
        """Whether `rank` sends its shard to `owner`, which needs one copy of every shard."""
        return rank == owner if self.dim is None else self.lines[rank] == self.lines[owner]

    def piece_shape(self, rank: int) -> torch.Size:
        """The shape of a rank's shard."""
        if self.dim is None:
            return self.shape
        start, stop = self.spans[rank]
        return torch.Size([stop - start if i == self.dim else size for i, size in enumerate(self.shape)])

    def cut_out(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's shard of the whole tensor, as a view."""
        if self.dim is None:
            return whole
        start, stop = self.spans[rank]
        return whole.narrow(self.dim, start, stop - start)

    def joined(self, pieces: Mapping[int, Tensor]) -> Tensor:
        """Concatenate shards, given by rank, to the whole tensor."""
        if self.dim is None:
            return next(iter(pieces.values()))
        return torch.cat([pieces[rank] for rank in sorted(pieces, key=lambda rank: self.spans[rank])], self.dim)


class Exchange:
    """Sends the shards of parameters to the owners of their blocks, and results back. Its methods are collectives.

    Args:
        ranks: The process group.
        parameters: The parameters, by name.
        owners: The owning rank of every parameter to exchange, by name.
    """

    def __init__(self, ranks: Ranks, parameters: Mapping[str, Tensor], owners: Mapping[str, int]) -> None:
        self.ranks, self.owners = ranks, owners
        self.layouts = {name: Layout.of(name, parameters[name], ranks.size) for name in sorted(owners)}
        self.devices = {name: parameters[name].device for name in self.layouts}

    @property
    def own(self) -> list[str]:
        """The names of the parameters whose blocks this rank owns."""
        return [name for name in self.layouts if self.owners[name] == self.ranks.rank]

    def bring(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather every tensor on the rank that owns it.

        Args:
            tensors: Tensors that are sharded like the parameters of the same names.

        Returns:
            The whole tensors that this rank owns, by name.
        """
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
        """Scatter every tensor from its owner to all ranks.

        Args:
            whole: The whole tensors that this rank owns, by name.
            names: The names of the tensors of all owners.

        Returns:
            This rank's shard of every tensor in `names`.
        """
        names, rank, size = sorted(names), self.ranks.rank, self.ranks.size
        sent = [[self.layouts[n].cut_out(whole[n], to) for n in names if self.owners[n] == rank] for to in range(size)]
        shapes = [
            [self.layouts[n].piece_shape(rank) for n in names if self.owners[n] == source] for source in range(size)
        ]
        received = [iter(pieces) for pieces in self._swap(sent, shapes, names)]
        return {name: next(received[self.owners[name]]) for name in names}

    def _swap(self, sent: list[list[Tensor]], shapes: list[list[torch.Size]], names: list[str]) -> list[list[Tensor]]:
        """Send `sent[rank]` to every rank and receive tensors of `shapes[rank]`, in one all-to-all of one dtype."""
        if not names:
            return [[] for _ in shapes]
        dtype = reduce(torch.promote_types, (self.layouts[name].dtype for name in names))
        device = self.devices[names[0]]
        flat = [piece.to(device, dtype).reshape(-1) for pieces in sent for piece in pieces]
        out = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        here = [sum(shape.numel() for shape in some) for some in shapes]
        into = torch.empty(sum(here), dtype=dtype, device=device)
        self.ranks.all_to_all(into, out, here, [sum(piece.numel() for piece in pieces) for pieces in sent])
        found = []
        for some, part in zip(shapes, torch.split(into, here), strict=True):
            parts = torch.split(part, [shape.numel() for shape in some])
            found.append([piece.reshape(shape) for piece, shape in zip(parts, some, strict=True)])
        return found

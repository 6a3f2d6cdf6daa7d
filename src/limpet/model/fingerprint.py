"""Fingerprint of the weights of a model that does not depend on how they are sharded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from limpet.distributed import current, is_sharded, local
from limpet.distributed.dtensor import Layout
from limpet.model.quantized import with_quantized_part

CHUNK = 2**22
"""Elements whose bits are summed at a time."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint_of_weights(parameters: Mapping[str, nn.Parameter]) -> str:
    """Compute a fingerprint of the weights: parameter names, and sums over the bits of the values.

    For every parameter there are two sums, a plain one and one weighted by the position of each element. Integer sums
    (modulo 2^64) do not depend on the order, so the ranks of a sharded model only have to add up theirs.

    Args:
        parameters: The parameters by name.

    Returns:
        A text with one line per parameter.
    """
    names = sorted(parameters)
    sums = torch.stack([_sums(name, parameters[name]) for name in names]) if names else torch.zeros(0, 2)
    lines = [f"{name} {parameters[name].requires_grad} {row}" for name, row in zip(names, sums.tolist(), strict=True)]
    return "\n".join(lines)


@torch.no_grad()
def fingerprint_of_replica(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Describe every parameter by what must be the same on all ranks, which for replicated ones includes the values.

    The sums are computed on the device of the parameter, a few million elements at a time.

    Args:
        parameters: The parameters by name.

    Returns:
        Shape, dtype and whether it is trainable, for every parameter, and a hash of the values unless it is sharded.
    """
    found = {}
    for name, parameter in parameters.items():
        kind = f"{tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"
        found[f"the parameter {name}"] = kind if parameter.requires_grad else f"{kind} (frozen)"
        if not is_sharded(parameter):
            found[f"the values of {name}"] = f"hash {_hash_of_bits(parameter)}"
    return found


def _hash_of_bits(parameter: Tensor) -> str:
    """Two sums over the bits of a tensor, modulo 2^64: a plain one and one weighted by the position."""
    flat = with_quantized_part(parameter, parameter).detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), CHUNK):
        bits = flat[start : start + CHUNK].view(BITS[flat.element_size()]).to(torch.int64)
        odd = 2 * torch.arange(start, start + bits.numel(), device=bits.device) + 1
        total += torch.stack([bits.sum(), (bits * odd).sum()])
    plain, weighted = (value & (2**64 - 1) for value in total.tolist())
    return f"{plain:016x}{weighted:016x}"


def _sums(name: str, parameter: Tensor) -> Tensor:
    """Return the plain and the weighted sum over the bits of a parameter, over all ranks if it is sharded."""
    ranks = current()
    shard = local(with_quantized_part(parameter, parameter)).cpu().contiguous()
    positions = torch.arange(parameter.numel()).reshape(parameter.shape)
    if ranks is not None and is_sharded(parameter):
        layout = Layout.of(name, parameter, ranks.size)
        positions = layout.cut_out(positions, ranks.rank)
        mine = layout.sends(ranks.rank, 0)
    else:
        mine = True
    bits = shard.reshape(-1).view(BITS[shard.element_size()]).to(torch.int64)
    found = torch.stack([bits.sum(), (bits * (2 * positions.reshape(-1) + 1)).sum()]) * int(mine)
    if ranks is not None and is_sharded(parameter):
        found = ranks.sum({"found": found})["found"].cpu()
    return found

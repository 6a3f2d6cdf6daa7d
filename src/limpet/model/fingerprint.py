"""Fingerprint of the weights of a model that does not depend on how they are sharded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from limpet.distributed import current, is_sharded, local
from limpet.distributed.dtensor import Layout

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


def _sums(name: str, parameter: Tensor) -> Tensor:
    """Return the plain and the weighted sum over the bits of a parameter, over all ranks if it is sharded."""
    ranks = current()
    shard = local(parameter).cpu().contiguous()
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

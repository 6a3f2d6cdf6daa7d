"""A number for the weights of a model that is the same however they lie on the ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from limpet.distributed import current, is_sharded, local
from limpet.distributed.dtensor import Layout

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint_of_weights(parameters: Mapping[str, nn.Parameter]) -> str:
    """The names of all parameters, and sums over their bits: plain, and times the places of the numbers.

    Integers add up to the same in whatever order (modulo 2^64), so the ranks of a model in pieces need only add theirs.
    """
    names = sorted(parameters)
    sums = torch.stack([_sums(name, parameters[name]) for name in names]) if names else torch.zeros(0, 2)
    told = [f"{name} {parameters[name].requires_grad} {row}" for name, row in zip(names, sums.tolist(), strict=True)]
    return "\n".join(told)


def _sums(name: str, parameter: Tensor) -> Tensor:
    ranks = current()
    piece = local(parameter).cpu().contiguous()
    places = torch.arange(parameter.numel()).reshape(parameter.shape)
    if ranks is not None and is_sharded(parameter):
        layout = Layout.of(name, parameter, ranks.size)
        places = layout.cut_out(places, ranks.rank)
        mine = layout.sends(ranks.rank, 0)
    else:
        mine = True
    bits = piece.reshape(-1).view(BITS[piece.element_size()]).to(torch.int64)
    found = torch.stack([bits.sum(), (bits * (2 * places.reshape(-1) + 1)).sum()]) * int(mine)
    if ranks is not None and is_sharded(parameter):
        found = ranks.sum({"found": found})["found"].cpu()
    return found

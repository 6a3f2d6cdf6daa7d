"""Choose the rank of a memory before there is one, from the number of bytes that it may take."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from limpet.curvature import Structure
from limpet.errors import LimpetError, finite_number
from limpet.methods.checks import check_model, excluded_names
from limpet.methods.compress import parsed_bytes, stored_bytes
from limpet.model import discover, named_parameters, unwrapped
from limpet.precision import Kronecker


def rank_within(
    model: nn.Module,
    *,
    bytes_per_weight: float | None,
    max_bytes: float | str | None,
    max_factor_size: int,
    storage_dtype: str | None,
    exclude: Iterable[str | nn.Module | nn.Parameter],
) -> int:
    """Find the largest rank at which the curvature of one task takes at most a number of bytes in a file.

    Args:
        model: The model.
        bytes_per_weight: Bytes for each weight that the memory covers, or None.
        max_bytes: Bytes in all, as a number or as a text such as "4GB", or None.
        max_factor_size: As for `limpet.OnlineLaplace`.
        storage_dtype: As for `limpet.OnlineLaplace`.
        exclude: As for `limpet.OnlineLaplace`.

    Returns:
        The rank, the same for all factors.

    Raises:
        ValueError: If the target is not a positive number.
        LimpetError: If not even one eigenvector per factor fits.
    """
    check_model(model)
    model = unwrapped(model)
    blocks, parameters = discover(model, excluded_names(model, exclude)), named_parameters(model)
    if max_bytes is not None:
        limit = parsed_bytes(max_bytes)
    else:
        limit = sum(b.shape.numel() for b in blocks) * finite_number("bytes_per_weight", bytes_per_weight)

    def size(rank: int) -> int:
        structure, total = Structure("kronecker", max_factor_size, rank=rank), 0
        for block in blocks:
            dtype = torch.promote_types(parameters[block.parameters[0]].dtype, torch.float32)
            if not block.factored:
                total += block.shape.numel() * dtype.itemsize
                continue
            like = torch.zeros((), dtype=dtype, device="meta")
            start = Kronecker.start(block.shape, 0.0, like, **structure.sides(block))
            total += stored_bytes(start, (rank, rank), storage_dtype, product=len(block.layers) == 1)
        return total

    low, high = 1, max((max(block.shape[-2:]) for block in blocks), default=1)
    if size(low) > limit:
        raise LimpetError(
            f"{limit:,.0f} bytes do not hold one eigenvector per factor, which takes {size(low):,}: pass a larger "
            "target"
        )
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(middle) <= limit else (low, middle - 1)
    return low

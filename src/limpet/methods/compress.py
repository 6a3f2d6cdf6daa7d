"""Truncate the Kronecker factors of a memory: to a rank, to a part of their trace, or to a number of bytes.

Every factor keeps its largest eigenvalues and the mean of the others (`limpet.precision.truncated_basis`). Layers with
the same input share the eigenvectors of its factor. For a target in bytes, the rank of a factor of n rows is
proportional to 1 / sqrt(n), which repaired better than equal parts of the trace (decision 26).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from limpet.curvature.progress import Progress
from limpet.distributed import Ranks
from limpet.errors import LimpetError, UnsupportedError, finite_number, positive_whole
from limpet.posterior import Posterior
from limpet.precision import Kronecker
from limpet.precision.basis import Basis
from limpet.precision.linalg import widened
from limpet.precision.reflections import leading_columns
from limpet.precision.same_factor import same_factors
from limpet.precision.storage import EIGHT_BITS, Storage
from limpet.precision.truncated_basis import TruncatedBasis, is_truncated, part_of_trace

UNITS = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}


@dataclass(frozen=True)
class Target:
    """How small a memory should be. Exactly one of the first four is given.

    Args:
        rank: Number of eigenvectors of every factor.
        energy: Part of the trace of every factor that its eigenvectors hold, between 0 and 1.
        bytes_per_weight: Bytes of curvature per weight that the memory covers.
        max_bytes: Bytes of curvature, as a number or as a text such as "4GB".
        storage_dtype: How eigenvectors are stored: None, "float16", "bfloat16" or "int8".
    """

    rank: int | None = None
    energy: float | None = None
    bytes_per_weight: float | None = None
    max_bytes: float | str | None = None
    storage_dtype: str | None = None

    def __post_init__(self) -> None:
        given = [
            name for name in ("rank", "energy", "bytes_per_weight", "max_bytes") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ValueError(
                "pass one of rank=, energy=, bytes_per_weight= and max_bytes=" + (f", not {given}" if given else "")
            )
        if self.rank is not None:
            positive_whole("rank", self.rank)
        if self.energy is not None:
            part_of_trace(self.energy)
        if self.max_bytes is not None:
            parsed_bytes(self.max_bytes)
        Storage(self.storage_dtype)


def compress(posterior: Posterior, target: Target, *, progress: bool = True) -> dict[str, tuple[int, int]]:
    """Truncate the factors of all blocks, in place. If the memory is sharded, this is a collective.

    Args:
        posterior: The posterior of the memory.
        target: How small it should be.
        progress: Whether to show a progress bar if this takes long.

    Returns:
        The ranks of the input and output factor of every block with Kronecker factors; of factors that are not
        truncated, their size.

    Raises:
        UnsupportedError: If the memory has another structure.
        LimpetError: If the memory has no task, or not even one eigenvector per factor fits into the target.
    """
    if posterior.structure.name != "kronecker":
        raise UnsupportedError(
            f"compress truncates Kronecker factors, and this memory has structure {posterior.structure.name!r}: "
            "make it with structure='kronecker'"
        )
    blocks = {
        name: held.precision
        for name, held in posterior.held.items()
        if held.tasks and isinstance(held.precision, Kronecker)
    }
    if not posterior.on_any_rank(bool(blocks)):
        raise LimpetError("this memory has no Kronecker factors yet: call memory.consolidate(...) first")
    rest = Storage(target.storage_dtype, posterior.structure.rest.offload)
    same = same_factors({name: precision.inputs for name, precision in blocks.items()})
    chosen = _ranks(blocks, same, target, None if posterior.sharding is None else posterior.sharding.ranks)
    made: dict[str, Kronecker] = {}
    bar = Progress(len(blocks), show=progress, label="limpet: compress", unit="blocks")
    try:
        for name, precision in blocks.items():
            made[name] = precision.truncate(*chosen[name], rest)
            if name in same:
                made[name] = made[name].with_inputs_of(made[same[name]])
            bar.update(1)
    finally:
        bar.close()
    found = {name: (_rank_of(each.inputs), _rank_of(each.outputs)) for name, each in made.items()}
    cut = [each.rank for one in made.values() for each in (one.inputs, one.outputs) if isinstance(each, TruncatedBasis)]
    if posterior.sharding is not None:  # after this, no rank can fail
        every = posterior.sharding.ranks.gather((found, cut))
        of_all = {name: ranks for some, _ in every for name, ranks in some.items()}
        found = {name: of_all[name] for name in posterior.names if name in of_all}
        cut = [rank for _, some in every for rank in some]
    # for blocks without a task yet, and for methods that measure all tasks again
    posterior.structure = replace(posterior.structure, rest=rest, rank=max(cut, default=target.rank), energy=None)
    posterior.held = {
        name: replace(held, precision=made[name])
        if name in made
        else (held if held.tasks else posterior.without_tasks(held))
        for name, held in posterior.held.items()
    }
    return found


def _rank_of(basis: Basis) -> int:
    """The rank of a truncated basis, or the size of a complete one."""
    return basis.rank if isinstance(basis, TruncatedBasis) else sum(basis.sizes)


def _ranks(
    blocks: Mapping[str, Kronecker], same: Mapping[str, str], target: Target, ranks: Ranks | None
) -> dict[str, tuple[int, int]]:
    """Choose the ranks of every block, of which some have the same input factor as others.

    Args:
        blocks: The blocks, of this rank if the memory is sharded.
        same: For some of them, an earlier block with the same input factor.
        target: How small the memory should be, over all ranks.
        ranks: The ranks of a sharded memory.

    Returns:
        The ranks of the input and the output factor, by block.
    """
    if target.rank is not None:
        return dict.fromkeys(blocks, (target.rank, target.rank))
    if target.energy is not None:
        return {
            name: (_rank(block.inputs, target.energy), _rank(block.outputs, target.energy))
            for name, block in blocks.items()
        }

    def total(number: float) -> float:
        return number if ranks is None else ranks.numbers(number)[0]

    if target.max_bytes is not None:
        limit = parsed_bytes(target.max_bytes)
    else:
        weights = total(sum(precision.shape.numel() for precision in blocks.values()))
        limit = weights * finite_number("bytes_per_weight", target.bytes_per_weight)
    products = {n: block.values.mixed is None and block.separable() is not None for n, block in blocks.items()}

    def at(level: float) -> dict[str, tuple[int, int]]:
        return {name: (_scaled(block.inputs, level), _scaled(block.outputs, level)) for name, block in blocks.items()}

    def size(chosen: Mapping[str, tuple[int, int]]) -> float:
        return total(
            sum(
                stored_bytes(block, chosen[name], target.storage_dtype, product=products[name], shared=name in same)
                for name, block in blocks.items()
            )
        )

    longest = max((max(block.shape[-2:]) for block in blocks.values()), default=1)
    low, high = 0.0, max([longest] if ranks is None else ranks.gather(longest)) ** 1.5
    if (least := size(at(low))) > limit:
        raise LimpetError(
            f"{limit:,.0f} bytes do not hold one eigenvector per factor, which takes {least:,.0f}: pass a larger target"
        )
    if size(at(high)) <= limit:
        return at(high)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if size(at(middle)) <= limit else (low, middle)
    return at(low)


def _scaled(basis: Basis, level: float) -> int:
    """Return level / sqrt(n) for a factor of n rows, at least 1 and at most what is there."""
    return min(max(int(level / math.sqrt(sum(basis.sizes))), 1), basis.length)


def _energies(basis: Basis) -> Tensor:
    """Return the part of the trace that the 1, 2, ... largest eigenvalues hold: the smallest over the groups."""
    trace = widened(basis.trace)
    total = basis.spread(trace).sum(-1, keepdim=True).clamp_min(torch.finfo(trace.dtype).tiny)
    kept = trace if basis.length == sum(basis.sizes) else trace[..., :-1]
    parts = (kept.sort(-1, descending=True).values.cumsum(-1) / total).reshape(-1, kept.shape[-1])
    return parts.amin(0)


def _rank(basis: Basis, energy: float) -> int:
    """Return the smallest rank that holds a part of the trace, at least 1."""
    held = _energies(basis)
    return min(int((held < energy).sum()) + 1, len(held))


def stored_bytes(
    block: Kronecker, ranks: tuple[int, int], storage_dtype: str | None, *, product: bool, shared: bool = False
) -> int:
    """Return the bytes that the curvature of a block takes in a file when it is truncated.

    Args:
        block: The precision of the block.
        ranks: Ranks of the input and the output factor.
        storage_dtype: How eigenvectors are stored.
        product: Whether the eigenvalues are a product of the traces of the factors, so that a file need not have them.
        shared: Whether the input eigenvectors are those of another block. They are not counted then, if truncated.

    Returns:
        The number of bytes.
    """
    total, lengths, small = 0, [], False
    width = block.values.plain.element_size()
    complete = Storage(storage_dtype).of_complete
    own = {None: width, EIGHT_BITS: 1}.get(storage_dtype, 2)
    for basis, rank in zip((block.inputs, block.outputs), ranks, strict=True):
        size = sum(basis.sizes)
        known = min(rank, basis.length - 1)  # of a basis that is truncated already
        cut = is_truncated(basis.sizes, basis.diagonal, known)
        if cut and not (shared and basis is block.inputs):
            first = leading_columns(known) if storage_dtype == EIGHT_BITS else 0  # in float16
            scales = 4 * (known - first) if storage_dtype == EIGHT_BITS else 0
            total += 2 * size * first + size * (known - first) * own + scales
        elif not cut and not basis.diagonal:
            total += sum(part**2 for part in basis.sizes) * (width if complete is None else complete.itemsize)
        lengths.append(known + 1 if cut else size)
        small |= cut
    values = 0 if product and small else lengths[0] * lengths[1] * (1 if block.values.mixed is None else 2)
    return block.shape[:-2].numel() * (total + width * (sum(lengths) + values))


def parsed_bytes(given: float | str) -> float:
    """Read a number of bytes.

    Args:
        given: A number, or a text with a unit: kB, MB, GB or TB, of a thousand each.

    Returns:
        The number of bytes.

    Raises:
        ValueError: If it cannot be read.

    Examples:
        >>> parsed_bytes("4GB"), parsed_bytes("1.5 MB"), parsed_bytes(1000)
        (4000000000.0, 1500000.0, 1000.0)
    """
    if not isinstance(given, str):
        return finite_number("max_bytes", given)
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([a-zA-Z]*)\s*", given)
    if found is None or found[2].lower() not in UNITS:
        raise ValueError(f'max_bytes is {given!r}, expected a number of bytes or a text such as "4GB"')
    return finite_number("max_bytes", float(found[1])) * UNITS[found[2].lower()]

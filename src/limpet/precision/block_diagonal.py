"""Block-diagonal matrices, which replace Kronecker factors too large to be stored in full.

Split into k blocks of equal size, an n x n factor takes n^2 / k numbers and its eigendecomposition 1 / k^2 of the
operations; about 1 / k of the off-diagonal entries remain. A factor of a single block is a plain tensor, without a
wrapper class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.precision.reflections import Reflections
from limpet.precision.spiked import Spiked


@dataclass(frozen=True)
class BlockDiagonal:
    """Block-diagonal matrix that supports the matrix operations used in this package.

    Args:
        pieces: The blocks along the diagonal, each of shape (..., n_i, n_i).

    Examples:
        >>> matrix = BlockDiagonal((torch.full((2, 2), 3.0), torch.ones(1, 1)))
        >>> matrix.dense()
        tensor([[3., 3., 0.],
                [3., 3., 0.],
                [0., 0., 1.]])
        >>> torch.tensor([[1.0, 0.0, 2.0]]) @ matrix
        tensor([[3., 3., 2.]])
    """

    pieces: tuple[Tensor, ...]

    @property
    def sizes(self) -> list[int]:
        """Number of rows of each block."""
        return [piece.shape[-2] for piece in self.pieces]

    def __matmul__(self, v: Tensor) -> Tensor:
        parts = v.split_with_sizes([piece.shape[-1] for piece in self.pieces], -2)
        return torch.cat([piece @ part for piece, part in zip(self.pieces, parts, strict=True)], -2)

    def __rmatmul__(self, v: Tensor) -> Tensor:
        parts = v.split_with_sizes(self.sizes, -1)
        return torch.cat([part @ piece for piece, part in zip(self.pieces, parts, strict=True)], -1)

    def __mul__(self, factor: float) -> BlockDiagonal:
        return self.each(lambda piece: piece * factor)

    def __truediv__(self, divisor: float) -> BlockDiagonal:
        return self.each(lambda piece: piece / divisor)

    def each(self, change: Callable[[Tensor], Tensor]) -> BlockDiagonal:
        """Apply a function to every block.

        Args:
            change: Function from block to block.

        Returns:
            The block-diagonal matrix of the results.
        """
        return BlockDiagonal(tuple(map(change, self.pieces)))

    @property
    def mT(self) -> BlockDiagonal:  # noqa: N802
        """The transpose, named as in `torch.Tensor`."""
        return self.each(lambda piece: piece.mT)

    def square(self) -> BlockDiagonal:
        """Return the elementwise square."""
        return self.each(torch.square)

    def to(self, device: torch.device, dtype: torch.dtype) -> BlockDiagonal:
        """Return the matrix on another device and in another dtype.

        Args:
            device: Target device.
            dtype: Target dtype.

        Returns:
            The converted matrix.
        """
        return self.each(lambda piece: piece.to(device, dtype))

    def dense(self) -> Tensor:
        """Return the matrix with its zeros written out. For small matrices."""
        (whole,) = pieces(recut(self, [sum(self.sizes)]))
        return whole


Matrix = Tensor | BlockDiagonal
"""A square matrix, full or block-diagonal."""

Orthogonal = Matrix | Reflections
"""An orthogonal matrix: full, block-diagonal, or a product of reflections."""

Side = Matrix | Spiked
"""A factor of a Kronecker product: full, block-diagonal, or of low rank plus a multiple of the identity."""


def cut(side: int, longest: int) -> tuple[int, ...]:
    """Split a dimension into even block sizes.

    Args:
        side: Size of the dimension.
        longest: Largest allowed block size.

    Returns:
        The fewest sizes that are at most `longest`, differ by at most one and sum to `side`.

    Examples:
        >>> cut(10, 4), cut(10, 10)
        ((4, 3, 3), (10,))
    """
    count = -(-side // longest)
    return tuple(side // count + (i < side % count) for i in range(count))


def pieces(matrix: Orthogonal | Side) -> tuple[Tensor, ...]:
    """Return the diagonal blocks of a matrix; a matrix in any other form is a single block, with all its entries."""
    if isinstance(matrix, Reflections | Spiked):
        return (matrix.dense(),)
    return matrix.pieces if isinstance(matrix, BlockDiagonal) else (matrix,)


def joined(parts: Sequence[Tensor]) -> Matrix:
    """Build a matrix from its diagonal blocks, the inverse of `pieces`."""
    return parts[0] if len(parts) == 1 else BlockDiagonal(tuple(parts))


def recut(matrix: Matrix, sizes: Sequence[int]) -> Matrix:
    """Split a matrix into diagonal blocks of other sizes.

    Entries outside the new blocks are dropped; entries of the new blocks that the matrix does not store are zero.

    Args:
        matrix: Square matrix, full or block-diagonal.
        sizes: Sizes of the new blocks.

    Returns:
        The matrix in the new blocks.

    Examples:
        >>> recut(joined([torch.ones(2, 2), torch.ones(1, 1)]), [1, 2]).dense()
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """
    parts = pieces(matrix)
    if [part.shape[-1] for part in parts] == list(sizes):
        return matrix
    found, start = [], 0
    for size in sizes:
        piece = parts[0].new_zeros(*parts[0].shape[:-2], size, size)
        offset = 0
        for part in parts:
            low, high = max(start, offset), min(start + size, offset + part.shape[-1])
            if low < high:
                target, source = slice(low - start, high - start), slice(low - offset, high - offset)
                piece[..., target, target] = part[..., source, source]
            offset += part.shape[-1]
        found.append(piece)
        start += size
    return joined(found)


def diagonal(matrix: Side, is_diagonal: bool = False) -> Tensor:
    """Return the diagonal of a matrix.

    Args:
        matrix: Square matrix (..., n, n) in any form, or its diagonal (..., n).
        is_diagonal: Whether `matrix` is already the diagonal.

    Returns:
        The diagonal (..., n).
    """
    if is_diagonal and isinstance(matrix, Tensor):
        return matrix
    if isinstance(matrix, Spiked):
        return matrix.diagonal()
    found = [piece.diagonal(dim1=-2, dim2=-1) for piece in pieces(matrix)]
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def in_words(
    structure: str, sides: Mapping[str, tuple[bool, Sequence[int]]], ranks: Mapping[str, int] | None = None
) -> str:
    """Describe a structure, including which of its factors are diagonal, block-diagonal or truncated.

    Args:
        structure: Name of the structure.
        sides: For each factor, by name, whether it is diagonal and the sizes of its blocks.
        ranks: Ranks of the factors that are truncated, by name.

    Returns:
        The description.

    Examples:
        >>> in_words("kronecker", {"inputs": (True, [9]), "outputs": (False, [4, 4])})
        'kronecker (inputs diagonal, outputs in 2 pieces)'
    """
    notes = [
        f"{name} {'diagonal' if is_diagonal else f'in {len(sizes)} pieces'}"
        for name, (is_diagonal, sizes) in sides.items()
        if is_diagonal or len(sizes) > 1
    ]
    notes += [f"{name} of rank {rank}" for name, rank in (ranks or {}).items()]
    return f"{structure} ({', '.join(notes)})" if notes else structure


def named(name: str, matrix: Side) -> dict[str, Tensor]:
    """Return the tensors of a matrix by name: `name` for a full matrix, `name.0`, `name.1`, ... for its blocks.

    Args:
        name: Name of the matrix.
        matrix: Square matrix, full or block-diagonal.

    Returns:
        The tensors by name.

    Examples:
        >>> list(named("inputs", torch.eye(2))), list(named("inputs", joined([torch.eye(2), torch.eye(3)])))
        (['inputs'], ['inputs.0', 'inputs.1'])
    """
    parts = pieces(matrix)
    return {name: parts[0]} if len(parts) == 1 else {f"{name}.{i}": part for i, part in enumerate(parts)}


def find(name: str, tensors: Mapping[str, Tensor]) -> Matrix | None:
    """Look up a matrix among named tensors, the inverse of `named`.

    Args:
        name: Name of the matrix.
        tensors: Tensors by name.

    Returns:
        The matrix, or None if there is no tensor of that name.
    """
    found = [tensors[name]] if name in tensors else list(_numbered(name, tensors))
    return joined(found) if found else None


def _numbered(name: str, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the tensors `name.0`, `name.1`, ... as far as they exist."""
    i = 0
    while f"{name}.{i}" in tensors:
        yield tensors[f"{name}.{i}"]
        i += 1

"""Square matrices along a diagonal, and zeros beside them: what a side that is too long for one matrix keeps.

Cut into k even pieces, a factor of n x n takes n^2 / k numbers, its eigenvectors a k^2-th of the operations, and a
k-th of what lies beside its diagonal is kept. A side of one piece is a plain tensor: no class stands between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockDiagonal:
    """The matrix with these pieces along its diagonal, as far as a matrix is asked for here.

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
        """Rows of every piece."""
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
        """The pieces, all put through `change`."""
        return BlockDiagonal(tuple(map(change, self.pieces)))

    @property
    def mT(self) -> BlockDiagonal:  # noqa: N802
        """The transpose, as a tensor calls it."""
        return self.each(lambda piece: piece.mT)

    def square(self) -> BlockDiagonal:
        """The squares of the entries."""
        return self.each(torch.square)

    def to(self, device: torch.device, dtype: torch.dtype) -> BlockDiagonal:
        """The same elsewhere."""
        return self.each(lambda piece: piece.to(device, dtype))

    def dense(self) -> Tensor:
        """With the zeros, for small ones."""
        (whole,) = pieces(recut(self, [sum(self.sizes)]))
        return whole


Matrix = Tensor | BlockDiagonal
"""A square matrix, or one of pieces."""


def cut(side: int, longest: int) -> tuple[int, ...]:
    """Even pieces of a side, none above `longest`.

    >>> cut(10, 4), cut(10, 10)
    ((4, 3, 3), (10,))
    """
    count = -(-side // longest)
    return tuple(side // count + (i < side % count) for i in range(count))


def pieces(matrix: Matrix) -> tuple[Tensor, ...]:
    """The pieces of a matrix; one that is not cut is one."""
    return matrix.pieces if isinstance(matrix, BlockDiagonal) else (matrix,)


def joined(parts: Sequence[Tensor]) -> Matrix:
    """The inverse of `pieces`."""
    return parts[0] if len(parts) == 1 else BlockDiagonal(tuple(parts))


def recut(matrix: Matrix, sizes: Sequence[int]) -> Matrix:
    """The matrix in pieces of these sizes: what lies in them, as far as it is there.

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
        place = 0
        for part in parts:
            low, high = max(start, place), min(start + size, place + part.shape[-1])
            if low < high:
                own, theirs = slice(low - start, high - start), slice(low - place, high - place)
                piece[..., own, own] = part[..., theirs, theirs]
            place += part.shape[-1]
        found.append(piece)
        start += size
    return joined(found)


def diagonal(matrix: Matrix, is_diagonal: bool = False) -> Tensor:
    """The entries on the diagonal (..., n); with `is_diagonal` they are what is given."""
    if is_diagonal and isinstance(matrix, Tensor):
        return matrix
    found = [piece.diagonal(dim1=-2, dim2=-1) for piece in pieces(matrix)]
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def in_words(structure: str, sides: Mapping[str, tuple[bool, Sequence[int]]]) -> str:
    """A structure, and which of its sides are diagonal or in pieces of these sizes.

    >>> in_words("kronecker", {"inputs": (True, [9]), "outputs": (False, [4, 4])})
    'kronecker (inputs diagonal, outputs in 2 pieces)'
    """
    told = [
        f"{name} {'diagonal' if is_diagonal else f'in {len(sizes)} pieces'}"
        for name, (is_diagonal, sizes) in sides.items()
        if is_diagonal or len(sizes) > 1
    ]
    return f"{structure} ({', '.join(told)})" if told else structure


def named(name: str, matrix: Matrix) -> dict[str, Tensor]:
    """The tensors of a matrix by name: its own, or name.0, name.1 and so on.

    >>> list(named("inputs", torch.eye(2))), list(named("inputs", joined([torch.eye(2), torch.eye(3)])))
    (['inputs'], ['inputs.0', 'inputs.1'])
    """
    parts = pieces(matrix)
    return {name: parts[0]} if len(parts) == 1 else {f"{name}.{i}": part for i, part in enumerate(parts)}


def find(name: str, tensors: Mapping[str, Tensor]) -> Matrix | None:
    """The inverse of `named`; None where there is no tensor of that name."""
    found = [tensors[name]] if name in tensors else list(_numbered(name, tensors))
    return joined(found) if found else None


def _numbered(name: str, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    i = 0
    while f"{name}.{i}" in tensors:
        yield tensors[f"{name}.{i}"]
        i += 1

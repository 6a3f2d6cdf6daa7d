"""What one block of a memory costs, from its shape alone: numbers kept, numbers summed, operations.

A block is g matrices of out x in: g is 1 but for grouped convolutions, and a bias is one more column of in. A side n is
dense, or in even pieces where it is longer than `max_side`, or diagonal where these would be too many or the data are
one-hot. n^2 and n^3 are the squares and cubes of its pieces. What is kept for a block, besides the mean (g out in):

    diagonal        g out in
    kronecker       eigenvalues g out in, partial traces g (in + out), and a basis of n^2 for every side not diagonal
    kronecker-sum   the same, and Q (in^2, or in where it is diagonal) and H (out^2 or out) of every task
    dense           (g out in)^2

Normalisation layers and parameters that no layer class covers are diagonal; dense is dense for them too. A pass sums Q
and H, or the squares in the shape of the block. Where tasks had different strengths the eigenvalues (the diagonal, the
matrix) are kept twice.

Operations are those of the matrix products, two for every multiplication; what is done element by element is left out,
and is all there is for `diagonal`. R = 2 g (out^2 in + out in^2), without squares of sides that are diagonal, is a
rotation into the bases:

    gradient        kronecker 2 R, or R after one task with both sides dense, when H d Q is the same thing;
                    kronecker-sum R for every term; dense 2 (g out in)^2
    proximal map    kronecker 2 R; kronecker-sum K + 1 gradients and K + 2 maps of kronecker, with K = 4 steps of
                    conjugate gradients (stiff ones take more); dense 4 (g out in)^2
    adapters        6 r (out^2 + in^2 + out in), or 4 r (out^2 + in^2) + 8 r^2 (out + in) after one task: the products
                    of `limpet.posterior.lora`, counted; squares of dense sides alone
    a task          for every dense side 9 n^3 for its eigenvectors (Golub and Van Loan, "Matrix Computations", 8.3)
                    and 6 n^3 around them (2 n^3 in the first task), and R to carry the eigenvalues over
    a token         of a pass: 2 n^2 for every dense side, 5/4 n^2 where it is long (`gram`)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from limpet.curvature import Structure
from limpet.curvature.gram import STRIP_FROM, STRIPS
from limpet.model import Block
from limpet.precision.block_diagonal import in_words

EIGENVECTORS = 9
"""n^3 operations of a symmetric eigendecomposition with its vectors."""

CONJUGATE_STEPS = 4
"""Steps of conjugate gradients that a proximal map of kronecker-sum is counted with."""


@dataclass(frozen=True)
class BlockCost:
    """One block: bytes, and operations (of matrix products, two for every multiplication)."""

    block: str
    kind: str
    shape: tuple[int, ...]
    structure: str
    whole: int  # bytes of its weights, as the model has them
    weights: int  # bytes of its mean
    bytes: int  # of its memory
    before: int  # of its memory one task earlier,
    lasting: int  # of them what stays as it is: earlier terms of a growing sum
    fresh: int  # bytes that are made anew for every task
    sums: int  # bytes that a pass sums
    work: int  # bytes that are held while a task is added
    eigenvectors: int  # bytes kept besides, once they were asked for
    trained: int  # bytes of what a step changes: its weights, or their adapters
    ready: int  # bytes that gradient mode keeps besides while it protects
    room: int  # bytes that are held while it is pulled in a step
    laid_out: int  # bytes copied for its way back from its owner: weights with a bias beside them lie apart
    step: int  # operations that protection adds to a step
    update: int  # operations of taking a task in, once its sums are there
    per_token: int  # operations of those sums for one token
    size: int  # numbers kept after one task: what blocks are assigned by
    owner: int = 0  # the rank that has it where the memory is sharded

    @property
    def term(self) -> int:
        """Bytes of the sums that become a part of the memory: the newest term of a growing sum."""
        return self.bytes - self.lasting - self.fresh


@dataclass(frozen=True)
class KroneckerShape:
    """Which sides of one Kronecker product Q (x) H are dense."""

    use: str
    inputs: bool
    outputs: bool
    data_left: bool  # H is made of the data and Q of the gradients: an embedding


@dataclass(frozen=True)
class BlockShape:
    """A block by its shape and structure."""

    structure: str
    groups: int
    out: int
    in_: int
    inputs: bool  # whether the side is dense
    outputs: bool
    bias: int  # columns of in that no weight has
    products: tuple[KroneckerShape, ...]  # what one task adds, or would add in a structure with factors
    in_sizes: tuple[int, ...]  # of the pieces that the side is cut into
    out_sizes: tuple[int, ...]

    @classmethod
    def of(cls, block: Block, structure: Structure) -> BlockShape:
        """The block as this structure keeps it."""
        *groups, out, in_ = block.shape
        sides = structure.sides(block)
        inputs, outputs = not sides["inputs_diagonal"], not sides["outputs_diagonal"]
        sizes = (sides["inputs_sizes"] or (in_,), sides["outputs_sizes"] or (out,))
        products = [
            KroneckerShape(
                block.use(layer),
                inputs and not (layer.data_one_hot and not layer.data_left),
                outputs and not (layer.data_one_hot and layer.data_left),
                layer.data_left,
            )
            for layer in block.layers
        ]
        name = structure.of(block)
        dense = name.startswith("kronecker")
        known = tuple(products) if block.factored else ()
        g = groups[0] if groups else 1
        return cls(name, g, out, in_, dense and inputs, dense and outputs, block.bias, known, *sizes)

    @property
    def factored(self) -> bool:
        """Whether the block keeps Kronecker factors."""
        return self.structure.startswith("kronecker")

    @property
    def numbers(self) -> int:
        """Weights in the block."""
        return self.groups * self.out * self.in_

    @property
    def described(self) -> str:
        """The structure, and which sides are diagonal or in pieces."""
        if not self.factored:
            return self.structure
        sides = {"inputs": (not self.inputs, self.in_sizes), "outputs": (not self.outputs, self.out_sizes)}
        return in_words(self.structure, sides)

    # --- numbers kept ----------------------------------------------------------------------------------------

    def kept(self, tasks: int, several_strengths: bool = False) -> dict[str, int]:
        """Numbers of the tensors that the precision keeps after so many tasks, named as in `Precision.tensors`.

        The terms of a growing sum come on top: `terms`.
        """
        if tasks == 0:
            return {}
        twice = several_strengths and tasks > 1
        if not self.factored:
            name, numbers = ("matrix", self.numbers**2) if self.structure == "dense" else ("diagonal", self.numbers)
            return {name: numbers, **({f"{name}.weighted": numbers} if twice else {})}
        g, out, in_ = self.groups, self.out, self.in_
        found = {"eigenvalues": self.numbers, "inputs.trace": g * in_, "outputs.trace": g * out}
        if twice:
            found["eigenvalues.weighted"] = self.numbers
        if self.inputs:
            found |= self._named("inputs.vectors", self.in_sizes)
        if self.outputs:
            found |= self._named("outputs.vectors", self.out_sizes)
        if self.structure == "kronecker":
            return found
        return {f"eigenbasis.{name}": numbers for name, numbers in found.items()}

    def terms(self) -> list[tuple[int, int]]:
        """Numbers of Q and of H in every term that one task adds to a growing sum."""
        products = self.products if self.structure == "kronecker-sum" else ()
        sides = [(self._side("", self.in_sizes, p.inputs), self._side("", self.out_sizes, p.outputs)) for p in products]
        return [(sum(q.values()), sum(h.values())) for q, h in sides]

    def sums(self) -> dict[str, int]:
        """Numbers that a pass sums, named as in `Accumulator.sums`."""
        if not self.factored:
            return {"matrix": self.numbers**2} if self.structure == "dense" else {"squares": self.numbers}
        found: dict[str, int] = {}
        for product in self.products:
            names = [f"data/{product.use}", f"gradients/{product.use}"]
            q, h = reversed(names) if product.data_left else names
            found |= self._side(q, self.in_sizes, product.inputs) | self._side(h, self.out_sizes, product.outputs)
        return found

    def work(self, tasks: int, several_strengths: bool = False) -> float:
        """Float64 numbers that are held while the last of so many tasks is added: as measured, with LAPACK's own."""
        eigen = 5.5 if tasks > 1 else 5.0
        twice = 1.5 if several_strengths and tasks > 1 else 1.0
        if self.structure == "dense":
            return 3.0 * twice * self.numbers**2
        a, b = self._squares
        # one piece after another: what is held beside a side's own squares is that of its largest piece
        largest_a = self.groups * max(self.in_sizes) ** 2 * self.inputs
        largest_b = self.groups * max(self.out_sizes) ** 2 * self.outputs
        eigenvectors = max(a + (eigen - 1) * largest_a + b, b + (eigen - 1) * largest_b + 2.5 * a)
        return max(eigenvectors, 3.0 * twice * self.numbers + 2.5 * (a + b))

    def eigenvectors(self) -> int:
        """Numbers of the eigenvectors that a dense matrix keeps once they were asked for, as a task's curve does."""
        return self.numbers**2 if self.structure == "dense" else 0

    def multiplied_out(self, tasks: int) -> int:
        """Numbers of H and Q that gradient mode keeps beside a memory of one task, for the short way."""
        return sum(self._squares) if self._is_product(tasks) else 0

    def _side(self, name: str, sizes: tuple[int, ...], dense: bool) -> dict[str, int]:
        return self._named(name, sizes) if dense else {name: self.groups * sum(sizes)}

    def _named(self, name: str, sizes: tuple[int, ...]) -> dict[str, int]:
        """The numbers of a matrix in pieces, named as `block_diagonal.named` does."""
        numbers = [self.groups * size**2 for size in sizes]
        return {name: numbers[0]} if len(numbers) == 1 else {f"{name}.{i}": some for i, some in enumerate(numbers)}

    @property
    def _squares(self) -> tuple[int, int]:
        """Numbers of the bases of both sides."""
        return self._powers(2)

    def _powers(self, power: int) -> tuple[int, int]:
        inputs, outputs = (sum(size**power for size in sizes) for sizes in (self.in_sizes, self.out_sizes))
        return self.groups * inputs * self.inputs, self.groups * outputs * self.outputs

    # --- operations ------------------------------------------------------------------------------------------

    def _rotation(self, inputs: bool, outputs: bool) -> int:
        in_squares, out_squares = (sum(size**2 for size in sizes) for sizes in (self.in_sizes, self.out_sizes))
        return 2 * self.groups * (self.out * in_squares * inputs + self.in_ * out_squares * outputs)

    def _is_product(self, tasks: int) -> bool:
        """Whether L - prior is one Q (x) H, with both of them matrices."""
        one = tasks * len(self.products) == 1 and self.groups == 1
        return self.structure == "kronecker" and one and self.inputs and self.outputs

    def gradient(self, tasks: int) -> int:
        """Operations of the penalty's gradient."""
        if self.structure == "dense":
            return 2 * self.numbers**2
        if self.structure == "kronecker-sum":
            return tasks * sum(self._rotation(product.inputs, product.outputs) for product in self.products)
        rotation = self._rotation(self.inputs, self.outputs)
        return rotation if self._is_product(tasks) else 2 * rotation

    def proximal(self, tasks: int) -> int:
        """Operations of the proximal map."""
        if self.structure == "dense":
            return 4 * self.numbers**2
        in_bases = 2 * self._rotation(self.inputs, self.outputs)
        if self.structure == "kronecker-sum":
            return (CONJUGATE_STEPS + 1) * self.gradient(tasks) + (CONJUGATE_STEPS + 2) * in_bases
        return in_bases

    def adapters(self, tasks: int, rank: int) -> int:
        """Operations of the penalty's gradient in low-rank adapters of the block's weight."""
        columns = self.in_ - self.bias
        in_bases = self.structure == "kronecker"
        in_squares, out_squares = self._squares
        if len(self.in_sizes) == 1:
            in_squares = columns * self.in_ * self.inputs
        rotated = rank * (in_squares + out_squares) * in_bases
        if in_bases and tasks * len(self.products) == 1:
            return 4 * rotated + 8 * rank**2 * (self.out + columns)
        applied = 0 if in_bases else self.gradient(tasks)
        return 6 * rotated + 6 * rank * self.out * self.in_ + applied

    def update(self, tasks: int, several_strengths: bool = False) -> int:
        """Operations of taking the last of so many tasks in, once its sums are there."""
        if self.structure == "dense":
            return EIGENVECTORS * self.numbers**3
        cubes = sum(self._powers(3))
        carried = self._rotation(self.inputs, self.outputs) * (2 if several_strengths and tasks > 1 else 1)
        terms = len(self.products) * self.factored
        first = tasks == 1 and terms > 0
        return terms * ((EIGENVECTORS + 6) * cubes + carried) - first * 4 * cubes

    def per_token(self) -> int:
        """Operations of the sums for one token (one example at one position), beyond those of the network itself."""
        if not self.factored:
            products = sum(not product.data_left for product in self.products)
            own = 2 * self.groups * self.out * (self.in_ - self.bias) * products
            return own if self.structure == "diagonal" else own + gram(self.numbers)
        *most, last = self.in_sizes
        sides = [((*most, last - self.bias), product.inputs) for product in self.products]
        sides += [(self.out_sizes, product.outputs) for product in self.products]
        return sum(gram(size, self.groups) for sizes, dense in sides if dense for size in sizes)


def gram(width: int, groups: int = 1) -> int:
    """Operations of one row's outer product with itself, most of its lower triangle left out where it is large."""
    if groups > 1 or width < STRIP_FROM:
        return 2 * groups * width**2
    strip = -(-width // STRIPS)
    return sum(2 * min(strip, width - start) * (width - start) for start in range(0, width, strip))


@dataclass(frozen=True)
class CostModel:
    """The settings by which a block is counted."""

    structure: Structure
    tasks: int
    mode: str
    storage_dtype: str | None
    auto_strength: bool

    def row(self, block: Block, dtype: torch.dtype, rank: int | None) -> BlockCost:
        """One block; `rank` is that of its adapters."""
        outline = BlockShape.of(block, self.structure)
        if outline.structure == "dense":  # what a pass would refuse is refused here, in the same words
            self.structure.accumulator(block, torch.zeros((), dtype=dtype, device="meta"))
        width = torch.promote_types(dtype, torch.float32).itemsize
        weights = width * outline.numbers
        term = width * sum(map(sum, outline.terms()))
        lasting, asked = (self.tasks - 1) * term, width * outline.eigenvectors()
        before, fresh = (weights + self._kept(outline, tasks, width) for tasks in (self.tasks - 1, self.tasks))
        if rank is not None:
            step, trained = outline.adapters(self.tasks, rank), rank * (outline.out + outline.in_ - outline.bias)
        else:
            step = outline.gradient(self.tasks) if self.mode == "gradient" else outline.proximal(self.tasks)
            trained = outline.numbers
        return BlockCost(
            block=block.name,
            kind=block.kind,
            shape=tuple(block.shape),
            structure=outline.described,
            whole=dtype.itemsize * outline.numbers,
            weights=weights,
            bytes=fresh + lasting + term,
            before=before + lasting + asked * (self.tasks > 1 and not self.auto_strength),
            lasting=lasting,
            fresh=fresh,
            sums=width * sum(outline.sums().values()),
            work=round(8 * outline.work(self.tasks, self.auto_strength)),
            eigenvectors=asked,
            trained=dtype.itemsize * trained,
            ready=0 if rank is not None else width * outline.multiplied_out(self.tasks),
            room=0 if rank is not None else weights * (4 if self.mode == "gradient" else 3),
            laid_out=dtype.itemsize * outline.numbers * (outline.bias > 0),
            step=step,
            update=outline.update(self.tasks, self.auto_strength),
            per_token=outline.per_token(),
            size=self.structure.size(block),
        )

    def _kept(self, outline: BlockShape, tasks: int, width: int) -> int:
        """Bytes of the precision, but for the terms of a growing sum."""
        storage_dtype = width if self.storage_dtype is None else getattr(torch, self.storage_dtype).itemsize
        return sum(
            numbers * (storage_dtype if ".vectors" in name else width)
            for name, numbers in outline.kept(tasks, self.auto_strength).items()
        )

"""Numbers and operations of one block of a memory, from its shape alone.

A block consists of g matrices of shape out x in: g is 1 except for grouped convolutions, and a bias adds one column to
in. The Kronecker factor of a side of length n (in or out) is dense, or block-diagonal with blocks of nearly equal size
if n exceeds `max_factor_size`, or diagonal if there would be too many blocks or the data are one-hot. For a
block-diagonal factor, n^2 and n^3 denote the sums of the squares and cubes of the block sizes. Numbers stored for a
block, besides the mean (g out in):

    diagonal        g out in
    kronecker       eigenvalues g out in, partial traces g (in + out), and an eigenbasis of n^2 for every side that is
                    not diagonal
    kronecker-sum   the same, and Q (in^2, or in if diagonal) and H (out^2 or out) of every task
    dense           (g out in)^2

A factor that is truncated to rank r (`factor_rank`) has r + 1 eigenvalues, and in place of an eigenbasis n r + r^2
numbers (`limpet.precision.reflections`); a curvature pass accumulates n^2 numbers of it, or n (2 r + 1) if it is summed
as a sketch (`limpet.precision.sketch`).

Normalization layers and parameters that no layer class covers are diagonal, unless the structure is dense. A curvature
pass accumulates Q and H, or the squared gradients in the shape of the block. If tasks have different strengths, the
eigenvalues (the diagonal, the dense matrix) are stored twice.

Operations are those of the matrix products, two per multiply-add; elementwise operations, and thus all operations of
`diagonal`, are not counted. R = 2 g (out^2 in + out in^2), without the squares of diagonal sides, is the cost of one
rotation into the eigenbasis:

    gradient        kronecker 2 R, or R after one task with both sides dense, where it equals H d Q;
                    kronecker-sum R for every term; dense 2 (g out in)^2
    proximal step   kronecker 2 R; kronecker-sum K + 1 gradients and K + 2 proximal steps of kronecker, with K = 4
                    iterations of conjugate gradients (ill-conditioned problems take more); dense 4 (g out in)^2
    LoRA adapters   6 r (out^2 + in^2 + out in), or 4 r (out^2 + in^2) + 8 r^2 (out + in) after one task: the products
                    in `limpet.posterior.lora`; only squares of dense sides count
    task update     for every dense side 9 n^3 for the eigendecomposition (Golub and Van Loan, "Matrix Computations",
                    8.3) and 6 n^3 for related products (2 n^3 in the first task), and R to transfer the eigenvalues
    per token       in a curvature pass: 2 n^2 for every dense side, 5/4 n^2 if it is long (`gram`), 8 n r if sketched

A rotation with a truncated side takes 4 n r + 2 r^2 operations in place of every 2 n^2, and such a side has 4 n r^2
operations or so in a task update for every n^3, from a sketch of k = 2 r columns 20 n k^2 in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from limpet.curvature import Structure
from limpet.curvature.gram import strips
from limpet.model import Block
from limpet.precision.block_diagonal import in_words
from limpet.precision.truncated_basis import is_truncated

EIGENVECTORS = 9
"""Operations of a symmetric eigendecomposition with eigenvectors, in units of n^3."""

SIDES = ("in", "out")

CONJUGATE_STEPS = 4
"""Assumed number of conjugate gradient iterations in a proximal step of kronecker-sum."""


@dataclass(frozen=True)
class KroneckerShape:
    """Which factors of a Kronecker product Q (x) H are dense.

    Attributes:
        use: The name of the layer that uses the weights (`Block.use`).
        inputs: Whether Q is dense.
        outputs: Whether H is dense.
        data_left: Whether H is computed from the data and Q from the gradients, as in an embedding.
    """

    use: str
    inputs: bool
    outputs: bool
    data_left: bool


@dataclass(frozen=True)
class BlockShape:
    """The shape and structure of a block.

    Attributes:
        structure: The structure of its precision.
        groups: The number of matrices g.
        out: The number of rows of each matrix.
        in_: The number of columns of each matrix, including the bias.
        inputs: Whether the input side has an eigenbasis, rather than being diagonal.
        outputs: Whether the output side has an eigenbasis.
        bias: The number of columns that belong to a bias.
        products: The Kronecker products that one task adds, or would add in a Kronecker structure.
        in_sizes: The sizes of the diagonal blocks of the input factor; a single size if it is not block-diagonal.
        out_sizes: The sizes of the diagonal blocks of the output factor.
        ranks: Ranks of the factors that are truncated, by side ("in", "out").
        sketches: Columns of the sketches that a pass sums in place of factors, by side.
    """

    structure: str
    groups: int
    out: int
    in_: int
    inputs: bool
    outputs: bool
    bias: int
    products: tuple[KroneckerShape, ...]
    in_sizes: tuple[int, ...]
    out_sizes: tuple[int, ...]
    ranks: Mapping[str, int] = field(default_factory=dict)
    sketches: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, block: Block, structure: Structure) -> BlockShape:
        """Determine how a structure represents a block.

        Args:
            block: The block.
            structure: The structure.

        Returns:
            The shape.
        """
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
        rank, each = structure.rank, zip(SIDES, sizes, (inputs, outputs), strict=True)
        small = name == "kronecker" and rank is not None
        ranks = {side: rank for side, some, full in each if small and rank and is_truncated(some, not full, rank)}
        sketches = structure.sketches(block) if small else {}
        return cls(name, g, out, in_, dense and inputs, dense and outputs, block.bias, known, *sizes, ranks, sketches)

    @property
    def factored(self) -> bool:
        """Whether the precision of the block has Kronecker factors."""
        return self.structure.startswith("kronecker")

    @property
    def numbers(self) -> int:
        """The number of weights in the block, including biases."""
        return self.groups * self.out * self.in_

    @property
    def described(self) -> str:
        """The structure, and which sides are diagonal or block-diagonal."""
        if not self.factored:
            return self.structure
        sides = {"inputs": (not self.inputs, self.in_sizes), "outputs": (not self.outputs, self.out_sizes)}
        names = {"in": "inputs", "out": "outputs"}
        return in_words(self.structure, sides, {names[side]: rank for side, rank in self.ranks.items()})

    @property
    def lengths(self) -> dict[str, int]:
        """The lengths of both sides."""
        return {"in": self.in_, "out": self.out}

    # --- numbers stored ----------------------------------------------------------------------------------------

    def kept(self, tasks: int, several_strengths: bool = False) -> dict[str, int]:
        """Count the numbers in the tensors of the precision, without the terms of kronecker-sum (see `terms`).

        Args:
            tasks: The number of tasks consolidated.
            several_strengths: Whether the tasks have different strengths.

        Returns:
            The size of every tensor, by its name in `Precision.tensors`.
        """
        if tasks == 0:
            return {}
        twice = several_strengths and tasks > 1
        if not self.factored:
            name, numbers = ("matrix", self.numbers**2) if self.structure == "dense" else ("diagonal", self.numbers)
            return {name: numbers, **({f"{name}.weighted": numbers} if twice else {})}
        g = self.groups
        in_, out = (self.ranks[side] + 1 if side in self.ranks else size for side, size in self.lengths.items())
        found = {"eigenvalues": g * out * in_, "inputs.trace": g * in_, "outputs.trace": g * out}
        if twice:
            found["eigenvalues.weighted"] = g * out * in_
        for side, sizes, full in (("in", self.in_sizes, self.inputs), ("out", self.out_sizes, self.outputs)):
            if side in self.ranks:
                r = self.ranks[side]
                found |= {f"{side}puts.reflections": g * sizes[0] * r, f"{side}puts.triangle": g * r * r}
            elif full:
                found |= self._named(f"{side}puts.vectors", sizes)
        if self.structure == "kronecker":
            return found
        return {f"eigenbasis.{name}": numbers for name, numbers in found.items()}

    def terms(self) -> list[tuple[int, int]]:
        """The sizes of Q and H in every term that one task adds to a kronecker-sum."""
        products = self.products if self.structure == "kronecker-sum" else ()
        sides = [(self._side("", self.in_sizes, p.inputs), self._side("", self.out_sizes, p.outputs)) for p in products]
        return [(sum(q.values()), sum(h.values())) for q, h in sides]

    def sums(self) -> dict[str, int]:
        """The sizes of the tensors that a curvature pass accumulates, by their names in `Accumulator.sums`."""
        if not self.factored:
            return {"matrix": self.numbers**2} if self.structure == "dense" else {"squares": self.numbers}
        found: dict[str, int] = {}
        for product in self.products:
            names = [f"data/{product.use}", f"gradients/{product.use}"]
            q, h = reversed(names) if product.data_left else names
            for side, name, sizes, full in (
                ("in", q, self.in_sizes, product.inputs),
                ("out", h, self.out_sizes, product.outputs),
            ):
                if full and side in self.sketches:
                    n = self.groups * sizes[0]
                    found |= {f"{name}.sketch": n * self.sketches[side], f"{name}.diagonal": n}
                else:
                    found |= self._side(name, sizes, full)
        return found

    def work(self, tasks: int, several_strengths: bool = False) -> float:
        """Estimate the workspace of the update with the last task; fitted to measurements, including LAPACK's own.

        Args:
            tasks: The number of tasks, including the last.
            several_strengths: Whether the tasks have different strengths.

        Returns:
            The number of float64 numbers.
        """
        twice = 1.5 if several_strengths and tasks > 1 else 1.0
        if self.structure == "dense":
            return 3.0 * twice * self.numbers**2
        a, b = (self._factor(side) for side in SIDES)
        # diagonal blocks are decomposed one at a time, so the workspace is that of the largest one
        largest_a = a if "in" in self.sketches else self.groups * max(self.in_sizes) ** 2 * self.inputs
        largest_b = b if "out" in self.sketches else self.groups * max(self.out_sizes) ** 2 * self.outputs
        of_a, of_b = (self._decomposition(side, tasks) for side in SIDES)
        left_a, left_b = self._left("in", tasks) * a, self._left("out", tasks) * b
        values = self.kept(1)["eigenvalues"] if self.ranks else self.numbers
        copies = 4.0 if max(len(self.in_sizes), len(self.out_sizes)) > 1 else 3.0  # blocks are cut out and put together
        return max(of_a * largest_a, of_b * largest_b + left_a, copies * twice * values + left_a + left_b)

    def forecast(self) -> int:
        """The workspace of a forecast, in sizes of the weights: the displacement, its rotation and eigenvalues."""
        return (5 if self.ranks else 4) if self.factored else 3

    def _decomposition(self, side: str, tasks: int) -> float:
        """The workspace of a decomposition in sizes of the factor, which LAPACK needs three of itself."""
        if side in self.sketches:
            return 6.25 if tasks > 1 else 4.0
        if side in self.ranks:
            return 6.2 if tasks > 1 else 5.0
        return 4.0

    def _left(self, side: str, tasks: int) -> float:
        """What the decomposition of a side leaves: the new basis and the change of basis, in sizes of the factor."""
        if side in self.sketches:
            return 0.5
        if side in self.ranks:
            return 0.1
        first = self.structure == "kronecker" and tasks * len(self.products) == 1  # nothing changes its basis
        return 0.5 if first else 1.5

    def _factor(self, side: str) -> int:
        """The size of the factor of a side, as a pass measures it; 0 if it is diagonal."""
        if side in self.sketches:
            return self.groups * self.lengths[side] * self.sketches[side]
        return dict(zip(SIDES, self._powers(2), strict=True))[side]

    def eigenvectors(self) -> int:
        """The size of the eigenvectors that a dense matrix caches once computed, as they are for the loss curve."""
        return self.numbers**2 if self.structure == "dense" else 0

    def multiplied_out(self, tasks: int) -> int:
        """The size of H and Q, which gradient mode caches after a single task to compute the gradient as H d Q."""
        return sum(self._powers(2)) if self._is_product(tasks) else 0

    def _side(self, name: str, sizes: tuple[int, ...], dense: bool) -> dict[str, int]:
        return self._named(name, sizes) if dense else {name: self.groups * sum(sizes)}

    def _named(self, name: str, sizes: tuple[int, ...]) -> dict[str, int]:
        """The sizes of the diagonal blocks of a matrix, by their names in `block_diagonal.named`."""
        numbers = [self.groups * size**2 for size in sizes]
        return {name: numbers[0]} if len(numbers) == 1 else {f"{name}.{i}": some for i, some in enumerate(numbers)}

    def _powers(self, power: int) -> tuple[int, int]:
        inputs, outputs = (sum(size**power for size in sizes) for sizes in (self.in_sizes, self.out_sizes))
        return self.groups * inputs * self.inputs, self.groups * outputs * self.outputs

    # --- operations ------------------------------------------------------------------------------------------

    def _multiplied(self, side: str) -> int:
        """Multiplications of a row with the basis of a side: n^2, or 2 n r + r^2 if it is truncated."""
        n, r = self.lengths[side], self.ranks.get(side)
        sizes = self.in_sizes if side == "in" else self.out_sizes
        return sum(size**2 for size in sizes) if r is None else 2 * n * r + r**2

    def _weighted(self, side: str) -> int:
        """Multiplications of a row that is rotated, scaled and rotated back: 2 n r + 4 r^2 if the side is truncated."""
        n, r = self.lengths[side], self.ranks.get(side)
        return 2 * self._multiplied(side) if r is None else 2 * n * r + 4 * r**2

    def _rotation(self, inputs: bool, outputs: bool) -> int:
        in_squares, out_squares = map(self._multiplied, SIDES)
        return 2 * self.groups * (self.out * in_squares * inputs + self.in_ * out_squares * outputs)

    def _in_bases(self) -> int:
        """Operations of scaling a block in its eigenbases."""
        if self.groups > 1 or "in" not in self.ranks:
            return 2 * self._rotation(self.inputs, self.outputs)
        out_squares = 2 * self._multiplied("out") * self.outputs
        return 2 * (self.out * self._weighted("in") * self.inputs + self.in_ * out_squares)

    def _is_product(self, tasks: int) -> bool:
        """Whether L - prior is a single Kronecker product Q (x) H of two dense factors."""
        one = tasks * len(self.products) == 1 and self.groups == 1
        return self.structure == "kronecker" and one and self.inputs and self.outputs and not self.ranks

    def gradient(self, tasks: int) -> int:
        """Operations of the gradient of the penalty after `tasks` tasks."""
        if self.structure == "dense":
            return 2 * self.numbers**2
        if self.structure == "kronecker-sum":
            return tasks * sum(self._rotation(product.inputs, product.outputs) for product in self.products)
        return self._rotation(self.inputs, self.outputs) if self._is_product(tasks) else self._in_bases()

    def proximal(self, tasks: int) -> int:
        """Operations of a proximal step after `tasks` tasks."""
        if self.structure == "dense":
            return 4 * self.numbers**2
        if self.structure == "kronecker-sum":
            return (CONJUGATE_STEPS + 1) * self.gradient(tasks) + (CONJUGATE_STEPS + 2) * self._in_bases()
        return self._in_bases()

    def adapters(self, tasks: int, rank: int) -> int:
        """Count the operations of the gradient of the penalty with respect to LoRA adapters of the weight.

        Args:
            tasks: The number of tasks consolidated.
            rank: The rank of the adapters.

        Returns:
            The number of operations.
        """
        columns = self.in_ - self.bias
        in_bases = self.structure == "kronecker"
        in_squares = self.groups * self._multiplied("in") * self.inputs
        out_squares = self.groups * self._multiplied("out") * self.outputs
        in_weighted = self.groups * self._weighted("in") * self.inputs
        if len(self.in_sizes) == 1 and "in" not in self.ranks:
            in_squares, in_weighted = columns * self.in_ * self.inputs, 2 * columns * self.in_ * self.inputs
        rotated = rank * (in_squares + out_squares) * in_bases
        if in_bases and tasks * len(self.products) == 1:
            weighted = in_weighted + self.groups * self._weighted("out") * self.outputs
            return 2 * rank * weighted + 8 * rank**2 * (self.out + columns)
        applied = 0 if in_bases else self.gradient(tasks)
        return 6 * rotated + 6 * rank * self.out * self.in_ + applied

    def update(self, tasks: int, several_strengths: bool = False) -> int:
        """Count the operations of the update with the last task, after its curvature pass.

        Args:
            tasks: The number of tasks, including the last.
            several_strengths: Whether the tasks have different strengths.

        Returns:
            The number of operations.
        """
        if self.structure == "dense":
            return EIGENVECTORS * self.numbers**3
        short = {side: n for side, n in zip(SIDES, self._powers(3), strict=True) if side not in self.sketches}
        cubes = sum(short.values())
        sketched = sum(20 * self.groups * self.lengths[side] * k**2 for side, k in self.sketches.items())
        carried = self._rotation(self.inputs, self.outputs) * (2 if several_strengths and tasks > 1 else 1)
        terms = len(self.products) * self.factored
        first = tasks == 1 and terms > 0  # it is diagonal in its own eigenbasis
        return terms * (EIGENVECTORS * cubes + sketched) + (terms - first) * (6 * cubes + carried)

    def per_token(self) -> int:
        """Operations of a curvature pass per token (one position of one example), besides those of the network."""
        if not self.factored:
            products = sum(not product.data_left for product in self.products)
            own = 2 * self.groups * self.out * (self.in_ - self.bias) * products
            return own if self.structure == "diagonal" else own + gram(self.numbers)
        *most, last = self.in_sizes
        sides = [("in", (*most, last - self.bias), product.inputs) for product in self.products]
        sides += [("out", self.out_sizes, product.outputs) for product in self.products]
        return sum(
            4 * self.groups * size * self.sketches[side] if side in self.sketches else gram(size, self.groups)
            for side, sizes, dense in sides
            if dense
            for size in sizes
        )


def gram(width: int, groups: int = 1) -> int:
    """Count the operations of one row's contribution to a Gram matrix.

    For wide matrices, most of the lower triangle is not computed (`limpet.curvature.gram`).

    Args:
        width: The length of the row.
        groups: The number of groups, each of this width.

    Returns:
        The number of operations.
    """
    if groups > 1:
        return 2 * groups * width**2
    return sum(2 * (stop - start) * (width - start) for start, stop in strips(width))

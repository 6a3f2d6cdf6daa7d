"""The path X(strength) between two Kronecker-factored curvatures (`limpet.precision.pencil`).

If both are Kronecker products, O = A_o (x) G_o and N = A_n (x) G_n, the generalized eigenbases of the two factors

    V^T A_n V = I, V^T A_o V = diag(s),        U^T G_n U = I, U^T G_o U = diag(t)

give the solution in closed form:  X = U [ C_ij / (1 + strength t_i s_j) ] V^T  with  C = U^-1 D V^-T.

If one of them is a sum of products (a memory of several tasks, or a weight shared by several modules), the bases are
those of the nearest products, and (N + strength O) X = N D is solved by conjugate gradients, preconditioned with the
diagonals of N and O in these bases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.precision.basis import summed, widened_side
from limpet.precision.block_diagonal import joined, pieces
from limpet.precision.kronecker import SEPARABLE, Kronecker
from limpet.precision.kronecker_sum import KroneckerSum
from limpet.precision.linalg import conjugate_gradients, widened
from limpet.precision.pencil import MovedBlock, Pencil, sum_of, truncated
from limpet.precision.reflections import Reflections
from limpet.precision.side_basis import Factor, SideBasis
from limpet.precision.spiked import Spiked
from limpet.precision.terms import KroneckerTerm, Term

CG_STEPS = 500
"""Maximum number of conjugate gradient steps."""


class Curvature(ABC):
    """Positive definite matrix over a block, with the operations that the path needs."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """Return M x."""

    @abstractmethod
    def nearest(self) -> Product:
        """Return the Kronecker product with the same partial traces."""

    @abstractmethod
    def diagonal_in(self, outputs: SideBasis, inputs: SideBasis) -> Tensor:
        """Return the diagonal of (V (x) U)^T M (V (x) U).

        Args:
            outputs: Generalized eigenbasis U of the output factors.
            inputs: Generalized eigenbasis V of the input factors.

        Returns:
            The diagonal, in the shape of the block.
        """

    @abstractmethod
    def to(self, like: Tensor) -> Curvature:
        """Return the same curvature in the dtype and on the device of `like`."""


@dataclass(frozen=True)
class Product(Curvature):
    """Kronecker product inputs (x) outputs.

    Args:
        inputs: Input factor.
        outputs: Output factor.
    """

    inputs: Factor
    outputs: Factor

    @classmethod
    def of(cls, term: KroneckerTerm, form: Kronecker, columns: slice, amount: float) -> Product:
        """Build the damped Fisher of one task.

        Args:
            term: Fisher of the task.
            form: Precision of the block; its bases determine whether factors are diagonal, full or block-diagonal.
            columns: Columns of the block to keep.
            amount: Damping of each factor, relative to the mean of its diagonal.

        Returns:
            The product.
        """
        inputs, outputs = (
            Factor(widened_side(factor, is_diagonal, basis), basis.diagonal)
            for factor, is_diagonal, basis in (
                (term.inputs, term.inputs_diagonal, form.inputs),
                (term.outputs, term.outputs_diagonal, form.outputs),
            )
        )
        return cls(inputs.kept(columns).damped(amount), outputs.damped(amount))

    def apply(self, x: Tensor) -> Tensor:
        """Return M x."""
        return self.outputs.right(self.inputs.right(x).mT).mT

    def nearest(self) -> Product:
        """Return the product itself."""
        return self

    def diagonal_in(self, outputs: SideBasis, inputs: SideBasis) -> Tensor:
        """Return the diagonal of (V (x) U)^T M (V (x) U), in the shape of the block."""
        return outputs.diagonal_of(self.outputs).unsqueeze(-1) * inputs.diagonal_of(self.inputs).unsqueeze(-2)

    def to(self, like: Tensor) -> Product:
        """Return the same product in the dtype and on the device of `like`."""
        return Product(self.inputs.to(like), self.outputs.to(like))


@dataclass(frozen=True)
class Sum(Curvature):
    """Sum of Kronecker products.

    Args:
        products: The terms of the sum.
    """

    products: tuple[Product, ...]

    def apply(self, x: Tensor) -> Tensor:
        """Return M x."""
        return sum_of([product.apply(x) for product in self.products])

    def nearest(self) -> Product:
        """Return the Kronecker product with the same partial traces."""
        traces = [[f.diagonal.sum(-1, keepdim=True) for f in (p.inputs, p.outputs)] for p in self.products]
        inputs = [p.inputs.scaled(out) for p, (_, out) in zip(self.products, traces, strict=True)]
        outputs = [p.outputs.scaled(in_) for p, (in_, _) in zip(self.products, traces, strict=True)]
        total = sum_of([in_ * out for in_, out in traces])
        first, *others = inputs
        second, *rest = outputs
        for other in others:
            first = first.plus(other)
        for other in rest:
            second = second.plus(other)
        return Product(first.scaled(1 / total), second)

    def diagonal_in(self, outputs: SideBasis, inputs: SideBasis) -> Tensor:
        """Return the diagonal of (V (x) U)^T M (V (x) U), in the shape of the block."""
        return sum_of([product.diagonal_in(outputs, inputs) for product in self.products])

    def to(self, like: Tensor) -> Sum:
        """Return the same sum in the dtype and on the device of `like`."""
        return Sum(tuple(product.to(like) for product in self.products))


@dataclass(frozen=True)
class Eigenbasis(Curvature):
    """Curvature (U_Q (x) U_H) diag(D) (U_Q (x) U_H)^T, restricted to some columns of the block.

    Args:
        form: Precision that holds the eigenbases U_Q and U_H.
        values: Eigenvalues D, damped.
        columns: Columns of the block to keep.
    """

    form: Kronecker
    values: Tensor
    columns: slice

    @classmethod
    def of(cls, form: Kronecker, columns: slice, amount: float) -> Curvature:
        """Build the damped Fisher of a Kronecker precision.

        It is damped as its factors would be: (h + e mean h) (q + e mean q)^T where D = h q^T.

        Args:
            form: Fisher of the block, as a precision without prior.
            columns: Columns of the block to keep.
            amount: Damping e.

        Returns:
            A `Product` if D is an outer product, otherwise an `Eigenbasis`.
        """
        D = widened(form.plain)
        rows, total = D.sum(-1, keepdim=True), D.sum((-2, -1), keepdim=True)
        q = D.sum(-2, keepdim=True) / total
        if float((rows * q - D).norm()) <= SEPARABLE * float(D.norm()):
            inputs, outputs = _factor(form, "inputs", q.squeeze(-2)), _factor(form, "outputs", rows.squeeze(-1))
            return Product(inputs.kept(columns).damped(amount), outputs.damped(amount))
        means = D.mean(-1, keepdim=True) + D.mean(-2, keepdim=True)
        return cls(form, D + amount * means + amount**2 * D.mean((-2, -1), keepdim=True), columns)

    def apply(self, x: Tensor) -> Tensor:
        """Return M x."""
        sides = self.form.sides().to(x)
        whole = x.new_zeros((*x.shape[:-1], self.values.shape[-1]))
        whole[..., self.columns] = x
        return sides.back(self.values.to(x) * sides.into(whole))[..., self.columns]

    def nearest(self) -> Product:
        """Return the Kronecker product with the same partial traces."""
        rows, columns = self.values.sum(-1), self.values.sum(-2)
        inputs = _factor(self.form, "inputs", columns / columns.sum(-1, keepdim=True))
        return Product(inputs.kept(self.columns), _factor(self.form, "outputs", rows))

    def diagonal_in(self, outputs: SideBasis, inputs: SideBasis) -> Tensor:
        """Return the diagonal of (V (x) U)^T M (V (x) U), in the shape of the block."""
        found = inputs.carried(self.values, self.form.inputs, self.columns)
        return outputs.carried(found.mT, self.form.outputs, slice(0, self.values.shape[-2])).mT

    def to(self, like: Tensor) -> Eigenbasis:
        """Return the same curvature in the dtype and on the device of `like`."""
        return Eigenbasis(self.form, self.values.to(like), self.columns)


class KroneckerPencil(Pencil):
    """Path between two Kronecker-factored curvatures.

    The path has a closed form if each curvature is a single product; otherwise it is solved by conjugate gradients.

    Args:
        old: Precision of the block. Only its Fisher is used.
        new: Fisher of the block on the new data.
        moved: How training has moved the block.
    """

    def __init__(self, old: Kronecker | KroneckerSum, new: Sequence[Term], moved: MovedBlock) -> None:
        columns, damping = moved.columns, moved.damping
        self.like, self.columns = moved.parts[0], columns
        form = (old.eigenbasis if isinstance(old, KroneckerSum) else old).fisher()
        n = _added_up([Product.of(t, form, columns, damping.new) for t in new if isinstance(t, KroneckerTerm)])
        o = (
            _added_up([Product.of(term, form, columns, damping.old) for term in old.terms])
            if isinstance(old, KroneckerSum)
            else Eigenbasis.of(form, columns, damping.old)
        )
        outputs = SideBasis.of(n.nearest().outputs, o.nearest().outputs)
        inputs = SideBasis.of(n.nearest().inputs, o.nearest().inputs)
        self.exact = isinstance(n, Product) and isinstance(o, Product)
        parts = [widened(part)[..., columns] for part in moved.parts]
        pull = None if moved.linear_term is None else widened(moved.linear_term)[..., columns] / len(parts)
        if self.exact:
            self.new_values: Tensor | None = None  # N is the identity in these bases
            self.old_values = (outputs.values.unsqueeze(-1) * inputs.values.unsqueeze(-2)).to(self.like)
            self.coordinates = [outputs.into(inputs.into(d).mT).mT.to(self.like) for d in parts]
            self.pull = None if pull is None else outputs.into_dual(inputs.into_dual(pull).mT).mT.to(self.like)
        else:
            self.new, self.old = n.to(self.like), o.to(self.like)
            self.new_values = n.diagonal_in(outputs, inputs).to(self.like)
            self.old_values = o.diagonal_in(outputs, inputs).to(self.like)
            self.moved = [d.to(self.like) for d in parts]
            self.targets = [self.new.apply(d) for d in self.moved]
            self.pull = None if pull is None else pull.to(self.like)
        self.offset = None
        if moved.offset is not None:
            self.offset = outputs.into(inputs.into(widened(moved.offset)[..., columns]).mT).mT
        self.outputs = outputs.stored(self.like, with_dual=not self.exact)
        self.inputs = inputs.stored(self.like, with_dual=not self.exact)

    def _back(self, c: Tensor) -> Tensor:
        """Return U c V^T: coordinates mapped back to the moved columns of the block."""
        return self.outputs.back(self.inputs.back(c).mT).mT

    def _closed(self, strength: float) -> list[Tensor]:
        """Return each part's share in generalized eigencoordinates, if both curvatures are products."""
        pull = 0 if self.pull is None else strength * self.pull
        return [(c - pull) / (1 + strength * self.old_values) for c in self.coordinates]

    def _iterated(self, strength: float) -> list[Tensor]:
        """Return each part's share of the moved columns, by conjugate gradients."""
        assert self.new_values is not None
        diagonal = self.new_values + strength * self.old_values

        def precondition(x: Tensor) -> Tensor:
            return self._back(self.outputs.into_dual(self.inputs.into_dual(x).mT).mT / diagonal)

        pull = 0 if self.pull is None else strength * self.pull
        tolerance = 1e-13 if self.like.dtype == torch.float64 else 1e-6
        return [
            conjugate_gradients(
                lambda x: self.new.apply(x) + strength * self.old.apply(x),
                target - pull,
                precondition,
                tolerance=tolerance,
                steps=CG_STEPS,
            )
            for target in self.targets
        ]

    def at(self, strength: float) -> list[Tensor]:
        """Return each part's share of X(strength), in the shape of the block."""
        found = [self._back(c) for c in self._closed(strength)] if self.exact else self._iterated(strength)
        whole = [torch.zeros_like(self.like) for _ in found]
        for block, x in zip(whole, found, strict=True):
            block[..., self.columns] = x
        return whole

    def quadratics(self, strength: float) -> tuple[float, float]:
        """Return 1/2 |X - D|^2_N and 1/2 |X|^2_O, both damped."""
        if self.exact:
            x, c = widened(sum_of(self._closed(strength))), widened(sum_of(self.coordinates))
            return float((x - c).square().sum()) / 2, float((self.old_values * x.square()).sum()) / 2
        x = sum_of(self._iterated(strength))
        d = x - sum_of(self.moved)
        return float((d * self.new.apply(d)).sum()) / 2, float((x * self.old.apply(x)).sum()) / 2

    def low_rank(self, strength: float, part: int, rank: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return a low-rank approximation of a part's share, in a product metric close to both curvatures."""
        if self.exact:
            c = self._closed(strength)[part]
        else:
            c = self.outputs.into(self.inputs.into(self._iterated(strength)[part]).mT).mT
        c = scale * widened(c) - (0 if part or self.offset is None else self.offset)
        rows, columns = widened(self.outputs.root), widened(self.inputs.root)
        left, right = truncated(rows.unsqueeze(-1) * c * columns, rank)
        left, right = (left / rows.unsqueeze(-1)).to(self.like), (right / columns).to(self.like)
        return self.outputs.back(left.mT).mT, self.inputs.back(right)


def _added_up(products: Sequence[Product]) -> Curvature:
    """Return the only product, or the sum of several."""
    return products[0] if len(products) == 1 else Sum(tuple(products))


def _factor(form: Kronecker, side: str, values: Tensor) -> Factor:
    """Return the matrix with these eigenvalues in the basis of one factor of a precision."""
    basis = form.inputs if side == "inputs" else form.outputs
    if basis.diagonal:
        return Factor(values, True)
    if isinstance(basis.columns, Reflections):
        vectors = widened(basis.columns.first())
        return Factor(Spiked.of_eigen(vectors, values[..., : vectors.shape[-1]], values[..., -1]), False)
    parts = values.split_with_sizes(list(basis.sizes), -1)
    known = [None] * len(parts) if basis.columns is None else pieces(basis.columns)
    return Factor(joined([summed(vectors, part) for vectors, part in zip(known, parts, strict=True)]), False)

"""Tests of every method of every precision structure, against the dense matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from limpet.errors import LimpetError, UnsupportedError
from limpet.precision import (
    STRUCTURES,
    BlockDiagonal,
    Dense,
    DenseTerm,
    Diagonal,
    DiagonalTerm,
    Kronecker,
    KroneckerSum,
    KroneckerTerm,
    Matrix,
    Precision,
    Term,
)
from limpet.precision import linalg as limpet_linalg

DOUBLE = torch.zeros((), dtype=torch.float64)
SINGLE = torch.zeros((), dtype=torch.float32)
SHAPES = [(3, 4), (1, 5), (5, 1), (2, 3, 4)]  # the last one has two groups
STARTS = {
    "diagonal": Diagonal.start,
    "kronecker": Kronecker.start,
    "kronecker-sum": KroneckerSum.start,
    "dense": Dense.start,
}


def positive(generator: torch.Generator, *shape: int, rank: int | None = None) -> Tensor:
    *groups, n = shape
    root = torch.randn(*groups, n, rank or n, generator=generator, dtype=torch.float64)
    return root @ root.mT


def random_term(structure: str, shape: tuple[int, ...], seed: int, rank: int | None = None) -> Term:
    g = torch.Generator().manual_seed(seed)
    *groups, out, in_ = shape
    if structure == "diagonal":
        return DiagonalTerm(torch.rand(shape, generator=g, dtype=torch.float64))
    if structure == "dense":
        return DenseTerm(positive(g, torch.Size(shape).numel(), rank=rank))
    return KroneckerTerm(positive(g, *groups, in_, rank=rank), positive(g, *groups, out, rank=rank))


def as_dense(term: Term, shape: tuple[int, ...]) -> Tensor:
    """The term written out over W flattened row by row: there Q (x) H is kron(H, Q)."""
    if isinstance(term, DiagonalTerm):
        return torch.diag(term.diagonal.flatten())
    if isinstance(term, DenseTerm):
        return term.matrix
    q, h = term.factors()
    if len(shape) == 2:
        return torch.kron(h, q)
    return torch.block_diag(*(torch.kron(h_g, q_g) for h_g, q_g in zip(h, q, strict=True)))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    assert (a - b).norm() <= tolerance * b.norm().clamp_min(1e-300), (a - b).norm() / b.norm()


@pytest.fixture(params=[(s, shape) for s in STRUCTURES for shape in SHAPES], ids=str)
def one(request: pytest.FixtureRequest) -> tuple[Precision, Tensor]:
    """A precision after one task, where every structure is exact, and the dense matrix it stands for."""
    structure, shape = request.param
    term = random_term(structure, shape, seed=1)
    precision = STARTS[structure](torch.Size(shape), 0.7, DOUBLE).add(term, 2.5)
    n = torch.Size(shape).numel()
    return precision, 0.7 * torch.eye(n, dtype=torch.float64) + 2.5 * as_dense(term, shape)


def test_verbs_equal_the_dense_matrix(one: tuple[Precision, Tensor]) -> None:
    precision, L = one
    v = torch.randn(precision.shape, dtype=torch.float64)
    x = v.flatten()
    identity = torch.eye(len(x), dtype=torch.float64)
    close(precision.dense(), L)
    close(precision.apply(v).flatten(), L @ x)
    close(precision.quadratic(v), x @ L @ x)
    close(precision.proximal(v, 0.3).flatten(), torch.linalg.solve(identity + 0.3 * L, x))
    close(precision.solve(v).flatten(), torch.linalg.solve(L, x))
    close(precision.trace(), L.trace())
    close(precision.log_determinant(), torch.logdet(L))
    close(precision.scale(3.0).dense(), 3 * L)
    close(precision.fisher().dense(), (L - 0.7 * identity) / 2.5)


def test_the_spectrum_is_the_dense_matrix_in_its_basis(one: tuple[Precision, Tensor]) -> None:
    precision, L = one
    spectrum = precision.spectrum()
    v = torch.randn(precision.shape, dtype=torch.float64)
    identity = torch.eye(v.numel(), dtype=torch.float64)
    F = (L - 0.7 * identity) / 2.5
    close(spectrum.back(spectrum.into(v)), v)
    close(spectrum.back((0.7 + spectrum.total) * spectrum.into(v)).flatten(), L @ v.flatten())
    close(spectrum.back(spectrum.fisher * spectrum.into(v)).flatten(), F @ v.flatten())
    P = torch.linalg.inv(identity + 0.3 * (0.7 * identity + 4 * 2.5 * F))
    held = P @ v.flatten()
    close(spectrum.back(spectrum.into(v) / spectrum.proximal_denominator(0.3, 4.0)).flatten(), held)
    assert spectrum.rise(spectrum.into(v), 0.3, 4.0) == pytest.approx(float(held @ F @ held) / 2, rel=1e-9)
    P = torch.linalg.inv(identity + 0.3 * L)
    assert spectrum.expected_rise(0.3) == pytest.approx(float((P @ F @ P).trace()) / 2, rel=1e-9)


def test_the_applier_is_apply(one: tuple[Precision, Tensor]) -> None:
    precision, L = one
    v = torch.randn(precision.shape, dtype=torch.float64)
    close(precision.applier()(v).flatten(), L @ v.flatten())
    if isinstance(precision, Kronecker):
        other = precision.add(random_term("kronecker", tuple(precision.shape), seed=8), 1.0)
        close(other.applier()(v), other.apply(v), 1e-12)


def test_diagonals_are_those_of_the_dense_matrix(one: tuple[Precision, Tensor]) -> None:
    precision, L = one
    plain, total = precision.diagonals()
    close(total.flatten() + 0.7, L.diagonal())
    close(plain.flatten(), (L.diagonal() - 0.7) / 2.5)


def test_quadratic_is_differentiable(one: tuple[Precision, Tensor]) -> None:
    precision, L = one
    v = torch.randn(precision.shape, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(precision.quadratic(v) / 2, v)
    close(gradient.flatten(), L @ v.detach().flatten())


def test_samples_have_the_inverse_as_covariance(one: tuple[Precision, Tensor]) -> None:
    precision, L = one
    g = torch.Generator().manual_seed(0)
    draws = torch.stack([precision.sample(g).flatten() for _ in range(2000)])
    # Whitened by L the draws are standard normal, whatever the conditioning.
    white = draws @ torch.linalg.cholesky(L)
    covariance = white.T @ white / len(white)
    assert (covariance - torch.eye(len(L))).abs().max() < 6 * (2 / 2000) ** 0.5


def test_tensors_and_facts_bring_it_back(one: tuple[Precision, Tensor]) -> None:
    precision, L = one
    again = type(precision).restore(precision.shape, precision.tensors(), precision.metadata())
    assert torch.equal(again.dense(), precision.dense())
    assert precision.nbytes == sum(t.numel() * t.element_size() for t in precision.tensors().values())
    single = precision.to(torch.device("cpu"), torch.float32)
    close(single.dense().double(), L, 1e-6)
    for name, tensor in precision.tensors().items():
        wrong = {**precision.tensors(), name: torch.zeros(*tensor.shape, 2, dtype=torch.float64)}
        with pytest.raises(ValueError, match=r"shape"):
            type(precision).restore(precision.shape, wrong, precision.metadata())


@pytest.mark.parametrize("sides", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("structure", ["kronecker", "kronecker-sum"])
def test_either_basis_may_be_the_identity(structure: str, shape: tuple[int, ...], sides: tuple[bool, bool]) -> None:
    term = random_term("kronecker", shape, seed=3)
    assert isinstance(term, KroneckerTerm)
    q = term.inputs.diagonal(dim1=-2, dim2=-1) if sides[0] else term.inputs
    h = term.outputs.diagonal(dim1=-2, dim2=-1) if sides[1] else term.outputs
    term = KroneckerTerm(q, h, *sides)
    kind = STRUCTURES[structure]
    start = kind.start(torch.Size(shape), 0.5, DOUBLE, inputs_diagonal=sides[0], outputs_diagonal=sides[1])
    precision = start.add(term, 1.0).add(term, 1.0)
    L = 0.5 * torch.eye(torch.Size(shape).numel(), dtype=torch.float64) + 2 * as_dense(term, shape)
    v = torch.randn(shape, dtype=torch.float64)
    close(precision.apply(v).flatten(), L @ v.flatten())
    close(precision.trace(), L.trace())
    close(precision.log_determinant(), torch.logdet(L))
    again = kind.restore(precision.shape, precision.tensors(), precision.metadata())
    assert torch.equal(again.apply(v), precision.apply(v))


CUTS: list[tuple[tuple[int, ...] | None, tuple[int, ...] | None]] = [
    ((2, 2), None),
    (None, (2, 1)),
    ((3, 1), (1, 2)),
    ((1, 1, 1, 1), (1, 1, 1)),
]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("structure", ["kronecker", "kronecker-sum"])
def test_a_side_in_pieces_is_the_matrix_with_zeros_beside_them(
    structure: str, shape: tuple[int, ...], cuts: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
) -> None:
    kind, size = STRUCTURES[structure], torch.Size(shape)
    start = kind.start(size, 0.5, DOUBLE, inputs_sizes=cuts[0], outputs_sizes=cuts[1])  # type: ignore[call-arg]
    precision, plain = start, kind.start(size, 0.5, DOUBLE)
    L = 0.5 * torch.eye(size.numel(), dtype=torch.float64)
    for seed, strength in ((3, 1.0), (3, 1.0), (4, 3.0)):
        term = is_sharded(random_term("kronecker", shape, seed=seed), cuts)
        precision, plain = precision.add(term, strength), plain.add(KroneckerTerm(*term.factors()), strength)
        L = L + strength * as_dense(term, shape)
        if seed == 3 or structure == "kronecker-sum":  # tasks that differ have no common basis
            close(precision.dense(), L)
    close(precision.trace(), L.trace())
    if cuts[0] == (1, 1, 1, 1):
        close(precision.dense(), L)
    v, dense = torch.randn(shape, dtype=torch.float64), precision.dense()
    close(precision.applier()(v).flatten(), dense @ v.flatten())
    close(precision.quadratic(v), v.flatten() @ dense @ v.flatten())
    close(dense @ precision.solve(v).flatten(), v.flatten(), 1e-8)
    close(
        precision.proximal(v, 0.3).flatten(), torch.linalg.solve(torch.eye(len(dense)) + 0.3 * dense, v.flatten()), 1e-8
    )
    close(precision.log_determinant(), torch.logdet(dense))
    close(precision.diagonals()[1].flatten() + 0.5, dense.diagonal())
    into = precision.spectrum()
    close(into.back(into.into(v)), v)
    again = kind.restore(precision.shape, precision.tensors(), precision.metadata())
    assert torch.equal(again.apply(v), precision.apply(v))
    assert precision.nbytes < plain.nbytes
    wrong = {name: t for name, t in precision.tensors().items() if not name.endswith("vectors.1")}
    if len(wrong) < len(precision.tensors()):
        with pytest.raises(ValueError):
            kind.restore(precision.shape, wrong, precision.metadata())


def test_a_factor_in_other_pieces_is_taken_as_far_as_it_goes() -> None:
    """A file of an earlier release may have a side cut at other places than a pass cuts it now."""
    term = random_term("kronecker", (3, 4), seed=3)
    there, other = (is_sharded(term, cuts) for cuts in (((2, 2), None), ((3, 1), (1, 2))))
    start = Kronecker.start(torch.Size([3, 4]), 0.5, DOUBLE, inputs_sizes=(2, 2))
    both = torch.block_diag(torch.ones(2, 2), torch.ones(1, 1), torch.ones(1, 1)).double()
    q, h = other.factors()
    L = 0.5 * torch.eye(12, dtype=torch.float64) + torch.kron(h, q * both)
    close(start.add(other, 1.0).dense(), L)
    close(start.add(there, 1.0).dense(), 0.5 * torch.eye(12) + as_dense(there, (3, 4)))
    whole = Kronecker.start(torch.Size([3, 4]), 0.5, DOUBLE)
    close(whole.add(other, 1.0).dense(), 0.5 * torch.eye(12) + as_dense(other, (3, 4)))


def is_sharded(term: Term, cuts: tuple[tuple[int, ...] | None, tuple[int, ...] | None]) -> KroneckerTerm:
    """The term without what lies beside the pieces of its sides."""
    assert isinstance(term, KroneckerTerm)

    def side(matrix: Tensor, sizes: tuple[int, ...] | None) -> Matrix:
        if sizes is None:
            return matrix
        rows = matrix.split(sizes, -2)
        return BlockDiagonal(tuple(part.split(sizes, -1)[i].clone() for i, part in enumerate(rows)))

    q, h = term.factors()
    return KroneckerTerm(side(q, cuts[0]), side(h, cuts[1]))


def test_both_bases_the_identity_is_the_diagonal_structure() -> None:
    d = torch.rand(3, 4, dtype=torch.float64)
    shape = torch.Size([3, 4])
    both = Kronecker.start(shape, 1.0, DOUBLE, inputs_diagonal=True, outputs_diagonal=True)
    for row in range(3):  # a matrix of rank 3 as a sum of three products
        e = torch.zeros(3, dtype=torch.float64)
        e[row] = 1
        both = both.add(KroneckerTerm(d[row], e, True, True), 2.0)
    close(both.dense(), Diagonal.start(shape, 1.0, DOUBLE).add(DiagonalTerm(d), 2.0).dense(), 1e-14)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("shape", [(6, 9), (2, 4, 5)], ids=str)
@pytest.mark.parametrize("rank", [None, 2])
def test_equal_tasks_add_up_in_float32(structure: str, shape: tuple[int, ...], rank: int | None) -> None:
    term = random_term(structure, shape, seed=5, rank=rank)
    one = STARTS[structure](torch.Size(shape), 0.0, SINGLE).add(term, 3.0)
    many = one
    for _ in range(9):
        many = many.add(term, 3.0)
    for seed in range(5):
        v = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        close(many.apply(v).double(), 10 * one.apply(v).double(), 1e-6)


def test_different_tasks_keep_the_trace_and_the_size() -> None:
    shape = torch.Size([7, 11])
    eigen, exact = Kronecker.start(shape, 1.0, SINGLE), KroneckerSum.start(shape, 1.0, SINGLE)
    sizes = []
    for seed in range(50):
        term = random_term("kronecker", shape, seed)
        eigen, exact = eigen.add(term, 3.0), exact.add(term, 3.0)
        sizes.append(eigen.nbytes)
        assert bool((eigen.values.plain >= 0).all())
        if seed == 9:
            close(eigen.trace(), exact.trace(), 1e-6)
    assert set(sizes) == {sizes[0]}


def test_the_carried_eigenvalues_are_the_diagonal_of_the_sum_in_the_new_basis() -> None:
    """Two different tasks: D is exactly diag(V^T (F_1 + F_2) V), the nearest in the Frobenius norm,
    up to what the first task's form already lost (nothing: it is exact)."""
    shape = torch.Size([3, 4])
    first, second = (random_term("kronecker", shape, seed) for seed in (1, 2))
    precision = Kronecker.start(shape, 0.0, DOUBLE).add(first, 1.0).add(second, 1.0)
    assert precision.outputs.vectors is not None and precision.inputs.vectors is not None
    V = torch.kron(precision.outputs.vectors, precision.inputs.vectors)
    written_out = V.T @ (as_dense(first, shape) + as_dense(second, shape)) @ V
    close(precision.values.plain.flatten(), written_out.diagonal())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_mixed_strengths_keep_the_fisher_itself(structure: str) -> None:
    shape = torch.Size([3, 4])
    term = random_term(structure, shape, seed=7)
    F = as_dense(term, shape)
    precision = STARTS[structure](shape, 1.0, DOUBLE).add(term, 2.0).add(term, 5.0).add(term, 5.0)
    close(precision.dense(), torch.eye(12, dtype=torch.float64) + 12 * F)
    close(precision.fisher().dense(), 3 * F)
    again = type(precision).restore(shape, precision.tensors(), precision.metadata())
    close(again.fisher().dense(), 3 * F)
    close(again.scale(2.0).dense(), 2 * torch.eye(12, dtype=torch.float64) + 24 * F)


@settings(max_examples=40, deadline=None)
@given(
    out=st.integers(1, 6),
    in_=st.integers(1, 6),
    tasks=st.integers(1, 4),
    rank=st.integers(1, 6),
    scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e6]),
    step=st.sampled_from([0.0, 1e-3, 1.0, 1e3]),
    seed=st.integers(0, 10_000),
)
def test_proximal_map_equals_the_dense_solve(
    out: int, in_: int, tasks: int, rank: int, scale: float, step: float, seed: int
) -> None:
    shape = torch.Size([out, in_])
    v = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for structure in STRUCTURES:
        precision = STARTS[structure](shape, 1.0, DOUBLE)
        for task in range(tasks):
            precision = precision.add(random_term(structure, shape, seed + task, rank).scaled(scale), 1.0)
        system = torch.eye(out * in_, dtype=torch.float64) + step * precision.dense()
        solved = torch.linalg.solve(system, v.flatten())
        error = (precision.proximal(v, step).flatten() - solved).norm()
        # The map is a contraction: what rounding leaves is relative to v, however small the result.
        assert error <= 1e-6 * solved.norm() + 1e-12 * v.norm()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_zero_and_rank_deficient_factors(structure: str) -> None:
    shape = torch.Size([3, 4])
    zero = random_term(structure, shape, seed=1).scaled(0.0)
    if isinstance(zero, KroneckerTerm):
        zero = KroneckerTerm(torch.zeros_like(zero.inputs), torch.zeros_like(zero.outputs))
    precision = STARTS[structure](shape, 2.0, SINGLE).add(zero, 1.0)
    v = torch.randn(shape)
    close(precision.apply(v), 2 * v, 1e-6)
    close(precision.solve(v), v / 2, 1e-6)
    rank_one = precision.add(random_term(structure, shape, seed=2, rank=1), 1.0)
    close(rank_one.solve(rank_one.apply(v)), v, 1e-4)
    assert torch.isfinite(rank_one.log_determinant())


def test_badly_scaled_factors_keep_their_digits() -> None:
    shape = torch.Size([3, 4])
    scales_q = torch.diag(torch.tensor([1e-8, 1e-3, 1.0, 1e8], dtype=torch.float64))
    scales_h = torch.diag(torch.tensor([1e-9, 1.0, 1e9], dtype=torch.float64))
    term = KroneckerTerm(scales_q, scales_h)
    precision = Kronecker.start(shape, 1.0, SINGLE).add(term, 1.0).add(term, 1.0)
    expected = 1 + 2 * scales_h.diagonal()[:, None] * scales_q.diagonal()
    v = torch.ones(shape)
    assert torch.allclose(precision.apply(v).double(), expected, rtol=1e-5)
    assert torch.allclose(precision.solve(v).double(), 1 / expected, rtol=1e-5)


def test_a_solver_that_does_not_converge_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Tensor) -> tuple[Tensor, Tensor]:
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    matrix = positive(torch.Generator().manual_seed(1), 5)
    expected, _ = torch.linalg.eigh(matrix)
    monkeypatch.setattr(limpet_linalg.torch.linalg, "eigh", fails)
    values, vectors = limpet_linalg.symmetric_eigen(matrix)
    close(vectors @ torch.diag(values) @ vectors.T, matrix)
    close(values.sort().values, expected)


def test_what_cannot_be_right_is_refused() -> None:
    shape = torch.Size([3, 4])
    with pytest.raises(LimpetError, match="inf or nan"):
        bad = KroneckerTerm(torch.full((4, 4), float("nan")), torch.eye(3))
        Kronecker.start(shape, 1.0, SINGLE).add(bad, 1.0)
    with pytest.raises(LimpetError, match="prior_precision > 0"):
        Diagonal.start(shape, 0.0, SINGLE).sample()
    large = KroneckerSum.start(torch.Size([65, 65]), 1.0, SINGLE)
    with pytest.raises(UnsupportedError, match="structure='kronecker'"):
        large.log_determinant()
    for structure in STRUCTURES:
        other = "dense" if structure == "diagonal" else "diagonal"
        with pytest.raises(TypeError, match="takes a"):
            STARTS[structure](shape, 1.0, SINGLE).add(random_term(other, shape, 1), 1.0)


@pytest.mark.parametrize("structure", STARTS)
def test_a_singular_precision_cannot_be_sampled(structure: str) -> None:
    shape = torch.Size([3, 4])
    precision = STARTS[structure](shape, 0.0, SINGLE).add(random_term(structure, shape, seed=0, rank=1), 1.0)
    if structure != "diagonal":  # whose one term already has every entry
        with pytest.raises(LimpetError, match="prior_precision > 0"):
            precision.sample()

"""Tests of the path between two curvatures, against the minimiser of the two dense quadratics."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from limpet.precision import (
    STRUCTURES,
    DenseTerm,
    DiagonalTerm,
    KroneckerTerm,
    Precision,
    Term,
)
from limpet.precision.block_diagonal import joined
from limpet.precision.pencil import Damping, Pencil, truncated
from limpet.precision.pencils import pencil

STRENGTHS = (0.01, 0.3, 1.0, 7.0, 100.0)
DAMPING = Damping(old=0.01, new=0.1)


def spd(*shape: int, seed: int) -> Tensor:
    """Positive definite matrices (..., n, n)."""
    size = (*shape[:-1], shape[-1] + 2)
    root = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return root @ root.mT / shape[-1]


def block(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_mean(matrix: Tensor, amount: float) -> Tensor:
    """M + amount mean(diag M) I, written out."""
    n = matrix.shape[-1]
    return matrix + amount * matrix.diagonal().mean() * torch.eye(n, dtype=matrix.dtype)


def kron(h: Tensor, q: Tensor) -> Tensor:
    """The matrix over W (out, in), flattened row by row, of H W Q."""
    return torch.kron(h.contiguous(), q.contiguous())


def minimiser(new: Tensor, old: Tensor, d: Tensor, strength: float, linear_term: Tensor | None = None) -> Tensor:
    """argmin 1/2 |x - d|^2_new + strength (1/2 |x|^2_old + slope^T x)."""
    target = new @ d.flatten() - (0 if linear_term is None else strength * linear_term.flatten())
    return torch.linalg.solve(new + strength * old, target).reshape(d.shape)


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def taken(structure: str, shape: tuple[int, ...], terms: list[Term], **sides: Any) -> Precision:
    precision: Any = STRUCTURES[structure].start(torch.Size(shape), 0.5, torch.zeros((), dtype=torch.float64), **sides)
    for term in terms:
        precision = precision.add(term, 3.0)  # a strength and a prior, neither of which counts here
    return precision


def product(out: int, in_: int, seed: int) -> KroneckerTerm:
    return KroneckerTerm(spd(in_, in_, seed=seed), spd(out, out, seed=seed + 1))


def dense(term: KroneckerTerm, amount: float, columns: slice = slice(None)) -> Tensor:
    q, h = term.factors()
    return kron(with_mean(h, amount), with_mean(q[columns, columns], amount))


def whole(shape: tuple[int, ...]) -> slice:
    return slice(0, shape[-1])


def test_two_products_give_the_dense_minimiser() -> None:
    shape = (5, 7)
    old, new, d = product(5, 7, 1), product(5, 7, 3), block(shape, 5)
    path = pencil(taken("kronecker", shape, [old]), [new], [d], columns=whole(shape), damping=DAMPING)
    for strength in STRENGTHS:
        want = minimiser(dense(new, 0.1), dense(old, 0.01), d, strength)
        assert far(path.at(strength)[0], want) < 1e-10


@pytest.mark.parametrize("columns", [slice(0, 6), slice(6, 7)], ids=["weight alone", "bias alone"])
def test_columns_that_may_not_move_stay_and_the_others_take_it_into_account(columns: slice) -> None:
    shape = (5, 7)
    old, new, d = product(5, 7, 1), product(5, 7, 3), torch.zeros(shape, dtype=torch.float64)
    d[:, columns] = block((5, columns.stop - columns.start), 5)
    path = pencil(taken("kronecker", shape, [old]), [new], [d], columns=columns, damping=DAMPING)
    for strength in STRENGTHS:
        found = path.at(strength)[0]
        want = minimiser(dense(new, 0.1, columns), dense(old, 0.01, columns), d[:, columns], strength)
        assert far(found[:, columns], want) < 1e-10
        rest = torch.ones(7, dtype=torch.bool)
        rest[columns] = False
        assert not found[:, rest].any()


def test_several_tasks_in_one_eigenbasis_are_solved_exactly() -> None:
    shape = (4, 6)
    tasks = [product(4, 6, seed) for seed in (1, 11, 21)]
    memory: Any = taken("kronecker", shape, list(tasks))
    new, d = product(4, 6, 31), block(shape, 5)
    values = memory.fisher().values.plain
    h, q = memory.outputs.vectors, memory.inputs.vectors
    # damped as the product of damped factors would be, which this eigenbasis is not
    damped = values + 0.01 * (values.mean(1, keepdim=True) + values.mean(0)) + 1e-4 * values.mean()
    basis = kron(h, q)
    old = basis @ torch.diag(damped.flatten()) @ basis.mT
    path = pencil(memory, [new], [d], columns=whole(shape), damping=DAMPING)
    for strength in STRENGTHS:
        assert far(path.at(strength)[0], minimiser(dense(new, 0.1), old, d, strength)) < 1e-8


def test_a_sum_of_products_is_solved_exactly_on_either_side() -> None:
    shape = (4, 6)
    tasks, news, d = [product(4, 6, s) for s in (1, 11)], [product(4, 6, s) for s in (31, 41)], block(shape, 5)
    path = pencil(taken("kronecker-sum", shape, list(tasks)), news, [d], columns=whole(shape), damping=DAMPING)
    old, new = sum(dense(t, 0.01) for t in tasks), sum(dense(t, 0.1) for t in news)
    for strength in STRENGTHS:
        assert far(path.at(strength)[0], minimiser(new, torch.as_tensor(old), d, strength)) < 1e-8


def test_diagonal_sides_and_pieces() -> None:
    shape = (4, 6)
    q = joined([spd(4, 4, seed=1), spd(2, 2, seed=2)])
    h = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.1
    old = KroneckerTerm(q, h, False, True)
    new = KroneckerTerm(joined([spd(4, 4, seed=4), spd(2, 2, seed=5)]), h.flip(0), False, True)
    sides = {"inputs_sizes": (4, 2), "outputs_diagonal": True}
    d = block(shape, 5)
    for tasks in ([old], [old, new]):
        memory: Any = taken("kronecker", shape, list(tasks), **sides)
        path = pencil(memory, [new], [d], columns=whole(shape), damping=DAMPING)
        dense_old = memory.fisher().dense()
        if len(tasks) == 1:
            dense_old = dense(old, 0.01)
        else:
            values = memory.fisher().values.plain
            damped = values + 0.01 * (values.mean(1, keepdim=True) + values.mean(0)) + 1e-4 * values.mean()
            basis = kron(torch.eye(4, dtype=torch.float64), memory.inputs.vectors.dense())
            dense_old = basis @ torch.diag(damped.flatten()) @ basis.mT
        for strength in STRENGTHS:
            assert far(path.at(strength)[0], minimiser(dense(new, 0.1), dense_old, d, strength)) < 1e-8


def test_groups_are_blocks_of_their_own() -> None:
    shape = (3, 4, 5)
    old, new = (KroneckerTerm(spd(3, 5, 5, seed=s), spd(3, 4, 4, seed=s + 1)) for s in (1, 3))
    d = block(shape, 5)
    for tasks in ([old], [old, new]):
        path = pencil(taken("kronecker", shape, list(tasks)), [new], [d], columns=whole(shape), damping=DAMPING)
        for g in range(3):
            alone = [KroneckerTerm(t.inputs[g], t.outputs[g]) for t in tasks]
            single = pencil(
                taken("kronecker", shape[1:], list(alone)),
                [KroneckerTerm(new.inputs[g], new.outputs[g])],
                [d[g]],
                columns=whole(shape),
                damping=DAMPING,
            )
            assert far(path.at(1.0)[0][g], single.at(1.0)[0]) < 1e-7


@pytest.mark.parametrize("structure", ["diagonal", "dense"])
def test_diagonal_and_dense_blocks(structure: str) -> None:
    shape, n = (3, 4), 12
    d, linear_term = block(shape, 5), block(shape, 6)
    if structure == "diagonal":
        values = [block(shape, s).square() for s in (1, 2)]
        old, new = (DiagonalTerm(v) for v in values)
        matrices = [torch.diag(v.flatten()) for v in values]
    else:
        matrices = [spd(n, n, seed=s) for s in (1, 2)]
        old, new = (DenseTerm(m) for m in matrices)
    memory = taken(structure, shape, [old])
    dense_old, dense_new = with_mean(matrices[0], 0.01), with_mean(matrices[1], 0.1)
    for pull in (None, linear_term):
        path = pencil(memory, [new], [d], columns=whole(shape), linear_term=pull, damping=DAMPING)
        for strength in STRENGTHS:
            assert far(path.at(strength)[0], minimiser(dense_new, dense_old, d, strength, pull)) < 1e-10


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_slope_moves_the_old_optimum(tasks: int) -> None:
    shape = (4, 6)
    olds, new = [product(4, 6, 10 * t + 1) for t in range(tasks)], product(4, 6, 51)
    d, linear_term = block(shape, 5), block(shape, 6)
    memory = taken("kronecker-sum", shape, list(olds))
    path = pencil(memory, [new], [d], columns=whole(shape), linear_term=linear_term, damping=DAMPING)
    old = torch.as_tensor(sum(dense(t, 0.01) for t in olds))
    for strength in STRENGTHS:
        assert far(path.at(strength)[0], minimiser(dense(new, 0.1), old, d, strength, linear_term)) < 1e-8


def any_path(
    name: str,
    damping: Damping = DAMPING,
    *,
    equal: bool = False,
    parts: list[Tensor] | None = None,
    offset: Tensor | None = None,
) -> tuple[Pencil, Tensor]:
    shape = (4, 6)
    d = block(shape, 5)
    if name == "diagonal":
        old, new = (DiagonalTerm(block(shape, s).square()) for s in (1, 2))
    elif name == "dense":
        old, new = (DenseTerm(spd(24, 24, seed=s)) for s in (1, 2))
    else:
        old, new = product(4, 6, 1), product(4, 6, 3)
    tasks = [old] if equal else [old, new] if name == "kronecker, two tasks" else [old]
    structure = name.partition(",")[0]
    memory = taken(structure, shape, tasks)
    path = pencil(memory, [old if equal else new], parts or [d], columns=whole(shape), offset=offset, damping=damping)
    return path, d


@pytest.mark.parametrize("name", ["diagonal", "dense", "kronecker", "kronecker, two tasks", "kronecker-sum"])
def test_factors_of_a_full_rank_are_the_share_less_the_offset(name: str) -> None:
    offset, other = block((4, 6), 8), block((4, 6), 9)
    path, d = any_path(name, parts=[block((4, 6), 5) - other, other], offset=offset)
    shares = path.at(0.7)
    for part, wanted in enumerate((0.9 * shares[0] - offset, 0.9 * shares[1])):
        left, right = path.low_rank(0.7, part, 4, 0.9)
        assert far(left @ right, wanted) < 1e-7
    assert d.shape == (4, 6)


NAMES = ["diagonal", "dense", "kronecker", "kronecker, two tasks", "kronecker-sum"]


@pytest.mark.parametrize("name", NAMES)
def test_equal_curvatures_give_uniform_scaling(name: str) -> None:
    path, d = any_path(name, Damping(0.1, 0.1), equal=True)
    for strength in STRENGTHS:
        assert far(path.at(strength)[0], d / (1 + strength)) < 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_the_path_goes_from_the_tuned_weights_to_those_before_and_is_monotone(name: str) -> None:
    path, d = any_path(name)
    assert far(path.at(0.0)[0], d) < 1e-10
    assert float(path.at(1e12)[0].norm() / d.norm()) < 1e-6
    ladder = [path.quadratics(10.0**power) for power in range(-4, 5)]
    new, old = zip(*ladder, strict=True)
    assert all(a < b for a, b in itertools.pairwise(new))
    assert all(a > b for a, b in itertools.pairwise(old))


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_the_displacement_have_their_shares(name: str) -> None:
    shape, d = (4, 6), block((4, 6), 5)
    first = block(shape, 9)
    one, _ = any_path(name)
    both, _ = any_path(name, parts=[first, d - first])
    assert far(torch.stack(both.at(2.0)).sum(0), one.at(2.0)[0]) < 1e-9


@pytest.mark.parametrize("name", ["kronecker", "kronecker, two tasks"])
def test_the_cut_to_a_rank_is_the_best_in_the_metric_of_both_curvatures(name: str) -> None:
    shape = (4, 6)
    path, _ = any_path(name)
    left, right = path.low_rank(1.0, 0, 2)
    assert left.shape == (4, 2) and right.shape == (2, 6)
    x = path.at(1.0)[0]
    assert (
        far(torch.stack([torch.stack(path.low_rank(1.0, 0, 4)[:1]).sum(0) @ path.low_rank(1.0, 0, 4)[1]])[0], x) < 1e-7
    )
    if name != "kronecker":
        return
    old, new = product(4, 6, 1), product(4, 6, 3)
    roots = []
    for index, amount_of in ((1, "outputs"), (0, "inputs")):
        del index
        factors = [with_mean(getattr(term, amount_of), amount) for term, amount in ((new, 0.1), (old, 0.01))]
        roots.append(torch.linalg.cholesky(torch.as_tensor(sum(f / f.diagonal().mean() for f in factors))))
    g, a = roots
    u, s, v = torch.linalg.svd(g.mT @ x @ a)
    want = torch.linalg.solve(g.mT, (u[:, :2] * s[:2]) @ v[:2]) @ torch.linalg.inv(a)
    assert far(left @ right, want) < 1e-8
    assert shape == tuple(x.shape)


def test_truncated_is_the_truncated_singular_value_decomposition() -> None:
    for shape in ((9, 4), (4, 9)):
        matrix = block(shape, 1)
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        left, right = truncated(matrix, 3)
        assert far(left @ right, (u[:, :3] * s[:3]) @ v[:3]) < 1e-10
        assert far(left.norm(), right.norm()) < 1e-10  # the same size on both sides


def test_a_small_rank_of_a_large_matrix_is_found_by_its_range() -> None:
    for shape in ((90, 70), (70, 90)):
        # singular values that fall slowly, which is hardest for a range finder
        u, _, v = torch.linalg.svd(block(shape, 1), full_matrices=False)
        s = 1 / torch.arange(1, 71, dtype=torch.float64).sqrt()
        matrix = (u * s) @ v
        left, right = truncated(matrix, 5)
        assert left.shape == (shape[0], 5)
        assert float((matrix - left @ right).norm()) < 1.001 * float(s[5:].norm())
        assert torch.equal(truncated(matrix, 5)[0], left)

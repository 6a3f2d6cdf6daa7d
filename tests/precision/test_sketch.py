"""Factors of long sides: low rank plus a multiple of the identity, and the sketches that they are recovered from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from limpet.errors import LimpetError
from limpet.precision import Kronecker, KroneckerTerm
from limpet.precision.pencils import pencil
from limpet.precision.sketch import Sketch, sketch_columns
from limpet.precision.spiked import Spiked
from limpet.precision.spiked_basis import generalized_basis

GROUPS = [(), (3,)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spiked(n: int, m: int, seed: int = 0, groups: tuple[int, ...] = ()) -> Spiked:
    weights = drawn(*groups, m, seed=seed + 1).square() + 0.1
    return Spiked(drawn(*groups, n, m, seed=seed), weights, drawn(*groups, seed=seed + 2).square() + 0.1)


@pytest.mark.parametrize("groups", GROUPS)
def test_operations_are_those_of_the_dense_matrix(groups: tuple[int, ...]) -> None:
    one, other = spiked(8, 3, groups=groups), spiked(8, 2, 10, groups)
    dense = one.dense()
    x, factor = drawn(*groups, 8, 4, seed=20), drawn(*groups, seed=21)
    torch.testing.assert_close(one @ x, dense @ x)
    torch.testing.assert_close(x.mT @ one, x.mT @ dense)
    torch.testing.assert_close((one + other).dense(), dense + other.dense())
    torch.testing.assert_close((one * factor).dense(), dense * factor.reshape(*groups, 1, 1))
    torch.testing.assert_close((one / 4).dense(), dense / 4)
    torch.testing.assert_close(one.diagonal(), dense.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(one.kept(slice(2, 7)).dense(), dense[..., 2:7, 2:7])
    basis = torch.linalg.qr(x)[0]
    torch.testing.assert_close(one.projected(basis), basis.mT @ dense @ basis)
    values, vectors = one.top_eigen(3)
    torch.testing.assert_close(values, torch.linalg.eigvalsh(dense)[..., -3:])
    torch.testing.assert_close(dense @ vectors, vectors * values.unsqueeze(-2))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("ones", [False, True])
def test_a_sketch_of_few_rows_recovers_their_factor(groups: tuple[int, ...], ones: bool) -> None:
    rows = drawn(*groups, 6, 40)
    sketch = Sketch.zeros(groups, 40 + ones, 8, rows.new_zeros(()))
    for part in rows.split(4, -2):
        sketch.add(part, ones=ones)
    if ones:
        rows = torch.cat([rows, torch.ones_like(rows[..., :1])], -1)
    torch.testing.assert_close(sketch.recovered().dense(), rows.mT @ rows, rtol=1e-6, atol=1e-6)


def test_a_sketch_keeps_the_trace_and_most_of_the_leading_eigenvalues() -> None:
    rows = drawn(400, 160) / torch.arange(1.0, 161, dtype=torch.float64)
    whole = rows.mT @ rows
    for dtype in (torch.float32, torch.float64):
        sketch = Sketch.zeros((), 160, 2 * 20, torch.zeros((), dtype=dtype))
        sketch.add(rows.to(dtype), ones=False)
        found = sketch.recovered().widened()
        assert float(found.diagonal().sum()) == pytest.approx(float(whole.trace()), rel=1e-6)
        assert float(torch.linalg.eigvalsh(found.dense())[0]) >= 0
        _, vectors = found.top_eigen(20)
        held = float((vectors * (whole @ vectors)).sum() / torch.linalg.eigvalsh(whole)[-20:].sum())
        assert 0.998 < held <= 1
        assert float((found.dense() - whole).norm()) < 0.01 * float(whole.norm())


def test_sums_of_sketches_are_sketches_of_sums() -> None:
    rows = drawn(12, 40)
    parts = [Sketch.zeros((), 40, 8, rows.new_zeros(())) for _ in range(3)]
    for sketch, some in zip(parts, (rows, rows[:5], rows[5:]), strict=True):
        sketch.add(some, ones=False)
    whole, first, second = parts
    torch.testing.assert_close(whole.product, first.product + second.product)
    names = whole.named("data/a")
    again = Sketch.find("data/a", names, rows.device)
    assert again is not None and torch.equal(again.product, whole.product)
    assert Sketch.find("data/b", names, rows.device) is None


def test_sketches_of_zero_and_of_nan() -> None:
    sketch = Sketch.zeros((), 40, 8, torch.zeros((), dtype=torch.float32))
    assert not sketch.recovered().dense().any()
    sketch.product[3, 2] = torch.nan
    with pytest.raises(LimpetError, match="inf or nan"):
        sketch.recovered()


def test_which_sides_are_sketched() -> None:
    assert sketch_columns(1536, 128) == 256
    assert sketch_columns(576, 128) is None
    assert sketch_columns(1536, None) is None


@pytest.mark.parametrize("groups", GROUPS)
def test_the_generalized_basis_is_that_of_the_dense_matrices(groups: tuple[int, ...]) -> None:
    new, old = spiked(30, 4, groups=groups), spiked(30, 3, 10, groups)
    found = generalized_basis(new, old)
    assert found is not None
    vectors, dual, values = found
    identity = torch.eye(30, dtype=torch.float64).expand(*groups, 30, 30)
    V, W = identity @ vectors, identity @ dual
    torch.testing.assert_close(V.mT @ new.dense() @ V, identity)
    torch.testing.assert_close(V.mT @ old.dense() @ V, torch.diag_embed(values))
    torch.testing.assert_close(V.mT @ W, identity)
    x = drawn(*groups, 5, 30, seed=30)
    torch.testing.assert_close(x @ vectors.mT, x @ V.mT)
    third = spiked(30, 2, 20, groups)
    torch.testing.assert_close(vectors.diagonal_of(third), (V.mT @ third.dense() @ V).diagonal(dim1=-2, dim2=-1))
    assert generalized_basis(spiked(30, 10), spiked(30, 6)) is None


def long_term(seed: int, *, dense: bool) -> KroneckerTerm:
    """A term with a long side of 64 inputs and 6 outputs."""
    root = drawn(6, 6, seed=seed + 7)
    found = spiked(64, 8, seed)
    return KroneckerTerm(found.dense() if dense else found, root @ root.mT)


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_precision_of_spiked_factors_is_that_of_dense_ones(tasks: int) -> None:
    like, found = torch.zeros((), dtype=torch.float64), []
    for dense in (False, True):
        precision = Kronecker.start(torch.Size((6, 64)), 0.5, like, rank=7)
        for seed in range(tasks):
            precision = precision.add(long_term(seed, dense=dense), 2.0)
        found.append(precision)
    x = drawn(6, 64, seed=40)
    # the leading eigenvalues of a dense factor come from a range finder
    torch.testing.assert_close(found[0].apply(x), found[1].apply(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_repair_with_spiked_factors_is_that_with_dense_ones(tasks: int) -> None:
    old = Kronecker.start(torch.Size((6, 64)), 0.0, torch.zeros((), dtype=torch.float64), rank=7)
    for seed in range(tasks):
        old = old.add(long_term(seed, dense=False), 1.0)
    moved = drawn(6, 64, seed=41)
    paths = [pencil(old, [long_term(90, dense=dense)], [moved], columns=slice(0, 64)) for dense in (False, True)]
    for strength in (0.1, 1.0, 10.0):
        (one,), (other,) = (path.at(strength) for path in paths)
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)
        assert paths[0].quadratics(strength) == pytest.approx(paths[1].quadratics(strength), rel=1e-7)
        left, right = paths[0].low_rank(strength, 0, 2)
        expected_left, expected_right = paths[1].low_rank(strength, 0, 2)
        torch.testing.assert_close(left @ right, expected_left @ expected_right, rtol=1e-6, atol=1e-6)

"""Truncated factors, held against the dense matrix of what they claim to be."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from limpet.errors import LimpetError
from limpet.precision import Kronecker, KroneckerTerm
from limpet.precision.basis import Basis
from limpet.precision.linalg import top_eigen
from limpet.precision.pencils import pencil
from limpet.precision.reflections import Reflections
from limpet.precision.rotation import Rotation
from limpet.precision.spectrum import Spectrum
from limpet.precision.storage import Storage
from limpet.precision.weighted import WeightedSum

OUT, IN, RANK = 6, 9, 3


def factor(n: int, seed: int, groups: tuple[int, ...] = ()) -> Tensor:
    root = torch.randn(*groups, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    decay = torch.logspace(0, -2, n, dtype=torch.float64)
    return (root * decay) @ (root * decay).mT


def term(seed: int, groups: tuple[int, ...] = ()) -> KroneckerTerm:
    return KroneckerTerm(factor(IN, seed, groups), factor(OUT, seed + 100, groups))


def cut(matrix: Tensor, rank: int) -> Tensor:
    """The matrix with the mean of its small eigenvalues instead of each of them."""
    values, vectors = torch.linalg.eigh(matrix)
    values[:-rank] = values[:-rank].mean()
    return (vectors * values) @ vectors.mT


def one(prior: float = 0.5, groups: tuple[int, ...] = (), rank: int = RANK, strength: float = 2.0) -> Kronecker:
    like = torch.zeros((), dtype=torch.float64)
    start = Kronecker.start(torch.Size((*groups, OUT, IN)), prior, like, rank=rank)
    return start.add(term(0, groups), strength)


def vector(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def test_reflections_complete_a_basis() -> None:
    columns = torch.linalg.qr(vector(4, 9, 3))[0]
    basis = Reflections.completing(columns)
    whole = basis.dense()
    torch.testing.assert_close(whole.mT @ whole, torch.eye(9, dtype=torch.float64).expand(4, 9, 9))
    torch.testing.assert_close((basis.first().mT @ columns).abs(), torch.eye(3, dtype=torch.float64).expand(4, 3, 3))
    x = vector(4, 9, 9)
    for mine, dense in ((basis, whole), (basis.mT, whole.mT)):
        torch.testing.assert_close(mine @ x, dense @ x)
        torch.testing.assert_close(x @ mine, x @ dense)


@pytest.mark.parametrize("dtype", [None, "float16", "int8"])
def test_low_rank_factors_are_multiplied_in_half_the_operations(dtype: str | None) -> None:
    stored = Reflections.completing(torch.linalg.qr(vector(40, 12).float())[0]).laid(Storage(dtype))
    basis = stored.to(torch.device("cpu"), torch.float32)
    values = torch.cat([vector(12).float().exp(), torch.full((28,), 0.1)])
    x = vector(5, 40).float().requires_grad_()
    whole = basis.dense()
    dense = (whole * values) @ whole.mT
    found = basis.weighted(values, x)
    torch.testing.assert_close(found, x @ dense, atol=2e-5, rtol=1e-4)
    by_row = values * torch.arange(1, 6).unsqueeze(-1)  # others in every row
    torch.testing.assert_close(basis.weighted(by_row, x), ((x @ whole) * by_row) @ whole.mT, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], dense.sum(1).expand_as(x), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("side", ["reflections", "dense", "none"])
def test_rotations_weigh_low_rank_factors(side: str) -> None:
    vectors = Reflections.completing(torch.linalg.qr(vector(9, 3))[0])
    basis = {"reflections": vectors, "dense": vectors.dense(), "none": None}[side]
    whole = torch.eye(9, dtype=torch.float64) if side == "none" else vectors.dense()
    values = torch.tensor([5.0, 3.0, 2.0, *[0.5] * 6], dtype=torch.float64)
    dense, rotation = (whole * values) @ whole.mT, Rotation(basis, basis)
    left, right = vector(9, 2), vector(2, 8)  # the block has a bias column, which adapters do not change
    torch.testing.assert_close(rotation.rows_weighted(values, left), dense @ left)
    torch.testing.assert_close(rotation.columns_weighted(values, right), right @ dense[:8, :8])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_reflections_are_orthogonal_and_near(dtype: torch.dtype) -> None:
    columns = torch.linalg.qr(vector(200, 40))[0].float()
    basis = Reflections.of(Reflections.completing(columns).vectors.to(dtype)).to(torch.device("cpu"), torch.float32)
    whole = basis.dense()
    torch.testing.assert_close(whole.mT @ whole, torch.eye(200), atol=2e-6, rtol=0)
    cosines = (basis.first() * columns).sum(0).abs()
    assert float(1 - cosines.min()) < 40 * torch.finfo(dtype).eps ** 2


def test_eight_bits_change_eigenvectors_by_at_most_two_percent() -> None:
    columns = torch.linalg.qr(vector(600, 128))[0].float()
    stored = Reflections.completing(columns).laid(Storage("int8"))
    assert stored.vectors.dtype == torch.int8
    basis = stored.to(torch.device("cpu"), torch.float32)
    torch.testing.assert_close(basis.mT @ basis.dense(), torch.eye(600), atol=3e-6, rtol=0)
    signs = (basis.first() * columns).sum(0).sign()
    assert float((basis.first() * signs - columns).norm(dim=0).max()) < 0.02


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_largest_eigenvalues_of_a_long_side(power: float) -> None:
    vectors = torch.linalg.qr(vector(2, 400, 400))[0]
    exact = torch.arange(1, 401, dtype=torch.float64) ** -power
    matrix = (vectors * exact) @ vectors.mT
    values, found = top_eigen(matrix, 30)
    torch.testing.assert_close(found.mT @ found, torch.eye(30, dtype=torch.float64).expand(2, 30, 30))
    torch.testing.assert_close((found.mT @ matrix @ found).diagonal(dim1=-2, dim2=-1), values)
    assert bool((values.sum(-1) > 0.999 * exact[:30].sum()).all())
    torch.testing.assert_close(values[..., -10:].flip(-1), exact[:10].expand(2, 10), rtol=1e-4, atol=0)
    with pytest.raises(LimpetError, match="inf or nan"):
        top_eigen(matrix / 0, 30)


def test_a_long_side_is_truncated_without_a_complete_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the precision that it claims to be, and within a thousandth of the exact truncation."""
    long = factor(160, 3) / 160
    start = Kronecker.start(torch.Size((4, 160)), 0.1, torch.zeros((), dtype=torch.float64), rank=8)
    precision = start.add(KroneckerTerm(long, factor(4, 1)), 1.0)
    monkeypatch.setattr("limpet.precision.linalg.SUBSPACE_FROM", 1000)
    exact = start.add(KroneckerTerm(long, factor(4, 1)), 1.0)
    v = vector(4, 160)
    assert float(precision.quadratic(v)) == pytest.approx(float(exact.quadratic(v)), rel=0.01)
    torch.testing.assert_close(precision.trace(), exact.trace())
    assert float(precision.inputs.trace[-1]) == pytest.approx(float(exact.inputs.trace[-1]), rel=0.01)


def test_one_task_is_the_product_of_the_truncated_factors() -> None:
    precision = one()
    wanted = 0.5 * torch.eye(OUT * IN, dtype=torch.float64) + 2 * torch.kron(
        cut(factor(OUT, 100), RANK), cut(factor(IN, 0), RANK)
    )
    torch.testing.assert_close(precision.dense(), wanted)
    assert precision.separable() is not None
    stored = (OUT + IN) * RANK + 2 * (RANK + 1)  # the eigenvalues of one task are a product of the traces
    assert sum(tensor.numel() for tensor in precision.tensors().values()) == stored
    assert precision.nbytes == 8 * (stored + 2 * RANK**2 + (RANK + 1) ** 2)


@pytest.mark.parametrize("groups", [(), (2,)])
@pytest.mark.parametrize("tasks", [1, 3])
def test_everything_a_precision_does_is_that_of_the_dense_matrix(groups: tuple[int, ...], tasks: int) -> None:
    precision = one(groups=groups)
    for seed in range(1, tasks):
        precision = precision.add(term(seed, groups), 0.3 + seed)
    n = precision.shape.numel()
    L, v = precision.dense(), vector(*precision.shape)
    flat, identity = v.flatten(), torch.eye(n, dtype=torch.float64)
    torch.testing.assert_close(L, L.mT)
    torch.testing.assert_close(precision.apply(v).flatten(), L @ flat)
    torch.testing.assert_close(precision.applier()(v).flatten(), L @ flat)
    torch.testing.assert_close(precision.quadratic(v), flat @ L @ flat)
    torch.testing.assert_close(precision.proximal(v, 0.7).flatten(), torch.linalg.solve(identity + 0.7 * L, flat))
    torch.testing.assert_close(precision.solve(v).flatten(), torch.linalg.solve(L, flat))
    torch.testing.assert_close(precision.trace(), L.trace())
    torch.testing.assert_close(precision.log_determinant(), torch.logdet(L))
    assert precision.eigenvalue_bound() == pytest.approx(float(torch.linalg.eigvalsh(L).max()))
    plain, total = precision.diagonals()
    torch.testing.assert_close(plain.flatten(), precision.fisher().dense().diagonal())
    torch.testing.assert_close(total.flatten(), L.diagonal() - 0.5)
    spectrum = precision.spectrum()
    assert spectrum.counts is not None and spectrum.fisher_values.shape != spectrum.fisher.shape
    written_out = Spectrum(spectrum.fisher, spectrum.total, spectrum.prior, spectrum.into, spectrum.back)
    assert spectrum.expected_rise(0.3) == pytest.approx(written_out.expected_rise(0.3), rel=1e-12)
    scaled = spectrum.back((spectrum.total + spectrum.prior) * spectrum.into(v))
    torch.testing.assert_close(scaled.flatten(), L @ flat)
    torch.testing.assert_close(precision.scale(3.0).dense(), 3 * L)
    sides = precision.sides()
    torch.testing.assert_close(sides.back(precision.apply_in_sides(sides.into(v))).flatten(), L @ flat)


def test_samples_have_the_covariance() -> None:
    precision, generator = one(prior=1.0), torch.Generator().manual_seed(0)
    drawn = torch.stack([precision.sample(generator).flatten() for _ in range(20_000)])
    torch.testing.assert_close(drawn.T @ drawn / len(drawn), torch.linalg.inv(precision.dense()), atol=0.03, rtol=0)


@pytest.mark.parametrize("rank", [IN - 1, IN, 50])
def test_a_large_rank_changes_nothing(rank: int) -> None:
    like = torch.zeros((), dtype=torch.float64)
    whole = Kronecker.start(torch.Size((OUT, IN)), 0.1, like)
    cut_ = Kronecker.start(torch.Size((OUT, IN)), 0.1, like, rank=rank)
    for seed in range(3):
        whole, cut_ = whole.add(term(seed), 1.0), cut_.add(term(seed), 1.0)
    torch.testing.assert_close(cut_.dense(), whole.dense())


def test_adding_tasks_preserves_the_trace_and_the_size() -> None:
    precision = one(prior=0.0, strength=1.0)
    wanted, size = precision.trace(), precision.nbytes
    for seed in range(1, 6):
        new = term(seed)
        precision = precision.add(new, 1.0)
        wanted = wanted + new.inputs.trace() * new.outputs.trace()
        torch.testing.assert_close(precision.trace(), wanted)
        assert precision.nbytes <= size and bool((precision.values.plain >= 0).all())


def test_equal_tasks_are_a_multiple_of_one() -> None:
    precision = one(prior=0.0, strength=1.0)
    thrice = precision.add(term(0), 1.0).add(term(0), 1.0)
    torch.testing.assert_close(thrice.dense(), 3 * precision.dense())


def test_a_carried_precision_is_the_nearest_of_its_form() -> None:
    """The sum in the new bases: its mean over each cell that shares one eigenvalue."""
    before, new = one(prior=0.0, strength=1.0), term(1)
    after = before.add(new, 1.0)
    carried = after.plain
    sides = after.sides()
    basis = torch.kron(sides.rows.dense(), sides.columns.dense())  # type: ignore[union-attr]
    exact = before.dense() + torch.kron(new.outputs, new.inputs)
    diagonal = (basis.mT @ exact @ basis).diagonal().reshape(OUT, IN)
    for rows, columns in itertools.product((slice(0, RANK), slice(RANK, None)), repeat=2):
        mine, wanted = carried[rows, columns], diagonal[rows, columns]
        if rows.stop is None:
            wanted = wanted.mean(0, keepdim=True).expand_as(wanted)
        if columns.stop is None:
            wanted = wanted.mean(1, keepdim=True).expand_as(wanted)
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("tasks", [1, 3])
def test_truncating_afterwards_averages_the_small_eigenvalues(tasks: int) -> None:
    like = torch.zeros((), dtype=torch.float64)
    whole = Kronecker.start(torch.Size((OUT, IN)), 0.2, like)
    for seed in range(tasks):
        whole = whole.add(term(seed), 0.5 + seed)
    small = whole.truncate(RANK, RANK)
    torch.testing.assert_close(small.trace(), whole.trace())
    torch.testing.assert_close(small.fisher().trace(), whole.fisher().trace())
    if tasks == 1:
        same = Kronecker.start(torch.Size((OUT, IN)), 0.2, like, rank=RANK).add(term(0), 0.5)
        torch.testing.assert_close(small.dense(), same.dense())
    smaller = small.truncate(RANK - 1, RANK - 1)
    torch.testing.assert_close(smaller.dense(), whole.truncate(RANK - 1, RANK - 1).dense())
    assert small.truncate(RANK, RANK).tensors().keys() == small.tensors().keys()
    torch.testing.assert_close(whole.truncate(50, 50).dense(), whole.dense())


def complete(precision: Kronecker) -> Kronecker:
    """The same precision with all its eigenvectors and eigenvalues written out."""

    def whole(basis: Basis) -> Basis:
        assert isinstance(basis.vectors, Reflections)
        return Basis(basis.vectors.dense(), basis.spread(basis.trace), False, basis.sizes)

    values = WeightedSum(precision.plain, precision.spectrum().total)
    return Kronecker(precision.shape, precision.prior, whole(precision.inputs), whole(precision.outputs), values)


@pytest.mark.parametrize("tasks", [1, 3])
def test_the_path_of_a_repair_is_that_of_the_written_out_precision(tasks: int) -> None:
    old, moved, new = one(prior=0.0, strength=1.0), vector(OUT, IN), [term(5)]
    for seed in range(1, tasks):
        old = old.add(term(seed), 1.0)
    torch.testing.assert_close(complete(old).dense(), old.dense())
    mine, theirs = (pencil(each, new, [moved], columns=slice(0, IN - 1)) for each in (old, complete(old)))
    for strength in (0.1, 1.0, 10.0):
        torch.testing.assert_close(mine.at(strength)[0], theirs.at(strength)[0])
        for a, b in zip(mine.low_rank(strength, 0, 2), theirs.low_rank(strength, 0, 2), strict=True):
            torch.testing.assert_close(a.abs(), b.abs(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [None, "float16", "int8"])
def test_saved_and_restored(dtype: str | None) -> None:
    like = torch.zeros((), dtype=torch.float32)
    start = Kronecker.start(torch.Size((OUT, IN)), 0.5, like, rank=RANK, rest=Storage(dtype))
    for precision in (start, start.add(term(0), 1.0), start.add(term(0), 1.0).add(term(1), 2.0)):
        again = Kronecker.restore(precision.shape, precision.tensors(), precision.metadata())
        again.check()
        v = vector(OUT, IN).float()
        assert torch.equal(again.apply(v), precision.apply(v))
        assert again.metadata() == precision.metadata()


def test_damaged_files_are_rejected() -> None:
    precision = one()
    tensors, metadata = precision.tensors(), precision.metadata()
    zero = tensors | {"inputs.reflections": torch.zeros_like(tensors["inputs.reflections"])}
    with pytest.raises(ValueError, match=r"inputs\.reflections are zero"):
        Kronecker.restore(precision.shape, zero, metadata).check()
    twice = tensors | {"eigenvalues": torch.ones(OUT, IN)}
    with pytest.raises(ValueError, match="given twice"):
        Kronecker.restore(precision.shape, twice, metadata)
    with pytest.raises(ValueError, match=r"eigenvalues has shape \(6, 9\), expected \(4, 4\)"):
        Kronecker.restore(precision.shape, twice, metadata | {"product": False})
    with pytest.raises(ValueError, match="inputs_rank is 9"):
        Kronecker.restore(precision.shape, tensors, metadata | {"inputs_rank": IN})
    with pytest.raises(ValueError, match="outputs_rank"):
        Kronecker.restore(precision.shape, tensors, metadata | {"outputs_rank": "3"})


def test_eight_bits_keep_the_directions_of_the_largest_eigenvalues() -> None:
    values = torch.cat([torch.logspace(5, 2, 6, dtype=torch.float64), torch.ones(194, dtype=torch.float64)])
    columns = torch.linalg.qr(vector(200, 200))[0]
    matrix = (columns * values) @ columns.mT
    like = torch.zeros((), dtype=torch.float64)
    found = {}
    for dtype in (None, "int8"):
        start = Kronecker.start(torch.Size((1, 200)), 0.0, like, rank=24, rest=Storage(dtype))
        found[dtype] = start.add(KroneckerTerm(matrix, torch.ones(1, 1, dtype=torch.float64)), 1.0)
    small = columns[:, -100:] @ vector(100, 50)  # where the matrix is the identity
    exact, rounded = (
        torch.stack([precision.quadratic(x.unsqueeze(0)) for x in small.mT]) for precision in found.values()
    )
    torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0.0)
    # a file from before has all columns in 8 bits, and is off by the largest eigenvalues
    tensors = {name: t for name, t in found["int8"].tensors().items() if not name.endswith("leading")}
    below = found[None].tensors()["inputs.reflections"].tril(-1)
    scale = below.abs().amax(-2, keepdim=True) / 127
    tensors |= {"inputs.reflections": (below / scale).round().to(torch.int8), "inputs.reflections.scale": scale.float()}
    older = Kronecker.restore(torch.Size((1, 200)), tensors, found["int8"].metadata())
    worse = torch.stack([older.quadratic(x.unsqueeze(0)) for x in small.mT])
    assert float((worse - exact).norm()) > 20 * float((rounded - exact).norm())

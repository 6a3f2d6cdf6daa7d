"""What holds for every precision: orthonormal bases, positive semi-definite matrices, and a bound on eigenvalues."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from limpet.precision import Dense, DenseTerm, Diagonal, DiagonalTerm, Kronecker, KroneckerSum, KroneckerTerm, Precision
from limpet.precision.storage import AS_USED, Storage
from limpet.precision.validity import check_non_negative, check_orthonormal, check_positive_semidefinite

FLOAT32 = AS_USED.epsilon


def basis(n: int, groups: int = 0) -> Tensor:
    shape = (groups, n, n) if groups else (n, n)
    return torch.linalg.qr(torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(n)))[0]


@pytest.mark.parametrize("n", [1, 2, 7, 300])
@pytest.mark.parametrize("storage", [None, "float16", "bfloat16"])
def test_rounded_bases_are_orthonormal_and_others_are_not(n: int, storage: str | None) -> None:
    rest = Storage(storage)
    for groups in (0, 3):
        whole = basis(n, groups).float()
        rounded = rest.lay(whole).float()
        for _ in range(20):
            check_orthonormal("U", rounded, rest.epsilon)
        scaled, sheared = rounded.clone(), rounded.clone()
        scaled[..., 0] *= 3.0
        sheared[..., 0] += 2.0 * whole[..., -1]
        for wrong in (1.2 * rounded, 0 * rounded, scaled, sheared):
            for _ in range(20):
                with pytest.raises(ValueError, match="columns of U are not orthonormal"):
                    check_orthonormal("U", wrong, rest.epsilon)
    with pytest.raises(ValueError, match="not orthonormal"):
        check_orthonormal("U", torch.full((3, 3), torch.nan), FLOAT32)


def test_the_deviation_is_that_of_the_full_product() -> None:
    n = 400
    U = basis(n).float()
    for size, found in ((1e-6, False), (1e-2, True)):
        noise = torch.randn(n, n, generator=torch.Generator().manual_seed(0)) / n**0.5
        V = U + size * noise
        deviation = (V.T @ V - torch.eye(n)).norm() / n**0.5  # of a random vector of norm 1
        assert (float(deviation) > 1e-4) == found
        if found:
            with pytest.raises(ValueError, match="not orthonormal"):
                check_orthonormal("U", V, FLOAT32)
        else:
            check_orthonormal("U", V, FLOAT32)


def test_checking_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    check_orthonormal("U", basis(5), FLOAT32)
    assert torch.equal(torch.get_rng_state(), before)


def with_eigenvalues(values: Tensor) -> Tensor:
    U = basis(len(values))
    return (U * values) @ U.T


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_positive_semidefinite_matrices(size: float) -> None:
    for values in (torch.ones(40), torch.arange(40.0), torch.eye(40)[0], torch.zeros(40)):
        matrix = (size * with_eigenvalues(values.double())).float()
        check_positive_semidefinite("A", matrix)
        check_positive_semidefinite("A", torch.stack([matrix, matrix]))
    negative = torch.arange(40.0).double()
    negative[0] = -1e-3 * float(negative.sum())
    for matrix in (
        with_eigenvalues(negative),
        torch.ones(3, 3) - 2 * torch.ones(3, 3).triu(1) - 2 * torch.ones(3, 3).tril(-1),
    ):
        assert bool((matrix.diagonal() > 0).all()) and float(torch.linalg.eigvalsh(matrix)[0]) < 0
        with pytest.raises(ValueError, match="A has negative eigenvalues"):
            check_positive_semidefinite("A", (size * matrix).float())
    skewed = size * torch.eye(4)
    skewed[0, 3] = 0.01 * size
    with pytest.raises(ValueError, match="A is not symmetric"):
        check_positive_semidefinite("A", skewed)
    with pytest.raises(ValueError, match="the diagonal of A has negative entries"):
        check_positive_semidefinite("A", -size * torch.eye(4))


def test_non_negative() -> None:
    check_non_negative("a", torch.tensor([0.0, -0.0, 5.0]))
    check_non_negative("a", torch.zeros(0))
    for wrong in (-1e-45, torch.nan):
        with pytest.raises(ValueError, match="a has negative entries"):
            check_non_negative("a", torch.tensor([1.0, wrong]))


def filled(structure: str) -> Precision:
    generator = torch.Generator().manual_seed(0)
    shape, like = torch.Size([3, 4]), torch.zeros(())

    def psd(n: int) -> Tensor:
        root = torch.randn(n, n, generator=generator)
        return root @ root.T

    kinds = {"kronecker": Kronecker, "kronecker-sum": KroneckerSum, "dense": Dense, "diagonal": Diagonal}
    precision: Precision = kinds[structure].start(shape, 0.5, like)  # type: ignore[attr-defined]
    for strength in (2.0, 0.3):
        if structure.startswith("kronecker"):
            precision = precision.add(KroneckerTerm(psd(4), psd(3)), strength)
        elif structure == "dense":
            precision = precision.add(DenseTerm(psd(12)), strength)
        else:
            precision = precision.add(DiagonalTerm(torch.rand(3, 4, generator=generator)), strength)
    return precision


@pytest.mark.parametrize("structure", ["kronecker", "kronecker-sum", "dense", "diagonal"])
def test_every_precision_is_valid_and_bounded(structure: str) -> None:
    precision = filled(structure)
    precision.check()
    largest = float(torch.linalg.eigvalsh(precision.dense().double())[-1])
    bound = precision.eigenvalue_bound()
    assert largest <= bound * (1 + 1e-5)
    exact = structure in ("kronecker", "diagonal")
    assert bound == pytest.approx(largest if exact else float(precision.trace()), rel=1e-5)


@pytest.mark.parametrize(
    ("structure", "name", "told"),
    [
        ("diagonal", "diagonal", "diagonal has negative"),
        ("diagonal", "diagonal.weighted", "diagonal.weighted has negative"),
        ("kronecker", "eigenvalues", "eigenvalues has negative"),
        ("kronecker", "eigenvalues.weighted", "eigenvalues.weighted has negative"),
        ("kronecker", "inputs.trace", "inputs.trace has negative"),
        ("dense", "matrix", "the diagonal of matrix has negative"),
        ("dense", "matrix.weighted", "the diagonal of matrix.weighted has negative"),
        ("kronecker-sum", "terms.1.outputs", "the diagonal of terms.1.outputs has negative"),
        ("kronecker-sum", "eigenbasis.outputs.trace", "outputs.trace has negative"),
    ],
)
def test_negative_parts_are_named(structure: str, name: str, told: str) -> None:
    precision = filled(structure)
    tensors = {**precision.tensors(), name: -precision.tensors()[name]}
    with pytest.raises(ValueError, match=told):
        precision.restore(precision.shape, tensors, precision.metadata()).check()


def test_other_contradictions() -> None:
    kronecker, summed = filled("kronecker"), filled("kronecker-sum")
    tensors, metadata = kronecker.tensors(), kronecker.metadata()
    with pytest.raises(ValueError, match=r"outputs\.vectors are not orthonormal"):
        changed = {**tensors, "outputs.vectors": 2 * tensors["outputs.vectors"]}
        kronecker.restore(kronecker.shape, changed, metadata).check()
    with pytest.raises(ValueError, match="inputs is diagonal, but has eigenvectors"):
        kronecker.restore(kronecker.shape, tensors, {**metadata, "inputs_diagonal": True}).check()
    with pytest.raises(ValueError, match="inputs_sizes"):
        kronecker.restore(kronecker.shape, tensors, {**metadata, "inputs_sizes": [5, -1]})
    tensors = summed.tensors()
    with pytest.raises(ValueError, match="do not add up to the trace"):
        changed = {**tensors, "eigenbasis.eigenvalues.weighted": 1.5 * tensors["eigenbasis.eigenvalues.weighted"]}
        summed.restore(summed.shape, changed, summed.metadata()).check()

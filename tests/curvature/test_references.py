"""Kronecker factors, compared with two independent libraries (curvlinops and nngeometry)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from limpet.likelihoods import Categorical
from limpet.precision import KroneckerTerm
from reference import measure

pytestmark = pytest.mark.reference
N = 12


def case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    if name == "linear":
        model: nn.Module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        x = torch.randn(N, 6)
    else:
        first, second = nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Conv2d(3, 4, 2)
        model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(16, 4))
        x = torch.randn(N, 2, 6, 6)
    return model.double(), x.double(), torch.randint(0, 4, (N,))


def product(term: object) -> Tensor:
    assert isinstance(term, KroneckerTerm)
    return torch.kron(term.outputs, term.inputs)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", ["linear", "conv2d"])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_blocks_agree_with_curvlinops(name: str, fisher: str) -> None:
    from curvlinops import KFACLinearOperator

    model, x, y = case(name)
    parameters = list(model.parameters())
    operator = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(reduction="sum"),
        parameters,
        [(x, y)],
        fisher_type={"exact": "type-2", "empirical": "empirical"}[fisher],
        kfac_approx="expand",
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    matrix = operator @ torch.eye(operator.shape[0], dtype=torch.float64)
    found = measure(model, [(x, y)], Categorical(), "kronecker", fisher=fisher)
    start = 0
    for block in found.blocks:
        size = block.shape.numel()
        theirs = matrix[start : start + size, start : start + size]
        places = torch.arange(float(size), dtype=torch.float64)
        weight, bias = places.split([size - block.rows[0], block.rows[0]])
        order = block.matrix([weight.reshape(block.shapes[0]), bias]).flatten().long()
        ours = product(found.terms[block.name][0])
        assert relative(ours, theirs[order][:, order]) < 1e-5
        start += size


@pytest.mark.parametrize("name", ["linear", "conv2d"])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_blocks_agree_with_nngeometry(name: str, fisher: str) -> None:
    from nngeometry.metrics import FIM
    from nngeometry.object import PMatKFAC

    model, x, y = case(name)
    theirs_model = copy.deepcopy(model)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=N)
    if fisher == "empirical":
        matrix = empirical_nngeometry(theirs_model, loader)
    else:
        torch.set_default_dtype(torch.float64)  # it makes a constant of the default dtype
        try:
            matrix = FIM(model=theirs_model, loader=loader, representation=PMatKFAC, variant="classif_logits")
        finally:
            torch.set_default_dtype(torch.float32)
    found = measure(model, [(x, y)], Categorical(), "kronecker", fisher=fisher)
    assert len(matrix.data) == len(found.blocks)
    for block, (a, g) in zip(found.blocks, matrix.data.values(), strict=True):
        ours = product(found.terms[block.name][0])
        assert relative(ours, N * torch.kron(g, a)) < 1e-5


def empirical_nngeometry(model: nn.Module, loader: object) -> Any:
    """nngeometry has no ready empirical Fisher for classes: its backend takes the log likelihood as a function."""
    from nngeometry.backend import TorchHooksJacobianBackend
    from nngeometry.layercollection import LayerCollection
    from nngeometry.object import PMatKFAC

    def log_likelihood(x: Tensor, y: Tensor) -> Tensor:
        return torch.log_softmax(model(x), 1).gather(1, y[:, None])

    layers = LayerCollection.from_model(model)
    backend = TorchHooksJacobianBackend(layer_collection=layers, model=model, function=log_likelihood)
    return PMatKFAC(generator=backend, examples=loader)

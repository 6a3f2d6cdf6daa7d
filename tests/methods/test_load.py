"""Tests of `limpet.load`: a memory that is loaded into a model with other weights is noticed."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import limpet
from limpet.errors import LimpetWarning
from limpet.methods.load import UNRELATED, similarity


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4))


def task(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(400, 12, generator=generator), torch.randint(0, 4, (400,), generator=generator)


def train(model: nn.Module, data: tuple[Tensor, Tensor], steps: int, lr: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A trained network and the file of its memory."""
    model = network(0)
    train(model, task(0), 100, 0.1)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([task(0)], progress=False)
    path = tmp_path_factory.mktemp("made") / "memory.safetensors"
    memory.save(path)
    return model, path


def test_the_same_weights_and_their_fine_tunes_are_loaded_in_silence(made: tuple[nn.Module, Path]) -> None:
    model, path = copy.deepcopy(made[0]), made[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert similarity(limpet.load(path, model)) == (pytest.approx(1.0), 0.0)
        train(model, task(1), 300, 0.1)  # other inputs with random labels, to a loss near zero
        cosine, distance = similarity(limpet.load(path, model))
        assert cosine > 2 * UNRELATED and distance > 0.5
        with torch.no_grad():  # a new head is one block of several
            model.get_parameter("5.weight").normal_()
        limpet.load(path, model)


@pytest.mark.parametrize("trained", [False, True])
def test_unrelated_weights_are_loaded_with_a_warning_that_says_how_far_they_are(
    made: tuple[nn.Module, Path], trained: bool
) -> None:
    model = network(1)
    if trained:
        train(model, task(0), 100, 0.1)
    with pytest.warns(LimpetWarning, match="seem unrelated to those that the memory was made at") as caught:
        memory = limpet.load(made[1], model)
    assert memory.tasks == 1
    found = re.search(r"mean is (\d\.\d\d), and the cosine similarity (-?\d\.\d\d)", str(caught[0].message))
    assert found is not None
    # the middle layer has most of the weights, so it is the median
    mean, now = (middle(one) for one in (made[0], model))
    assert float(found[1]) == pytest.approx(float((now - mean).norm() / mean.norm()), abs=0.006)
    assert float(found[2]) == pytest.approx(float((mean * now).sum() / mean.norm() / now.norm()), abs=0.006)


@torch.no_grad()
def middle(model: nn.Module) -> Tensor:
    layer = model.get_submodule("3")
    assert isinstance(layer, nn.Linear)
    return torch.cat([layer.weight, layer.bias[:, None]], 1)


def test_a_model_of_zeros_is_unrelated(made: tuple[nn.Module, Path]) -> None:
    model = network(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.warns(LimpetWarning, match=r"mean is 1\.00, and the cosine similarity 0\.00"):
        limpet.load(made[1], model)


def test_a_memory_without_tasks_is_never_far(tmp_path: Path) -> None:
    limpet.OnlineLaplace(network(0)).save(tmp_path / "memory.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limpet.load(tmp_path / "memory.safetensors", network(1))

"""Copies of a model do not run the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from limpet.errors import UnsupportedError
from limpet.model.copied import independent_copy


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def compiled(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def compiled_inner(model: Any) -> None:
    model.inner.forward = torch.compile(model.inner.forward, backend="eager")


def bound(model: Any) -> None:
    model.forward = MethodType(Network.forward, model)


def partial(model: Any) -> None:
    model.forward = functools.partial(Network.forward, model)


@pytest.mark.parametrize("change", [lambda _: None, compiled, compiled_inner, bound, partial])
def test_a_copy_keeps_its_outputs_when_the_model_changes(change: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    model, x = Network(), torch.randn(4, 3)
    before = model(x)
    change(model)
    copied = independent_copy(model)
    with torch.no_grad():
        model.inner.weight.add_(1.0)
    assert torch.allclose(copied(x), before) and not torch.allclose(model(x), before)
    assert "forward" in vars(model) or "forward" in vars(model.inner) or change.__name__ == "<lambda>"


def under_autocast(model: Any) -> None:
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)


def patched(model: Any) -> None:
    old = model.inner.forward
    model.inner.forward = lambda x: 2 * old(x)


def other_function(model: Any) -> None:
    model.scaled = lambda x: model(x) / 2


@pytest.mark.parametrize(
    ("change", "where"), [(under_autocast, "forward"), (patched, "inner.forward"), (other_function, "scaled")]
)
def test_a_function_that_calls_the_model_is_rejected(change: Callable[[Any], None], where: str) -> None:
    model = Network()
    change(model)
    with pytest.raises(UnsupportedError, match=rf"^{where} is a function that calls the model itself"):
        independent_copy(model)

"""Changes of weights that are noticed, and what noticing them does not do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from limpet.protection.weight_watch import WeightWatch


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(40, 30), (40,), (), (6, 3, 5, 5)]
    some = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    return [*some, nn.Parameter(torch.randn(50, 70).t())]  # the last one is not contiguous


CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda p: p.detach().mul_(2),
    "through data": lambda p: p.data.mul_(2),
    "another tensor": lambda p: setattr(p, "data", 2 * p.data),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_way_to_change_weights_is_noticed(change: str) -> None:
    weights = parameters()
    watch = WeightWatch(weights)
    assert not watch.replaced() and not watch.moved()
    for parameter in weights:
        CHANGES[change](parameter)
    assert watch.replaced() and watch.moved()
    watch.mark(sample=True)
    assert not watch.replaced() and watch.moved()
    for parameter in weights:
        CHANGES[change](parameter)
    assert watch.replaced()


def test_changes_between_a_mark_and_a_look_are_counted() -> None:
    weights = parameters()
    watch = WeightWatch(weights)
    with torch.no_grad():
        for _ in range(5):
            for parameter in weights:
                parameter.add_(1)
                parameter.add_(1)
            watch.look()
            weights[0].sub_(1)  # not counted: a step of the optimizer
            watch.mark()
            watch.mark()
    assert (watch.writes, watch.changed) == (10, 5)


def test_a_change_that_is_undone_is_none() -> None:
    weights = parameters()
    watch = WeightWatch(weights)
    with torch.no_grad():
        weights[0].fill_(torch.nan)
        watch.mark(sample=True)
        for _ in range(3):
            kept = [parameter.detach().clone() for parameter in weights]
            for parameter, before in zip(weights, kept, strict=True):
                parameter.fill_(7)
                parameter.copy_(before)
            watch.look()
            watch.mark()
    assert (watch.writes, watch.changed) == (6, 0)

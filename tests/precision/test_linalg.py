"""Numerical routines: whether all numbers are finite, and the searches for a number at which a measurement crosses a
level."""

import math
from collections.abc import Callable

import pytest
import torch

from limpet.precision.linalg import all_finite, bisected, falls_to

FURTHEST, CLOSE = math.log(1e4), 0.05
FALLING: dict[str, Callable[[float], float]] = {
    "power": lambda s: 3 / s,
    "pencil": lambda s: 0.5 / (1 + s) ** 2,
    "two directions": lambda s: 0.3 / (1 + s) + 0.1 / (1 + 0.01 * s) ** 2,
    "with a rest": lambda s: 0.02 + 1 / (1 + s),
    "exponential": lambda s: math.exp(-s),
    "step": lambda s: 1.0 if s < 37 else 0.001,
}


@pytest.mark.parametrize("level", [0.3, 0.1, 0.03, 0.01])
@pytest.mark.parametrize("name", list(FALLING))
def test_the_secant_finds_what_bisection_finds(name: str, level: float) -> None:
    value, calls = FALLING[name], []

    def counted(s: float) -> float:
        calls.append(s)
        return value(s)

    found, at_found = falls_to(counted, level, furthest=FURTHEST, close=CLOSE)
    _, expected = bisected(lambda s: value(s) > level, furthest=FURTHEST, close=CLOSE)
    assert at_found == value(found)
    if value(expected) > level:  # there is no such number
        assert found == pytest.approx(expected)
    else:
        assert at_found <= level
        assert at_found >= level * math.exp(-CLOSE) or abs(math.log(found / expected)) <= CLOSE
    assert len(calls) <= (7 if name in ("power", "pencil", "two directions") else 13)  # bisection: 10


def test_a_level_of_zero_is_searched_to_the_end() -> None:
    assert falls_to(lambda s: 1 / s, 0.0, furthest=FURTHEST, close=CLOSE) == pytest.approx((1e4, 1e-4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_finite_numbers_are_told_from_others(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert all_finite(torch.zeros(0, dtype=dtype))
    assert all_finite(torch.full((3, 5), largest, dtype=dtype))  # although their sum is inf
    assert all_finite(torch.tensor([largest, largest, -largest], dtype=dtype))
    for wrong in ([torch.inf], [-torch.inf, 1], [torch.nan, 0], [torch.inf, -torch.inf], [largest, largest, torch.inf]):
        assert not all_finite(torch.tensor(wrong, dtype=dtype))

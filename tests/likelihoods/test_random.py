"""The numbers that are drawn for an example, against their definition in Python's integers."""

from __future__ import annotations

import pytest
import torch

from limpet.likelihoods import random as per_example
from limpet.likelihoods.random import Occurrences, PerExampleRNG

MASK = (1 << 64) - 1


def mixed(x: int) -> int:
    """SplitMix64 as it was published, for unsigned integers."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def hashed(row: list[int]) -> int:
    return sum(value * (mixed(column) | 1) for column, value in enumerate(row, 1)) & MASK


def test_numbers_are_mixed_as_published() -> None:
    torch.manual_seed(0)
    numbers = torch.cat([torch.randint(-(2**63), 2**63 - 1, (100,)), torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])])
    expected = [mixed(int(x)) for x in numbers]
    assert [int(x) & MASK for x in per_example._mixed(numbers)] == expected
    assert [int(per_example._mixed(x)) & MASK for x in numbers] == expected  # one by one, where numpy is not used
    assert torch.equal(per_example._mixed(numbers.reshape(5, 21).mT), per_example._mixed(numbers).reshape(5, 21).mT)


@pytest.mark.parametrize("at_once", [1, 20, 1 << 16])
def test_rows_are_hashed_with_all_their_bits(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_example, "HASHED_AT_ONCE", at_once)
    torch.manual_seed(0)
    integers = torch.randint(-(2**31), 2**31 - 1, (7, 9), dtype=torch.int32)
    found = per_example._digest(integers)
    assert [int(x) & MASK for x in found] == [hashed(row) for row in integers.tolist()]
    assert torch.equal(per_example._digest(integers.view(torch.float32)), found)
    assert torch.equal(per_example._digest(integers.long()), found)


def test_uniform_numbers_are_the_bits_of_seed_and_position() -> None:
    x, y = torch.randint(0, 9, (6, 4)), torch.randint(0, 3, (6,))
    stream = PerExampleRNG.of([x, y], 5, Occurrences())
    found = torch.cat([stream.uniform(torch.Size([6, 2])), stream.uniform(torch.Size([6, 1]))], 1)
    for row, label, numbers in zip(x.tolist(), y.tolist(), found.tolist(), strict=True):
        seed = mixed(mixed(mixed(5) + hashed(row)) + hashed([label]))
        bits = [(mixed(seed + mixed(position)) >> 39) & ((1 << 24) - 1) for position in range(3)]
        assert numbers == [(b + 0.5) / (1 << 24) for b in bits]

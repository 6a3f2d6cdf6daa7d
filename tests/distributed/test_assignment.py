"""Tests of the assignment of blocks to ranks: every block has an owner, and the load is balanced."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.distributed.assignment import share

SIZES = st.dictionaries(st.text(max_size=4), st.integers(0, 1000), max_size=7)


def loads(sizes: dict[str, int], owners: dict[str, int], ranks: int) -> list[int]:
    return [sum(sizes[name] for name in sizes if owners[name] == rank) for rank in range(ranks)]


@given(SIZES, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_the_fullest_rank_is_near_the_best_possible(sizes: dict[str, int], ranks: int) -> None:
    owners = share(sizes, ranks)
    assert owners.keys() == sizes.keys() and set(owners.values()) <= set(range(ranks))
    names = list(sizes)
    best = min(
        max(loads(sizes, dict(zip(names, choice, strict=True)), ranks))
        for choice in product(range(ranks), repeat=len(names))
    )
    assert max(loads(sizes, owners, ranks)) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_the_bound_is_reached() -> None:
    sizes = dict(zip("abcde", (3, 3, 2, 2, 2), strict=True))  # the best is 6 and 6; greedy has 7 = (4/3 - 1/6) 6
    assert sorted(loads(sizes, share(sizes, 2), 2)) == [5, 7]


@given(SIZES, st.integers(1, 9), st.randoms())
@settings(deadline=None)
def test_the_order_of_the_blocks_does_not_matter(sizes: dict[str, int], ranks: int, random: object) -> None:
    names = list(sizes)
    random.shuffle(names)  # type: ignore[attr-defined]
    assert share({name: sizes[name] for name in names}, ranks) == share(sizes, ranks)


def test_more_ranks_than_blocks_and_none_at_all() -> None:
    assert share({"a": 1, "b": 2}, 5) == {"b": 0, "a": 1}
    assert share({}, 3) == {}
    with pytest.raises(ValueError, match="ranks must be an integer >= 1, not 0"):
        share({"a": 1}, 0)

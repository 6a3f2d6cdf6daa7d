"""Tests that ranks fail together: whatever goes wrong on one of them, all raise the same error, and none waits."""

from __future__ import annotations

import pytest

import failing_ranks
import limpet
from limpet.distributed import Ranks, current, failure, set_timeout, together
from limpet.errors import RankError
from rank_processes import started


def lines(ranks: int, *words: str) -> list[str]:
    """What rank 0 says, of ranks that all succeed."""
    found = started(failing_ranks.main, ranks, *words)
    assert all(f"rank {rank} is done" in text for rank, (_, text) in enumerate(found)), found
    return found[0][1].splitlines()


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "ranks", "stride"), [("replicated", 2, 13), ("sharded", 2, 41), ("sharded", 4, 149)])
def test_an_exception_before_any_collective_reaches_all_ranks(kind: str, ranks: int, stride: int) -> None:
    """A part of them; `python -m torch.distributed.run --nproc-per-node 4 tests/failing_ranks.py every sharded` is all.

    The script compares the messages of all ranks, and lets the same process group go on after each.
    """
    (said,) = [line for line in lines(ranks, "every", kind, str(stride)) if "injections" in line]
    injections, collectives = int(said.split()[3]), int(said.split()[6])
    assert collectives > (40 if kind == "replicated" else 120)
    assert injections >= ranks * (collectives // stride)


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_that_differ_are_named() -> None:
    said = dict(line.split(": ", 1) for line in lines(3, "differ") if ": " in line)
    assert said["strength"] == "RankError: the ranks differ in the setting strength: 2.0 on rank 1, but 1.0 on rank 0"
    assert said["structure"].endswith("in the setting structure: diagonal on rank 1, but kronecker on rank 0")
    assert said["limit"].endswith("in the argument limit: 6 on rank 1, but 5 on rank 0")
    assert "the ranks differ in the values of 0.bias: hash" in said["weights"]
    assert "the kind of batches: replicated on rank 1" in said["kind of batches"]
    assert "batch 0 of rank 1 is not that of rank 0" in said["order of batches"]
    assert "rank 1 is at collective 1 of forecast (exchange of shards, torch.float32), but rank 0 at" in said["calls"]
    assert "rank 2 is at collective 1 of counting (sum of numbers, 2 of them), but rank 0 at" in said["numbers"]
    assert said["the same error"].startswith("CurvatureError: the batches contain no examples")
    assert said["nothing"] == "nothing"


@pytest.mark.slow
@pytest.mark.ranks
def test_exceptions_of_loaders_and_layers_reach_all_ranks() -> None:
    said = [line for line in lines(2, "interrupted") if "RankError" in line]
    assert said == [
        "loader, replicated: RankError: consolidate failed on rank 1: ValueError: row 7",
        "layer, replicated: RankError: consolidate failed on rank 1: KeyError: 'in a layer'",
        "loader, sharded: RankError: consolidate failed on rank 1: ValueError: row 7",
        "layer, sharded: RankError: consolidate failed on rank 1: KeyError: 'in a layer'",
    ]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "dies"), [("replicated", 0), ("replicated", 1), ("sharded", 0), ("sharded", 1)])
def test_a_killed_rank_is_named_in_one_line(kind: str, dies: int) -> None:
    """Rank 0 hosts the store, so the others have to do without it."""
    found = started(failing_ranks.main, 3, "killed", kind, str(dies))
    said = [line for _, text in found for line in text.splitlines() if "after less than 30 s" in line]
    assert len(said) == 2 and found[dies][0] == -9, found
    assert all(f": rank {dies} has ended; start all ranks again" in line for line in said), found


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_that_does_not_come_is_named_on_all() -> None:
    found = started(failing_ranks.main, 2, "late")
    expected = "consolidate, comparison: rank 1 has not come here within 2 s"
    assert all(f"rank {rank}: {expected}" in text for rank, (_, text) in enumerate(found)), found


def test_a_single_process_is_not_guarded() -> None:
    def never() -> dict[str, object]:
        raise AssertionError

    before = failure._operation
    with pytest.raises(ValueError, match="as it is"), together("nothing", current(), never):
        assert failure._operation is before is None
        raise ValueError("as it is")


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), "5"])
def test_a_timeout_is_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be"):
        set_timeout(seconds)


class Told(Ranks):
    """One of several ranks, whose errors are known."""

    errors: tuple[object, ...] = ()

    def gather(self, value: object, what: str = "") -> list[object]:  # type: ignore[override]
        return [value if rank == self.rank else error for rank, error in enumerate(self.errors)]


def test_the_error_of_one_rank_is_raised_by_all_and_the_error_of_all_by_each() -> None:
    own, others = ValueError("mine"), Told(1, 2)
    object.__setattr__(others, "errors", (None, None))
    with pytest.raises(RankError, match="rank 1: ValueError: mine") as caught:
        others.raise_together(own)
    assert caught.value.__cause__ is own and caught.value.rank == 1
    object.__setattr__(others, "errors", (("ValueError", "mine"), None))
    with pytest.raises(ValueError, match="mine"):
        others.raise_together(own)
    with pytest.raises(RankError, match="rank 0: ValueError: mine") as caught:
        others.raise_together(None)
    assert caught.value.__cause__ is None and issubclass(RankError, limpet.LimpetError)

"""One file from several ranks, here threads: the bytes of a single writer, or the old file and errors on all."""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from limpet.distributed import Ranks
from limpet.errors import RankError, SaveError
from limpet.io import sharded_tensor_file, tensor_file

SIZE = 3


def threads_as_ranks() -> list[Ranks]:
    barrier, values = threading.Barrier(SIZE, timeout=30), [None] * SIZE

    class Thread(Ranks):
        def gather(self, value: Any, what: str = "") -> list[Any]:
            values[self.rank] = value
            barrier.wait()
            found: list[Any] = list(values)
            barrier.wait()
            return found

    return [Thread(rank, SIZE) for rank in range(SIZE)]


def tensors() -> list[dict[str, Tensor]]:
    """The tensors of each rank; one has none."""
    return [
        {"b": torch.arange(5.0), "a": torch.tensor([True])},
        {},
        {"c": torch.arange(4), "d": torch.ones(2, 2).half()},
    ]


def write_together(path: Path, parts: list[dict[str, Tensor]]) -> list[Exception | None]:
    raised: list[Exception | None] = [None] * SIZE

    def write(ranks: Ranks, own: Mapping[str, Tensor]) -> None:
        try:
            sharded_tensor_file.write(path, "test", {"x": 1}, own, ranks)
        except Exception as error:
            raised[ranks.rank] = error

    threads = [threading.Thread(target=write, args=pair) for pair in zip(threads_as_ranks(), parts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_the_bytes_are_those_of_a_single_writer(tmp_path: Path) -> None:
    parts = tensors()
    tensor_file.write(tmp_path / "alone", "test", {"x": 1}, {name: t for part in parts for name, t in part.items()})
    (tmp_path / "together").touch(mode=0o640)
    assert write_together(tmp_path / "together", parts) == [None] * SIZE
    assert (tmp_path / "together").read_bytes() == (tmp_path / "alone").read_bytes()
    assert (tmp_path / "together").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "together"]


@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_on_one_rank_leaves_the_old_file(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, real = tensors(), tensor_file.raw_bytes
    broken = parts[rank]["b" if rank == 0 else "c"]

    def full(tensor: Tensor) -> memoryview:
        if tensor is broken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(tensor)

    monkeypatch.setattr(tensor_file, "raw_bytes", full)
    path = tmp_path / "m"
    path.write_bytes(b"old")
    raised = write_together(path, parts)
    for number, error in enumerate(raised):
        assert isinstance(error, RankError) and error.rank == rank
        assert isinstance(error.__cause__, SaveError) == (number == rank)
        assert "No space left on device. The file that was there before is unchanged" in str(error)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_named_on_all_ranks(tmp_path: Path) -> None:
    raised = write_together(tmp_path / "none" / "m", tensors())
    assert all("create it first" in str(error) for error in raised)
    assert all(isinstance(error, RankError) for error in raised)
    assert isinstance(raised[0].__cause__, FileNotFoundError)

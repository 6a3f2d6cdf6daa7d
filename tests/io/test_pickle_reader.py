"""Pickles and archives are read as descriptions: plain values as unpickled, everything else inert."""

from __future__ import annotations

import datetime
import io
import pickle
import time
import tracemalloc
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.errors import MemoryFileError
from limpet.io import pickle_reader, torch_archive
from limpet.io.pickle_reader import Name, Pairs, Record

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.pickle"))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def with_dicts(value: Any) -> Any:
    """Pairs as the dicts that they stand for."""
    if isinstance(value, Pairs):
        return {key: with_dicts(inner) for key, inner in value.items}
    return type(value)(map(with_dicts, value)) if isinstance(value, list | tuple) else value


@settings(max_examples=300, deadline=None)
@given(PLAIN, st.integers(0, 5))
def test_plain_values_are_those_of_pickle(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    try:
        found = pickle_reader.read(data)
    except MemoryFileError:
        assert protocol < 3  # bytes are a call of _codecs.encode there, or a string of Python 2
        return
    if not any(isinstance(part, bytes) for part in leaves(value)) or protocol >= 3:
        assert with_dicts(found) == value


def leaves(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    return [value] if inner is None else [leaf for one in inner for leaf in leaves(one)]


def test_instances_and_calls_are_descriptions() -> None:
    found = pickle_reader.read(pickle.dumps([torch.float32, OrderedDict(a=1), datetime.date(2024, 1, 2), {1, 2}]))
    dtype, ordered, date, numbers = found
    assert isinstance(dtype, Name) and dtype.name == "torch.float32"
    assert isinstance(ordered, Record) and ordered.name == "collections.OrderedDict" and ordered.items == [("a", 1)]
    assert isinstance(date, Record) and date.name == "datetime.date" and len(date.args) == 1
    assert sorted(numbers) == [1, 2]


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_nothing_in_the_corpus_does_anything(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickles that once ran code, patched classes, or took gigabytes or minutes."""
    monkeypatch.chdir(tmp_path)
    data, methods = path.read_bytes(), dict(vars(Path))
    tracemalloc.start()
    started = time.perf_counter()
    with suppress(MemoryFileError):
        pickle_reader.read(data)
    seconds, (_, peak) = time.perf_counter() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not list(tmp_path.iterdir()) and dict(vars(Path)) == methods
    assert seconds < 5 and peak < 20_000_000


@pytest.mark.parametrize(("limit", "value"), [("MAX_BYTES", 1000), ("MAX_OPCODES", 100)])
def test_limits(limit: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(list(range(2000)))
    assert len(pickle_reader.read(data)) == 2000
    monkeypatch.setattr(pickle_reader, limit, value)
    with pytest.raises(MemoryFileError, match=f"{value:,}"):
        pickle_reader.read(data)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("dtype", [*torch_archive.STORAGES.values()])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 2)])
def test_tensors_are_those_of_torch_load(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 10).to(dtype)
    found = torch_archive.read(saved(tensor))
    assert isinstance(found, torch.Tensor) and found.dtype == dtype and torch.equal(found, tensor)
    turned = tensor.mT if tensor.dim() > 1 else tensor
    assert torch.equal(torch_archive.read(saved(turned)), turned)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [{"a": 1}, [1], torch.nn.Linear(2, 2), torch.randn(4)[1:], {torch.float32}])
def test_other_values_are_rejected(value: Any) -> None:
    with pytest.raises(MemoryFileError):
        torch_archive.read(saved(value))


def repacked(compression: int, change: Any = None) -> bytes:
    """An archive of two numbers with changed members."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(torch.ones(2)))) as source, zipfile.ZipFile(file, "w", compression) as target:
        for name in source.namelist():
            content = source.read(name)
            target.writestr(name, change(name, content) if change else content)
    return file.getvalue()


def test_changed_archives() -> None:
    assert torch.equal(torch_archive.read(repacked(zipfile.ZIP_STORED)), torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(MemoryFileError, match="compressed"):
        torch_archive.read(repacked(zipfile.ZIP_DEFLATED))
    with pytest.raises(MemoryFileError, match="endian"):
        torch_archive.read(repacked(0, lambda name, data: b"big" if name.endswith("byteorder") else data))
    with pytest.raises(MemoryFileError, match="do not match"):
        torch_archive.read(repacked(0, lambda name, data: data[:-1] if name.endswith("data/0") else data))
    with pytest.raises(MemoryFileError, match="not an archive"):
        torch_archive.read(b"PK" + b"\0" * 100)

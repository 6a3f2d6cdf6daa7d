"""Read one tensor or string that `torch.save` wrote, without unpickling it.

The archive is a zip file, stored without compression: `data.pkl` describes the tensor, `data/0` holds its bytes.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile

import torch
from torch import Tensor

from limpet.errors import MemoryFileError
from limpet.io import pickle_reader
from limpet.io.pickle_reader import Name, Record, Reference

STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
REBUILD = "torch._utils._rebuild_tensor_v2"
LOCAL_HEADER = 30
"""Size of the fixed part of a zip member's header, which ends with the lengths of the name and of the extra field."""


def read(data: bytes) -> Tensor | str:
    """Read an archive.

    Args:
        data: The bytes that `torch.save` wrote for a contiguous tensor on the CPU, or for a string.

    Returns:
        The tensor or the string.

    Raises:
        MemoryFileError: If the archive is damaged, or holds anything else.

    Examples:
        >>> import io
        >>> file = io.BytesIO()
        >>> torch.save(torch.arange(6.0).reshape(2, 3), file)
        >>> read(file.getvalue())
        tensor([[0., 1., 2.],
                [3., 4., 5.]])
    """
    members = _members(data)
    found = pickle_reader.read(bytes(_member(members, "data.pkl")))
    if isinstance(found, str):
        return found
    if members.get("byteorder", sys.byteorder.encode()) != sys.byteorder.encode():
        raise MemoryFileError(f"a tensor was written on a machine that is not {sys.byteorder}-endian")
    return _tensor(found, members)


def _members(data: bytes) -> dict[str, memoryview]:
    """The members of the archive by their names inside its folder, as views."""
    view, members = memoryview(data), {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise MemoryFileError("an entry is compressed or encrypted, which torch.save never does")
            header = view[info.header_offset : info.header_offset + LOCAL_HEADER]
            start = info.header_offset + LOCAL_HEADER + sum(struct.unpack("<HH", header[26:30]))
            if start + info.file_size > len(data):
                raise MemoryFileError("an entry is truncated")
            members[info.filename.partition("/")[2]] = view[start : start + info.file_size]
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, EOFError, IndexError) as error:
        raise MemoryFileError(f"an entry is not an archive of torch.save, or is corrupted: {error}") from error
    return members


def _member(members: dict[str, memoryview], name: str) -> memoryview:
    if name not in members:
        raise MemoryFileError(f"an archive has no {name}")
    return members[name]


def _tensor(found: object, members: dict[str, memoryview]) -> Tensor:
    """Build the tensor that a call of torch's `_rebuild_tensor_v2` describes."""
    match found:
        case Record(
            name=name,
            args=(Reference(key=("storage", Name(name=storage), str(file), str(), int(length))), int(start), size,
                  stride, bool(), *_),
        ) if name == REBUILD and storage in STORAGES:  # fmt: skip
            pass
        case _:
            raise MemoryFileError("an entry is neither a plain tensor nor a string")
    dtype = STORAGES[storage]
    shape, steps = dimensions(size), dimensions(stride)
    content = _member(members, f"data/{file}")
    numel = math.prod(shape)
    if start != 0 or numel != length or len(content) != numel * dtype.itemsize or len(shape) != len(steps):
        raise MemoryFileError("the bytes of a tensor do not match its description")
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    try:
        return torch.frombuffer(bytearray(content), dtype=dtype).as_strided(shape, steps).contiguous()
    except RuntimeError as error:
        raise MemoryFileError("the strides of a tensor leave its storage") from error


def dimensions(value: object) -> tuple[int, ...]:
    """Check a shape or a stride.

    Args:
        value: What a pickle has in its place.

    Returns:
        The non-negative integers.

    Raises:
        MemoryFileError: If it is anything else.
    """
    if not isinstance(value, tuple) or not all(type(side) is int and 0 <= side < 2**62 for side in value):
        raise MemoryFileError("a tensor has an invalid shape or stride")
    return value

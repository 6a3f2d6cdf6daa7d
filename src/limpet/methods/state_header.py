"""Read the metadata of a state: the settings of a memory and its blocks, which may come from a damaged file."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from limpet.errors import LimpetError, MemoryFileError, finite_number, whole_number
from limpet.io import tensor_file
from limpet.io.state import State, unsealed
from limpet.model import PER_SAMPLE


@dataclass(frozen=True)
class Content:
    """A state with its metadata decoded.

    Attributes:
        metadata: The decoded metadata.
        tensors: The tensors by name.
    """

    metadata: dict[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, state: State) -> Content:
        """Decode a state; raises MemoryFileError if it is not the state of a memory."""
        with rejecting_damage():
            metadata = json.loads(state["metadata"], parse_constant=tensor_file.no_constant)
            if not isinstance(metadata, dict) or not isinstance(metadata.get("settings"), dict):
                raise ValueError("the metadata are not those of a limpet memory")
            return cls(*unsealed(metadata, state["tensors"]))


@contextmanager
def rejecting_damage() -> Iterator[None]:
    """Turn any error raised while reading a state into a MemoryFileError."""
    try:
        yield
    except MemoryFileError:
        raise
    except (LimpetError, KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, OverflowError) as e:
        raise MemoryFileError(f"not a limpet memory, or a corrupted one: {type(e).__name__}: {e}") from e


class Settings:
    """Typed access to the settings of a state; every getter raises if a value has the wrong type.

    Args:
        content: The decoded state.
    """

    def __init__(self, content: Content) -> None:
        self._values: Mapping[str, Any] = content.metadata["settings"]

    def has(self, name: str) -> bool:
        """Return whether there is a setting of this name."""
        return name in self._values

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number >= 0, or the default if an older file does not have it."""
        return finite_number(name, self._values.get(name, default))

    def whole(self, name: str) -> int:
        """Return an integer >= 0."""
        return whole_number(name, self._values[name])

    def flag(self, name: str) -> bool:
        """Return a bool, False if an older file does not have it."""
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, not {value!r}")
        return value

    def choice(self, name: str, choices: Collection[str]) -> str:
        """Return a string that must be one of `choices`."""
        value = self._values[name]
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        return value

    def names(self, name: str) -> list[str]:
        """Return a list of strings."""
        value = self._values[name]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{name} must be a list of names, not {value!r}")
        return value

    def list(self, name: str) -> Sequence[Any]:
        """Return a list, empty if an older file does not have it."""
        value = self._values.get(name, [])
        if not isinstance(value, list):
            raise ValueError(f"{name} must be a list, not {value!r}")
        return value

    def part(self, name: str) -> Mapping[str, Any] | None:
        """Return a nested mapping of settings, or None."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a mapping of settings, not {value!r}")
        return value


def check_settings(content: Content, expected: Mapping[str, Any]) -> None:
    """Check that a state was made by the same kind of memory.

    Args:
        content: The decoded state.
        expected: The required values by setting.

    Raises:
        MemoryFileError: If a setting differs.
    """
    with rejecting_damage():
        for name, value in expected.items():
            found = content.metadata["settings"][name]
            if found != value:
                raise MemoryFileError(
                    f"the state has {name} {found!r}, but this memory has {value!r}: use limpet.load(path, model), "
                    "which creates the right memory"
                )


def direct_parameters(content: Content) -> set[str]:
    """Return the parameters that were measured per sample."""
    with rejecting_damage():
        return {p for block in content.metadata["blocks"] if block["kind"] == PER_SAMPLE for p in block["parameters"]}


def parameter_names(content: Content) -> set[str]:
    """Return the parameters of all blocks in the state."""
    with rejecting_damage():
        return {p for block in content.metadata["blocks"] for p in block["parameters"]}

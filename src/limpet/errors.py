"""What limpet raises and warns: every message says what is wrong and how to mend it."""

from __future__ import annotations

import operator
from typing import Any


class LimpetError(Exception):
    """The root of every error that limpet raises on purpose."""


class UnsupportedError(LimpetError):
    """Something that cannot be done right, and is refused rather than done wrong."""


class CurvatureError(LimpetError):
    """The pass over the data met something it cannot measure."""


class MemoryFileError(LimpetError):
    """A memory file (or state) that is damaged, of another version, or made for another model."""


class LimpetWarning(UserWarning):
    """The root of every warning that limpet gives."""


class NotProtectedWarning(LimpetWarning):
    """Something in the model that the memory does not hold fast."""


def positive_whole(name: str, value: Any) -> int:
    """The value as an int >= 1, whatever kind of whole number it is (numpy's too)."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 1:
        raise ValueError(f"{name} must be a whole number >= 1, not {value!r}")
    return number

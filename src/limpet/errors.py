"""What limpet raises and warns: every message says what is wrong and how to mend it."""

from __future__ import annotations

import math
import numbers
import operator
import sys
import warnings
from pathlib import Path
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


class FallbackWarning(LimpetWarning):
    """Something that is protected in another way than was asked for."""


def warn(message: str, category: type[LimpetWarning]) -> None:
    """Warn at the user's own line: the nearest one that is not in this package."""
    package, level = str(Path(__file__).parent), 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"limpet: {message}", category, stacklevel=level)


def finite_number(name: str, value: Any) -> float:
    """The value as a float >= 0 that is finite, whatever kind of number it is (numpy's too)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, not {value!r}")
    return float(value)


def signed_number(name: str, value: Any) -> float:
    """The value as a finite float of either sign."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(float(value)):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    return float(value)


def whole_number(name: str, value: Any, *, least: int = 0) -> int:
    """The value as an int >= `least`, whatever kind of whole number it is (numpy's too)."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be a whole number >= {least}, not {value!r}")
    return number


def positive_whole(name: str, value: Any) -> int:
    """The value as an int >= 1."""
    return whole_number(name, value, least=1)

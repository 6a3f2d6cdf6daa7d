"""Errors, warnings, the logger and argument checks. Every message says what is wrong and how to fix it."""

from __future__ import annotations

import logging
import math
import numbers
import operator
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

LARGEST_NUMBER = 1e18
"""Largest strength and prior precision: the square of it, and not much more, is finite in float32."""

logger = logging.getLogger("limpet")
"""Logger of the library: what it reads and writes (level INFO), and the warnings of ranks other than 0."""
logger.addHandler(logging.NullHandler())


class LimpetError(Exception):
    """Base class of all errors that limpet raises."""


class UnsupportedError(LimpetError):
    """The combination of model, optimizer and options is not supported."""


class CurvatureError(LimpetError):
    """The curvature cannot be measured on this model or these data."""


class MemoryFileError(LimpetError):
    """A memory file or state dict is corrupted, has an unknown version, or was made for another model."""


class SaveError(LimpetError, OSError):
    """A file could not be written. The message says what is there now: as a rule, the previous file, unchanged.

    Args:
        message: The message.
        number: The error number of the operating system, as in `errno`.
    """

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.errno = number


class RankError(LimpetError):
    """An operation of several ranks failed on one of them, or the ranks differ. All ranks raise it, with one message.

    On a rank whose own exception is the reason, that exception is the `__cause__`.

    Args:
        message: The message, the same on all ranks.
        rank: The first rank that failed, differs or has ended; None if it is not known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class LimpetWarning(UserWarning):
    """Base class of all warnings that limpet issues."""


class NotProtectedWarning(LimpetWarning):
    """Part of the model is not protected by the memory."""


class FallbackWarning(LimpetWarning):
    """Part of the model is protected with a different structure than requested."""


class PrivacyWarning(LimpetWarning):
    """Examples can be recovered from the memory, or the budget of `limpet.Privacy` promises nothing."""


def _only_process() -> int:
    return 0


_rank: Callable[[], int] = _only_process


def set_rank(rank: Callable[[], int]) -> None:
    """Set the function that returns the rank of this process, for `warn`. Called by `limpet.distributed`."""
    global _rank
    _rank = rank


def warn(message: str, category: type[LimpetWarning], *, every_rank: bool = False) -> None:
    """Issue a warning that points at the caller's code, the nearest frame outside this package.

    In a distributed run only rank 0 issues it; the other ranks, which have the same to say, write it to the logger.

    Args:
        message: The text, without the "limpet: " prefix.
        category: The warning class.
        every_rank: Issue it on every rank. For warnings about what only one rank knows, such as its own shards.
    """
    rank = _rank()
    if rank and not every_rank:
        logger.info("rank %d: %s", rank, message)
        return
    package, level = str(Path(__file__).parent), 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"limpet: {message}", category, stacklevel=level)


def finite_number(name: str, value: Any) -> float:
    """Convert a value to a finite float >= 0.

    Args:
        name: The argument's name, for the error message.
        value: A real number of any type, NumPy scalars included.

    Returns:
        The value as a float.

    Raises:
        ValueError: If the value is not a finite number >= 0.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, not {value!r}")
    return float(value)


def limited_number(name: str, value: Any) -> float:
    """Convert a multiplier of the penalty to a float from 0 to `LARGEST_NUMBER`.

    Args:
        name: The argument's name, for the error message.
        value: A real number of any type, NumPy scalars included.

    Returns:
        The value as a float.

    Raises:
        ValueError: If the value is not a number in this range.
    """
    number = finite_number(name, value)
    if number > LARGEST_NUMBER:
        raise ValueError(
            f"{name} must be at most {LARGEST_NUMBER:g}, not {number:g}, because larger penalties overflow: to keep "
            "weights as they are, freeze them with requires_grad_(False)"
        )
    return number


def signed_number(name: str, value: Any) -> float:
    """Convert a value to a finite float of either sign.

    Args:
        name: The argument's name, for the error message.
        value: A real number of any type, NumPy scalars included.

    Returns:
        The value as a float.

    Raises:
        ValueError: If the value is not a finite number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(float(value)):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    return float(value)


def whole_number(name: str, value: Any, *, least: int = 0) -> int:
    """Convert a value to an int >= `least`.

    Args:
        name: The argument's name, for the error message.
        value: An integer of any type, NumPy scalars included.
        least: The smallest allowed value.

    Returns:
        The value as an int.

    Raises:
        ValueError: If the value is not an integer >= `least`.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be an integer >= {least}, not {value!r}")
    return number


def positive_whole(name: str, value: Any) -> int:
    """Convert a value to an int >= 1.

    Args:
        name: The argument's name, for the error message.
        value: An integer of any type, NumPy scalars included.

    Returns:
        The value as an int.

    Raises:
        ValueError: If the value is not an integer >= 1.
    """
    return whole_number(name, value, least=1)

"""Settings as they are written: YAML texts, dotted names, nested mappings, and their validation."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from limpet.errors import LimpetError
from limpet.experiments.registry import suggestion

M = TypeVar("M", bound=BaseModel)

LARGEST = 10_000
"""Largest number of values in a preset or recipe."""

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80
_short = _repr.repr


def parse(text: str, name: str) -> dict[str, Any]:
    """Parse a YAML mapping.

    Args:
        text: The YAML.
        name: Its source, for error messages.

    Returns:
        The mapping.

    Raises:
        LimpetError: If the text is not valid YAML, not a mapping, or too large with all its aliases expanded.
    """
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # ValueError: month 13, and the like
        raise LimpetError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise LimpetError(f"{name} must be a mapping of names to values")
    if _is_larger(values, LARGEST):
        raise LimpetError(f"{name} contains more than {LARGEST} values: check its aliases (*name)")
    return values


def _is_larger(values: Any, most: int) -> bool:
    """Whether a nested value has more than `most` parts. An alias counts as often as it occurs."""
    stack, seen = [values], 0
    while stack and seen <= most:
        value = stack.pop()
        seen += 1
        if isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list | tuple | set):
            stack.extend(value)
    return seen > most


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse `training.lr=0.1` into a dotted name and a value."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise LimpetError(f"--set takes name=value, e.g. training.lr=0.1, not {text!r}")
    try:
        return name.strip(), _number(yaml.safe_load(value))
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise LimpetError(f"--set {text}: the value is not valid YAML") from error


def _number(value: Any) -> Any:
    """Convert strings such as 1e5, which YAML 1.1 does not read as a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def checked(kind: type[M], values: Any, name: str) -> M:
    """Validate values, reporting the first invalid one in a single line.

    Args:
        kind: The pydantic model to validate against.
        values: The values.
        name: Source of the values, for error messages.

    Returns:
        The validated object.

    Raises:
        LimpetError: If a value is invalid.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise LimpetError(f"{name}: unknown setting {where!r}{_near(kind, first['loc'])}") from None
        if first["type"] == "value_error":
            raise LimpetError(f"{name}: {first['msg'].removeprefix('Value error, ')}") from None
        raise LimpetError(f"{name}: {where}: {first['msg']} (got {_short(first['input'])})") from None


def _near(kind: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """Suggest the field whose name is closest to an unknown one."""
    for part in loc[:-1]:
        inner = kind.model_fields[str(part)].annotation if str(part) in kind.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return ""
        kind = inner
    return suggestion(str(loc[-1]), kind.model_fields)


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Convert {"training.lr": 1} to {"training": {"lr": 1}}."""
    tree: dict[str, Any] = {}
    for name, value in dotted.items():
        *path, last = name.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise LimpetError(
                    f"{name} cannot be set, because {part} is set to a single value: remove one of the two"
                )
        place[last] = value
    return tree


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings; values of `above` take precedence."""
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both

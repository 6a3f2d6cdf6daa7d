"""The settings of a recipe as tables: names, types and defaults from the models, meanings from their docstrings."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from limpet.experiments.recipe import Recipe

SECTION = re.compile(r"Attributes:\n(.*)", flags=re.S)
ENTRY = re.compile(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", flags=re.S | re.M)


def tables() -> str:
    """A table for the recipe itself, and one for every part of it."""
    return "\n\n".join("\n".join(_table(prefix, kind)) for prefix, kind in parts(Recipe))


def parts(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """A model and the models that its fields are, each with the dotted name that leads there."""
    yield prefix, kind
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from parts(field.annotation, f"{prefix}{name}.")


def meanings(kind: type[BaseModel]) -> dict[str, str]:
    """What the docstring of a model says about its fields."""
    section = SECTION.search(inspect.cleandoc(kind.__doc__ or ""))
    return {name: " ".join(text.split()) for name, text in ENTRY.findall(section[1])} if section else {}


def _table(prefix: str, kind: type[BaseModel]) -> Iterator[str]:
    yield f"## {prefix.rstrip('.') or 'The recipe'}"
    yield ""
    yield "| setting | values | default | meaning |"
    yield "| --- | --- | --- | --- |"
    told = meanings(kind)
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            continue  # it has a table of its own
        cells = (f"`{prefix}{name}`", _values(field), f"`{_shown(field.default)}`", told[name])
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _shown(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if _plain(value) else str(value)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _values(field: FieldInfo) -> str:
    bounds = [_bound(one) for one in field.metadata]
    return ", ".join([_name(field.annotation), *(bound for bound in bounds if bound)])


def _bound(constraint: Any) -> str:
    for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if getattr(constraint, name, None) is not None:
            return f"{sign} {getattr(constraint, name)}"
    return ""


def _name(kind: Any) -> str:
    """A type in words, as YAML has it."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(map(str, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(_name(one) for one in inner)
    if origin is Annotated:
        bounds = [_bound(part) for one in inner[1:] for part in getattr(one, "metadata", [one])]
        return " ".join([_name(inner[0]), *(bound for bound in bounds if bound)])
    names = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(kind) or {list: "list", dict: "mapping"}[origin or kind]

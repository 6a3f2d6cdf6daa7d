"""Examples of docstrings that stand outside an `Examples:` section are shown as code, not as quotations."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", flags=re.S | re.M)


class Doctests(Extension):
    """Fences every example that the parser of docstrings does not see."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for everything that has a docstring."""
        if obj.docstring is not None and "Examples:" not in obj.docstring.value:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
    return "```pycon\n{}\n```".format(example[0].replace("<BLANKLINE>", ""))

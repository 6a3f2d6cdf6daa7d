"""Docstrings as Markdown: their examples, which begin with >>>, are code and not quotations."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", flags=re.S | re.M)


class Doctests(Extension):
    """Puts every example of a docstring into a block of its own."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for everything that has a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
    return "```pycon\n{}\n```".format(example[0].replace("<BLANKLINE>", ""))

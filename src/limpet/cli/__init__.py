"""The command line: `limpet run`, `sweep`, `report`, `list`, `consolidate`, `repair`, `drift`, `inspect` and `plan`."""

from limpet.cli.base import app, console, main

# isort: split
from limpet.cli import experiments, memories, repair  # after `base`, which says what to install where it is missing

__all__ = ["app", "console", "experiments", "main", "memories", "repair"]

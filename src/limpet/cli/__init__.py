"""Command line: `limpet run`, `sweep`, `report`, `list`, `consolidate`, `inspect`, `plan`, `repair` and so on."""

from limpet.cli.base import app, console, main

# isort: split
from limpet.cli import experiments, memories, publish, repair  # after `base`, which reports missing extras

__all__ = ["app", "console", "experiments", "main", "memories", "publish", "repair"]

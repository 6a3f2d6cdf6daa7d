"""The versions that a record names."""

from __future__ import annotations

import platform
from importlib.metadata import version

import torch

import limpet


def versions(*packages: str) -> dict[str, str]:
    """Those of limpet, torch and Python, and of other packages that took part."""
    found = {"limpet": limpet.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return found | {package: version(package) for package in packages}


def in_words(*packages: str) -> str:
    """The same on one line."""
    return ", ".join(f"{name.replace('python', 'Python')} {found}" for name, found in versions(*packages).items())

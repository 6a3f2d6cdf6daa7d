"""What the tests share."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from experiment_data import cache_folder, mirror, small_data

__all__ = ["benchmark", "cache_folder", "mirror", "small_data"]


def benchmark(name: str) -> ModuleType:
    """A script of benchmarks/ as a module."""
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

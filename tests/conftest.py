"""What the tests share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

if importlib.util.find_spec("pydantic") is not None:  # what limpet.experiments needs; the core's tests do not
    from experiment_data import cache_folder, mirror, small_data

    __all__ = ["benchmark", "cache_folder", "mirror", "small_data"]


def benchmark(name: str) -> ModuleType:
    """A script of benchmarks/ as a module; run by itself it finds the scripts beside it, and so it does here."""
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_configure(config: Any) -> None:
    """The networks of most tests are too small, or their structures too coarse, for a forecast to be trusted."""
    config.addinivalue_line("filterwarnings", "ignore:limpet. forecasts of this memory cannot be trusted")

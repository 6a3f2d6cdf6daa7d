"""No import points upwards, and the core brings no extra along: docs/architecture.py, held against the real imports."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("architecture", DOCS / "architecture.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


architecture = script()


def test_no_import_points_upwards_and_the_core_imports_no_extra() -> None:
    faults = architecture.wrong()
    assert not faults, "\n" + "\n".join(faults)
    assert len(architecture.imports()) > 200  # that nothing is found is not because nothing was looked at


def test_few_modules_lie_in_the_root() -> None:
    assert len(list(architecture.SOURCE.glob("*.py"))) <= 8


def test_the_page_names_every_part() -> None:
    text = (DOCS / "architecture.md").read_text()
    assert architecture.table() in text, "the table is an old one: run python docs/architecture.py"
    assert all(f"`{part}" in text for part in architecture.existing())


def package(tmp_path: Path, files: dict[str, str]) -> Path:
    """A package with modules of its own beside an empty face."""
    source = tmp_path / "src" / "limpet"
    for name, text in {"__init__.py": "", **files}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    return source


FAULTS = {
    "upwards": (
        {"posterior/lora.py": "import torch\nfrom limpet.methods import Memory\n", "methods/__init__.py": ""},
        ["src/limpet/posterior/lora.py:2: 'posterior' (posterior) imports 'methods' (methods), which is above it"],
    ),
    "upwards, hidden in a function": (
        {"io/hub.py": "def f():\n    from limpet.methods import load\n", "methods/load.py": ""},
        ["src/limpet/io/hub.py:2: 'io' (model and files) imports 'methods' (methods)"],
    ),
    "upwards, for type checkers alone": (
        {
            "io/hub.py": "import typing\nif typing.TYPE_CHECKING:\n    from limpet.methods import Memory\n",
            "methods/__init__.py": "",
        },
        ["src/limpet/io/hub.py:3: 'io' (model and files) imports 'methods' (methods)"],
    ),
    "upwards, to the package itself": (
        {"curvature/fisher_pass.py": "import limpet\n"},
        ["src/limpet/curvature/fisher_pass.py:1: 'curvature' (curvature) imports 'limpet' (methods)"],
    ),
    "upwards, relatively": (
        {"curvature/fisher_pass.py": "from ..posterior import Posterior\n", "posterior/__init__.py": ""},
        ["src/limpet/curvature/fisher_pass.py:1: 'curvature' (curvature) imports 'posterior' (posterior)"],
    ),
    "an extra in the core": (
        {"posterior/summary.py": "from rich.table import Table\n", "curvature/new.py": "def f():\n    import tqdm\n"},
        ["src/limpet/posterior/summary.py:1: 'posterior' is a core part and imports rich when it is loaded"],
    ),
    "a precision that knows of ranks": (
        {"precision/new.py": "from limpet.distributed import current\n", "distributed/__init__.py": ""},
        ["src/limpet/precision/new.py:1: 'precision' knows limpet's errors and nothing else, not 'distributed'"],
    ),
    "a circle in one layer": (
        {
            "predictive/a.py": "from limpet.forgetting.b import x\n",
            "forgetting/b.py": "from limpet.predictive.a import y\n",
        },
        ["a circle of imports: forgetting -> predictive -> forgetting"],
    ),
    "a circle in one folder": (
        {
            "model/a.py": "def f():\n    from limpet.model.b import x\n",
            "model/b.py": "import typing\nif typing.TYPE_CHECKING:\n    from limpet.model import a\n",
        },
        ["a circle of imports: limpet.model."],
    ),
    "a module without a place": (
        {"brandnew.py": "import torch\n"},
        ["src/limpet/brandnew has no place: add 'brandnew' to a layer of LAYERS in docs/architecture.py"],
    ),
    "nothing": (
        {
            "curvature/brandnew.py": "import json\nimport torch.nn\nfrom limpet.layers import Layer\n",
            "layers/__init__.py": "import typing\n",
            "integrations/brandnew.py": "import keras\nfrom limpet import methods\n",
            "methods/__init__.py": "",
        },
        [],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_its_mend_named(name: str, tmp_path: Path) -> None:
    files, expected = FAULTS[name]
    found = architecture.wrong(package(tmp_path, files))
    assert len(found) == len(expected), found
    for said, begin in zip(found, expected, strict=True):
        assert said.startswith(begin), said


def test_the_drawing_has_every_part_and_no_arrow_that_follows_from_others(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    architecture.draw(tmp_path / "drawn.svg")
    text = (tmp_path / "drawn.svg").read_text()
    assert all(f">{part}<" in text for part in architecture.existing())
    graph = {"a": ["b", "c"], "b": ["c"], "c": []}
    assert architecture.needed_arrows(graph) == {"a": ["b"], "b": ["c"], "c": []}
    kept = (DOCS / "architecture.svg").read_text()
    assert all(f">{part}<" in kept for part in architecture.existing()), "an old one: run python docs/architecture.py"

"""The wheel and the sdist: what is in them, and that the first lines of the README run where only the wheel is."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import limpet

ROOT = Path(__file__).parents[2]
README_LINES = """
import doctest, json, sys
flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
result = doctest.testfile(sys.argv[1], module_relative=False, optionflags=flags)
import limpet
from importlib.metadata import version
from importlib.util import find_spec
print(json.dumps({
    "failed": result.failed, "attempted": result.attempted, "file": limpet.__file__, "version": version("limpet"),
    "extras": [name for name in ("tqdm", "transformers", "typer", "matplotlib") if find_spec(name)],
}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, the wheel made from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return out


def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.mark.slow
def test_they_hold_the_package_and_nothing_else(built: Path) -> None:
    source = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "limpet").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "limpet/py.typed" in source and "limpet/experiments/presets/permuted-mnist.yaml" in source
    inside = set(zipfile.ZipFile(wheel(built)).namelist())
    assert {name for name in inside if ".dist-info/" not in name} == source
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in source} | {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= names
    assert not any(name.startswith(("tests", "results", ".ci")) for name in names)
    assert wheel(built).stat().st_size < 600_000


@pytest.mark.slow
def test_the_first_lines_of_the_readme_run_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    install += ["-c", ROOT / ".ci" / "constraints.txt", wheel(built)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    command = [python, "-I", "-c", README_LINES, ROOT / "docs" / "quickstart.md"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["attempted"] >= 10 and told["failed"] == 0, ran.stdout
    assert Path(told["file"]).is_relative_to(tmp_path / "venv")
    assert told["version"] == limpet.__version__ and told["extras"] == []
    command_line = subprocess.run([python, "-I", "-m", "limpet"], capture_output=True, text=True, check=False)
    assert command_line.returncode == 1 and "pip install 'limpet[experiments]'" in command_line.stderr

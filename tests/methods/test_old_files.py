"""Memory files of every released format keep loading, with the same content as when they were written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

import old_files
from limpet.io import tensor_file

FILES = sorted(old_files.DATA.glob("format-*/*.safetensors"))
EXPECTED = {
    path.parent.name: json.loads(path.read_text()) for path in sorted(old_files.DATA.glob("format-*/expected.json"))
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_it_says_what_it_said(path: Path) -> None:
    expected, found = EXPECTED[path.parent.name][path.stem], old_files.says(path)
    assert found.keys() == expected.keys()
    blocks, expected_blocks = found.pop("blocks"), expected["blocks"]
    for key, value in found.items():
        assert value == (pytest.approx(expected[key], rel=1e-5) if isinstance(value, float) else expected[key]), key
    assert expected["penalty"] > 0.1
    assert blocks == pytest.approx(expected_blocks, rel=1e-4)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_it_goes_on(path: Path) -> None:
    assert old_files.go_on(path) == EXPECTED[path.parent.name][path.stem]["tasks"] + 1


def test_every_format_every_method_and_structure_is_kept() -> None:
    assert tuple(old_files.VERSIONS) == tensor_file.VERSIONS
    for version, made in old_files.VERSIONS.items():
        kept = old_files.folder(version)
        names = {path.stem for path in kept.glob("*.safetensors")}
        assert names == EXPECTED[kept.name].keys(), kept.name
        for name in names:
            with safe_open(kept / f"{name}.safetensors", framework="pt") as file:
                assert file.metadata()["version"] == str(version)
        missing = made.keys() - names
        assert not missing, f"no file for {', '.join(sorted(missing))}: run python tests/old_files.py"
    assert sum(path.stat().st_size for path in FILES) < 300_000

"""What the checks install is pinned and hashed, lower bounds have no known vulnerability, and actions are pinned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

tomllib = pytest.importorskip("tomllib")  # Python 3.11
packaging = pytest.importorskip("packaging")
from packaging.requirements import Requirement  # noqa: E402
from packaging.utils import canonicalize_name  # noqa: E402
from packaging.version import Version  # noqa: E402

ROOT = Path(__file__).parents[2]
CI = ROOT / ".ci"
LOCKS = sorted(CI.glob("locked*.txt"))
FIXED = {
    "torch": "2.6",
    "transformers": "5.5",
    "lightning": "2.6.6",
    "ray": "2.55",
    "pillow": "12.2",
    "tqdm": "4.66.3",
    "mkdocs-material": "9.5.32",
    "pytest": "9.0.3",
}
"""The first versions without the vulnerabilities of docs/dependencies.md."""


def requirements(path: Path) -> list[tuple[Requirement, int]]:
    """The requirements of a file, each with its number of hashes."""
    text = re.sub(r"\s#.*", "", re.sub(r"^#.*\n", "", path.read_text(), flags=re.M)).replace("\\\n", " ")
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}(?![0-9a-f])", line)
        found.append((Requirement(line.split(" --hash")[0].strip()), len(hashes)))
    return found


def locked(name: str) -> dict[str, Version]:
    """The versions of a lock file on this Python."""
    return {
        canonicalize_name(one.name): Version(str(one.specifier).removeprefix("=="))
        for one, _ in requirements(CI / name)
        if one.marker is None or one.marker.evaluate()
    }


def project(*extras: str) -> list[Requirement]:
    """The dependencies of the project and of its extras."""
    described: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = described["optional-dependencies"]
    found = [Requirement(one) for one in described["dependencies"]]
    for extra in extras:
        for one in map(Requirement, optional[extra]):
            found += project(*one.extras) if one.name == "limpet" else [one]
    return found


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_package_is_pinned_and_hashed(path: Path) -> None:
    found = requirements(path)
    assert found
    for one, hashes in found:
        assert re.fullmatch(r"==[^,*]+", str(one.specifier)) and one.url is None, one
        assert hashes, one
    assert not re.search(r"https?:|--(?:index|extra|find|trusted)", path.read_text())


def test_the_lock_is_that_of_the_project() -> None:
    versions = locked("locked.txt")
    for one in [*project("dev", "sweep"), *(one for one, _ in requirements(CI / "references-needs.txt"))]:
        assert versions[canonicalize_name(one.name)] in one.specifier, f"{one}: run .ci/lock"
    for one, _ in requirements(CI / "constraints.txt"):
        if one.marker is None or one.marker.evaluate():
            assert versions[canonicalize_name(one.name)] in one.specifier, f"{one}: run .ci/lock"
    for name, source in (("floor", "floor.txt"), ("floor", "floor-needs.txt"), ("audit", "audit.txt")):
        for one, _ in requirements(CI / source):
            assert locked(f"locked-{name}.txt")[canonicalize_name(one.name)] in one.specifier, f"{one}: run .ci/lock"
    references = locked("locked-references.txt")
    for one, _ in requirements(CI / "references.txt"):
        assert references[canonicalize_name(one.name)] in one.specifier, f"{one}: run .ci/lock"
    assert {"hatchling", "setuptools"} <= versions.keys()  # builds are not isolated


def test_the_lock_allows_the_cpu_build_of_torch() -> None:
    (cpu,) = re.findall(r"sha256:[0-9a-f]{64}", (CI / "torch-cpu.txt").read_text())
    torch = next(
        block for block in re.split(r"\n(?=\S)", (CI / "locked.txt").read_text()) if block.startswith("torch==")
    )
    assert cpu in torch and torch.count("sha256:") > 1
    assert not any(name.startswith(("nvidia-", "cuda-", "triton")) for name in locked("locked.txt"))


def test_lower_bounds_have_no_known_vulnerability() -> None:
    bounds = {one.name: one.specifier for one in project("dev", "sweep")}
    page = (ROOT / "docs" / "dependencies.md").read_text()
    for name, fixed in FIXED.items():
        (lower,) = (Version(one.version) for one in bounds[name] if one.operator == ">=")
        assert lower >= Version(fixed), name
        assert f"| {name} | {lower} |" in page, name
    assert len(re.findall(r"^\| \S+ \| [\d.]+ \|", page, flags=re.M)) == len(FIXED)


def test_actions_are_pinned_by_commit_and_advisories_are_scanned() -> None:
    yaml = pytest.importorskip("yaml")
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        used = re.findall(r"uses: (.*)", path.read_text())
        assert used and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", one) for one in used), path
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    checks = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())
    commands = [step.get("run", "") for step in checks["jobs"]["advisories"]["steps"]]
    assert any("--require-hashes" in one and "locked-audit.txt" in one for one in commands)
    assert any(one.startswith("pip-audit ") and "-r .ci/locked.txt" in one for one in commands)


def test_the_checks_install_nothing_without_a_hash() -> None:
    lines = [line for line in (CI / "run").read_text().splitlines() if "pip install" in line]
    known = [
        "--require-hashes --no-index",
        '--require-hashes "${@:3}"',
        "--no-build-isolation -e .",
        "-e '.[dev,sweep]'",
        "--no-deps -r .ci/references.txt",
    ]
    assert len(lines) == len(known) and all(any(one in line for line in lines) for one in known)
    body = re.search(r"^newest\(\).*?^}", (CI / "run").read_text(), flags=re.M | re.S)
    assert body is not None and all(any(one in line for line in body[0].splitlines()) for one in known[3:])

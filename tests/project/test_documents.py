"""The pages around the code: links lead somewhere, forms can be read, and the version is said once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import limpet

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", ".github/**/*.md", "benchmarks/*.md", "docs/**/*.md", "examples/*.md", "results/**/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    targets = [target for target in LINK.findall(text) if not re.match(r"https?://|mailto:", target)]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing
    assert not re.search(r"/(?:tmp|home|root|work)/", text)


def test_the_citation_is_that_of_this_version() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == limpet.__version__ and citation["license"] == "Apache-2.0"
    assert [author["name"] for author in citation["authors"]] == ["The limpet authors"]
    (paper,) = citation["references"]
    assert [author["family-names"] for author in paper["authors"]] == ["Ritter", "Botev", "Barber"]
    assert paper["year"] == 2018


def test_the_forms_have_what_the_tracker_needs() -> None:
    yaml = pytest.importorskip("yaml")
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert {path.stem for path in forms} == {"bug", "wish"}
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys()
        fields = [field["id"] for field in form["body"]]
        assert len(set(fields)) == len(fields) >= 3
        assert all(field["type"] == "textarea" and field["attributes"]["label"] for field in form["body"])
        assert any(field.get("validations", {}).get("required") for field in form["body"])


def prose(text: str) -> list[str]:
    """The lines of a page outside code blocks, tables and comments."""
    lines, fenced = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif (
            not fenced
            and not line.startswith("    ")
            and not line.lstrip().startswith(("|", "<!--", "#", "$$", "--8<--"))
        ):
            lines.append(line)
    return lines


WRITTEN = [page for page in PAGES if page != ROOT / "results" / "peers" / "README.md"]  # its lists are generated


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_wrapped(page: Path) -> None:
    def atoms(line: str) -> list[str]:  # a code span or a link is not broken
        return re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)|\$[^$]*\$", lambda span: "x" * len(span[0]), line).split()

    long = [line for line in prose(page.read_text()) if len(line) > 120]
    assert [line for line in long if max(map(len, atoms(line))) < 60] == []

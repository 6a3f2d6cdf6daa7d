"""The documentation site: it builds without a warning, asks the net for nothing, and its code is run."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *("index", "how-it-works", "questions", "scale", "command-line", "architecture", "versions", "dependencies"),
    *("tutorials/index", "tutorials/own_loop", "tutorials/vision", "tutorials/language", "tutorials/processes"),
    *("tutorials/strength", "api/index", "api/methods", "api/files", "api/likelihoods", "api/parallel"),
    *("api/integrations", "api/plan", "results/index", "results/permuted-mnist-50/index", "results/language/index"),
    *("quickstart", "options", "language-models", "many-processes", "experiments", "glossary", "find-your-way"),
    *("encoders", "settings"),
    *("decisions/index", "decisions/0008-measured-rise", "CHANGELOG", "CONTRIBUTING", "examples/index"),
]


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


tutorials, settings = module("tutorials"), module("settings")
SCRIPTS = sorted(tutorials.SCRIPTS.glob("*.py"))


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `mkdocs build --strict` builds it: links and images that lead nowhere are errors."""
    pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr
    return out


def test_the_reference_has_every_setting_of_a_recipe_with_its_meaning() -> None:
    from limpet.experiments.recipe import Preset, Recipe
    from limpet.experiments.settings import parse_setting

    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \| `(.*)` \| (.+) \|$", settings.tables(), flags=re.M)
    told = {name: (values, default, meaning) for name, values, default, meaning in rows}
    kinds = dict(settings.parts(Recipe))
    fields = {f"{prefix}{name}" for prefix, kind in kinds.items() for name in kind.model_fields}
    assert set(told) == fields - {prefix.rstrip(".") for prefix in kinds}
    for prefix, kind in kinds.items():
        assert set(settings.meanings(kind)) == set(kind.model_fields), prefix
    for name, (_, default, _) in told.items():  # a default, set on the command line, is the default
        assert Preset().resolve(dict([parse_setting(f"{name}={default}")])) == Recipe(), name
    assert told["training.lr"][:2] == ("number, > 0", "0.05")
    assert told["training.clip_norm"][:2] == ("number > 0 or auto or null", "auto")
    assert told["scenario"][:2] == ("task, domain, class or null", "null")


@pytest.mark.slow
def test_every_page_is_there_and_every_link_leads_somewhere(site: Path) -> None:
    assert [page for page in PAGES if not (site / f"{page}.html").is_file()] == []
    missing = []
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # served from the root, whatever was asked for
            continue
        targets = re.findall(r'(?:href|src)="([^"#?]+)', page.read_text())
        inside = [target for target in targets if not re.match(r"[a-z]+:", target)]
        missing += [f"{page.name}: {target}" for target in inside if not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"(https?:[^\"]+)", page.read_text())
        assert loaded == [], page.name


@pytest.mark.slow
def test_what_is_shown_is_that_of_the_project(site: Path) -> None:
    formulas = (site / "how-it-works.html").read_text()
    assert formulas.count("<math") > 40 and "arithmatex" not in formulas and "merror" not in formulas
    assert not re.search(r"<m\w+[^>]*>\\[a-z]", formulas)  # a word that was not understood
    commands = (site / "command-line.html").read_text()
    assert all(f'id="limpet-{name}"' in commands for name in ("run", "sweep", "report", "consolidate", "plan", "list"))
    assert "--checkpoint-seconds" in commands
    methods = (site / "api" / "methods.html").read_text()
    assert "<strong>Budget</strong>" in methods  # what the README says of the words
    assert 'id="limpet.Memory.protect"' in methods and "&gt;&gt;&gt; " in methods
    assert "90.97" in (site / "results" / "permuted-mnist-50" / "index.html").read_text()
    assert (site / "results" / "permuted-mnist-50" / "accuracy.png").is_file()
    assert (site / "tutorials" / "own_loop.ipynb").is_file() and not (site / "site" / "hooks.py").exists()


def test_links_on_the_site_are_those_of_the_project() -> None:
    pytest.importorskip("latex2mathml")
    from mkdocs.structure.files import File, Files

    hooks = module("hooks")
    here = File("results/a/README.md", str(ROOT), "site", False)
    names = ["decisions/0008-measured-rise.md", "index.md", "tutorials/strength.md"]
    files = Files([*(File(name, str(DOCS), "site", False) for name in names), here])
    text = (
        "[d](../../docs/decisions/0008-measured-rise.md#x) [front](../../README.md) `[no](../../LICENSE)` "
        "[t](../../docs/tutorials/strength.py) [licence](../../LICENSE) [page](https://example.org/a) [no](nowhere.md)"
    )
    found = "".join(hooks._outside_code(text, lambda part: hooks.LINK.sub(lambda m: hooks._link(m, here, files), part)))
    assert found == (
        "[d](../../decisions/0008-measured-rise.md#x) [front](../../index.md) `[no](../../LICENSE)` "
        "[t](../../tutorials/strength.md) licence [page](https://example.org/a) [no](nowhere.md)"
    )


def test_the_answers_are_right() -> None:
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testfile(str(DOCS / "questions.md"), module_relative=False, optionflags=flags)
    assert result.attempted >= 20 and result.failed == 0


def test_a_script_is_cut_into_cells() -> None:
    script = '"""For readers."""\n\n# %% [markdown]\n# # Title\n#\n# Words.\n\n# %%\nx = 1\n\n\n# %%\n# why\nprint(x)\n'
    assert tutorials.cells(script) == [(True, "# Title\n\nWords."), (False, "x = 1"), (False, "# why\nprint(x)")]


@pytest.mark.parametrize("name", tutorials.NOTEBOOKS)
def test_notebooks_are_those_of_the_scripts(name: str) -> None:
    nbformat = pytest.importorskip("nbformat")
    path = tutorials.SCRIPTS / f"{name}.py"
    written = path.with_suffix(".ipynb").read_text()
    assert written == tutorials.notebook(path)  # python docs/site/tutorials.py
    notebook = nbformat.reads(written, as_version=4)
    nbformat.validate(notebook)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert code == [cell.text for cell in tutorials.cells(path.read_text()) if not cell.prose]


@pytest.mark.slow
def test_a_notebook_says_what_the_script_says() -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(tutorials.SCRIPTS / "own_loop.ipynb", as_version=4)
    space: dict[str, object] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for cell in notebook.cells:
            if cell.cell_type == "code":
                exec(cell.source, space)
    printed = (tutorials.SCRIPTS / "own_loop.txt").read_text()
    assert numbers(said.getvalue()) == pytest.approx(numbers(printed), rel=0.1, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_tutorials_print_what_the_pages_show(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem == "language":
        pytest.importorskip("peft")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    if path.stem == "vision":  # the page shows MNIST and Fashion-MNIST, which are not everywhere
        monkeypatch.delenv("LIMPET_DATA", raising=False)
        said = tutorials.run(path)
        plain, held = (numbers(line)[0] for line in said.splitlines() if "a memory:" in line)
        assert plain < 70 and held > 97
        return
    said, shown = tutorials.run(path), path.with_suffix(".txt").read_text()
    assert re.sub(r"[\d.,]+", "#", said) == re.sub(r"[\d.,]+", "#", shown)
    assert numbers(said) == pytest.approx(numbers(shown), rel=0.1, abs=0.02)

"""What mkdocs does not do by itself: pages that lie elsewhere in the project, their links, the commands, mathematics.

Nothing is copied into docs/: results/*/README.md, their figures, the changelog and so on are pages from where they lie.
"""

from __future__ import annotations

import html
import importlib.util
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
ELSEWHERE = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/*.md", "examples/README.md", "examples/*.py"),
    *("results/README.md", "results/*/README.md", "results/*/*.png"),
)
FRONT = {"README.md": "index.md"}
"""The README is for people who look at the code; the site has a first page of its own."""

LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)", flags=re.S)
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", flags=re.S | re.M)
FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', flags=re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and figures that lie outside of docs/, and a page for each tutorial."""
    tutorials = _beside("tutorials")
    for path in sorted(tutorials.SCRIPTS.glob("*.py")):
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=tutorials.page(path)))
    for pattern in ELSEWHERE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them, and the commands where they belong."""
    text = "".join(_outside_code(markdown, lambda part: LINK.sub(lambda m: _link(m, page.file, files), part)))
    for mark, made in (("<!-- commands -->", _commands), ("<!-- settings -->", lambda: _beside("settings").tables())):
        text = text.replace(mark, made()) if mark in text else text
    return text


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    r"""\( ... \) and \[ ... \] as MathML."""
    return FORMULA.sub(lambda found: _formula(html.unescape(found[2]), found[1] == "div"), content)


def _outside_code(text: str, change: Callable[[str], str]) -> Iterator[str]:
    for number, part in enumerate(CODE.split(text)):
        yield part if number % 2 else change(part)


def _link(found: re.Match[str], here: File, files: Files) -> str:
    """The same link between pages of the site; where the site has no such page, its words alone."""
    words, (target, mark, anchor) = found[1], found[2].partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return found[0]
    place = posixpath.normpath(posixpath.join(posixpath.dirname(_in_project(here)), target))
    for name in (place, f"{place}/README.md"):
        uri = FRONT.get(name, name.removeprefix("docs/"))
        uri = re.sub(r"^(tutorials/\w+)\.py$", r"\1.md", uri)
        if files.get_file_from_path(uri) is not None:
            return f"{words}({posixpath.relpath(uri, posixpath.dirname(here.src_uri) or '.')}{mark}{anchor})"
    if not (ROOT / place).exists():
        return found[0]  # mkdocs says that it leads nowhere
    return words.strip("[]")


def _in_project(file: File) -> str:
    """Where a page comes from; what is made here comes from docs/."""
    elsewhere = file.abs_src_path is not None and not Path(file.abs_src_path).is_relative_to(ROOT / "docs")
    return file.src_uri if elsewhere else f"docs/{file.src_uri}"


def _beside(name: str) -> ModuleType:
    """A module of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _formula(latex: str, display: bool) -> str:
    inner = latex.strip()[2:-2].strip()
    formula: str = convert(inner, display="block" if display else "inline")
    return f'<div class="formula">{formula}</div>' if display else formula


def _commands() -> str:
    """Every command with its options, from the program itself."""
    import typer
    from typer.cli import get_docs_for_click

    from limpet.cli import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="limpet"), name="limpet")
    text = text.partition("\n## ")[2]  # without the list of commands: the page's own contents are one
    return re.sub(r"^(limpet \S+ .*)$", r"```bash\n\1\n```", f"## {text}", flags=re.M)

"""Tutorials are scripts: cells of prose (# %% [markdown]) and of code (# %%). Here they become pages and notebooks.

python docs/site/tutorials.py           docs/tutorials/*.ipynb anew, for those that a browser can run
python docs/site/tutorials.py --run     also docs/tutorials/*.txt: what every script prints
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

SCRIPTS = Path(__file__).parents[1] / "tutorials"
NOTEBOOKS = ("own_loop", "strength")
RANKS = {"processes": 2}
"""Scripts that torchrun starts, and how many of them."""


class Cell(NamedTuple):
    """Prose, without the # before each line, or code."""

    prose: bool
    text: str


def cells(script: str) -> list[Cell]:
    """The cells of a script; what stands before the first one, its docstring, is for those who read the script."""
    parts = re.split(r"^# %%(.*)\n", script, flags=re.M)[1:]
    found = []
    for mark, text in zip(parts[::2], parts[1::2], strict=True):
        prose = "[markdown]" in mark
        found.append(Cell(prose, (re.sub(r"^# ?", "", text, flags=re.M) if prose else text).strip("\n")))
    return found


def page(path: Path) -> str:
    """A tutorial as Markdown, with what it prints at the end."""
    title, *rest = [cell.text if cell.prose else f"```python\n{cell.text}\n```" for cell in cells(path.read_text())]
    notebook = f', <a href="{path.stem}.ipynb" download>notebook</a>' if path.stem in NOTEBOOKS else ""
    links = f'<p class="caption">As a <a href="{path.name}" download>script</a>{notebook}.</p>'
    heading, _, prose = title.partition("\n")
    printed = f"## What it prints\n\n```text\n{path.with_suffix('.txt').read_text().strip()}\n```"
    return "\n\n".join([heading, links, prose.strip(), *rest, printed]) + "\n"


def notebook(path: Path) -> str:
    """A tutorial as a notebook. Links in its prose are for the site, so only their words are left."""
    import nbformat
    from nbformat import v4

    made = []
    for number, cell in enumerate(cells(path.read_text())):
        words = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", cell.text)
        name = f"cell-{number}"  # the same script is the same file
        made.append(v4.new_markdown_cell(words, id=name) if cell.prose else v4.new_code_cell(cell.text, id=name))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    text: str = nbformat.writes(v4.new_notebook(cells=made, metadata={"kernelspec": kernel}))
    return text + "\n"


def run(path: Path, **environment: str) -> str:
    """What a script prints, as a person runs it."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS[path.stem])] if path.stem in RANKS else []
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning", **environment}
    done = subprocess.run(
        [sys.executable, *launcher, str(path)], capture_output=True, text=True, timeout=600, env=settings, check=False
    )
    if done.returncode:
        raise SystemExit(f"{path.name} failed:\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Write notebooks, and what is printed if asked."""
    for path in sorted(SCRIPTS.glob("*.py")):
        if path.stem in NOTEBOOKS:
            path.with_suffix(".ipynb").write_text(notebook(path))
        if "--run" in sys.argv:
            path.with_suffix(".txt").write_text(run(path))
        print(path.stem)


if __name__ == "__main__":
    main()

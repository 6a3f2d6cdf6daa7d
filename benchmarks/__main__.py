"""Run a benchmark: `python -m benchmarks NAME [options]`. Without a name, list all of them."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """The first line of the docstring of every script, or package, that can be run."""
    found = {}
    for path in [*FOLDER.glob("[a-z]*.py"), *FOLDER.glob("[a-z]*/__main__.py")]:
        text = path.read_text()
        if '__name__ == "__main__"' in text:
            name = path.stem if path.parent == FOLDER else path.parent.name
            found[name] = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    return dict(sorted(found.items()))


def main() -> None:
    """Run the benchmark that is named on the command line."""
    known = benchmarks()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in known:
        width = max(map(len, known))
        listed = "\n".join(f"  {one:{width}}  {about}" for one, about in known.items())
        sys.exit(f"usage: python -m benchmarks NAME [options]\n\n{listed}")
    sys.path.insert(0, str(FOLDER))  # the scripts import from one another
    sys.argv = [f"benchmarks {name}", *sys.argv[2:]]
    runpy.run_module(name, run_name="__main__")


if __name__ == "__main__":
    main()

"""Typer application, shared options and entry point of the command line."""

from __future__ import annotations

import signal
import sys
import warnings
from typing import Annotated, Any

from limpet.errors import LimpetError, LimpetWarning
from limpet.version import __version__

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
except ImportError as missing:  # limpet was installed without the extra
    sys.exit(f"limpet: the command line requires {missing.name}: pip install 'limpet[experiments]'")

app = typer.Typer(
    help="Continual learning with Laplace approximations: run experiments, protect models and repair fine-tuned ones."
    "\n\nA memory is a file that summarizes what a model has learned. `limpet consolidate` builds one for a language "
    "model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console()

Structure = Annotated[
    str | None, typer.Option(help="Curvature structure: kronecker (default), diagonal, kronecker-sum or dense.")
]


def _print_version(asked: bool) -> None:
    if asked:
        console.print(f"limpet {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _shared(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options before the name of a command; the help text is that of `app`."""


def _one_line(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as a single line on stderr."""
    Console(stderr=True).print(
        f"[yellow]warning:[/yellow] {escape(str(message).removeprefix('limpet: '))}", highlight=False
    )


def _line(error: Exception) -> str:
    """The message of an error as one line of printable characters; it may quote a damaged file."""
    joined = " ".join(str(error).split())
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in joined)


def main() -> None:
    """Run the command line, reporting expected errors as a single line with exit status 2."""
    warnings.simplefilter("once", LimpetWarning)
    warnings.showwarning = _one_line
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app(standalone_mode=True)
    except (LimpetError, OSError, UnicodeError) as error:
        Console(stderr=True).print(f"[red]limpet:[/red] {escape(_line(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

"""What all commands share, and the way in."""

from __future__ import annotations

import signal
import sys
import warnings
from typing import Annotated, Any

from limpet.errors import LimpetError, LimpetWarning

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
except ImportError as missing:  # the core is installed without the extra
    sys.exit(f"limpet: the command line needs {missing.name}: pip install 'limpet[experiments]'")

app = typer.Typer(
    help="Networks that learn new things without forgetting the old ones: experiments, and memories of models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console()

Structure = Annotated[str | None, typer.Option(help="kronecker, diagonal, kronecker-sum or dense.")]


def _one_line(message: Warning | str, *_: Any, **__: Any) -> None:
    Console(stderr=True).print(
        f"[yellow]note:[/yellow] {escape(str(message).removeprefix('limpet: '))}", highlight=False
    )


def main() -> None:
    """The entry point: every error that limpet raises on purpose is one line."""
    warnings.simplefilter("once", LimpetWarning)
    warnings.showwarning = _one_line
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app(standalone_mode=True)
    except (LimpetError, OSError, UnicodeDecodeError) as error:
        Console(stderr=True).print(f"[red]limpet:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

"""Summaries and tables printed to the terminal."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from limpet.experiments.record import Record
from limpet.methods.inspect import Inspection


def show_metrics(console: Console, record: Record) -> None:
    """Print the final metrics of a run.

    Args:
        console: The console to print to.
        record: The record of the finished run.
    """
    shown = ", ".join(
        f"{name.replace('_', ' ')} {value:.2f}" for name, value in record.metrics.items() if value is not None
    )
    console.print(f"  [dim]{shown}[/dim]", highlight=False)


def show_inspection(console: Console, found: Inspection) -> None:
    """Print the contents of a memory file as a table of blocks and a table of tasks.

    Args:
        console: The console to print to.
        found: The inspected memory file.
    """
    settings = found.settings
    strength = "auto" if settings.get("automatic") else f"{settings['strength']:g}"
    console.print(
        f"[bold]{settings['method']}[/bold], {settings['structure']}, strength {strength}: {settings['tasks']} tasks, "
        f"{settings['examples']:,} examples, {found.nbytes / 1e6:.2f} MB, written by limpet {found.library}",
        highlight=False,
    )
    if settings.get("probes"):
        console.print("contains a probe: inputs and the model's outputs at consolidation", highlight=False)
    shape, tasks, nbytes = (Column(name, no_wrap=True) for name in ("shape", "tasks", "bytes"))
    names = "block", "kind", shape, "structure", tasks, "determined by data", "at stake (nats)", nbytes
    blocks = Table(*names, box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for block in found.blocks:
        sizes, share, stake = " x ".join(map(str, block.shape)), f"{100 * block.decided:.0f} %", f"{block.at_stake:.3g}"
        row = (block.name, block.kind, sizes, block.structure, str(block.tasks), share, stake, f"{block.nbytes:,}")
        blocks.add_row(*row)
    console.print(blocks)
    if found.history.tasks:
        learned = Table(
            "task", "examples", "measured / predicted increase", "travelled since (nats)", box=SIMPLE, pad_edge=False
        )
        for number, task in enumerate(found.history.tasks):
            pairs = zip(task.curve.predicted, task.curve.measured, strict=True)
            ratios = ", ".join(f"{rise / q:.2g} at {q:.2g}" for q, rise in pairs)
            travelled = found.history.travelled - task.since
            learned.add_row(str(number + 1), f"{task.examples:,}", ratios, f"{travelled:.3g}")
        console.print(learned)

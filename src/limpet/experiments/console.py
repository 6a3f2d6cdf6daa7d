"""Summaries and tables printed to the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from limpet.experiments.record import Record
from limpet.methods.inspect import BlockInspection, Inspection
from limpet.methods.private import privacy_text
from limpet.posterior.summary import numberless


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


def show_inspection(console: Console, found: Inspection, *, full: bool = False) -> None:
    """Print the contents of a memory file as a table of blocks and a table of tasks.

    Args:
        console: The console to print to.
        found: The inspected memory file.
        full: Print a line per block. By default, blocks that differ only in numbers in their names share a line.
    """
    settings = found.settings
    strength = "auto" if settings.get("automatic") else f"{settings['strength']:g}"
    console.print(
        f"[bold]{settings['method']}[/bold], {settings['structure']}, strength {strength}: {settings['tasks']} tasks, "
        f"{settings['examples']:,} examples, {found.nbytes / 1e6:.2f} MB, written by limpet {found.library}",
        highlight=False,
    )
    console.print(f"SHA-256 {found.sha256}", highlight=False, soft_wrap=True)
    if settings.get("probes"):
        console.print("contains a probe: inputs and the model's outputs at consolidation", highlight=False)
    if any(found.privacy):
        console.print(privacy_text(found.privacy).removeprefix(", "), highlight=False)
    console.print(_blocks(found.blocks, full))
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


def _blocks(blocks: Sequence[BlockInspection], full: bool) -> Table:
    """The table of blocks; of blocks that share a line, the mean of the percentages and the sums of nats and bytes."""
    groups: dict[tuple[object, ...], list[BlockInspection]] = {}
    for block in blocks:
        name = block.name if full else numberless(block.name)
        groups.setdefault((name, block.kind, block.shape, block.structure, block.tasks), []).append(block)
    number, shape, tasks, nbytes = (Column(name, no_wrap=True) for name in ("number", "shape", "tasks", "bytes"))
    names = "block", number, "kind", shape, "structure", tasks, "determined by data", "at stake (nats)", nbytes
    table = Table(*names, box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for (pattern, *_), group in groups.items():
        first = group[0]
        table.add_row(
            first.name if len(group) == 1 else str(pattern),
            str(len(group)),
            first.kind,
            " x ".join(map(str, first.shape)),
            first.structure,
            str(first.tasks),
            f"{100 * fmean(block.decided for block in group):.0f} %",
            f"{sum(block.at_stake for block in group):.3g}",
            f"{sum(block.nbytes for block in group):,}",
        )
    return table

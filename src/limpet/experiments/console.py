"""What a person at a terminal sees of a run: two bars, and a line for every task."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from limpet.experiments.record import Record
from limpet.experiments.runner import Watcher
from limpet.inspection import Inspection


class Bars(Watcher):
    """Progress of one run. Off a terminal only the lines are printed."""

    def __init__(self, title: str, console: Console) -> None:
        self.title, self.console = title, console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks = self._progress.add_task("tasks", total=None)
        self._updates = self._progress.add_task("updates", total=None)
        self._drawn = 0.0

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begun(self, record: Record, tasks: int) -> None:
        """The title, and where a run goes on."""
        self.console.print(f"[bold]{self.title}[/bold]" + (f", from task {record.tasks + 1}" if record.tasks else ""))
        self._progress.update(self._tasks, total=tasks, completed=record.tasks)

    def updated(self, task: int, epoch: int, done: int, total: int) -> None:
        """Drawn at most ten times a second: an update of a small network takes a millisecond."""
        now = time.monotonic()
        if now - self._drawn > 0.1 or done == total:
            self._drawn = now
            self._progress.update(
                self._updates, description=f"task {task + 1}, epoch {epoch + 1}", completed=done, total=total
            )

    def learned(self, record: Record) -> None:
        """A line for the task."""
        self._progress.update(self._tasks, completed=record.tasks)
        row = record.accuracy[-1][: record.tasks]
        if row:
            seconds = sum(spent[-1] for spent in record.seconds.model_dump().values())
            self.console.print(
                f"  {record.names[record.tasks - 1]}: {row[-1]:.1f} %, "
                f"mean of {record.tasks}: {record.mean_accuracy:.1f} %, first: {row[0]:.1f} %  "
                f"[dim]{seconds:.0f} s[/dim]",
                highlight=False,
            )


def show_metrics(console: Console, record: Record) -> None:
    """The numbers at the end."""
    shown = ", ".join(
        f"{name.replace('_', ' ')} {value:.2f}" for name, value in record.metrics.items() if value is not None
    )
    console.print(f"  [dim]{shown}[/dim]", highlight=False)


def show_inspection(console: Console, found: Inspection) -> None:
    """A memory file as two tables."""
    settings = found.settings
    strength = "auto" if settings.get("automatic") else f"{settings['strength']:g}"
    console.print(
        f"[bold]{settings['method']}[/bold], {settings['structure']}, strength {strength}: {settings['tasks']} tasks, "
        f"{settings['examples']:,} examples, {found.nbytes / 1e6:.2f} MB, made by limpet {found.library}",
        highlight=False,
    )
    blocks = Table("block", "kind", "shape", "structure", "tasks", "decided by data", "at stake (nats)", "bytes")
    for block in found.blocks:
        shape = " x ".join(map(str, block.shape))
        share, stake = f"{100 * block.decided:.0f} %", f"{block.at_stake:.3g}"
        row = (block.name, block.kind, shape, block.structure, str(block.tasks), share, stake, f"{block.nbytes:,}")
        blocks.add_row(*row)
    console.print(blocks)
    if found.history.tasks:
        tasks = Table("task", "examples", "measured / predicted rise", "way behind it (nats)")
        for number, task in enumerate(found.history.tasks):
            pairs = zip(task.curve.predicted, task.curve.measured, strict=True)
            ratios = ", ".join(f"{rise / q:.2g} at {q:.2g}" for q, rise in pairs)
            behind = found.history.travelled - task.since
            tasks.add_row(str(number + 1), f"{task.examples:,}", ratios, f"{behind:.3g}")
        console.print(tasks)

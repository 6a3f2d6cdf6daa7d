"""Live terminal display of a run: progress, accuracy on each task, and the forecast of forgetting."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from limpet.experiments.methods import Method, Status
from limpet.experiments.record import Record
from limpet.experiments.runner import Watcher

SHOWN = 12
"""Maximum number of tasks, or blocks, shown at a time."""

WIDTH = 24


class LiveDisplay(Watcher):
    """Show a live panel and print one line per task; without a terminal, only the lines are printed.

    Args:
        title: Title of the run.
        console: The console to print to.
    """

    def __init__(self, title: str, console: Console) -> None:
        self.title, self.console = title, console
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=console)
        self._tasks = self._progress.add_task("tasks", total=None)
        self._updates = self._progress.add_task("updates", total=None)
        self._live = Live(self._progress, console=console, transient=True, refresh_per_second=4)
        self._names: Sequence[str] = ()
        self._accuracy: Sequence[float] = ()
        self._drawn = self._polled = -1.0
        self._status = Status()

    def __enter__(self) -> LiveDisplay:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def begun(self, record: Record, tasks: int) -> None:
        """Print the title, and the task from which a run resumes."""
        self.console.print(f"[bold]{self.title}[/bold]" + (f", from task {record.tasks + 1}" if record.tasks else ""))
        self._progress.update(self._tasks, total=tasks, completed=record.tasks)
        self._take(record)

    def updated(self, task: int, epoch: int, done: int, total: int, method: Method) -> None:
        """Refresh the progress bars and the status of the method."""
        # An update of a small network takes a millisecond: draw at most ten times and poll at most once a second.
        now = time.monotonic()
        if not self.console.is_terminal or (now - self._drawn < 0.1 and done != total):
            return
        self._drawn = now
        shown = f"task {task + 1}, epoch {epoch + 1}"
        self._progress.update(self._updates, description=shown, completed=done, total=total)
        if now - self._polled > 1:
            self._status, self._polled = method.status(), now
            self._live.update(self.rendered())

    def learned(self, record: Record) -> None:
        """Print the accuracies after a task."""
        self._progress.update(self._tasks, completed=record.tasks)
        self._take(record)
        row = self._accuracy
        if row:
            seconds = sum(spent[-1] for spent in record.seconds.model_dump().values())
            self.console.print(
                f"  {record.names[record.tasks - 1]}: {row[-1]:.1f} %, "
                f"mean of {record.tasks}: {record.mean_accuracy:.1f} %, first: {row[0]:.1f} %  "
                f"[dim]{seconds:.0f} s[/dim]",
                highlight=False,
            )

    def _take(self, record: Record) -> None:
        self._names = record.names
        row = record.accuracy[-1][: record.tasks] if record.accuracy else []
        self._accuracy = [value for value in row if value is not None]

    def rendered(self) -> RenderableType:
        """Return the current panel."""
        parts: list[RenderableType] = [self._progress]
        tables = Table.grid(padding=(0, 4))
        known = _bars("accuracy", zip(self._names, self._accuracy, strict=False), 100.0, "{:.1f} %", newest=True)
        status = self._status
        if status.forecast is None:
            tables.add_row(known)
        else:
            ranked = sorted(status.blocks.items(), key=lambda block: -block[1])
            full = status.budget or max(status.forecast, 1e-12)
            tables.add_row(known, _bars("forecast by block", ranked, full, "{:.4f} nats"))
        parts.append(Padding(tables, (1, 2)))
        if status.forecast is not None:
            parts.append(Padding(_sentence(status), (0, 2)))
        return Group(*parts)


def _bars(title: str, values: Iterable[tuple[str, float]], full: float, form: str, *, newest: bool = False) -> Table:
    """Return a table of bars; if there are too many, show the first and last (`newest`) or only the first ones."""
    rows = list(values)
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 1))
    gap = len(rows) - SHOWN
    if gap > 0:
        first = SHOWN // 2 if newest else SHOWN
        rows = [*rows[:first], (f"({gap} more)", -1.0), *rows[first + gap :]]
    for name, value in rows:
        if value < 0:
            table.add_row(f"[dim]{name}[/dim]")
        else:
            share = min(max(value / full, 0.0), 1.0)
            table.add_row(name, ProgressBar(total=1.0, completed=share, width=WIDTH), form.format(value))
    return table


def _sentence(status: Status) -> str:
    forecast = f"forecast: loss on earlier tasks rises by {status.forecast:.4f} nats per example"
    if status.budget is not None and status.forecast is not None:
        forecast += f", {100 * status.forecast / status.budget:.0f} % of the budget of {status.budget:g}"
    return f"{forecast}; penalty {status.penalty:.4f}"

"""The TensorBoard log of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from limpet.errors import LimpetWarning, warn
from limpet.experiments.record import Record


class Log:
    """Curves over epochs (loss, forecast) and over tasks (accuracy). A run that goes on overwrites what it redoes."""

    def __init__(self, folder: Path, record: Record, *, epoch: int = 0) -> None:
        self._epochs = sum(record.epochs)  # of all tasks before the one being learned
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            warn("no TensorBoard log is written: pip install 'limpet[experiments]'", LimpetWarning)
        else:
            self._writer = SummaryWriter(str(folder), purge_step=self._epochs + epoch + 1)

    def epoch(self, epoch: int, numbers: dict[str, float]) -> None:
        """After an epoch of the task being learned."""
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(f"training/{name}", value, self._epochs + epoch)

    def learned(self, record: Record) -> None:
        """After a task."""
        self._epochs = sum(record.epochs)
        row = record.accuracy[-1][: record.tasks]
        if self._writer is None or not row:
            return
        self._writer.add_scalar("accuracy/mean", record.mean_accuracy, self._epochs)
        for name, value in zip(record.names, row, strict=False):
            self._writer.add_scalar(f"accuracy/{name}", value, self._epochs)
        self._writer.flush()

    def close(self) -> None:
        """End the log."""
        if self._writer is not None:
            self._writer.close()

"""TensorBoard log of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from limpet.errors import LimpetWarning, warn
from limpet.experiments.record import Record


class Log:
    """Log scalars per epoch (loss, forecast, penalty) and per task (accuracy).

    A resumed run purges the steps after its checkpoint, which it repeats.

    Args:
        folder: The log directory.
        record: The record of the run so far.
        epoch: Number of epochs already trained on the current task.
    """

    def __init__(self, folder: Path, record: Record, *, epoch: int = 0) -> None:
        self._epochs = sum(record.epochs)  # of all tasks before the current one
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            warn("TensorBoard is not installed, so no log is written: pip install 'limpet[experiments]'", LimpetWarning)
        else:
            self._writer = SummaryWriter(str(folder), purge_step=self._epochs + epoch + 1)

    def epoch(self, epoch: int, numbers: dict[str, float]) -> None:
        """Log scalars after an epoch of the current task."""
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(f"training/{name}", value, self._epochs + epoch)

    def learned(self, record: Record) -> None:
        """Log accuracies after a task."""
        self._epochs = sum(record.epochs)
        row = record.accuracy[-1][: record.tasks]
        if self._writer is None or not row:
            return
        self._writer.add_scalar("accuracy/mean", record.mean_accuracy, self._epochs)
        for name, value in zip(record.names, row, strict=False):
            self._writer.add_scalar(f"accuracy/{name}", value, self._epochs)
        self._writer.flush()

    def close(self) -> None:
        """Close the log."""
        if self._writer is not None:
            self._writer.close()

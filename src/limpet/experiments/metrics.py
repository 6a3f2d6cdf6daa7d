"""Numbers from an accuracy matrix, and the scores of one network on one task.

R[t][i] is the accuracy on task i after task t was learned, in percent (Lopez-Paz and Ranzato 2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.errors import LimpetError
from limpet.experiments.data import Examples
from limpet.precision.linalg import widened

BINS = 15

Matrix = Sequence[Sequence[float | None]]


class Score(NamedTuple):
    """Accuracy in percent, negative log likelihood in nats, calibration error in percent."""

    accuracy: float
    nll: float
    calibration: float


@torch.no_grad()
def score(model: nn.Module, examples: Examples, head: int, batch_size: int) -> Score:
    """How a network does on a set."""
    was_training = model.training
    model.eval()
    try:
        logits = torch.cat([model(inputs, head) for inputs, _ in examples.batches(batch_size)])
    finally:
        model.train(was_training)
    if not bool(torch.isfinite(logits).all()):
        raise LimpetError("the network's outputs hold inf or nan: training diverged, a smaller training.lr may help")
    return score_logits(logits, examples.labels)


def score_logits(logits: Tensor, labels: Tensor) -> Score:
    """The same from logits.

    >>> logits = torch.tensor([[9.0, 0.0], [9.0, 0.0], [9.0, 0.0], [9.0, 0.0]])
    >>> [round(value, 1) for value in score_logits(logits, torch.tensor([0, 0, 0, 1]))]
    [75.0, 2.3, 25.0]
    """
    log_probabilities = logits.log_softmax(1)
    confidence, predicted = log_probabilities.max(1)
    correct = predicted == labels
    return Score(
        100 * correct.sum().item() / len(labels),
        F.nll_loss(log_probabilities, labels).item(),
        100 * calibration_error(confidence.exp(), correct),
    )


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> float:
    """Expected calibration error: sum over bins of (share of examples) |accuracy - confidence| (Guo et al. 2017)."""
    confidence, correct = widened(confidence), widened(correct)
    which = (confidence * bins).long().clamp_(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.double, device=confidence.device).index_add_(0, which, correct - confidence)
    return float(gaps.abs().sum() / len(confidence))


def last_row(accuracy: Matrix) -> list[float]:
    """Accuracy on every task at the end."""
    return [value for value in accuracy[-1] if value is not None]


def average(accuracy: Matrix) -> float:
    """Mean over all tasks at the end.

    >>> R = [[90.0, 10.0], [80.0, 90.0]]
    >>> average(R), forgetting(R), backward_transfer(R), forward_transfer(R, [5.0, 8.0])
    (85.0, 10.0, -10.0, 2.0)
    """
    row = last_row(accuracy)
    return sum(row) / len(row)


def forgetting(accuracy: Matrix) -> float | None:
    """How far each task fell from its best, mean over all but the last (Chaudhry et al. 2018)."""
    columns = _columns(accuracy)[:-1]
    if not columns or any(len(row) <= task for task, row in enumerate(accuracy)):  # not tested when it was learned
        return None
    return sum(max(column[:-1]) - column[-1] for column in columns) / len(columns)


def backward_transfer(accuracy: Matrix) -> float | None:
    """What later tasks did to earlier ones: mean of R[T][i] - R[i][i]."""
    last = accuracy[-1]
    pairs = [(last[i], accuracy[i][i]) for i in range(len(accuracy) - 1) if accuracy[i]]
    gains = [end - begin for end, begin in pairs if end is not None and begin is not None]
    return sum(gains) / len(gains) if gains and len(gains) == len(accuracy) - 1 else None


def forward_transfer(accuracy: Matrix, untrained: Sequence[float]) -> float | None:
    """What earlier tasks did for one not yet learned: mean of R[i-1][i] - (accuracy of the untrained network)."""
    gains = []
    for i in range(1, len(accuracy)):
        ahead = accuracy[i - 1][i] if len(accuracy[i - 1]) > i else None
        if ahead is None:
            return None
        gains.append(ahead - untrained[i])
    return sum(gains) / len(gains) if gains else None


def _columns(accuracy: Matrix) -> list[list[float]]:
    """For each task its accuracies from when it was learned."""
    columns = []
    for i in range(len(accuracy)):
        values = [accuracy[t][i] for t in range(i, len(accuracy)) if len(accuracy[t]) > i]
        columns.append([value for value in values if value is not None])
    return columns

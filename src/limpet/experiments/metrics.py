"""Continual-learning metrics of an accuracy matrix, and scores of a network on one task.

R[t][i] is the accuracy on task i after training on task t, in percent (Lopez-Paz and Ranzato 2017).
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
    """Accuracy in percent, negative log-likelihood in nats, expected calibration error in percent."""

    accuracy: float
    nll: float
    calibration: float


@torch.no_grad()
def score(model: nn.Module, examples: Examples, head: int, batch_size: int) -> Score:
    """Evaluate a network on a dataset.

    Args:
        model: The network; its training mode is restored afterwards.
        examples: The dataset.
        head: Head of the network to use.
        batch_size: Number of examples per batch.

    Returns:
        The score over all examples.

    Raises:
        LimpetError: If an output is not finite.
    """
    was_training = model.training
    model.eval()
    try:
        logits = torch.cat([model(inputs, head) for inputs, _ in examples.batches(batch_size)])
    finally:
        model.train(was_training)
    if not bool(torch.isfinite(logits).all()):
        raise LimpetError("the network's outputs contain inf or nan: training diverged, try a smaller training.lr")
    return score_logits(logits, examples.labels)


def score_logits(logits: Tensor, labels: Tensor) -> Score:
    """Compute the score from logits.

    Args:
        logits: Logits of shape (n, classes).
        labels: Class indices of shape (n,).

    Returns:
        The score over all examples.

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
    """Expected calibration error: sum over bins of (share of examples) |accuracy - confidence| (Guo et al. 2017).

    Args:
        confidence: Probability of the predicted class, per example.
        correct: Whether the prediction is correct, per example.
        bins: Number of equal-width bins of the confidence.

    Returns:
        The error, between 0 and 1.
    """
    confidence, correct = widened(confidence), widened(correct)
    which = (confidence * bins).long().clamp_(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.double, device=confidence.device).index_add_(0, which, correct - confidence)
    return float(gaps.abs().sum() / len(confidence))


def last_row(accuracy: Matrix) -> list[float]:
    """Return the final accuracy on every task."""
    return [value for value in accuracy[-1] if value is not None]


def average(accuracy: Matrix) -> float:
    """Return the final accuracy averaged over all tasks.

    >>> R = [[90.0, 10.0], [80.0, 90.0]]
    >>> average(R), forgetting(R), backward_transfer(R), forward_transfer(R, [5.0, 8.0])
    (85.0, 10.0, -10.0, 2.0)
    """
    row = last_row(accuracy)
    return sum(row) / len(row)


def forgetting(accuracy: Matrix) -> float | None:
    """Mean drop of each task from its best accuracy, over all tasks but the last (Chaudhry et al. 2018)."""
    columns = _columns(accuracy)[:-1]
    if not columns or any(
        len(row) <= task for task, row in enumerate(accuracy)
    ):  # some task was not tested right after training
        return None
    return sum(max(column[:-1]) - column[-1] for column in columns) / len(columns)


def backward_transfer(accuracy: Matrix) -> float | None:
    """Influence of later tasks on earlier ones: mean of R[T][i] - R[i][i]."""
    last = accuracy[-1]
    pairs = [(last[i], accuracy[i][i]) for i in range(len(accuracy) - 1) if accuracy[i]]
    gains = [end - begin for end, begin in pairs if end is not None and begin is not None]
    return sum(gains) / len(gains) if gains and len(gains) == len(accuracy) - 1 else None


def forward_transfer(accuracy: Matrix, untrained: Sequence[float]) -> float | None:
    """Influence of earlier tasks on the next one: mean of R[i-1][i] - (accuracy of the untrained network).

    Args:
        accuracy: The accuracy matrix R.
        untrained: Accuracy of the untrained network on each task.

    Returns:
        The mean, or None if a value is missing.
    """
    gains = []
    for i in range(1, len(accuracy)):
        ahead = accuracy[i - 1][i] if len(accuracy[i - 1]) > i else None
        if ahead is None:
            return None
        gains.append(ahead - untrained[i])
    return sum(gains) / len(gains) if gains else None


def _columns(accuracy: Matrix) -> list[list[float]]:
    """Return for each task its accuracies from its own training onwards."""
    columns = []
    for i in range(len(accuracy)):
        values = [accuracy[t][i] for t in range(i, len(accuracy)) if len(accuracy[t]) > i]
        columns.append([value for value in values if value is not None])
    return columns

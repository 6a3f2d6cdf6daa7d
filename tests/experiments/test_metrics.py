"""Test metrics against hand-computed values and learning-rate schedules against the paper."""

from __future__ import annotations

import math

import pytest
import torch

from limpet.experiments import metrics
from limpet.experiments.recipe import Training
from limpet.experiments.training import learning_rate

R = [[90.0, 20.0, None], [85.0, 95.0, 30.0], [60.0, 90.0, 97.0]]


def test_matrix_metrics() -> None:
    assert metrics.average(R) == pytest.approx((60 + 90 + 97) / 3)
    assert metrics.forgetting(R) == pytest.approx(((90 - 60) + (95 - 90)) / 2)
    assert metrics.backward_transfer(R) == pytest.approx(((60 - 90) + (90 - 95)) / 2)
    assert metrics.forward_transfer(R, [10.0, 11.0, 12.0]) == pytest.approx(((20 - 11) + (30 - 12)) / 2)


def test_metrics_that_cannot_be_known() -> None:
    joint: metrics.Matrix = [[], [], [80.0, 80.0, 80.0]]
    assert metrics.average(joint) == 80
    assert metrics.forgetting(joint) is metrics.backward_transfer(joint) is None
    assert metrics.forward_transfer(joint, [0.0, 0.0, 0.0]) is None
    assert metrics.forgetting([[], [80.0, 90.0], [70.0, 60.0, 95.0]]) is None  # task 1 was not tested when learned
    assert metrics.forgetting([[90.0]]) is metrics.forward_transfer([[90.0]], [0.0]) is None


def test_calibration_error_by_hand() -> None:
    confidence = torch.tensor([0.95, 0.97, 0.61, 0.65, 0.62])
    correct = torch.tensor([True, False, True, True, False])
    # bins of width 1/15: {0.95, 0.97} with accuracy 1/2, {0.61, 0.65, 0.62} with 2/3
    expected = 2 / 5 * abs(0.5 - 0.96) + 3 / 5 * abs(2 / 3 - (0.61 + 0.65 + 0.62) / 3)
    assert metrics.calibration_error(confidence, correct) == pytest.approx(expected, abs=1e-7)
    assert metrics.calibration_error(torch.ones(4), torch.ones(4, dtype=torch.bool)) == 0


def test_score_of_logits() -> None:
    logits, labels = torch.randn(50, 4), torch.randint(0, 4, (50,))
    accuracy, nll, _ = metrics.score_logits(logits, labels)
    assert accuracy == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    assert nll == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item())


def test_learning_rates() -> None:
    cosine = Training(lr=0.4, epochs=2, schedule="cosine")
    assert [learning_rate(cosine, 1, 0, u, 10) for u in (0, 5, 10, 20)] == pytest.approx(
        [0.4, 0.2 * (1 + math.cos(math.pi / 4)), 0.2, 0.0]
    )
    dropped = Training(lr=0.1, epochs=20, schedule="step", drop_epochs=5)
    assert [learning_rate(dropped, 1, 0, u, 10) for u in (0, 49, 50, 100)] == pytest.approx([0.1, 0.1, 0.01, 0.001])
    by_updates = Training(lr=0.1, schedule="step", drop_updates=1000)
    assert learning_rate(by_updates, 1, 0, 2000, 10) == pytest.approx(0.001)
    by_task = Training(lr=0.1, schedule="constant", task_decay=0.5)
    assert [learning_rate(by_task, 1, t, 0, 10) for t in (0, 1, 4)] == pytest.approx([0.1, 0.1 / 1.5, 0.1 / 3])
    by_strength = Training(lr=0.1, schedule="constant", strength_decay=0.1)
    assert [learning_rate(by_strength, s, t, 0, 10) for s, t in ((300, 0), (300, 1), (3, 1))] == pytest.approx(
        [0.1, 0.1 / 30, 0.1]
    )

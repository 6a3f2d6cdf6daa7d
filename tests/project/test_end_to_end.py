"""Real data: five permuted-MNIST tasks, and the network still knows the first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from limpet.experiments import load_preset, run

PLAIN = {"pixels.mean": 0.0, "pixels.std": 1.0, "training.lr": 0.05, "training.batch_size": 250}
"""Settings that owe nothing to tuning."""


@pytest.mark.slow
@pytest.mark.skipif("LIMPET_DATA" not in os.environ, reason="LIMPET_DATA is not set; .ci/run sets it")
def test_five_permuted_tasks(tmp_path: Path) -> None:
    def mean_accuracy(method: str, structure: str | None = None, strength: float = 1.0) -> float:
        settings = {"method": method, "structure": structure, "tasks": 5, "training.epochs": 3, **PLAIN}
        settings |= {"memory.strength": strength, "memory.smoothing": 0.0, "memory.prior_precision": 1.0}
        recipe = load_preset("permuted-mnist").resolve(settings)
        return run(recipe, tmp_path / f"{method}-{structure}-{strength}").mean_accuracy

    plain = mean_accuracy("fine-tuning")
    diagonal = {strength: mean_accuracy("online-laplace", "diagonal", strength) for strength in (3.0, 10.0, 30.0)}
    kronecker = mean_accuracy("online-laplace", "kronecker", 3.0)
    print(f"kronecker {kronecker:.2f}, diagonal {diagonal}, plain {plain:.2f}")
    assert kronecker >= 95.5
    assert kronecker >= max(diagonal.values()) + 1.5
    assert kronecker >= plain + 30

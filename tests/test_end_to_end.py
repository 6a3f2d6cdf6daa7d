"""Real data: five permuted-MNIST tasks, and the network still knows the first."""

from __future__ import annotations

import os

import pytest

from conftest import benchmark


@pytest.mark.slow
@pytest.mark.skipif("LIMPET_DATA" not in os.environ, reason="LIMPET_DATA is not set; .ci/run sets it")
def test_five_permuted_tasks() -> None:
    permuted = benchmark("permuted_mnist")
    tasks = [permuted.Permuted(number) for number in range(5)]

    def mean_accuracy(structure: str | None, strength: float = 1.0) -> float:
        return float(permuted.mean(permuted.run(tasks, structure, strength)[-1]))

    plain = mean_accuracy(None)
    diagonal = {strength: mean_accuracy("diagonal", strength) for strength in (3.0, 10.0, 30.0)}
    kronecker = mean_accuracy("kronecker", 3.0)
    print(f"kronecker {kronecker:.2f}, diagonal {diagonal}, plain {plain:.2f}")
    assert kronecker >= 95.5
    assert kronecker >= max(diagonal.values()) + 1.5
    assert kronecker >= plain + 30

"""MNIST as tensors, from a mirror of the hub's parquet layout that LIMPET_DATA points at."""

from __future__ import annotations

import io
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor


@cache
def mnist(split: str) -> tuple[Tensor, Tensor]:
    """Images (n, 784) in [0, 1] and labels."""
    folder = os.environ.get("LIMPET_DATA")
    if not folder:
        pytest.skip("LIMPET_DATA is not set: .ci/run sets it")
    from PIL import Image
    from pyarrow import parquet

    table = parquet.read_table(Path(folder) / "mnist" / f"{split}-00000.parquet")
    images = [
        np.asarray(Image.open(io.BytesIO(row["bytes"])), dtype=np.uint8).reshape(-1)
        for row in table["image"].to_pylist()
    ]
    return torch.from_numpy(np.stack(images)).float() / 255, torch.tensor(table["label"].to_pylist())


class Permuted:
    """One permuted-MNIST task: the first is the original, every other has its own order of the pixels."""

    def __init__(self, number: int) -> None:
        order = torch.randperm(784, generator=torch.Generator().manual_seed(1000 + number))
        self.order = torch.arange(784) if number == 0 else order
        (x, self.y), (test_x, self.test_y) = mnist("train"), mnist("test")
        self.x, self.test_x = x[:, self.order], test_x[:, self.order]

    def batches(self, size: int, order: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """The training set in batches, in the order given."""
        indices = torch.arange(len(self.y)) if order is None else order
        return [(self.x[part], self.y[part]) for part in indices.split(size)]

    def accuracy(self, model: torch.nn.Module) -> float:
        """Percent of the test set."""
        with torch.no_grad():
            return 100 * float((model(self.test_x).argmax(1) == self.test_y).float().mean())

"""Image datasets from the Hugging Face Hub as uint8 tensors, decoded once and cached.

Datasets are loaded from the Hub by default. The environment variable LIMPET_DATA points to a local mirror instead, with
one folder per dataset that contains `train-*.parquet` and `test-*.parquet` as on the Hub. Decoded images are cached in
LIMPET_CACHE (default: ~/.cache/limpet).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limpet.errors import LimpetError, MemoryFileError
from limpet.experiments.registry import suggestion
from limpet.io import tensor_file

HUB = {
    "mnist": ("ylecun/mnist", "mnist"),
    "notmnist": ("anubhavmaity/notMNIST", None),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", "fashion_mnist"),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits"),
    "cifar10": ("uoft-cs/cifar10", "plain_text"),
}
"""Hub repository and configuration of each dataset."""

FORMAT = "limpet images"


@dataclass(frozen=True)
class Examples:
    """Inputs and labels of a dataset.

    Integer inputs are pixels: they stay uint8 until a batch is requested, and become (x / 255 - mean) / std.
    Floating-point inputs are used as they are.

    Args:
        inputs: Inputs, with examples along the first dimension.
        labels: Class index of each example.
        mean: Mean that is subtracted from pixels in [0, 1].
        std: Standard deviation by which pixels are then divided.
    """

    inputs: Tensor
    labels: Tensor
    mean: float = 0.0
    std: float = 1.0

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return the normalized inputs and the labels of the given rows."""
        inputs = self.inputs[rows]
        if not inputs.is_floating_point():
            shift = torch.tensor(-self.mean / self.std, device=inputs.device)
            inputs = torch.add(shift, inputs.to(shift.dtype), alpha=1 / (255 * self.std))
        return inputs, self.labels[rows]

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over batches of all rows.

        Args:
            size: Number of examples per batch.
            order: Permutation of the rows; by default they keep their order.

        Yields:
            Pairs of normalized inputs and labels.
        """
        if order is None:
            for start in range(0, len(self), size):
                yield self.batch(slice(start, start + size))
        else:
            for rows in torch.split(order, size):
                yield self.batch(rows)

    def take(self, rows: Tensor | slice) -> Examples:
        """Return a new dataset with the given rows."""
        return replace(self, inputs=self.inputs[rows], labels=self.labels[rows])

    def to(self, device: torch.device) -> Examples:
        """Return a copy on the given device."""
        return replace(self, inputs=self.inputs.to(device), labels=self.labels.to(device))


def joined(sets: list[Examples]) -> Examples:
    """Concatenate several datasets."""
    if len(sets) == 1:
        return sets[0]
    return replace(sets[0], inputs=torch.cat([s.inputs for s in sets]), labels=torch.cat([s.labels for s in sets]))


@cache
def images(name: str, split: str) -> Examples:
    """Load an image dataset, from the cache if it was decoded before.

    Args:
        name: Name of the dataset, a key of `HUB`.
        split: "train" or "test".

    Returns:
        Images of shape (n, channels, height, width) and their labels.

    Raises:
        LimpetError: If the dataset is unknown or could not be loaded.
    """
    if name not in HUB:
        raise LimpetError(f"unknown image dataset {name!r}{suggestion(name, HUB)}")
    source = _mirror_files(name, split)
    cached = _cache_folder() / f"{name}-{split}-{_fingerprint(name, source)}.safetensors"
    try:
        tensors: Mapping[str, Tensor] = tensor_file.read(cached, FORMAT)[1]
    except MemoryFileError:  # missing or corrupted: decode again
        tensors = _decode(name, split, source)
        cached.parent.mkdir(parents=True, exist_ok=True)
        tensor_file.write(cached, FORMAT, {"set": name, "split": split}, tensors)
    return Examples(tensors["images"], tensors["labels"])


def _mirror_files(name: str, split: str) -> list[Path]:
    """Return the Parquet files of the local mirror, or an empty list if the Hub is used."""
    mirror = os.environ.get("LIMPET_DATA")
    if not mirror:
        return []
    found = sorted((Path(mirror) / name).glob(f"{split}-*.parquet"))
    if not found:
        raise LimpetError(
            f"LIMPET_DATA is {mirror}, which contains no {name}/{split}-*.parquet: unset it to load from the Hub"
        )
    return found


def _cache_folder() -> Path:
    return Path(os.environ.get("LIMPET_CACHE") or Path.home() / ".cache" / "limpet")


def _fingerprint(name: str, source: list[Path]) -> str:
    """Return a hash that changes when the source files change."""
    identity: list[object] = [HUB[name]]
    if source:
        identity = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source]
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:12]


def _decode(name: str, split: str, source: list[Path]) -> dict[str, Tensor]:
    """Load a dataset and decode its images into one uint8 tensor."""
    try:
        import datasets
        from tqdm.auto import tqdm
    except ImportError as error:
        raise LimpetError(f"{error.name} is not installed: pip install 'limpet[experiments]'") from error
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        if source:
            loaded = datasets.load_dataset("parquet", data_files={split: [str(p) for p in source]}, split=split)
        else:
            loaded = datasets.load_dataset(*HUB[name], split=split)
    except Exception as error:
        where = "the mirror" if source else f"the Hub ({HUB[name][0]})"
        raise LimpetError(f"{name} could not be loaded from {where}: {error}") from error
    finally:
        if shown:
            datasets.enable_progress_bars()
    image, label = _columns(loaded.features)
    bar = tqdm(loaded, desc=f"decoding {name} {split}", unit=" images", delay=1.0, leave=False, disable=None)
    pictures = np.stack([np.asarray(row[image]) for row in bar])
    pictures = pictures[..., None] if pictures.ndim == 3 else pictures
    return {
        "images": torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous(),
        "labels": torch.tensor(loaded[label][:]),
    }


def _columns(features: Any) -> tuple[str, str]:
    """Return the names of the image column and the label column."""
    image = [name for name, kind in features.items() if type(kind).__name__ == "Image"]
    label = [name for name, kind in features.items() if type(kind).__name__ == "ClassLabel"] or ["label"]
    if not image or label[0] not in features:
        raise LimpetError(f"the dataset needs an image column and a label column, but has {', '.join(features)}")
    return image[0], label[0]

"""Small image sets in the hub's layout, so that the experiments can be tested without the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from limpet.experiments.data import images

SIZES = {"train": 300, "test": 100}
SHAPES = {
    "mnist": (28, 28),
    "notmnist": (28, 28),
    "fashion_mnist": (28, 28),
    "svhn": (32, 32, 3),
    "cifar10": (32, 32, 3),
}


def pixels(name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Ten prototypes with noise on them: easy to learn, and different for every set."""
    number, shape = list(SHAPES).index(name), SHAPES[name]
    prototypes = np.random.default_rng(number).integers(0, 200, (10, *shape))
    random = np.random.default_rng([number, split == "test"])
    labels = random.permutation(np.arange(SIZES[split]) % 10)
    noise = random.integers(0, 56, (SIZES[split], *shape))
    return (prototypes[labels] + noise).astype(np.uint8), labels


def write_mirror(folder: Path, image_column: str = "image") -> Path:
    import datasets
    from PIL import Image

    for name in SHAPES:
        (folder / name).mkdir(parents=True)
        for split in SIZES:
            pictures, labels = pixels(name, split)
            columns = {image_column: [Image.fromarray(picture) for picture in pictures], "label": labels.tolist()}
            kinds = datasets.Features({image_column: datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
            table = datasets.Dataset.from_dict(columns, features=kinds)
            table.to_parquet(folder / name / f"{split}-00000.parquet")
    return folder


@pytest.fixture(scope="session")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mirror(tmp_path_factory.mktemp("mirror"))


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def small_data(mirror: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """LIMPET_DATA and LIMPET_CACHE point at the small sets."""
    monkeypatch.setenv("LIMPET_DATA", str(mirror))
    monkeypatch.setenv("LIMPET_CACHE", str(cache_folder))
    images.cache_clear()
    yield mirror
    images.cache_clear()

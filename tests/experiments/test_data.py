"""Test image datasets and task sequences: pixels, labels, splits and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from experiment_data import SIZES, pixels, write_mirror
from limpet.errors import LimpetError, LimpetWarning
from limpet.experiments import SEQUENCES, Examples, images
from limpet.experiments.sequences import experiment_key


@pytest.mark.parametrize("name", ["mnist", "svhn"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_images_are_the_encoded_pixels(small_data: Path, name: str, split: str) -> None:
    pictures, labels = pixels(name, split)
    loaded = images(name, split)
    assert loaded.inputs.dtype == torch.uint8
    expected = pictures[:, None] if pictures.ndim == 3 else pictures.transpose(0, 3, 1, 2)
    assert np.array_equal(loaded.inputs.numpy(), expected)
    assert np.array_equal(loaded.labels.numpy(), labels)


def test_other_column_names_and_a_damaged_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_data: Path
) -> None:
    monkeypatch.setenv("LIMPET_DATA", str(write_mirror(tmp_path / "mirror", "img")))
    monkeypatch.setenv("LIMPET_CACHE", str(tmp_path / "cache"))
    images.cache_clear()
    first = images("cifar10", "test")
    (cached,) = (tmp_path / "cache").iterdir()
    whole = cached.read_bytes()
    cached.write_bytes(whole[:-3])
    images.cache_clear()
    assert torch.equal(images("cifar10", "test").inputs, first.inputs)
    assert cached.read_bytes() == whole


def test_the_cache_is_read_without_the_source_being_decoded(small_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = images("mnist", "test")
    images.cache_clear()
    monkeypatch.setattr("limpet.experiments.data._decode", lambda *_: pytest.fail("decoded again"))
    assert torch.equal(images("mnist", "test").inputs, first.inputs)


def test_missing_sets_name_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMPET_DATA", str(tmp_path))
    images.cache_clear()
    with pytest.raises(LimpetError, match=r"no mnist/train-\*.parquet: unset it"):
        images("mnist", "train")
    with pytest.raises(LimpetError, match="did you mean 'mnist'"):
        images("mnst", "train")


def test_batches_are_normalised() -> None:
    examples = Examples(torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8), torch.tensor([3, 4]), 0.5, 0.25)
    (inputs, labels), *rest = examples.batches(2, torch.tensor([1, 0]))
    torch.testing.assert_close(inputs, torch.tensor([[-1.2, -0.4], [-2.0, 2.0]]))
    assert labels.tolist() == [4, 3] and not rest
    floats = Examples(torch.tensor([[0.5]]), torch.tensor([0]), 0.5, 0.25)
    assert floats.batch(slice(0, 1))[0].item() == 0.5


def test_permuted_tasks_are_permutations_of_mnist(small_data: Path) -> None:
    sequence = SEQUENCES["permuted-mnist"](3, seed=4)
    plain = images("mnist", "train").inputs.flatten(1)
    assert torch.equal(sequence.examples(0, "train").inputs, plain)
    first, second = (sequence.examples(number, "train") for number in (1, 2))
    for task in (first, second):
        assert not torch.equal(task.inputs, plain)
        assert torch.equal(task.inputs.sort(1).values, plain.sort(1).values)
        assert torch.equal(task.labels, images("mnist", "train").labels)
    assert not torch.equal(first.inputs, second.inputs)
    # train and test have the same order of pixels, which the seed decides
    order = [int((plain == first.inputs[:, [i]]).all(0).nonzero()[0]) for i in range(784)]
    assert torch.equal(sequence.examples(1, "test").inputs, images("mnist", "test").inputs.flatten(1)[:, order])
    assert not torch.equal(SEQUENCES["permuted-mnist"](3, seed=5).examples(1, "train").inputs, first.inputs)


def test_disjoint_tasks_share_one_head() -> None:
    with pytest.warns(LimpetWarning, match="class-incremental"):
        sequence = SEQUENCES["disjoint-mnist"]()
    assert (sequence.heads, sequence.tasks, [sequence.head(i) for i in range(2)]) == ((10,), 2, [0, 0])


@pytest.mark.parametrize("scenario", ["task", "domain", "class"])
@pytest.mark.filterwarnings("ignore:limpet. class-incremental")
def test_split_scenarios(small_data: Path, scenario: str) -> None:
    sequence = SEQUENCES["split-mnist"](5, scenario=scenario)
    labels = [sorted(set(sequence.examples(i, "train").labels.tolist())) for i in range(5)]
    assert sum(len(sequence.examples(i, "train")) for i in range(5)) == SIZES["train"]
    expected = [[2 * i, 2 * i + 1] for i in range(5)] if scenario == "class" else [[0, 1]] * 5
    assert labels == expected
    assert sequence.heads == {"task": (2,) * 5, "domain": (2,), "class": (10,)}[scenario]
    assert [sequence.head(i) for i in range(5)] == (list(range(5)) if scenario == "task" else [0] * 5)


def test_vision_is_padded_and_coloured(small_data: Path) -> None:
    sequence = SEQUENCES["vision"]()
    assert [sequence.name(i) for i in range(5)] == ["MNIST", "notMNIST", "Fashion-MNIST", "SVHN", "CIFAR-10"]
    grey, svhn = sequence.examples(0, "test").inputs, sequence.examples(3, "test").inputs
    assert grey.shape == svhn.shape == (SIZES["test"], 3, 32, 32)
    original = images("mnist", "test").inputs[:, 0]
    for channel in range(3):
        assert torch.equal(grey[:, channel, 2:-2, 2:-2], original)
    assert grey.long().sum() == 3 * original.long().sum()  # nothing but zeros around it
    assert torch.equal(svhn, images("svhn", "test").inputs)


def test_wrong_sequences_name_the_mend() -> None:
    with pytest.raises(LimpetError, match="this sequence has 5 tasks, but 9 were requested"):
        SEQUENCES["vision"](9)
    with pytest.raises(LimpetError, match="scenario must be one of task for this sequence"):
        SEQUENCES["vision"](scenario="class")
    with pytest.raises(LimpetError, match="did you mean 'split-mnist'"):
        SEQUENCES["splitmnist"]


def test_names_of_experiments() -> None:
    assert experiment_key("permuted-mnist", 50, None) == "permuted-mnist-50"
    assert experiment_key("vision", None, None) == experiment_key("vision", 5, "task") == "vision"
    assert experiment_key("split-mnist", 3, "class") == "split-mnist-class-3"

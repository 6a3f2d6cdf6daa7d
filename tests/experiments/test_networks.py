"""Test the networks of the experiments, and that a ResNet learns a sequence of tasks from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from limpet.errors import LimpetError
from limpet.experiments.networks import build, parameter_count
from limpet.experiments.record import RunFolder


def test_the_default_resnet_is_resnet18_for_small_images() -> None:
    with torch.device("meta"):
        model = build("resnet", {}, (3, 32, 32), (10,), seed=0)
    assert parameter_count(model) == 11_173_962  # of the ResNet-18 with a 3x3 stem and ten classes
    convolutions = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convolutions) == 17 + 3  # 3 of them are shortcuts


def test_stages_halve_the_resolution_and_double_the_channels() -> None:
    model = build("resnet", {"width": 4, "blocks": [1, 2, 1]}, (1, 12, 12), (2, 3), seed=0)
    shapes = []
    for module in model.modules():
        if type(module).__name__ == "ResidualBlock":
            module.register_forward_hook(lambda _, __, output: shapes.append(tuple(output.shape[1:])))
    assert model(torch.randn(5, 1, 12, 12), head=1).shape == (5, 3)
    assert shapes == [(4, 12, 12), (8, 6, 6), (8, 6, 6), (16, 3, 3)]
    with pytest.raises(LimpetError, match="resnet takes images"):
        build("resnet", {}, (784,), (10,), seed=0)


@pytest.mark.slow
def test_split_cifar10_with_a_resnet_from_the_command_line(small_data: Path, tmp_path: Path) -> None:
    words = ["run", "split-cifar10", "--set", "network.name=resnet", "--set", "network.options.width=8"]
    words += ["--set", "training.freeze_batch_norm=true", "--epochs", "30"]  # a task has 60 images, one update an epoch
    words += ["--tasks", "3", "--threads", "1", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-m", "limpet", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "running statistics" not in done.stderr
    record = RunFolder(tmp_path / "run").load_record()
    assert record is not None and record.recipe.memory.every == 1 and record.recipe.training.lr == 0.02
    assert [row[task] for task, row in enumerate(record.accuracy)] == [100.0] * 3  # each when it was learned
    assert record.mean_accuracy > 70

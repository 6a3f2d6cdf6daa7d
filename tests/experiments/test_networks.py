"""Test the networks of the experiments, and that a ResNet learns a sequence of tasks from the command line."""

from __future__ import annotations

import os
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


CIFAR10 = Path(os.environ.get("LIMPET_DATA", "")) / "cifar10"


@pytest.mark.slow
@pytest.mark.skipif("LIMPET_DATA" not in os.environ or not CIFAR10.is_dir(), reason="needs CIFAR-10 in LIMPET_DATA")
def test_split_cifar10_with_a_resnet_from_the_command_line(tmp_path: Path) -> None:
    words = ["run", "split-cifar10", "--set", "network.name=resnet", "--set", "training.freeze_batch_norm=true"]
    words += ["--set", "network.options.width=8", "--set", "network.options.blocks=[1, 1, 1]"]
    words += ["--set", "training.validation=8500", "--epochs", "4"]  # 1500 examples remain
    words += ["--tasks", "2", "--threads", "1", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-m", "limpet", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "running statistics" not in done.stderr
    record = RunFolder(tmp_path / "run").load_record()
    assert record is not None and record.recipe.memory.every == 1 and record.recipe.training.lr == 0.02
    first, second = (float(record.accuracy[task][task] or 0) for task in (0, 1))
    assert first > 75 and second > 55

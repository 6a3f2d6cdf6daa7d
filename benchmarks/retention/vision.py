"""Suite "vision": a small ResNet that classifies CIFAR-10 learns other images with a new head; what does it forget?

The residual network (He et al. 2016, 8 layers) is trained here. Then its batch norm is frozen, statistics and affine
parameters, and all other weights train. What is lost is the share of CIFAR-10's test images that are not classified
right, through their own head.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

import limpet
from limpet.experiments.data import images
from limpet.io.atomic import atomic_write
from retention.bench import Bench
from retention.classifier import Batch, Classification, adamw
from retention.pair import Pair
from retention.training import KEPT

OLD, OLD_IMAGES, OLD_EPOCHS, OLD_RATE = "cifar10", 20_000, 6, 3e-3
NEW_IMAGES, TEST_IMAGES, MEASURED, PROBE = 9_600, 2_000, 1_000, 100
BATCH, REPLAYED, MEAN, STD = 32, 4, 0.47, 0.25

PAIRS = {
    name: Pair(new, steps=900, rate=rate, moments=(300, 450, 600, 750, 900))
    for name, new, rate in (
        ("development", "fashion_mnist", 3e-3),
        ("svhn", "svhn", 3e-3),
        ("svhn, high rate", "svhn", 1e-2),
    )
}


class Residual(nn.Module):
    """Two convolutions, and a connection around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Add the two ways."""
        inner = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(inner + self.around(x))


class ResNet(nn.Module):
    """Three stages of one block each, the mean over positions, and a head for ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Linear(64, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """Logits, and the loss if there are labels."""
        logits = self.classifier(self.features(pixel_values))
        loss: Any = None if labels is None else F.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


def batches(name: str, split: str, count: int, seed: int) -> list[Batch]:
    """Images as batches, of three channels and 32 x 32 pixels."""
    found = images(name, split)
    rows = torch.randperm(len(found.labels), generator=torch.Generator().manual_seed(seed))[:count]
    pixels = found.inputs[rows].float().div(255).sub(MEAN).div(STD)
    if pixels.shape[-1] < 32:
        pixels = F.pad(pixels, [(32 - pixels.shape[-1]) // 2] * 4, value=-MEAN / STD)
    pixels = pixels.expand(-1, 3, -1, -1)
    parts = zip(torch.split(pixels, BATCH), torch.split(found.labels[rows], BATCH), strict=True)
    return [{"pixel_values": x, "labels": y} for x, y in parts]


def freeze_norm(model: nn.Module) -> None:
    """Freeze batch norm: its statistics and its parameters."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False).eval()


class VisionBench(Classification, Bench):
    """The network that has learned CIFAR-10; each seed has its own."""

    def __init__(self, options: argparse.Namespace, name: str, pair: Pair, seed: int) -> None:
        super().__init__(options, name, pair, seed)
        self.old, self.old_test = batches(OLD, "train", OLD_IMAGES, seed), batches(OLD, "test", TEST_IMAGES, seed)
        self.new = batches(pair.new, "train", NEW_IMAGES, seed)
        self.new_test = batches(pair.new, "test", TEST_IMAGES, seed)
        self.examples = NEW_IMAGES
        self.teacher = self._learned().eval().requires_grad_(False)

    def _learned(self) -> Any:
        """The network after CIFAR-10."""
        path = self.work / f"{OLD} {self.seed}.pt"
        torch.manual_seed(self.seed)
        model = ResNet()
        if path.exists():
            model.load_state_dict(torch.load(path, weights_only=True))
            return model
        steps = OLD_EPOCHS * len(self.old)
        optimizer, schedule = adamw(model, OLD_RATE, steps)
        for step in range(steps):
            model.train()
            batch = self.old[step % len(self.old)]
            optimizer.zero_grad()
            torch.autograd.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
        with atomic_write(path) as temporary:
            torch.save(model.state_dict(), temporary)
        return model

    def freeze(self, model: Any) -> Any:
        freeze_norm(model.requires_grad_(True))
        return model

    def set_mode(self, model: Any) -> None:
        model.train()
        freeze_norm(model)

    @torch.no_grad()
    def new_loss(self, model: Any) -> float:
        return sum(float(model(**batch).loss) * len(batch["labels"]) for batch in self.new_test) / TEST_IMAGES

    def old_logits(self, model: Any, batch: Batch) -> Tensor:
        """The outputs for CIFAR-10, through their own head."""
        found: Tensor = self.teacher.classifier(model.features(batch["pixel_values"]))
        return found

    @torch.no_grad()
    def lost(self, model: Any) -> list[float]:
        found = [self.old_logits(model, batch).argmax(1) != batch["labels"] for batch in self.old_test]
        return torch.cat(found).float().tolist()

    def distilled(self, model: Any, batch: Batch, outputs: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.old_logits(self.teacher, batch).log_softmax(1)
        now = self.old_logits(model, batch).log_softmax(1)
        return F.kl_div(now, before, log_target=True, reduction="batchmean")

    def old_loss(self, model: Any, share: float) -> Tensor:
        assert share <= KEPT
        batch = self.old[int(torch.randint(0, max(round(share * len(self.new)), 1), (), generator=self.draws))]
        rows = torch.randperm(len(batch["labels"]), generator=self.draws)[:REPLAYED]
        some = {name: value[rows] for name, value in batch.items()}
        return F.cross_entropy(self.old_logits(model, some), some["labels"], reduction="sum")

    @property
    def memories(self) -> Any:
        return self.work / f"memory {self.seed}"

    def consolidate(self, **settings: Any) -> limpet.Memory:
        """With the lines of the README."""
        model = self.copied()
        chosen = {"strength": "auto", "prior_mean": "initial", "exclude": ["classifier"], **settings}
        memory = limpet.OnlineLaplace(model, **chosen)
        memory.consolidate(self.old, limit=MEASURED, examples=OLD_IMAGES, probe=PROBE, progress=False)
        return memory

    def save(self, model: Any, name: str) -> None:
        torch.save(model.state_dict(), self.path(f"{name}.weights.pt"))

    def trained(self, name: str) -> Any:
        model = self.copied()
        model.load_state_dict(torch.load(self.path(f"{name}.weights.pt"), weights_only=True))
        return model.eval()

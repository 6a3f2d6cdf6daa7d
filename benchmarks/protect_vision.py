"""Fine-tune a small convolutional network on five further classes with `memory.protect` and its rivals.

    python -m benchmarks protect_vision              # all runs that are still missing
    python -m benchmarks protect_vision --draw       # the tables, from the stored results

The network learns five classes of CIFAR-10, its batch norm is frozen (statistics and affine parameters), and it then
learns the five others with a new head: all other weights, AdamW with a linear decay, at three learning rates.
Protection uses the lines of the README and nothing else; the settings of the rivals are those of protect_sentences.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

import common
from limpet.experiments.data import images
from rivals import parser, run_all
from two_tasks import Batch, TwoTasks

RESULTS = common.RESULTS / "protect" / "vision.jsonl"
RATES = {"3e-4": (3e-4, 150), "1e-3": (1e-3, 150), "3e-3": (3e-3, 150)}  # learning rate and steps
OLD, NEW = "classes 0 to 4", "classes 5 to 9"
TRAIN, TEST = {OLD: 10_000, NEW: 4800}, 2000
BATCH, EPOCHS, OLD_LR = 32, 4, 2e-3
MEAN, STD = 0.47, 0.25
COLUMNS = ("new classes %", "change of old classes")


class Net(nn.Module):
    """Three convolutions with batch norm, the mean over positions, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Linear(128, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """Logits, and the loss if there are labels."""
        logits = self.classifier(self.convolutions(pixel_values))
        loss: Any = None if labels is None else F.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


class Images(TwoTasks):
    """The network and the two tasks as batches.

    Args:
        seed: Seed of the images, the network and the training.
    """

    rates, measured = RATES, 1000

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.train = {name: self._batches("train", name, TRAIN[name]) for name in TRAIN}
        self.test = {name: self._batches("test", name, TEST) for name in TRAIN}
        torch.manual_seed(seed)
        self.model = Net()
        self.frozen = False

    def _batches(self, split: str, name: str, count: int) -> list[Batch]:
        found = images("cifar10", split)
        rows = ((found.labels >= 5) == (name == NEW)).nonzero().squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.seed))][:count]
        pixels, labels = found.inputs[rows].float().div(255).sub(MEAN).div(STD), found.labels[rows] % 5
        parts = zip(torch.split(pixels, BATCH), torch.split(labels, BATCH), strict=True)
        return [{"pixel_values": x, "labels": y} for x, y in parts]

    def learn_first(self) -> None:
        """Learn the first task, and freeze batch norm."""
        self.fit(self.model, OLD, OLD_LR, EPOCHS * len(self.train[OLD]))
        self.frozen = True

    @staticmethod
    def features(model: Any, inputs: Any) -> Tensor:
        """What the head reads."""
        found: Tensor = model.convolutions(inputs["pixel_values"])
        return found

    def set_mode(self, model: Any) -> None:
        """Train everything but frozen batch norm."""
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.requires_grad_(not self.frozen).train(not self.frozen)

    @torch.no_grad()
    def scores(self, name: str, head: nn.Module) -> tuple[float, float]:
        """Accuracy in per cent, and the mean loss, with a task's own head."""
        self.model.eval()
        logits = torch.cat([head(self.features(self.model, batch)) for batch in self.test[name]])
        labels = torch.cat([batch["labels"] for batch in self.test[name]])
        right = 100 * float((logits.argmax(1) == labels).float().mean())
        return round(right, 2), round(float(F.cross_entropy(logits, labels)), 4)


def main() -> None:
    chosen = common.parse(parser(__doc__, RATES, RESULTS))
    run_all(chosen, Images, RATES, COLUMNS)


if __name__ == "__main__":
    main()

"""A network with a head that learns to classify, with a new head: what the suites "vision" and "sequence" share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from retention.method import During
from retention.training import Training
from retention.update import Layer, squared_distance, weight_updates

Batch = dict[str, Tensor]


def adamw(model: nn.Module, rate: float, steps: int) -> tuple[Any, Any]:
    """AdamW with a linear decay."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)


class Classification(Training):
    """The training of a network with a new head. The head is its `classifier`, and batches have the names of inputs."""

    teacher: Any
    """The network before."""

    new: list[Batch]
    """The new examples."""

    stage = 1
    """The number of this training, so that heads of several do not begin with the same weights."""

    _order: list[int]

    def freeze(self, model: Any) -> Any:
        """The model with its frozen parts frozen, and the others trainable."""
        return model.requires_grad_(True)

    @property
    def before(self) -> dict[str, Tensor]:
        """The weights before, without the head."""
        weights = self.teacher.named_parameters()
        return {name: weight for name, weight in weights if not name.startswith("classifier.")}

    def copied(self) -> Any:
        """A copy of the network before, to train."""
        return self.freeze(copy.deepcopy(self.teacher))

    def fresh(self, method: During, value: float) -> Any:
        model = self.copied()
        torch.manual_seed(1000 * self.stage + self.seed)
        model.classifier.reset_parameters()
        self._order = []
        return model

    def optimizer(self, model: Any, rate: float) -> tuple[Any, Any]:
        return adamw(model, rate, self.pair.steps)

    def batch(self, generator: torch.Generator) -> Batch:
        self._order = self._order or torch.randperm(len(self.new), generator=generator).tolist()
        return self.new[self._order.pop()]

    def forward(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        found = model(**batch)
        return found.loss, found.logits

    def updates(self, model: Any) -> list[Layer]:
        return weight_updates(model, self.before)

    def displaced(self, model: Any) -> Tensor:
        return squared_distance(model, self.before)

"""Train a network on tasks that are lists of batches: one loop for the benchmarks with two tasks in a row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import limpet

Batch = dict[str, Tensor]


@torch.no_grad()
def scale_update(model: nn.Module, before: dict[str, Tensor], tuned: dict[str, Tensor], scale: float) -> None:
    """Set all weights but those of the head between two states, as WiSE-FT does: scale 0 is before, 1 is tuned."""
    for name, value in model.state_dict().items():
        if "classifier" not in name and value.is_floating_point():
            value.copy_(before[name] + scale * (tuned[name] - before[name]))


class TwoTasks:
    """What the loop needs.

    Attributes:
        seed: Seed of the order of the batches.
        train: The batches of each task, by its name.
        max_norm: Clips the gradient to this norm; None clips nothing.
    """

    seed: int
    train: dict[str, list[Batch]]
    max_norm: float | None = None

    def set_mode(self, model: Any) -> None:
        """Set what trains and in which mode, before a run and before every step."""
        model.train()

    def fit(
        self,
        model: Any,
        name: str,
        lr: float,
        steps: int,
        memory: limpet.Memory | None = None,
        *,
        extra: Callable[[Any, Batch], Tensor] | None = None,
        after: Callable[[int], None] = lambda step: None,
        **options: Any,
    ) -> None:
        """So many steps of AdamW with a linear decay.

        Args:
            model: The model.
            name: The task.
            lr: Learning rate of the first step.
            steps: Number of steps.
            memory: A memory that protects during training.
            extra: A further loss, of the model and the batch.
            after: Called after every step, with its number.
            **options: Options of `memory.protect`.
        """
        self.set_mode(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        generator = torch.Generator().manual_seed(self.seed)
        optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        order: list[int] = []
        examples = sum(len(batch["labels"]) for batch in self.train[name])
        with nullcontext() if memory is None else memory.protect(optimizer, examples=examples, **options):
            for step in range(steps):
                self.set_mode(model)
                order = order or torch.randperm(len(self.train[name]), generator=generator).tolist()
                batch = self.train[name][order.pop()]
                optimizer.zero_grad()
                loss = model(**batch).loss
                torch.autograd.backward(loss if extra is None else loss + extra(model, batch))
                if self.max_norm is not None:
                    nn.utils.clip_grad_norm_(trained, self.max_norm)
                optimizer.step()
                rate.step()
                after(step + 1)

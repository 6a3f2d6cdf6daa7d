"""A language model that learns a text, with LoRA or with all weights: what the suites "drift" and "skill" share."""

from __future__ import annotations

import argparse
from abc import abstractmethod
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

import fine_tuning
import limpet
from fine_tuning import BATCH, HELD_OUT, NEW_BLOCKS, adamw, adapted, blocks, fresh, loss
from limpet.integrations.causal_lm import consolidate_lm
from retention.bench import Bench
from retention.method import During
from retention.pair import Pair
from retention.update import Layer, adapted_layers, adapter_updates, squared_distance, weight_updates


class LanguageBench(Bench):
    """The text to learn, and the model before."""

    pool: Tensor
    """Old rows for replay."""

    def __init__(self, options: argparse.Namespace, name: str, pair: Pair, seed: int) -> None:
        super().__init__(options, name, pair, seed)
        self.source = options.model
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.source)
        text = self.text(options, pair.new, NEW_BLOCKS + HELD_OUT, seed=1)
        self.new_test, self.new = text[:HELD_OUT], text[HELD_OUT:]
        self.examples = self.new[:, 1:].numel()
        self.teacher = fresh(self.source).eval().requires_grad_(False)

    def text(self, options: argparse.Namespace, name: str, rows: int, seed: int) -> Tensor:
        """Rows of a text, from all over it."""
        return blocks(self.tokenizer, [Path(options.texts[name])], rows, seed)

    @abstractmethod
    def remembered(self) -> tuple[Tensor, Tensor]:
        """Rows of what the model knew, for a memory, and others for its probe."""

    def fresh(self, method: During, value: float) -> Any:
        torch.manual_seed(self.seed)
        model = fresh(self.source)
        if method.wrapped is not None:
            return method.wrapped(model, value)
        if not self.pair.full:
            return adapted(model)
        model.get_input_embeddings().requires_grad_(False)
        return model

    def optimizer(self, model: Any, rate: float) -> tuple[Any, Any]:
        return adamw(model, rate, self.pair.steps)

    def batch(self, generator: torch.Generator) -> Tensor:
        return self.new[torch.randint(0, len(self.new), (BATCH,), generator=generator)]

    def forward(self, model: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
        found = model(input_ids=batch, labels=batch)
        return found.loss, found.logits

    def new_loss(self, model: Any) -> float:
        return loss(model, self.new_test)

    def distilled(self, model: Any, batch: Tensor, outputs: Tensor) -> Tensor:
        return fine_tuning.distilled(self.teacher, batch, outputs)

    def old_loss(self, model: Any, share: float) -> Tensor:
        count = max(round(share * NEW_BLOCKS), 1)
        row = self.pool[torch.randint(0, count, (1,), generator=self.draws)]
        return self.forward(model, row)[0]

    def updates(self, model: Any) -> list[Layer]:
        if self.pair.full:
            return weight_updates(model, dict(self.teacher.named_parameters()))
        return adapter_updates(model)

    def displaced(self, model: Any) -> Tensor:
        """Of an adapter it is s^2 |B A|^2 = s^2 <B'B, A A'>."""
        if self.pair.full:
            return squared_distance(model, dict(self.teacher.named_parameters()))
        total = torch.zeros(())
        for layer in adapted_layers(model).values():
            for name in layer.active_adapters:
                a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
                total = total + layer.scaling[name] ** 2 * ((b.T @ b) * (a @ a.T)).sum()
        return total

    def consolidate(self, **settings: Any) -> limpet.Memory:
        model = fresh(self.source)
        model.get_input_embeddings().requires_grad_(False)
        rows, probe = (torch.split(some, BATCH) for some in self.remembered())
        return consolidate_lm(model, rows, probe=probe, **{"strength": 1.0, **settings})

    def save(self, model: Any, name: str) -> None:
        model.save_pretrained(self.path(name))

    def trained(self, name: str) -> Any:
        if not self.pair.full:
            return peft.PeftModel.from_pretrained(fresh(self.source), self.path(name))
        model = fresh(str(self.path(name)))
        model.get_input_embeddings().requires_grad_(False)
        return model

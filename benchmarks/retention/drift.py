"""Suite "drift": a language model learns a text; how far does it move on everything else?

What is lost is KL(before || now) per token on samples of the model before, which no method has seen. The loss on other
texts takes as long as a third of a training run, so it is measured at one point of every method, with one seed.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from fine_tuning import BATCH, LENGTH, MEMORY_TOKENS, NEW_BLOCKS, loss, stored_samples
from retention.language import LanguageBench
from retention.pair import Pair
from retention.training import KEPT

PROBE_ROWS, TEST_ROWS, OTHER_ROWS = 120, 60, 318
OTHERS_SEED, OTHERS_BATCH = 0, 16
REHEARSED = 293  # as many as `limpet.SelfRehearsal` draws
SAMPLE_SEEDS = {"memory": 0, "probe": 1, "test": 2}

PAIRS = {
    "development": Pair("french", ("reviews",), steps=100, moments=(60, 80, 100)),
    "german": Pair("german", ("reviews", "speeches", "english")),
    "speeches": Pair("speeches", ("reviews", "german", "english")),
    "german, high rate": Pair("german", ("reviews", "speeches", "english"), rate=1e-2),
    "german, all weights": Pair(
        "german", ("reviews", "speeches", "english"), steps=60, rate=1e-4, moments=(20, 30, 40, 50, 60), full=True
    ),
}


class DriftBench(LanguageBench):
    """With samples of the model before, and other texts."""

    def __init__(self, options: argparse.Namespace, name: str, pair: Pair, seed: int) -> None:
        super().__init__(options, name, pair, seed)
        kept = round(KEPT * NEW_BLOCKS)
        others = {name: self.text(options, name, OTHER_ROWS + kept, seed=0) for name in pair.others}
        self.texts = {name: rows[:OTHER_ROWS] for name, rows in others.items()}
        in_turns = torch.stack([rows[OTHER_ROWS:] for rows in others.values()], 1).flatten(0, 1)
        self.pool = in_turns[:kept]
        self.test = self.samples("test", TEST_ROWS)
        self.remembered()  # all samples are drawn before anything is timed
        self.rehearsed()
        self.before = torch.cat([log_probabilities(self.teacher, rows) for rows in torch.split(self.test, BATCH)])

    def samples(self, which: str, rows: int) -> Tensor:
        """Samples of the model before, drawn once and kept."""
        return stored_samples(self.source, self.work / f"samples-{which}.json", rows, SAMPLE_SEEDS[which])

    def rehearsed(self) -> list[Tensor]:
        path, seed = self.work / f"samples-rehearsed-{self.seed}.json", 1000 + self.seed  # none of the other seeds
        return list(torch.split(stored_samples(self.source, path, REHEARSED, seed), BATCH))

    def remembered(self) -> tuple[Tensor, Tensor]:
        return self.samples("memory", MEMORY_TOKENS // (LENGTH - 1)), self.samples("probe", PROBE_ROWS)

    def lost(self, model: Any) -> list[float]:
        found: list[float] = []
        for rows, before in zip(torch.split(self.test, BATCH), torch.split(self.before, BATCH), strict=True):
            now = log_probabilities(model, rows)
            found += (before.exp() * (before - now)).sum(-1).mean(-1).tolist()
        return found

    def others(self, model: Any) -> dict[str, float]:
        if self.seed != OTHERS_SEED:
            return {}
        return {name: round(loss(model, rows, OTHERS_BATCH), 5) for name, rows in self.texts.items()}


@torch.no_grad()
def log_probabilities(model: Any, rows: Tensor) -> Tensor:
    """The log probabilities of the next token, at every position of these rows but the last."""
    logits: Tensor = model(input_ids=rows, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1)

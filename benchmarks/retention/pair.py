"""What is learned in a suite, and how."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """What is learned, and how.

    Attributes:
        new: The name of the new data.
        others: The names of other data that the model is to keep its loss on.
        steps: Number of steps.
        rate: Largest learning rate.
        moments: Steps at which a training run is measured.
        full: Train all weights instead of adapters.
    """

    new: str
    others: tuple[str, ...] = ()
    steps: int = 300
    rate: float = 2e-3
    moments: tuple[int, ...] = (40, 60, 80, 100, 150, 200, 250, 300)
    full: bool = False

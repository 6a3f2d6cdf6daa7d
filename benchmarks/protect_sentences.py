"""Fine-tune a sentence encoder on a second task with `memory.protect` and its rivals: what is retained, at what cost?

    python -m benchmarks protect_sentences --model M --reviews R.csv          # all runs that are still missing
    python -m benchmarks protect_sentences --draw                             # the tables, from the stored results

The tasks, data and training are those of repair_sentences: sentiment of short reviews, then word order with a new head,
all weights, AdamW, at three learning rates. Protection uses the lines of the README and nothing else.
M is a folder or a name on the hub; R has the columns text, label and source ("imdb" or "rotten_tomatoes").
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

import common
from repair_sentences import EPOCHS, MEASURED, OLD, OLD_LR, Experiment
from rivals import parser, run_all
from sentences import TASKS

RESULTS = common.RESULTS / "protect" / "sentences.jsonl"
RATES = {"3e-5": (3e-5, 60), "1e-4": (1e-4, 60), "2e-4": (2e-4, 30)}  # learning rate and steps
COLUMNS = ("word order %", "change of sentiment")


class Sentences(Experiment):
    """The encoder and its two tasks."""

    rates, measured = RATES, MEASURED

    def learn_first(self) -> None:
        """Learn the first task."""
        self.fit(self.model, OLD, OLD_LR, EPOCHS * len(self.train[OLD]))

    @staticmethod
    def features(model: Any, inputs: Any) -> Tensor:
        """What the head reads."""
        found: Tensor = model.bert(**inputs).pooler_output
        return found


def main() -> None:
    options = parser(__doc__, RATES, RESULTS)
    options.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    options.add_argument("--reviews", type=Path)
    options.add_argument("--old", choices=TASKS[:2], default=OLD, help="the first task; the other is for development")
    chosen = common.parse(options)
    make = partial(Sentences, chosen.model, chosen.reviews, old=chosen.old)
    run_all(chosen, make, RATES, COLUMNS)


if __name__ == "__main__":
    main()

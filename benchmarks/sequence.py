"""Cost of a whole sequence: permuted MNIST with a memory, compared with plain SGD on the same tasks, one thread.

    python -m benchmarks sequence                 # 50 tasks, as shipped; about 12 minutes
    python -m benchmarks sequence --tasks 5

Both run in one process and alternate after every task, so that a temporary slowdown of the machine affects both.
Everything counts for both: training, curvature and evaluation, and beside it training and curvature alone.
The data come from the Hugging Face hub, or from the folder in LIMPET_DATA.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import common
from common import versions_text
from limpet.experiments import RunFolder, Watcher, load_preset
from limpet.experiments.methods import with_structure
from limpet.experiments.record import Record
from limpet.experiments.runner import Run

BOUND = 1.25


def measure(tasks: int, epochs: int = 5) -> dict[str, Record]:
    """The records of both runs, made in turn."""
    records: dict[str, Record] = {}
    preset = load_preset("permuted-mnist")
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for method in ("fine-tuning", "online-laplace"):
            settings = {"method": method, "tasks": tasks, "training.epochs": epochs, "threads": 1}
            recipe = with_structure(preset.resolve(settings))
            place = RunFolder(Path(folder) / method)
            place.begin(recipe)
            runs[method] = Run(recipe, place, Watcher(), checkpoint_seconds=20.0).learn()
        for _ in range(tasks):
            records.update({method: next(run) for method, run in runs.items()})
    return records


def ratio(records: dict[str, Record], *, evaluation: bool = True) -> float:
    """Everything with the memory over everything without it."""
    spent = {
        method: sum(
            sum(values) for part, values in record.seconds.model_dump().items() if evaluation or part != "evaluation"
        )
        for method, record in records.items()
    }
    return spent["online-laplace"] / spent["fine-tuning"]


def main() -> None:
    parser = common.parser(__doc__, threads=1)
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=5)
    options = common.parse(parser)
    records = measure(options.tasks, options.epochs)
    print("| method | training (s) | curvature (s) | evaluation (s) | mean accuracy (%) |")
    print("| --- | --- | --- | --- | --- |")
    for method, record in records.items():
        spent = [f"{sum(values):.1f}" for values in record.seconds.model_dump().values()]
        print(f"| {method} | {' | '.join(spent)} | {record.mean_accuracy:.1f} |")
    settings = f"{options.tasks} tasks, {options.epochs} epochs"
    alone = f"{ratio(records, evaluation=False):.2f} without evaluation"
    print(f"\n{ratio(records):.2f} times plain SGD, {alone} (bound: {BOUND}); {settings}\n\n{versions_text()}")


if __name__ == "__main__":
    main()

"""What limits a repair after a third task with a new head: the curvature of the new data, or the head?

    python -m benchmarks new_head --model M --reviews R.csv --work FOLDER    # all rows that are still missing
    python -m benchmarks new_head --draw                                     # the table, from the stored results

MiniLM learns the three tasks of the benchmark `sentences`, the first two under `memory.protect`, the third by plain
training. The same tuned weights are then repaired to the same drift in several ways. FOLDER keeps the tuned model, so
an interrupted command resumes with the next row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import common
import limpet
from common import versions
from limpet.forgetting.repair import Repair
from limpet.forgetting.repair_paths import solve
from limpet.methods.repair_pass import RepairOptions, new_fisher, path_measures
from limpet.model import full_precision
from limpet.protection.recorder import InputRecorder
from sentences import TASKS, Experiment

RESULTS = common.RESULTS / "sentences" / "new_head.jsonl"
BUDGET, EPOCHS, RATE, SEED = 0.04, 2, "2e-4", 0


class Tuned:
    """The model after all three tasks, the memory of the first two, and the inputs that `protect` would have recorded.

    Args:
        experiment: The tasks.
        rate: The learning rate.
        work: Folder of the stored states.
    """

    def __init__(self, experiment: Experiment, rate: str, work: Path) -> None:
        self.experiment, self.model, name = experiment, experiment.fresh(), TASKS[2]
        memory = experiment.memory(self.model)
        heads: dict[str, Any] = {}
        stored = work / f"tuned-{experiment.seed}-{rate}.pt", work / f"memory-{experiment.seed}-{rate}.safetensors"
        if all(path.exists() for path in stored):
            state = torch.load(stored[0], weights_only=True)
            self.model.load_state_dict(state["model"])
            loaded = limpet.load(stored[1], self.model)
            assert isinstance(loaded, limpet.OnlineLaplace)
            self.memory = loaded
            self.heads, self.recorded = state["heads"], state["recorded"]
            return
        for task in TASKS:
            optimizer = experiment.optimizer(self.model, float(rate))
            if task == name:
                recorder = InputRecorder(self.model)
                recorder.start()
                experiment.fit(self.model, optimizer, task, EPOCHS)
                recorder.stop()
            else:
                with memory.protect(optimizer, examples=experiment.examples):
                    experiment.fit(self.model, optimizer, task, EPOCHS)
            heads[task] = {key: tensor.clone() for key, tensor in self.model.classifier.state_dict().items()}
            if task != name:
                experiment.consolidate(memory, task)
            print(f"after {task}: {experiment.accuracies(self.model, heads)}", flush=True)
        work.mkdir(parents=True, exist_ok=True)
        self.memory, self.heads, self.recorded = memory, heads, recorder.batches
        memory.save(stored[1])
        torch.save({"model": self.model.state_dict(), "heads": heads, "recorded": self.recorded}, stored[0])

    def measured(self) -> dict[str, Any]:
        """Accuracies and drift of the current weights, each task through its head."""
        heads = self.heads | {TASKS[2]: self.model.classifier.state_dict()}
        drift = self.memory.drift()
        return {
            "accuracy": self.experiment.accuracies(self.model, heads),
            "drift": round(float(drift), 4),
            "upper": round(drift.upper, 4),
        }

    def repaired(self, batches: Any = None, **options: Any) -> Repair:
        """The model after `limpet.repair` to the budget."""
        batches = self.recorded if batches is None else batches
        return limpet.repair(
            self.model, self.memory, batches, budget=BUDGET, examples=self.experiment.examples, **options
        )

    def repaired_halfway(self) -> Repair:
        """The same, with the curvature measured halfway between the weights before and the tuned ones."""
        options = RepairOptions(examples=self.experiment.examples)
        with full_precision():
            path = limpet.repair(self.model, self.memory, self.recorded[:2], strength=0.0, refit=False, progress=False)
            path.at(0.0, 0.5)
            fisher = new_fisher(self.memory, self.recorded, options)
            path.undo()
            measures = path_measures(self.memory, self.recorded[:1], fisher, options)
            return solve(self.memory.posterior, fisher, measures).within_budget(BUDGET)


def ways(tuned: Tuned) -> dict[str, Callable[[], Repair | None]]:
    """The rows of the table."""
    every = tuned.experiment.train[TASKS[2]]
    return {
        "tuned": lambda: None,
        "head as trained": lambda: tuned.repaired(refit=False),
        "head as trained, Gaussian curvature": lambda: tuned.repaired(refit=False, likelihood=limpet.Gaussian()),
        "head as trained, curvature halfway": tuned.repaired_halfway,
        "head as trained, all rows": lambda: tuned.repaired(every, refit=False),
        "head fitted again": lambda: tuned.repaired(),
        "head fitted again, all rows": lambda: tuned.repaired(every),
    }


def table(records: list[dict[str, Any]]) -> str:
    """Accuracy in percent on every task, and the drift on the probes."""
    lines = [f"| repair to {BUDGET} nats | {' | '.join(TASKS)} | drift |", f"|{' --- |' * (len(TASKS) + 2)}"]
    for record in records:
        cells = [f"{value:.1f}" for value in record["accuracy"]]
        lines.append(f"| {record['what']} | {' | '.join(cells)} | {record['drift']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--reviews", type=Path)
    parser.add_argument("--work", type=Path, default=Path("new_head"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = common.parse(parser)
    if not options.draw:
        tuned = Tuned(Experiment(options.model, options.reviews, 800, 400, seed=SEED), RATE, options.work)
        for what, way in ways(tuned).items():
            if what not in {record["what"] for record in common.read_records(options.out)}:
                repair = way()
                record = {"seed": SEED, "rate": RATE, "what": what, **tuned.measured()}
                common.append_record(options.out, record | {"versions": versions("transformers")})
                print(record, flush=True)
                if repair is not None:
                    repair.undo()
    print(table(common.read_records(options.out)))


if __name__ == "__main__":
    main()

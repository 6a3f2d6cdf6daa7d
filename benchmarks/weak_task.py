"""How much drift may a network have that is unsure of its answers? A repair to several budgets after a second task.

    python -m benchmarks weak_task --model M --reviews R.csv     # all rows that are still missing
    python -m benchmarks weak_task --draw                        # the table, from the stored results

The last three blocks of MiniLM learn the sentiment of 256 short reviews, and then word order, with a new head and under
`memory.protect`; the tasks and the training are those of the benchmark `sentences`. Seeds are those of the new head.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

import common
from common import versions
from limpet.forgetting.drift import information
from repair_figures import grouped, markdown
from sentences import TASKS, Experiment

RESULTS = common.RESULTS / "sentences" / "weak_task.jsonl"
OLD, NEW = TASKS[1:]
TEXTS, TESTED, BLOCKS, EPOCHS, RATE = 256, 160, 3, 3, 1e-4
BUDGETS, SEEDS = (0.04, 0.02, 0.01, 0.005), (1, 2)


def run(experiment: Experiment, out: Path) -> None:
    """Learn both tasks, and record what is left of the first at every budget.

    Args:
        experiment: The encoder and its tasks.
        out: The file of the records.
    """
    model = experiment.fresh()
    memory, optimizer = experiment.memory(model), experiment.optimizer(model, RATE)
    experiment.fit(model, optimizer, OLD, EPOCHS)
    head = copy.deepcopy(model.classifier.state_dict())
    experiment.consolidate(memory, OLD)
    before, start = experiment.accuracies(model, {OLD: head})[0], copy.deepcopy(model.state_dict())
    known = round(information(memory.probes, memory.likelihood), 4)
    for seed in SEEDS:
        model.load_state_dict(start)
        torch.manual_seed(seed)
        optimizer = experiment.optimizer(model, RATE)
        with memory.protect(optimizer, examples=experiment.examples) as protection:
            experiment.fit(model, optimizer, NEW, EPOCHS)
        assert protection.repair is not None
        for budget in BUDGETS:
            protection.repair.within_budget(budget)
            old, new = experiment.accuracies(model, {OLD: head, NEW: model.classifier.state_dict()})
            record = {"seed": seed, "budget": budget, "drift": round(float(memory.drift()), 4), "information": known}
            record |= {"before": before, "old": old, "new": new}
            common.append_record(out, record | {"versions": versions("transformers")})
            print(record, flush=True)


def table(records: list[dict[str, Any]]) -> str:
    """One row for each budget, with a number for each seed."""
    rows = []
    for budget, some in grouped(records, lambda record: record["budget"]).items():
        columns = (("drift", 3), ("old", 1), ("new", 1))
        cells = [", ".join(f"{record[name]:.{digits}f}" for record in some) for name, digits in columns]
        rows.append([f"{budget:g}", *cells])
    return markdown(["budget", "drift on the probe", f"{OLD} %", f"{NEW} %"], rows)


def main() -> None:
    parser = common.parser(__doc__, threads=1)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--reviews", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = common.parse(parser)
    if not options.draw and not options.out.exists():
        run(Experiment(options.model, options.reviews, TEXTS, TESTED, tasks=(OLD, NEW), blocks=BLOCKS), options.out)
    print(table(common.read_records(options.out)))


if __name__ == "__main__":
    main()

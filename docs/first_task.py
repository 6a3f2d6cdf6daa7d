"""Draw docs/first-task.png, the picture of docs/index.md, from the records of results/permuted-mnist-50.

python docs/first_task.py
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from limpet.experiments.results import gather

ROOT = Path(__file__).parents[1]
LINES = {
    "online-laplace/kronecker": ("limpet", "#1f6f8b"),
    "online-laplace/diagonal": ("diagonal (online EWC)", "#d98032"),
    "fine-tuning": ("plain training", "#8a8a8a"),
}


def main() -> None:
    """Accuracy on the first task after each task, mean over seeds, each method at its best strength."""
    (experiment,) = gather([ROOT / "results" / "permuted-mnist-50"])
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    for label, (name, colour) in LINES.items():
        rows = zip(*(record.accuracy for record in experiment.best(label).records), strict=True)
        accuracy = [fmean(row[0] for row in seeds) for seeds in rows]
        axis.plot(range(1, len(accuracy) + 1), accuracy, color=colour, linewidth=2.4)
        axis.text(len(accuracy) + 0.7, accuracy[-1], f"{name}: {accuracy[-1]:.0f} %", color=colour, va="center")
        print(f"{name}: {accuracy[-1]:.1f} % of the first task after {len(accuracy)}")
    axis.set(xlabel="tasks learned, one after another", ylabel="accuracy on the first one (%)")
    axis.set(xlim=(0, 50.5), ylim=(0, 101))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.3)
    figure.savefig(Path(__file__).with_name("first-task.png"), dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    main()

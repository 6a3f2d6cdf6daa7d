"""The paper's figures, drawn from run records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from limpet.experiments.record import Record
from limpet.experiments.results import Experiment, Variant
from limpet.methods.inspect import Inspection

COLOURS = {
    "kronecker": "#1f6f8b",
    "diagonal": "#d98032",
    "kronecker-sum": "#5b9a3c",
    "dense": "#444444",
    "si": "#8a4f9e",
    "fine-tuning": "#9a9a9a",
    "joint": "#000000",
    "one-network-per-task": "#000000",
}
DASHES = {"per-task-laplace": "--", "approximate-laplace": "-.", "joint": ":", "one-network-per-task": ":"}
CURVES = ("online-laplace/kronecker", "online-laplace/diagonal", "si")


def draw_all(experiment: Experiment, folder: Path) -> list[Path]:
    """Draw every figure for which the experiment has the required runs.

    Args:
        experiment: The runs of one experiment.
        folder: Output folder.

    Returns:
        The paths of the PNG files written, one per figure.
    """
    written = []
    for name, draw in FIGURES.items():
        figure = draw(experiment)
        if figure is not None:
            written.append(_save(figure, folder / f"{name}.png"))
    return written


def _save(figure: Any, path: Path) -> Path:
    """Save a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    return path


def _axes(rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.0, 3.8), **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
    return figure, axes


def _style(label: str) -> dict[str, Any]:
    method, _, structure = label.partition("/")
    return {"color": COLOURS.get(structure or method, "#b03060"), "linestyle": DASHES.get(method, "-")}


def _statistic(variant: Variant, statistic: Callable[[Sequence[float]], float]) -> tuple[list[int], list[float]]:
    """Return task counts and, for each, a statistic over the tasks seen so far, averaged over seeds."""
    ticks, values = [], []
    for number in range(variant.records[0].tasks):
        rows = [_row(record, number) for record in variant.records]
        if all(rows):
            ticks.append(number + 1)
            values.append(float(np.mean([statistic(row) for row in rows])))
    return ticks, values


def _row(record: Record, number: int) -> list[float]:
    return [value for value in record.accuracy[number][: number + 1] if value is not None]


def accuracy_over_tasks(experiment: Experiment) -> Any:
    """Fig. 1 of the paper: mean test accuracy against the number of tasks, with joint training dotted."""
    if experiment.variants[0].records[0].tasks < 3:
        return None
    figure, axes = _axes(1, 2, (10, 4.4))
    for label in experiment.labels():
        if label == "one-network-per-task":
            continue
        variant = experiment.best(label)
        ticks, values = _statistic(variant, _mean)
        alone = {"marker": "_", "markersize": 14} if len(ticks) == 1 else {}
        for axis in axes[0]:
            axis.plot(ticks, values, label=_named(variant), linewidth=1.8, **alone, **_style(label))
            axis.xaxis.get_major_locator().set_params(integer=True)
    best = max(experiment.best(label).mean for label in experiment.labels())
    axes[0, 0].set(xlabel="tasks learned", ylabel="mean test accuracy of all tasks so far (%)", ylim=(0, 100))
    axes[0, 1].set(xlabel="tasks learned", ylim=(best - 15, 100))
    named = axes[0, 0].get_legend_handles_labels()
    figure.legend(*named, frameon=False, fontsize=8, ncols=4, loc="outside lower center")
    figure.suptitle(experiment.key)
    return figure


def _mean(row: Sequence[float]) -> float:
    return sum(row) / len(row)


def the_first_task(experiment: Experiment) -> Any:
    """Plot the accuracy on all tasks and on the first one: plain training, diagonal and Kronecker-factored Laplace."""
    labels = ("fine-tuning", "online-laplace/diagonal", "online-laplace/kronecker")
    if not all(map(experiment.has, labels)) or experiment.variants[0].records[0].tasks < 3:
        return None
    figure, axes = _axes(1, 2, (9, 3.4), sharey=True)
    names = ("plain training", "diagonal", "Kronecker")
    panels = {"mean of all tasks so far": _mean, "the first task": lambda row: row[0]}
    for axis, (title, statistic) in zip(axes[0], panels.items(), strict=True):
        for label, name in zip(labels, names, strict=True):
            axis.plot(*_statistic(experiment.best(label), statistic), label=name, linewidth=2, **_style(label))
        axis.set(title=title, xlabel="tasks learned")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set_ylabel("test accuracy (%)")
    axes[0, 0].legend(frameon=False, loc="lower left")
    return figure


def _named(variant: Variant) -> str:
    """Return the label of a variant, with its strength if the method has one."""
    name = variant.label.replace("/", ", ")
    return f"{name} ({variant.strength_text})" if variant.records[0].kept_bytes else name


STATISTICS: dict[str, tuple[Callable[[Sequence[float]], float], dict[str, Any]]] = {
    "mean": (_mean, {"color": "#000000", "linewidth": 2}),
    "best task": (max, {"color": "#9a9a9a", "linestyle": ":"}),
    "worst task": (min, {"color": "#9a9a9a", "linestyle": "--"}),
    "first task": (lambda row: row[0], {"color": "#1f6f8b"}),
    "newest task": (lambda row: row[-1], {"color": "#d98032"}),
}


def effect_of_strength(experiment: Experiment) -> Any:
    """Plot the accuracy on old and new tasks at the smallest, best and largest strength, as in Fig. 2 of the paper."""
    rows = []
    for structure in ("kronecker", "diagonal"):
        swept = experiment.swept(f"online-laplace/{structure}")
        if len({strength for strength, _ in swept}) >= 2 and swept[0][1].records[0].tasks >= 3:
            best = max(swept, key=lambda pair: pair[1].mean)
            by_strength = dict((swept[0], swept[-1], best))
            rows.append((structure, [by_strength[strength] for strength in sorted(by_strength)]))
    if not rows:
        return None
    columns = max(len(chosen) for _, chosen in rows)
    figure, axes = _axes(len(rows), columns, (3.3 * columns, 2.8 * len(rows)), sharex=True, sharey=True)
    for (structure, chosen), line in zip(rows, axes, strict=True):
        for axis in line[len(chosen) :]:
            axis.set_visible(False)
        for variant, axis in zip(chosen, line, strict=False):
            for name, (statistic, style) in STATISTICS.items():
                axis.plot(*_statistic(variant, statistic), label=name, **style)
            axis.set_title(f"{structure}, strength {variant.strength_text}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("tasks learned")
    for axis in axes[:, 0]:
        axis.set_ylabel("test accuracy (%)")
    axes[0, 0].legend(frameon=False, fontsize=7, loc="lower left")
    return figure


def accuracy_over_strength(experiment: Experiment) -> Any:
    """Plot the test accuracy against the strength (c for Synaptic Intelligence), as in Fig. 3 of the paper."""
    swept = [label for label in experiment.labels() if len(dict(experiment.swept(label))) >= 3]
    if not swept:
        return None
    figure, axes = _axes()
    axis = axes[0, 0]
    for label in swept:
        strengths, variants = zip(*experiment.swept(label), strict=True)
        means, spreads = [v.mean for v in variants], [v.spread or 0.0 for v in variants]
        axis.errorbar(
            strengths, means, spreads, label=label.replace("/", ", "), marker="o", markersize=4, **_style(label)
        )
    for label in ("joint", "fine-tuning"):
        if experiment.has(label):
            axis.axhline(experiment.best(label).mean, label=label, linewidth=1.2, **_style(label))
    axis.set(xscale="log", xlabel="strength (SI: c)", ylabel="mean test accuracy (%)", title=experiment.key)
    figure.legend(frameon=False, fontsize=8, ncols=3, loc="outside lower center")
    return figure


def curves_through_training(experiment: Experiment) -> Any:
    """Plot the accuracy on each task during training, as in Fig. 4 of the paper; dotted: one network per task."""
    labels = [label for label in CURVES if experiment.has(label) and experiment.best(label).records[0].curve]
    if not labels:
        return None
    # The x-axis is epochs, so only runs with the same number of epochs are comparable.
    length = len(experiment.best(labels[0]).records[0].curve)
    labels = [label for label in labels if len(experiment.best(label).records[0].curve) == length]
    names = experiment.best(labels[0]).records[0].names
    figure, axes = _axes(len(names), 1, (6.5, 1.5 * len(names)), sharex=True)
    alone = experiment.best("one-network-per-task").records if experiment.has("one-network-per-task") else ()
    for number, (name, axis) in enumerate(zip(names, axes[:, 0], strict=True)):
        for label in labels:
            record = experiment.best(label).records[0]
            points = [(i + 1, point.accuracy[number]) for i, point in enumerate(record.curve) if point.task >= number]
            axis.plot(*zip(*points, strict=True), label=label.replace("/", ", "), **_style(label))
        if alone:
            axis.axhline(np.mean([record.accuracy[-1][number] for record in alone]), color="black", linestyle=":")
        axis.set_ylabel(f"{name} (%)", fontsize=8)
        low = min(min(line.get_ydata()) for line in axis.lines)
        axis.set_ylim(max(0, low - 3), None)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), frameon=False, fontsize=8, ncols=3, loc="outside upper center"
    )
    axes[-1, 0].set_xlabel("epochs, one task after another")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    return figure


FIGURES: dict[str, Callable[[Experiment], Any]] = {
    "accuracy": accuracy_over_tasks,
    "first": the_first_task,
    "strength": effect_of_strength,
    "strengths": accuracy_over_strength,
    "training": curves_through_training,
}


def stakes(found: Inspection) -> Any:
    """Plot the predicted cost of overwriting each direction of each block, from most to least constrained."""
    from matplotlib.colors import LogNorm

    columns = 200
    rows = []
    for block in found.blocks:
        places = torch.linspace(0, len(block.stakes) - 1, columns).round().long()
        rows.append(block.stakes[places].clamp_min(1e-12).numpy())
    grid = np.stack(rows)
    figure, axes = _axes(size=(7.0, 1.2 + 0.34 * len(rows)))
    axis = axes[0, 0]
    norm = LogNorm(vmin=max(grid.max() * 1e-8, 1e-12), vmax=max(grid.max(), 1e-11))
    shown = axis.imshow(grid, aspect="auto", norm=norm, cmap="magma", extent=(0, 100, len(rows), 0))
    axis.grid(False)
    axis.set_yticks([i + 0.5 for i in range(len(rows))], [block.name for block in found.blocks], fontsize=8)
    axis.set(xlabel="directions of the block, most constrained first (%)")
    axis.set_title("what a new task would overwrite", fontsize=11)
    figure.colorbar(shown, ax=axis, label="nats per example")
    return figure

"""The figure of a suite: what is lost over the loss on the new data, one curve for each method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from retention.compare import decoded
from retention.report import PLAIN, Results, Row

COLORS = {
    "early stopping": "#555555",
    "scaling": "#d98032",
    "repair": "#1f6f8b",
    "protect": "#0b3c49",
    "self-rehearsal": "#6a994e",
    "self-rehearsal of one row": "#a7c957",
    "self-rehearsal, then repair": "#386641",
    "distillation": "#8b3d6b",
    "replay of 5%": "#b8a11f",
    "L2-SP": "#c98bb0",
    "diagonal EWC": "#9aa5b1",
    "LiNeS": "#e5b181",
    "TIES": "#a34a28",
}
LABELS = {"drift": "drift, nats per token", "wrong": "share of wrong answers"}
TITLES = {
    ("drift", "german"): "SmolLM2-135M learns a German text (LoRA)",
    ("wrong", "german"): "SmolLM2-135M, taught JSON, learns a German text",
    ("wrong", "svhn"): "A small ResNet learns SVHN after CIFAR-10",
}
RANGE = (0.97, 1.3)


def points(results: Results, row: Row) -> tuple[list[float], list[float]]:
    """The curve of a method: new loss relative to plain training, and what is lost, means over seeds.

    Args:
        results: The results of a pair.
        row: The method.

    Returns:
        Both coordinates of every point that all seeds have.
    """
    seeds = results.seeds(row)
    curves = [results.curve(row, seed) for seed in seeds]
    some = min(map(len, curves))
    new = [
        np.mean([curve[i]["new"] / results.plain(s) for curve, s in zip(curves, seeds, strict=True)])
        for i in range(some)
    ]
    lost = [np.mean([decoded(curve[i]["lost"]).mean() for curve in curves]) for i in range(some)]
    return [float(value) for value in new], [float(value) for value in lost]


def draw(results: dict[str, Results], lost: str, path: Path) -> None:
    """Draw one panel for each pair.

    Args:
        results: The results, by the name of the pair.
        lost: What is lost, a key of `LABELS`.
        path: The file to write.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(6.2 * len(results), 4.4), layout="constrained", squeeze=False)
    for axis, (name, found) in zip(axes[0], results.items(), strict=True):
        right = 1.0
        for row in found.runs:
            new, lost_there = points(found, row)
            if row.name in COLORS and new[-1 if row.name == "protect" else 0] <= RANGE[1]:
                _curve(axis, row, new, lost_there)
                right = max(right, *new)
        before = np.mean([decoded(found.runs[PLAIN][seed]["before"]["lost"]).mean() for seed in found.seeds(PLAIN)])
        axis.axhline(before, color="#cccccc", linewidth=1, zorder=0, label="before")
        axis.set(
            xlim=(RANGE[0], min(right + 0.02, RANGE[1])), title=TITLES.get((lost, name), name), ylabel=LABELS[lost]
        )
        axis.set_xlabel("loss on the new data / that of plain training")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=130)


def _curve(axis: Any, row: Row, new: list[float], lost: list[float]) -> None:
    ours = row.name in ("repair", "protect", "self-rehearsal, then repair")
    style = {"color": COLORS[row.name], "label": row.name, "linewidth": 2.2 if ours else 1.4}
    if row.name == "protect":  # a single point, of the path of the repair
        axis.plot(new[-1:], lost[-1:], "*", markersize=12, **style)
    else:
        axis.plot(new, lost, marker="o", markersize=3, **style)

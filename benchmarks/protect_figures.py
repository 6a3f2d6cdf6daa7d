"""The figure of results/protect, from the stored results of the protection benchmarks.

    python -m benchmarks protect_figures

Left: what is retained of the old task over what is learned of the new one, for every run of MiniLM. Right: the drift
that the memory forecast over the drift that was measured, during training without protection. "Before" is what the same
lines did earlier: a penalty in the gradient of Adam (results/repair), and a forecast by the quadratic alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import common

RESULTS = common.RESULTS / "protect"
STYLES = {
    "plain": ("plain training", "#555555", "o"),
    "penalty": ("memory.protect before: a penalty under Adam", "#b5453c", "x"),
    "protect": ("memory.protect", "#1f6f8b", "o"),
    "replay": ("replay of 5 %", "#8a6fb0", "^"),
    "distillation": ("distillation on the new data", "#d98032", "s"),
    "l2-sp": ("L2-SP", "#9a9a4a", "D"),
    "plain, then times 0.6": ("the update times 0.6", "#6aa84f", "v"),
}


def runs() -> Iterable[tuple[str, float, float]]:
    """Method, change of the old accuracy, and new accuracy beside that of plain training, of every run."""
    for path, reference, names in (
        (RESULTS / "sentences.jsonl", "plain", {name: name for name in STYLES}),
        (common.RESULTS / "repair" / "sentences.jsonl", "tuned", {"protect": "penalty"}),
    ):
        points = common.read_records(path)
        plain = {(p["seed"], p["rate"]): p["new"][0] for p in points if p["what"] == reference}
        for p in points:
            if p["what"] in names and (p["seed"], p["rate"]) in plain:
                new = p["new"][0] - plain[p["seed"], p["rate"]]
                yield names[p["what"]], p["old"][0] - p["before"][0], new


def moments() -> list[dict[str, Any]]:
    """The moments of training without protection."""
    points = common.read_records(RESULTS / "sentences.jsonl")
    return [m for p in points if p["what"] == "plain" for m in p["moments"] if m["drift"] > 0]


def draw(path: Path) -> None:
    """Draw both panels.

    Args:
        path: The file to write.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    found = list(runs())
    left.axvspan(-6, 4, color="#1f6f8b", alpha=0.05)
    left.axhspan(-4, 6, color="#1f6f8b", alpha=0.05)
    for what, (name, color, marker) in STYLES.items():
        own = [(new, old) for kind, old, new in found if kind == what]
        if own:
            left.scatter(*zip(*own, strict=True), s=34, color=color, marker=marker, label=name, alpha=0.85)
    left.set(xlabel="new task, points beside plain training", ylabel="old task, points beside what it was")
    left.set_title("MiniLM, two tasks, three learning rates, every seed", fontsize=10)
    left.set_xlim(-28, 10)  # one run before is at +47, where plain training had learned nothing
    left.legend(fontsize=7.5, loc="lower left", frameon=False)
    measured = moments()
    forecasts = [("quadratic", "before: the quadratic", "#b5453c"), ("forecast_drift", "forecast.drift", "#1f6f8b")]
    for key, name, color in forecasts:
        right.scatter([m["drift"] for m in measured], [m[key] for m in measured], s=22, color=color, label=name)
    ends = [min(m["drift"] for m in measured), max(m["drift"] for m in measured)]
    right.plot(ends, ends, color="#555555", linewidth=1)
    for factor in (2.5, 1 / 2.5):
        right.plot(ends, [factor * end for end in ends], color="#555555", linewidth=0.7, linestyle=":")
    right.set(xscale="log", yscale="log", xlabel="measured drift, nats per example", ylabel="forecast")
    right.set_title("forecasts, not trusted on this network", fontsize=10)
    right.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    common.parse(common.parser(__doc__))
    draw(RESULTS / "protection.png")


if __name__ == "__main__":
    main()

"""Tables and figure of results/repair, from the stored results of the three repair benchmarks.

python -m benchmarks repair_figures                      # tables and figure
python -m benchmarks repair_figures --collect runs       # first collect what `limpet run ... --out runs/NAME` wrote
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import common

RESULTS = common.RESULTS / "repair"
Point = dict[str, Any]
COLORS = {"repair": "#1f6f8b", "scale": "#d98032", "tuned": "#555555"}


def points(name: str) -> list[Point]:
    """What a benchmark has kept."""
    return common.read_records(RESULTS / f"{name}.jsonl")


def spread(values: Iterable[float], digits: int) -> str:
    """The mean, and in brackets the least and the greatest where there are several."""
    found = list(values)
    mean = f"{statistics.mean(found):.{digits}f}"
    return f"{mean} ({min(found):.{digits}f} to {max(found):.{digits}f})" if len(found) > 1 else mean


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def grouped(found: list[Point], key: Callable[[Point], Any]) -> dict[Any, list[Point]]:
    """Points by a key, in the order of their first."""
    groups: dict[Any, list[Point]] = {}
    for point in found:
        groups.setdefault(key(point), []).append(point)
    return groups


def language_table(kind: str, source: str = "self") -> str:
    """New loss, drift and old loss of every point, over the seeds."""
    own = [p for p in points("language") if p["kind"] == kind and p["source"] == source]
    rows = []
    for (what, at, scale), some in grouped(own, lambda p: (p["what"], p["at"], p["scale"])).items():
        names = {"tuned": "tuned", "scale": f"scaled by {at:g}", "repair": f"repair, strength {at:g}"}
        name = names.get(what, f"repair, {what} {at:g}") + (f", scale {scale:g}" if scale != 1 else "")
        cells = [spread((p[column] for p in some), 3) for column in ("new", "drift", "old")]
        rows.append([name, *cells, str(len(some))])
    return markdown(["", "new text", "drift", "old English text", "seeds"], rows)


def sentence_table(rate: str) -> str:
    """Accuracies on both tasks of every point, over the seeds."""
    own = [p for p in points("sentences") if p["rate"] == rate]
    rows = []
    if own:
        rows.append(["before", "", spread((p["before"][0] for p in own if p["what"] == "tuned"), 1), "", ""])
    for (what, at), some in grouped(own, lambda p: (p["what"], None if p["what"] == "protect" else p["at"])).items():
        names = {"tuned": "tuned", "scale": f"scaled by {at or 0:g}", "repair": f"repair, strength {at or 0:g}"}
        gone = spread((p["old"][0] - p["before"][0] for p in some), 1)
        cells = [spread((p["new"][0] for p in some), 1), spread((p["old"][0] for p in some), 1), gone]
        name = "instead: protect, gradient mode" if what == "protect" else names.get(what, f"repair, {what} {at:g}")
        rows.append([name, *cells, str(len(some))])
    return markdown(["", "word order %", "sentiment %", "change of sentiment", "seeds"], rows)


def mnist_table() -> str:
    """Old test losses of every case and seed."""
    header = ["", "before", "tuned", "best scale", "best repair", "repair, strength 1", "its new loss / tuned"]
    rows = []
    for p in points("mnist"):
        cells = [p["before"], p["tuned"], p["best scale"], p["best repair"], p["default"]]
        ratio = p["default"]["new"] / p["tuned"]["new"]
        rows.append([f"{p['case']}, seed {p['seed']}", *(f"{cell['old']:.3f}" for cell in cells), f"{ratio:.3f}"])
    return markdown(header, rows)


def collect(folder: Path) -> None:
    """Keep a line of every run in a folder."""
    kept = {(p["experiment"], p["method"], p["seed"]): p for p in points("many_tasks")}
    for path in sorted(folder.glob("*/run.json")):
        run = json.loads(path.read_text())
        recipe, metrics = run["recipe"], run["metrics"]
        point = {"experiment": run["experiment"], "method": recipe["method"], "seed": recipe["seed"]}
        point |= {name: metrics[name] for name in ("average_accuracy", "first_task", "last_task")}
        point |= {"repair": recipe["memory"].get("repair"), "strength": recipe["memory"]["strength"]}
        kept[point["experiment"], point["method"], point["seed"]] = point | {"environment": run["environment"]}
    (RESULTS / "many_tasks.jsonl").write_text("".join(json.dumps(point) + "\n" for point in kept.values()))


def many_tasks_table() -> str:
    """Mean accuracy in the end of every sequence and method."""
    found = grouped(points("many_tasks"), lambda p: p["method"])
    sequences = list(grouped(points("many_tasks"), lambda p: p["experiment"]))
    rows = []
    for method, some in found.items():
        cells = [[p["average_accuracy"] for p in some if p["experiment"] == sequence] for sequence in sequences]
        rows.append([method, *(spread(cell, 1) if cell else "" for cell in cells)])
    return markdown(["", *sequences], rows)


def tables() -> list[str]:
    """All tables of the page for which something was measured."""
    kinds = [("lora", "self"), ("full", "self"), ("lora", "text"), ("merged", "self")]
    kept = {(p["kind"], p["source"]) for p in points("language")}
    found = [language_table(*one) for one in kinds if one in kept]
    return [*found, *(sentence_table(rate) for rate in ("1e-4", "2e-4")), mnist_table(), many_tasks_table()]


def draw(path: Path) -> None:
    """The path of repair beside that of scaling: what is kept of the old over what is kept of the new."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    language = [p for p in points("language") if p["kind"] == "lora" and p["source"] == "self" and p["scale"] == 1]
    sentences = [p for p in points("sentences") if p["rate"] == "1e-4"]
    panels: list[tuple[Any, list[Point], Callable[[Point], float], Callable[[Point], float]]] = [
        (left, language, lambda p: float(p["new"]), lambda p: float(p["drift"])),
        (right, sentences, lambda p: float(p["new"][0]), lambda p: float(p["old"][0])),
    ]
    for axis, found, x, y in panels:
        for seed, own in grouped(found, lambda p: p["seed"]).items():
            start = [p for p in own if p["what"] == "tuned"]
            for what, name in (("repair", "repair"), ("scale", "scale the update")):
                some = sorted((p for p in own if p["what"] == what), key=lambda p: p["at"], reverse=what == "scale")
                axis.plot(
                    [x(p) for p in start + some], [y(p) for p in start + some], marker="o", markersize=3,
                    linewidth=1.5, color=COLORS[what], alpha=0.8, label=name if not seed else None,
                )  # fmt: skip
            axis.plot(
                [x(p) for p in start], [y(p) for p in start], "s", color=COLORS["tuned"],
                label="plain fine-tuning" if not seed else None,
            )  # fmt: skip
        axis.spines[["top", "right"]].set_visible(False)
    left.set(
        xlabel="loss on the new text (nats per token)", ylabel="drift (nats per token)", yscale="log",
        title="SmolLM2-135M learns German by LoRA",
    )  # fmt: skip
    left.set_xlim(right=3.6)
    right.set(
        xlabel="accuracy on the new task (%)",
        ylabel="accuracy on the old task (%)",
        title="MiniLM learns a second task",
    )
    for number, value in enumerate(p["before"][0] for p in sentences if p["what"] == "tuned"):
        label = None if number else "before the fine-tune"
        right.axhline(value, color="#999999", linewidth=0.8, linestyle=":", label=label)
    left.legend(frameon=False, fontsize=9)
    dotted = [line for line in right.get_lines() if line.get_linestyle() == ":"]
    right.legend(handles=dotted[:1], frameon=False, fontsize=9, loc="lower left")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--collect", type=Path, help="a folder of runs")
    options = common.parse(parser)
    if options.collect is not None:
        collect(options.collect)
    for table in tables():
        print(table, end="\n\n")
    draw(RESULTS / "paths.png")


if __name__ == "__main__":
    main()

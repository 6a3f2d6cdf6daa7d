"""Figures, tables and summary.json from the folders of runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from limpet.experiments.figures import draw_all
from limpet.experiments.record import compact_json, write_text
from limpet.experiments.results import Experiment, Variant, gather

MANY = 10  # above so many tasks a table has statistics instead of a column a task


def report(folders: Sequence[Path], out: Path) -> list[Path]:
    """Write everything into `out`: a folder an experiment, with the records that its figures are drawn from.

    Records that `out` holds already are kept, so that runs can be added to results.
    """
    experiments = gather([out, *folders] if out.is_dir() else folders)
    written = []
    for experiment in experiments:
        place = out / experiment.key
        written += _keep_records(experiment, place / "runs")
        written += draw_all(experiment, place)
        written += _write_table(experiment, place)
    summary = out / "summary.json"
    write_text(summary, json.dumps({one.key: summarise(one) for one in experiments}, indent=2) + "\n")
    return [*written, summary]


def summarise(experiment: Experiment) -> dict[str, dict[str, object]]:
    """{method: {"mean": percent, "seeds": [percent, ...]}}, each method at its best."""
    best = {label: experiment.best(label) for label in experiment.labels()}
    return {
        label: {"mean": round(variant.mean, 3), "seeds": [round(score, 3) for score in variant.scores]}
        for label, variant in best.items()
    }


def _keep_records(experiment: Experiment, folder: Path) -> list[Path]:
    """A copy of every record, so that the figures can be drawn without the run folders."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        folder / f"{variant.name}-seed{record.recipe.seed}.json": compact_json(record.model_dump(mode="json"))
        for variant in experiment.variants
        for record in variant.records
    }
    for path in set(folder.glob("*.json")) - texts.keys():
        path.unlink()  # its record was read, and is among those written
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)


def _write_table(experiment: Experiment, folder: Path) -> list[Path]:
    """table.md, and the same between the marks <!-- table --> and <!-- /table --> of README.md, if it has them."""
    text = table(experiment)
    paths = [folder / "table.md"]
    write_text(paths[0], text)
    page = folder / "README.md"
    if page.is_file():
        old = page.read_text()
        new = re.sub(
            r"<!-- table -->.*?<!-- /table -->", lambda _: f"<!-- table -->\n\n{text}\n<!-- /table -->", old, flags=re.S
        )
        if new != old:
            write_text(page, new)
            paths.append(page)
    return paths


def table(experiment: Experiment) -> str:
    """One row a method, each at its best strength, and one where the memory chose the strength."""
    names = experiment.variants[0].records[0].names
    many = len(names) > MANY
    tasks = ["first", "last", "worst"] if many else names
    numbers = ["mean", "seeds", "forgetting", "NLL", "calibration error", "memory", "seconds"]
    head = ["method", "strength", "epochs", *tasks, *numbers]
    lines = [head, ["---"] * len(head), *(_line(variant, many) for variant in experiment.rows())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _line(variant: Variant, many: bool) -> list[str]:
    if many:
        tasks = [variant.metric(f"{which}_task") for which in ("first", "last", "worst")]
    else:
        rows = [[value or 0.0 for value in record.accuracy[-1]] for record in variant.records]
        tasks = [sum(column) / len(column) for column in zip(*rows, strict=True)]
    spread = f" ± {variant.spread:.2f}" if variant.spread is not None else ""
    held = variant.records[0].kept_bytes
    return [
        variant.label,
        variant.strength_text if held else "",
        str(variant.records[0].epochs[-1]),
        *(_number(value, 1) for value in tasks),
        f"{variant.mean:.2f}{spread}",
        str(len(variant.records)),
        _number(variant.metric("forgetting"), 1),
        _number(variant.metric("nll"), 3),
        _number(variant.metric("calibration_error"), 1),
        f"{held / 1e6:.1f} MB" if held else "",
        f"{variant.seconds():.0f}",
    ]


def _number(value: float | None, decimals: int) -> str:
    return "" if value is None else f"{value:.{decimals}f}"

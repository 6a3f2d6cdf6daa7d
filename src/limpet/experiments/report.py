"""Reports: figures, tables and summary.json from run folders."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from limpet.experiments.figures import draw_all
from limpet.experiments.results import Experiment, Variant, gather
from limpet.io.atomic import write_text

MANY = 10  # with more tasks than this, tables show statistics instead of one column per task


def report(folders: Sequence[Path], out: Path) -> list[Path]:
    """Write figures, tables and records, one folder per experiment, and summary.json.

    Records already in `out` are kept, so that runs can be added to existing results.

    Args:
        folders: Folders to search recursively for runs.
        out: Output folder.

    Returns:
        The paths of the files written.

    Raises:
        LimpetError: If a folder does not exist or there are no finished runs.
    """
    return write_report(gather([out, *folders] if out.is_dir() else folders), out)


def write_report(experiments: Sequence[Experiment], out: Path) -> list[Path]:
    """Write figures, tables and records of experiments that were gathered.

    Args:
        experiments: The experiments.
        out: Output folder.

    Returns:
        The paths of the files written.
    """
    written = []
    for experiment in experiments:
        place = out / experiment.key
        written += _keep_records(experiment, place)
        written += draw_all(experiment, place)
        written += _write_table(experiment, place)
    summary = out / "summary.json"
    write_text(summary, json.dumps({one.key: summarise(one) for one in experiments}, indent=2) + "\n")
    return [*written, summary]


def summarise(experiment: Experiment) -> dict[str, dict[str, object]]:
    """Return {method: {"mean": percent, "seeds": [percent, ...]}} with each method at its best setting."""
    best = {label: experiment.best(label) for label in experiment.labels()}
    return {
        label: {"mean": round(variant.mean, 3), "seeds": [round(score, 3) for score in variant.scores]}
        for label, variant in best.items()
    }


def _keep_records(experiment: Experiment, folder: Path) -> list[Path]:
    """Copy every record into runs.jsonl, so that figures can be redrawn without the run folders."""
    variants = sorted(experiment.variants, key=lambda variant: variant.name)
    records = [record.model_dump(mode="json") for variant in variants for record in variant.records]
    path = folder / "runs.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records))
    for old in (folder / "runs").glob("*.json"):
        old.unlink()  # one file per record is the older form: it was read, and its record is in runs.jsonl now
    return [path]


def _write_table(experiment: Experiment, folder: Path) -> list[Path]:
    """Write table.md, and insert it between <!-- table --> and <!-- /table --> of README.md if present."""
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
    """Format a Markdown table: a row per method at its best strength, and rows for automatic strengths."""
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

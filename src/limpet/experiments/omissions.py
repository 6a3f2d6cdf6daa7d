"""What a report leaves out: unfinished runs, runs replaced by others of the same settings, and settings not shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from limpet.experiments.recipe import Recipe
from limpet.experiments.record import Record, RunFolder, load_record
from limpet.experiments.results import Experiment, Variant, settings_key


def omissions(experiments: Sequence[Experiment], folders: Iterable[Path]) -> list[str]:
    """List the runs that are not in the tables of a report, and why.

    Args:
        experiments: The experiments of the report.
        folders: The folders that were searched for runs.

    Returns:
        One line per omission.
    """
    places = [path.parent for folder in folders for path in sorted(folder.rglob("recipe.yaml"))]
    finished = {place: load_record(RunFolder(place).record) for place in places if RunFolder(place).record.is_file()}
    unfinished = [f"{place}: not finished, continue it with --resume" for place in places if place not in finished]
    hidden = [line for experiment in experiments for line in _hidden(experiment)]
    return [*unfinished, *_replaced(finished), *hidden]


def _replaced(finished: Mapping[Path, Record]) -> list[str]:
    """Runs with the settings and seed of a later one, which is reported instead."""
    newest: dict[tuple[str, str, int], Path] = {}
    lines = []
    for place, record in finished.items():
        key = record.experiment, settings_key(record.recipe), record.recipe.seed
        before = newest.get(key)
        if before is not None and before.resolve() != place.resolve() and finished[before] != record:
            lines.append(f"{before}: has the same settings and seed as {place}, which is reported instead")
        newest[key] = place
    return lines


def _hidden(experiment: Experiment) -> list[str]:
    """Settings of a method that are not in the table, which shows one per method and those with automatic strength."""
    shown = experiment.rows()
    lines = []
    for label in experiment.labels():
        best = experiment.best(label)
        others = [variant for variant in experiment.of(label) if variant not in shown]
        if others:
            listed = "; ".join(f"{_difference(best, other)} ({_score(other)})" for other in others)
            lines.append(
                f"{experiment.key}, {label}: the table shows {_score(best)}, the best mean of those with the most "
                f"seeds; not {listed}"
            )
    return lines


def _score(variant: Variant) -> str:
    seeds = len(variant.records)
    return f"{variant.mean:.2f} % from {seeds} seed{'s' if seeds > 1 else ''}"


def _difference(shown: Variant, other: Variant) -> str:
    """The settings of a variant that differ from those of the variant that is shown."""
    ours, theirs = (_flat(variant.records[0].recipe) for variant in (shown, other))
    return ", ".join(f"{name}={theirs.get(name)}" for name in theirs | ours if theirs.get(name) != ours.get(name))


def _flat(recipe: Recipe) -> dict[str, Any]:
    values = recipe.model_dump(mode="json", exclude={"seed", "threads", "device", "files"})
    return {
        name if inner is None else f"{name}.{inner}": value
        for name, part in values.items()
        for inner, value in (part.items() if isinstance(part, dict) else ((None, part),))
    }

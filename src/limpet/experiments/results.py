"""Results: records collected from folders, grouped by experiment, method and settings."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev

from limpet.errors import LimpetError
from limpet.experiments.recipe import Recipe
from limpet.experiments.record import Record, load_record, load_records


@dataclass(frozen=True)
class Variant:
    """Runs that differ only in their seed.

    Args:
        records: The records, one per seed.
    """

    records: tuple[Record, ...]

    @property
    def label(self) -> str:
        """Name of the method in results."""
        return self.records[0].recipe.label

    @property
    def name(self) -> str:
        """Unique name for files."""
        digest = hashlib.sha256(settings_key(self.records[0].recipe).encode()).hexdigest()[:6]
        return f"{self.label.replace('/', '-')}-{self.strength_text.replace(' ', '-')}-{digest}"

    @property
    def strength(self) -> float | None:
        """Multiplier of the Fisher; None for automatic strengths and budgets."""
        memory = self.records[0].recipe.memory
        return None if isinstance(memory.strength, str) or memory.budget is not None else memory.strength

    @property
    def strength_text(self) -> str:
        """The strength, "auto" or the budget as text."""
        if self.strength is not None:
            return f"{self.strength:g}"
        budget = self.records[0].recipe.memory.budget
        return "auto" if budget is None else f"budget {budget:g}"

    @cached_property
    def scores(self) -> list[float]:
        """Final mean test accuracy of each seed, in percent."""
        return [record.mean_accuracy for record in self.records]

    @property
    def mean(self) -> float:
        """Mean score over seeds."""
        return fmean(self.scores)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the score over seeds; None for a single seed."""
        return stdev(self.scores) if len(self.scores) > 1 else None

    def metric(self, name: str) -> float | None:
        """Return a metric averaged over seeds, or None if a seed lacks it."""
        values = [value for record in self.records if (value := record.metrics.get(name)) is not None]
        return fmean(values) if len(values) == len(self.records) else None

    def seconds(self) -> float:
        """Return the mean wall time of a run in seconds: training, curvature and evaluation."""
        return fmean(sum(map(sum, record.seconds.model_dump().values())) for record in self.records)


@dataclass(frozen=True)
class Experiment:
    """All runs of one experiment.

    Args:
        key: Name of the experiment in results.
        variants: Its runs, grouped by settings.
    """

    key: str
    variants: tuple[Variant, ...]

    def labels(self) -> list[str]:
        """Return the labels of the methods, sorted by the mean score of their best variant, highest first."""
        return sorted(
            {variant.label for variant in self.variants}, key=lambda label: self.best(label).mean, reverse=True
        )

    def of(self, label: str) -> list[Variant]:
        """Return the variants of a method, sorted by strength; automatic strengths come last."""
        return sorted((v for v in self.variants if v.label == label), key=_by_strength)

    def swept(self, label: str) -> list[tuple[float, Variant]]:
        """Return (strength, variant) pairs of a method, sorted by strength.

        If several variants have the same strength, the one with the most seeds is used; ties go to the best
        mean.
        """
        found = {v.strength: v for v in sorted(self.of(label), key=_seeds_and_mean) if v.strength is not None}
        return sorted(found.items(), key=lambda item: item[0])

    def best(self, label: str) -> Variant:
        """Return the variant that represents a method: of those with the most seeds, the one with the best mean.

        Variants with automatic strength are considered only if there are no others; tables list them separately.
        """
        given = [v for v in self.of(label) if v.strength is not None]
        return max(given or self.of(label), key=_seeds_and_mean)

    def rows(self) -> list[Variant]:
        """Return the rows of a table, best first: the best variant of each method, and all with automatic strength."""
        best = [self.best(label) for label in self.labels()]
        own = [v for v in self.variants if v.strength is None and v not in best]
        return sorted([*best, *own], key=lambda variant: variant.mean, reverse=True)

    def has(self, label: str) -> bool:
        """Return whether the method was run."""
        return any(variant.label == label for variant in self.variants)


def _seeds_and_mean(variant: Variant) -> tuple[int, float]:
    """Sort key: the number of seeds, then the mean."""
    return len(variant.records), variant.mean


def _by_strength(variant: Variant) -> float:
    return math.inf if variant.strength is None else variant.strength


def settings_key(recipe: Recipe) -> str:
    """Serialize the settings that affect the result, except the seed; defaults are omitted to keep names stable."""
    return json.dumps(
        recipe.model_dump(mode="json", exclude={"seed", "threads", "device", "files"}, exclude_defaults=True)
    )


def gather(folders: Iterable[Path]) -> list[Experiment]:
    """Collect all finished runs in the folders: run.json of run folders, and the records in results folders.

    Args:
        folders: Folders to search recursively.

    Returns:
        The experiments, sorted by key.

    Raises:
        LimpetError: If a folder does not exist or there are no finished runs.
    """
    found: dict[str, dict[str, dict[int, Record]]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise LimpetError(f"folder not found: {folder}")
        # Copies come first, so that run folders take precedence; runs/*.json is the older form of runs.jsonl.
        copies = [load_record(path) for path in sorted(folder.rglob("runs/*.json"))]
        copies += [record for path in sorted(folder.rglob("runs.jsonl")) for record in load_records(path)]
        for record in [*copies, *(load_record(path) for path in sorted(folder.rglob("run.json")))]:
            variants = found.setdefault(record.experiment, {})
            tasks = {one.tasks for seeds in variants.values() for one in seeds.values()}
            if tasks - {record.tasks}:
                raise LimpetError(
                    f"records of {record.experiment} in {folder} have {record.tasks} and {tasks.pop()} tasks: give "
                    "experiments with different numbers of tasks different names, or remove the damaged one"
                )
            variants.setdefault(settings_key(record.recipe), {})[record.recipe.seed] = record
    if not found:
        raise LimpetError(f"no finished runs found in {', '.join(map(str, folders))}")
    return [
        Experiment(key, tuple(Variant(tuple(seeds[s] for s in sorted(seeds))) for seeds in variants.values()))
        for key, variants in sorted(found.items())
    ]

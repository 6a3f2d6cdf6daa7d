"""Records gathered from folders, and which of them stands for a method in a figure or table."""

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
from limpet.experiments.record import Record, load_record


@dataclass(frozen=True)
class Variant:
    """Runs that differ in nothing but their seed."""

    records: tuple[Record, ...]

    @property
    def label(self) -> str:
        """The method as results name it."""
        return self.records[0].recipe.label

    @property
    def name(self) -> str:
        """A name for files, that no other variant has."""
        digest = hashlib.sha256(_settings(self.records[0].recipe).encode()).hexdigest()[:6]
        return f"{self.label.replace('/', '-')}-{self.strength_text.replace(' ', '-')}-{digest}"

    @property
    def strength(self) -> float | None:
        """What the Fisher was multiplied by; None where the memory chose it."""
        holding = self.records[0].recipe.memory
        return None if isinstance(holding.strength, str) or holding.budget is not None else holding.strength

    @property
    def strength_text(self) -> str:
        """The strength for people to read."""
        if self.strength is not None:
            return f"{self.strength:g}"
        budget = self.records[0].recipe.memory.budget
        return "auto" if budget is None else f"budget {budget:g}"

    @cached_property
    def scores(self) -> list[float]:
        """Mean test accuracy at the end, for every seed."""
        return [record.mean_accuracy for record in self.records]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return fmean(self.scores)

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds."""
        return stdev(self.scores) if len(self.scores) > 1 else None

    def metric(self, name: str) -> float | None:
        """One of the metrics, mean over seeds."""
        values = [value for record in self.records if (value := record.metrics.get(name)) is not None]
        return fmean(values) if len(values) == len(self.records) else None

    def seconds(self) -> float:
        """Wall time of one run: training, curvature and evaluation."""
        return fmean(sum(map(sum, record.seconds.model_dump().values())) for record in self.records)


@dataclass(frozen=True)
class Experiment:
    """All runs of one experiment."""

    key: str
    variants: tuple[Variant, ...]

    def labels(self) -> list[str]:
        """The methods, best first."""
        return sorted(
            {variant.label for variant in self.variants}, key=lambda label: self.best(label).mean, reverse=True
        )

    def of(self, label: str) -> list[Variant]:
        """The variants of a method, by strength; those that choose their own last."""
        return sorted((v for v in self.variants if v.label == label), key=_by_strength)

    def swept(self, label: str) -> list[tuple[float, Variant]]:
        """The variants of a method with a strength of their own, by strength; of several the one that stands for it."""
        found = {v.strength: v for v in sorted(self.of(label), key=_standing) if v.strength is not None}
        return sorted(found.items(), key=lambda item: item[0])

    def best(self, label: str) -> Variant:
        """What stands for the method: of the variants with most seeds the one with the best mean.

        A strength that the memory chose has a row of its own beside the given ones.
        """
        given = [v for v in self.of(label) if v.strength is not None]
        return max(given or self.of(label), key=_standing)

    def rows(self) -> list[Variant]:
        """What a table shows, best first: every method at its best, and memories that chose their own strength."""
        best = [self.best(label) for label in self.labels()]
        own = [v for v in self.variants if v.strength is None and v not in best]
        return sorted([*best, *own], key=lambda variant: variant.mean, reverse=True)

    def has(self, label: str) -> bool:
        """Whether the method was run."""
        return any(variant.label == label for variant in self.variants)


def _standing(variant: Variant) -> tuple[int, float]:
    return len(variant.records), variant.mean


def _by_strength(variant: Variant) -> float:
    return math.inf if variant.strength is None else variant.strength


def _settings(recipe: Recipe) -> str:
    """All that may change the result, but for the seed; without defaults, so that a new setting renames nothing."""
    return json.dumps(
        recipe.model_dump(mode="json", exclude={"seed", "threads", "device", "files"}, exclude_defaults=True)
    )


def gather(folders: Iterable[Path]) -> list[Experiment]:
    """All finished runs below the folders: run.json of run folders, and the records of a results folder."""
    found: dict[str, dict[str, dict[int, Record]]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise LimpetError(f"there is no folder {folder}")
        # copies first, so that a run folder has the last word
        for path in [*sorted(folder.rglob("runs/*.json")), *sorted(folder.rglob("run.json"))]:
            record = load_record(path)
            variants = found.setdefault(record.experiment, {})
            variants.setdefault(_settings(record.recipe), {})[record.recipe.seed] = record
    if not found:
        raise LimpetError(f"no finished run below {', '.join(map(str, folders))}")
    return [
        Experiment(key, tuple(Variant(tuple(seeds[s] for s in sorted(seeds))) for seeds in variants.values()))
        for key, variants in sorted(found.items())
    ]

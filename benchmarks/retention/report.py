"""The tables of a suite, from its records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from repair_figures import markdown
from retention.after import METHODS as AFTER
from retention.compare import RATIOS, Interval, Point, at_loss, decoded, paired
from retention.during import METHODS as DURING
from retention.runs import DEVELOPMENT


class Row(NamedTuple):
    """What a model was trained with, what was done to it afterwards ("": nothing), and a setting that was tried."""

    trained: str
    method: str = ""
    value: float | None = None

    @property
    def name(self) -> str:
        """Its name in tables and figures."""
        value = "" if self.value is None else f" {self.value:g}"
        if not self.method:
            return "early stopping" if self.trained == "plain" else f"{self.trained}{value}"
        return f"{self.method}{value}" if self.trained == "plain" else f"{self.trained}, then {self.method}{value}"


PLAIN, REFERENCE = Row("plain"), Row("plain", "scaling")


def _place(row: Row) -> tuple[int, int]:
    """Where a row stands in tables and figures: methods that act during training first."""
    names = [*DURING, *AFTER]
    return names.index(row.method or row.trained), names.index(row.trained)


class Results:
    """The runs of one pair.

    Args:
        records: All records of the suite.
        pair: The name of the pair.
    """

    def __init__(self, records: Iterable[dict[str, Any]], pair: str) -> None:
        self.runs: dict[Row, dict[int, dict[str, Any]]] = {}
        for record in records:
            if record["pair"] == pair:
                tried = pair == DEVELOPMENT and (record["method"] or DURING[record["trained"]].candidates)
                row = Row(record["trained"], record["method"], record["value"] if tried else None)
                self.runs.setdefault(row, {})[record["seed"]] = record  # the last one of a run counts
        self.runs = dict(sorted(self.runs.items(), key=lambda item: _place(item[0])))
        for row, runs in self.runs.items():
            if len(values := {run["value"] for run in runs.values()}) > 1:
                raise ValueError(f"{pair}, {row.name}: its seeds have different settings, {values}; run them with one")

    def plain(self, seed: int) -> float:
        """The loss on the new data after plain training."""
        return float(self.runs[PLAIN][seed]["curve"][-1]["new"])

    def curve(self, row: Row, seed: int) -> list[dict[str, Any]]:
        """The measured points of a method, from the trained model on if it acts after training."""
        start = [self.runs[Row(row.trained)][seed]["curve"][-1]] if row.method else []
        return [*start, *self.runs[row][seed]["curve"]]

    def lost(self, row: Row, seed: int, ratio: float) -> Any:
        """What is lost on every row of the test set where the new loss is this multiple of that of plain training."""
        points = [Point(point["new"], decoded(point["lost"])) for point in self.curve(row, seed)]
        return at_loss(points, ratio * self.plain(seed))

    @property
    def others(self) -> list[str]:
        """The names of the other data."""
        return list(self.runs[PLAIN][min(self.runs[PLAIN])]["before"].get("others", {}))

    def increases(self, row: Row) -> tuple[list[float], float]:
        """The increase of the loss on each of the other data where it was measured, mean over the seeds that were.

        With it, the new loss there relative to that of plain training.
        """
        points = [
            (point, seed) for seed in self.seeds(row) for point in self.runs[row][seed]["curve"] if point.get("others")
        ]
        if not points:
            return [], np.nan
        before = {seed: self.runs[PLAIN][seed]["before"]["others"] for _, seed in points}
        found = [[point["others"][name] - before[seed][name] for name in self.others] for point, seed in points]
        ratios = [point["new"] / self.plain(seed) for point, seed in points]
        return np.mean(found, axis=0).tolist(), float(np.mean(ratios))

    def seeds(self, row: Row) -> list[int]:
        """The seeds that a method was run with, of those with a plain run."""
        return sorted(self.runs[row].keys() & self.runs[PLAIN].keys())

    def seconds(self, row: Row, seed: int) -> float:
        """The seconds of a method and, if it acts after training, of that training; nan if they were not measured."""
        before = self.runs[Row(row.trained)][seed].get("seconds", np.nan) if row.method else 0.0
        return float(before + self.runs[row][seed].get("seconds", np.nan))

    def against(self, row: Row, other: Row, ratio: float) -> Interval | None:
        """The difference of what two methods lose; None where one of them does not reach the new loss."""
        both = [seed for seed in self.seeds(row) if other in self.runs and seed in self.runs[other]]
        found = {seed: (self.lost(row, seed, ratio), self.lost(other, seed, ratio)) for seed in both}
        if not found or any(a is None or b is None for a, b in found.values()):
            return None
        return paired({seed: a - b for seed, (a, b) in found.items()})

    def mean_lost(self, row: Row, ratio: float) -> float | None:
        """The mean over seeds and rows; None where a seed does not reach the new loss."""
        found = [self.lost(row, seed, ratio) for seed in self.seeds(row)]
        return None if not found or any(value is None for value in found) else float(np.mean(found))


def best(results: Results) -> dict[str, float]:
    """Choose settings on the development pair.

    Args:
        results: The results of that pair.

    Returns:
        By method, of the candidates that reach the most of the compared losses, the one that loses the least at the
        middle one, or at the next that it reaches. If none reaches any, the one that ends with the least loss on the
        new data.
    """
    found = {}
    for name in dict.fromkeys(row.trained for row in results.runs if row.value is not None):
        row = min((row for row in results.runs if row.trained == name), key=lambda row: _order(results, row))
        assert row.value is not None
        found[name] = row.value
    return found


def _order(results: Results, row: Row) -> tuple[int, float]:
    """The smaller, the better the setting."""
    losses = [lost for ratio in RATIOS if (lost := results.mean_lost(row, ratio)) is not None]
    if not losses:
        return 0, float(np.mean([run["curve"][-1]["new"] for run in results.runs[row].values()]))
    return -len(losses), losses[-2:][0]  # who reaches a loss reaches all larger ones, so it is at the middle one


def needs(row: Row) -> str:
    """The data that a method needs beside the new ones."""
    return AFTER[row.method].needs if row.method else DURING[row.trained].needs


SHORT = (
    PLAIN,
    REFERENCE,
    Row("plain", "repair"),
    Row("plain", "protect"),
    Row("self-rehearsal"),
    Row("self-rehearsal of one row"),
    Row("self-rehearsal", "scaling"),
    Row("self-rehearsal", "repair"),
    Row("distillation"),
    Row("replay of 5%"),
    Row("diagonal EWC"),
    Row("L2-SP"),
)
"""Methods of the short table."""

PAIRS = (
    (Row("plain", "repair"), REFERENCE),
    (Row("plain", "protect"), REFERENCE),
    (Row("self-rehearsal"), REFERENCE),
    (Row("self-rehearsal of one row"), REFERENCE),
    (Row("plain", "repair"), Row("self-rehearsal")),
    (Row("self-rehearsal of one row"), Row("self-rehearsal")),
    (Row("self-rehearsal", "repair"), Row("self-rehearsal")),
    (Row("self-rehearsal", "repair"), Row("self-rehearsal", "scaling")),
    (Row("distillation"), REFERENCE),
    (Row("distillation", "repair"), Row("distillation")),
)
"""Methods whose difference is shown."""


def tables(results: Results, lost: str) -> dict[str, str]:
    """The tables of a pair.

    Args:
        results: The results of the pair.
        lost: What is lost, as a word for headers.

    Returns:
        By what distinguishes their names: that of all methods and, except for the development pair, a short one and
        that of differences.
    """
    found = {"": table(results, lost)}
    if not any(row.value is not None for row in results.runs):
        found |= {", short": short(results, lost), ", differences": differences(results, PAIRS)}
    return found


def short(results: Results, lost: str) -> str:
    """What the best known methods lose at equal new loss, and how long training takes with them.

    Args:
        results: The results of a pair.
        lost: What is lost, as a word for the header.

    Returns:
        The table. The time includes that of the training that a method starts from.
    """
    header = ["", "beside the new data", *(f"{lost} at {ratio:.2f}" for ratio in RATIOS), "time / plain", "seeds"]
    rows = []
    for row in (one for one in SHORT if one in results.runs):
        losses = [results.mean_lost(row, ratio) for ratio in RATIOS]
        ratios = [results.seconds(row, seed) / results.seconds(PLAIN, seed) for seed in results.seeds(row)]
        rows.append(
            [
                row.name,
                needs(row),
                *("not reached" if loss is None else f"{loss:.3f}" for loss in losses),
                _shown(np.mean(ratios), 2),
                str(len(ratios)),
            ]
        )
    return markdown(header, rows)


def table(results: Results, lost: str) -> str:
    """One row for each method: where it ends, what it loses at equal new loss, and what it takes.

    Args:
        results: The results of a pair.
        lost: What is lost, as a word for the header.

    Returns:
        The table.
    """
    at = [f"{lost} at {ratio:.2f}" for ratio in RATIOS]
    others = [f"loss on {' / '.join(results.others)} (at)"] if results.others else []
    header = ["", "beside the new data", "new loss by default", f"{lost} by default", *at, *others,
              "seconds", "once before: seconds", "MB", "seeds"]  # fmt: skip
    return markdown(header, [_row(results, row) for row in results.runs])


def differences(results: Results, pairs: Iterable[tuple[Row, Row]]) -> str:
    """What one method loses less than another at equal new loss.

    Args:
        results: The results of a pair.
        pairs: The rows to compare. Those that were not run are left out.

    Returns:
        A table of means with their standard errors, over the seeds that both have.
    """
    header = ["", *(f"at {ratio:.2f}" for ratio in RATIOS), "seeds"]
    found = [(row, other) for row, other in pairs if row in results.runs and other in results.runs]
    rows = [
        [
            f"{row.name} minus {other.name}",
            *(_interval(results.against(row, other, ratio)) for ratio in RATIOS),
            str(len(set(results.seeds(row)) & set(results.seeds(other)))),
        ]
        for row, other in found
    ]
    return markdown(header, rows)


def _interval(found: Interval | None) -> str:
    return "not reached" if found is None else f"{found.mean:+.3f} +- {found.error:.3f}"


def _row(results: Results, row: Row) -> list[str]:
    seeds = results.seeds(row)
    records = [results.runs[row][seed] for seed in seeds]
    ends = [end for record in records if (end := by_default(row, record)) is not None]
    losses = [results.mean_lost(row, ratio) for ratio in RATIOS]
    kept = [record.get("kept", {}) for record in records]
    return [
        row.name,
        needs(row),
        f"{np.mean([end['new'] for end in ends]):.3f}" if ends else "",
        f"{np.mean([decoded(end['lost']).mean() for end in ends]):.3f}" if ends else "",
        *("not reached" if loss is None else f"{loss:.3f}" for loss in losses),
        *([_others(*results.increases(row))] if results.others else []),
        _shown(np.mean([results.seconds(row, seed) for seed in seeds])),
        *(_shown(np.mean([one.get(what, np.nan) for one in kept])) for what in ("seconds", "megabytes")),
        str(len(seeds)),
    ]  # fmt: skip


def _others(increases: list[float], ratio: float) -> str:
    return f"{' / '.join(f'{value:+.2f}' for value in increases)} ({ratio:.2f})" if increases else ""


def by_default(row: Row, record: dict[str, Any]) -> dict[str, Any] | None:
    """The point of a run that somebody gets who chooses nothing; None if its path was not followed so far."""
    if not row.method:
        return dict(record["curve"][-1])
    return next((point for point in record["curve"] if point["setting"] == AFTER[row.method].default), None)


def _shown(value: Any, digits: int = 0) -> str:
    return "" if np.isnan(value) else f"{value:.{digits}f}"

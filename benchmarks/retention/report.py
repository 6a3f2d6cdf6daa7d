"""The tables of a suite, from its records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from repair_figures import markdown
from retention.after import METHODS as AFTER
from retention.compare import RATIOS, Interval, Point, at_loss, paired
from retention.during import METHODS as DURING

Row = tuple[str, str]
"""What a model was trained with, and what was done to it afterwards ("": nothing)."""

REFERENCE: Row = ("plain", "scaling")


class Results:
    """The runs of one pair, with the settings that were chosen.

    Args:
        records: All records of the suite.
        pair: The name of the pair.
    """

    def __init__(self, records: Iterable[dict[str, Any]], pair: str) -> None:
        self.runs: dict[Row, dict[int, dict[str, Any]]] = {}
        for record in records:
            wanted = record["method"] or record["value"] in (0.0, DURING[record["trained"]].chosen)
            if record["pair"] == pair and wanted:
                self.runs.setdefault((record["trained"], record["method"]), {})[record["seed"]] = record

    def plain(self, seed: int) -> float:
        """The loss on the new data after plain training."""
        return float(self.runs["plain", ""][seed]["curve"][-1]["new"])

    def curve(self, row: Row, seed: int) -> list[dict[str, Any]]:
        """The measured points of a method, from the trained model on if it acts after training."""
        start = [self.runs[row[0], ""][seed]["curve"][-1]] if row[1] else []
        return [*start, *self.runs[row][seed]["curve"]]

    def lost(self, row: Row, seed: int, ratio: float) -> Any:
        """What is lost on every row of the test set where the new loss is this multiple of that of plain training."""
        points = [Point(point["new"], np.array(point["lost"], dtype=float)) for point in self.curve(row, seed)]
        return at_loss(points, ratio * self.plain(seed))

    def others(self, row: Row, seed: int, ratio: float) -> Any:
        """The increase of the loss on every other text there."""
        before = self.runs["plain", ""][seed]["before"].get("others", {})
        points = [
            Point(point["new"], np.array([point["others"][name] - before[name] for name in before]))
            for point in self.curve(row, seed)
            if "others" in point
        ]
        return at_loss(points, ratio * self.plain(seed))

    def seeds(self, row: Row) -> list[int]:
        """The seeds that a method was run with, of those with a plain run."""
        return sorted(self.runs[row].keys() & self.runs["plain", ""].keys())

    def against(self, row: Row, other: Row, ratio: float) -> Interval | None:
        """The difference of what two methods lose; None where one of them does not reach the new loss."""
        both = [seed for seed in self.seeds(row) if other in self.runs and seed in self.runs[other]]
        found = {seed: (self.lost(row, seed, ratio), self.lost(other, seed, ratio)) for seed in both}
        if not found or any(a is None or b is None for a, b in found.values()):
            return None
        return paired({seed: a - b for seed, (a, b) in found.items()})


def table(results: Results, lost: str) -> str:
    """One row for each method: where it ends, what it loses at equal new loss, and what it takes.

    Args:
        results: The results of a pair.
        lost: What is lost, as a word for the header.

    Returns:
        The table.
    """
    at = [f"{lost} at {ratio:.2f}" for ratio in RATIOS]
    header = ["", "beside the new text", "new text at the end", f"{lost} at the end", *at, "minus scaling at 1.05",
              "other texts at 1.05", "seconds", "seeds"]  # fmt: skip
    return markdown(header, [_row(results, row) for row in results.runs])


def name(row: Row) -> str:
    """The name of a row in tables and figures."""
    trained, method = row
    if not method:
        return "early stopping" if trained == "plain" else trained
    return method if trained == "plain" else f"{trained}, then {method}"


def _row(results: Results, row: Row) -> list[str]:
    seeds = results.seeds(row)
    ends = [results.runs[row][seed]["curve"][-1] for seed in seeds]
    losses = [_mean([results.lost(row, seed, ratio) for seed in seeds]) for ratio in RATIOS]
    other = _mean([results.others(row, seed, RATIOS[1]) for seed in seeds])
    difference = results.against(row, REFERENCE, RATIOS[1])
    trained, method = row
    needs = AFTER[method].needs if method else DURING[trained].needs
    one = not method or all(len(results.runs[row][seed]["curve"]) == 1 for seed in seeds)
    return [
        name(row),
        needs,
        f"{np.mean([end['new'] for end in ends]):.3f}" if one else "",
        f"{np.mean([np.mean(end['lost']) for end in ends]):.3f}" if one else "",
        *("not reached" if loss is None else f"{loss:.3f}" for loss in losses),
        "" if difference is None or row == REFERENCE else f"{difference.mean:+.3f} +- {difference.error:.3f}",
        "" if other is None else f"{other:+.3f}",
        f"{np.mean([results.runs[row][seed]['seconds'] for seed in seeds]):.0f}",
        str(len(seeds)),
    ]


def _mean(values: Sequence[Any]) -> float | None:
    return None if any(value is None for value in values) else float(np.mean(values))

"""What the quadratic does not know: how much the loss of a task really rises, measured while its data are in hand.

    rise = R(q),    q = 1/2 dw^T F dw / N

At the mode the quadratic is right; at the distances to which new tasks push the weights the loss rises faster. How much
faster, a task's own data tell (`limpet.forgetting.measurement`); a handful of numbers is kept.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from limpet.errors import finite_number, positive_whole

EXPECTED = 0.06
"""The q that a task is expected to have behind it in the end, in nats per example; strengths are for there."""

MARGIN = 2.0
"""Strengths are so many times what training examples say: the loss on others rises more. From permuted MNIST."""

KEPT = 64
"""Tasks that are remembered one by one; beyond them the two oldest become one."""


@dataclass(frozen=True)
class Curve:
    """R(q): between the points that were measured log(R / q) is linear in log q, and outside of them R / q stays.

    >>> curve = Curve.through([(0.01, 0.01), (0.1, 0.2)])
    >>> round(curve(0.1), 6), round(curve(0.2), 6), round(curve(0.001), 6)
    (0.2, 0.4, 0.001)
    >>> Curve()(0.3)  # nothing measured: the quadratic as it is
    0.3
    """

    predicted: tuple[float, ...] = ()
    measured: tuple[float, ...] = ()

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """The curve through (predicted, measured); never falling, without points where no rise was seen."""
        seen = sorted({q: rise for q, rise in points if q > 0 and rise > 0 and math.isfinite(rise)}.items())
        return cls(tuple(q for q, _ in seen), tuple(accumulate((rise for _, rise in seen), max)))

    def __call__(self, q: float) -> float:
        """The true rise where q is predicted."""
        return q * _interpolated(q, self.predicted, self._ratios)

    @property
    def strength(self) -> float:
        """What the task's Fisher is to be multiplied by, for what the task may have to go through in the end."""
        return MARGIN * self.slope(EXPECTED)

    def slope(self, q: float) -> float:
        """R'(q), smooth over the points and never falling: what makes the quadratic rise as fast as the loss there."""
        return _interpolated(q, self.predicted, self._slopes)

    @cached_property
    def _ratios(self) -> list[float]:
        return [rise / q for q, rise in zip(self.predicted, self.measured, strict=True)]

    @cached_property
    def _slopes(self) -> list[float]:
        """At the points: R/q (1 + p), with p the power with which R/q grows, that before a point and that after it."""
        known, ratios = self.predicted, self._ratios
        powers = [
            math.log(ratios[i + 1] / ratios[i]) / math.log(known[i + 1] / known[i]) for i in range(len(known) - 1)
        ]
        before, after = [0.0, *powers], [*powers, 0.0]
        slopes = (ratio * (1 + (before[i] + after[i]) / 2) for i, ratio in enumerate(ratios))
        return list(accumulate(slopes, max))


def _interpolated(q: float, places: Sequence[float], values: Sequence[float]) -> float:
    """The value at q, linear between the places on logarithmic scales and constant outside; 1 where there is none."""
    if not places:
        return 1.0
    after = bisect.bisect_right(places, q)
    if after in (0, len(places)):
        return values[min(after, len(places) - 1)]
    low, high = values[after - 1], values[after]
    share = math.log(q / places[after - 1]) / math.log(places[after] / places[after - 1])
    return float(low * (high / low) ** share)


@dataclass(frozen=True)
class TaskRecord:
    """A task that was taken in: its examples, its curve, and how far all weights had travelled by then."""

    examples: int
    curve: Curve
    since: float


@dataclass(frozen=True)
class TaskHistory:
    """What is remembered of each task beside the Gaussian: how its loss rises, and from where.

    `travelled` is the sum of the q of all moves from mode to mode; a task that was learned when it was `since` has
    travelled - since behind it, and another q adds to that:  rise = R(travelled - since + q) - R(travelled - since).
    """

    tasks: tuple[TaskRecord, ...] = ()
    travelled: float = 0.0

    def learned(self, examples: int, curve: Curve, moved: float) -> TaskHistory:
        """One more task, for which the weights moved by a q of `moved`."""
        travelled = self.travelled + moved
        tasks = (*self.tasks, TaskRecord(examples, curve, travelled))
        if len(tasks) > KEPT:
            tasks = (_merged(*tasks[:2]), *tasks[2:])
        return TaskHistory(tasks, travelled)

    def with_curve(self, curve: Curve) -> TaskHistory:
        """The same with a curve for the newest task."""
        return replace(self, tasks=(*self.tasks[:-1], replace(self.tasks[-1], curve=curve)))

    def measured_again(self) -> TaskHistory:
        """All curvature is that of the newest mode: nothing has been travelled since."""
        return TaskHistory(
            tuple(TaskRecord(task.examples, task.curve, self.travelled) for task in self.tasks), self.travelled
        )

    def rises(self, q: float) -> list[float]:
        """The predicted rise of every task's mean loss."""
        behind = [(task.curve, self.travelled - task.since) for task in self.tasks]
        return [curve(before + q) - curve(before) for curve, before in behind]

    def mean(self, values: Sequence[float]) -> float:
        """The mean over all examples of a value for each task."""
        total = sum(task.examples for task in self.tasks)
        return sum(task.examples * value for task, value in zip(self.tasks, values, strict=True)) / total

    def plain(self) -> dict[str, Any]:
        """As plain values, for a file."""
        tasks = [[t.examples, t.since, list(t.curve.predicted), list(t.curve.measured)] for t in self.tasks]
        return {"travelled": self.travelled, "tasks": tasks}

    @classmethod
    def restore(cls, values: Mapping[str, Any] | None) -> TaskHistory:
        """The inverse of `plain`; nothing where a file is older than this."""
        if values is None:
            return cls()
        tasks = tuple(
            TaskRecord(positive_whole("examples", n), Curve(_rising(q), _rising(rise)), finite_number("since", since))
            for n, since, q, rise in values["tasks"]
        )
        if any(len(task.curve.predicted) != len(task.curve.measured) for task in tasks):
            raise ValueError("a curve has as many measured as predicted rises")
        return cls(tasks, finite_number("travelled", values["travelled"]))


def _rising(values: Sequence[Any]) -> tuple[float, ...]:
    numbers = tuple(finite_number("a point of a curve", value) for value in values)
    if any(a > b for a, b in pairwise(numbers)) or not all(numbers):
        raise ValueError("the points of a curve are above zero and do not fall")
    return numbers


def _merged(a: TaskRecord, b: TaskRecord) -> TaskRecord:
    """Two tasks as one, of their mean."""
    examples = a.examples + b.examples
    places = a.curve.predicted or b.curve.predicted
    points = ((q, (a.examples * a.curve(q) + b.examples * b.curve(q)) / examples) for q in places)
    since = (a.examples * a.since + b.examples * b.since) / examples
    return TaskRecord(examples, Curve.through(points), since)

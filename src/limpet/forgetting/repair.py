"""Repair a fine-tuned model after training: trade off old against new curvature in closed form, block by block.

Fine-tuning has moved a block by D from the mean of the memory. The memory stores the curvature O of the old data at
that mean, and one pass over the new data gives their curvature N at the tuned weights. Then

    X(strength) = argmin over X of  1/2 |X - D|^2_N + strength/2 |X|^2_O

has a closed form for every strength (`limpet.precision.pencil`). Both curvatures are sums over examples, so strength 1
is the Laplace approximation of training on the old and new data jointly. Repair needs no old data, no optimizer and no
second training run, and since training did not optimize against O, it has not exploited the blind spots of O.

The method is mode-IMM (Lee et al. 2017) with Kronecker factors. MaTS (Tam et al. 2023) merges models by solving similar
systems, and Safe Delta (Lu et al. 2025) restores the safety of fine-tuned models with input factors and a budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from limpet.errors import LimpetError, LimpetWarning, finite_number, warn
from limpet.forgetting.displacement import Displacement, cut_to_rank, is_direct
from limpet.forgetting.drift import Drift
from limpet.forgetting.output_layer import OutputLayer
from limpet.posterior.summary import aligned
from limpet.posterior.whole_parameters import WholeParameters
from limpet.precision.linalg import bisected, falls_to
from limpet.precision.pencil import Pencil

LADDER = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Default strengths of `Repair.path` and `Repair.table`."""

FURTHEST, CLOSE = math.log(1e4), 0.1
"""The strength is searched between 1e-4 and 1e4, to within ten percent (both are logarithms)."""

TOLERANCE, SHARE = 0.05, 0.1
"""The tolerance "auto": nats per example, and the part of what was learned, whichever is less (decision 21)."""

LIMIT, MOST = 0.3, 0.5
"""The same beside a budget, where it is only a limit (decision 24)."""


@dataclass(frozen=True)
class Point:
    """Measurements at one point of the repair path.

    Attributes:
        strength: Multiplier of the old curvature.
        scale: Multiplier of the update.
        forecast: Increase of the old loss that the memory's quadratic predicts, in nats per example. Repair minimizes
            this very quadratic, so after a repair the forecast is a severe underestimate.
        loss: Mean loss on held-out new data, or None if it was not measured.
        drift: KL(before || now) on the memory's probe, or None if the memory has no probe.
    """

    strength: float
    scale: float
    forecast: float
    loss: float | None = None
    drift: float | None = None


@dataclass(frozen=True)
class Measures:
    """Functions that measure the model at its current weights.

    Attributes:
        forecast: Predicts the increase of the old loss, in nats per example.
        loss: Measures the mean loss on held-out new data; None if there are none.
        drift: Measures KL(before || now) on the memory's probe; None if the memory has no probe.
    """

    forecast: Callable[[], float]
    loss: Callable[[], float] | None = None
    drift: Callable[[], Drift] | None = None


@dataclass
class RepairMark:
    """Whether the model is at repaired weights, for the memory, which forecasts nothing there.

    Attributes:
        repaired: Whether the strength is not zero.
    """

    repaired: bool = False


class Repair:
    """The path of a fine-tuned model from its tuned weights back to the weights before fine-tuning.

    Returned by `limpet.repair`. `at` moves the model along the path and `undo` restores the tuned weights. The object
    keeps the matrix decompositions and a copy of the tuned weights in memory, so delete it when you are done.

    Args:
        paths: The displacement and the closed-form path of every block to repair. In a sharded model, every rank has
            those of the blocks that it owns, and all methods are collectives.
        whole: The parameters of these blocks.
        measures: Functions that measure the model at its current weights.
        weight: Factor applied to every strength: the fraction of the new data that the Fisher was estimated on.
        rank: Truncate adapters to this rank if it is smaller than their own; None keeps their rank.
        head: A new output layer, which is fitted again at every point of the path.

    Attributes:
        strength: The current strength; 0 for the tuned weights.
        scale: The current multiplier of the update; 1 for the tuned weights.
        mark: Whether the model is at repaired weights.
    """

    def __init__(
        self,
        paths: Sequence[tuple[Displacement, Pencil]],
        whole: WholeParameters,
        measures: Measures,
        *,
        weight: float,
        rank: int | None,
        head: OutputLayer | None = None,
    ) -> None:
        self._paths, self._whole, self._measures, self._weight, self._rank = paths, whole, measures, weight, rank
        self._head = head
        self._tuned = {p: p.detach().clone() for moved, _ in paths for p in moved.changed}
        self.strength, self.scale, self.mark = 0.0, 1.0, RepairMark()

    @property
    def refitted(self) -> str | None:
        """Name of the output layer that is fitted again at every point of the path; None if there is none."""
        return None if self._head is None else self._head.name

    @property
    def blocks(self) -> list[str]:
        """Names of the repaired blocks; in a sharded model, those that this rank owns."""
        return [moved.block.name for moved, _ in self._paths]

    def at(self, strength: float, scale: float = 1.0) -> Repair:
        """Move the model to a point of the path, without another pass or decomposition.

        Args:
            strength: Multiplier of the old curvature. 0 restores the tuned weights bit for bit; as it grows, the
                weights approach those before fine-tuning.
            scale: Multiplier of the whole update.

        Returns:
            This repair.

        Raises:
            ValueError: If `strength` or `scale` is negative or not finite.
            LimpetError: If the repaired weights would contain inf or nan. The model is then left unchanged.
        """
        strength, scale = finite_number("strength", strength), finite_number("scale", scale)
        self._move(strength, scale)
        if self._head is not None and (strength, scale) != (0, 1):
            self._head.fit()
        return self

    @torch.no_grad()
    def _move(self, strength: float, scale: float) -> None:
        """Move the weights that the memory covers to a point of the path, below the output layer as it was trained."""
        values: dict[nn.Parameter, Tensor] = {}
        if strength == 0 and scale == 1:
            values = self._tuned
        else:
            for moved, path in self._paths:
                values.update(self._values(moved, path, strength * self._weight, scale))
            if self._whole.on_any_rank(not all(bool(torch.isfinite(value).all()) for value in values.values())):
                raise LimpetError("the repaired weights contain inf or nan: check the curvature for inf or nan")
        if self._head is not None:
            self._head.restore()
        self._whole.write(values)
        self.strength, self.scale, self.mark.repaired = strength, scale, strength > 0

    def _values(self, moved: Displacement, path: Pencil, strength: float, scale: float) -> dict[nn.Parameter, Tensor]:
        """Compute the values of the parameters of one block at a point of the path."""
        shares = [scale * x for x in path.at(strength)] if any(moved.written) or is_direct(moved.block) else []
        cut = []
        for part, adapter in enumerate(moved.adapters, int(moved.base)):
            own = adapter.left.shape[1]
            rank = own if self._rank is None else min(self._rank, own)
            if is_direct(moved.block):
                offset = 0 if part or moved.offset is None else moved.offset
                cut.append(cut_to_rank(shares[part] - offset, adapter, rank))
            else:
                cut.append(path.low_rank(strength, part, rank, scale))
        return moved.values(shares, cut)

    def undo(self) -> Repair:
        """Restore the tuned weights of the model, bit for bit.

        Returns:
            This repair.
        """
        return self.at(0.0)

    def measured(self) -> Point:
        """Measure the model at its current weights.

        Returns:
            The forecast and, where available, the loss and the drift.
        """
        loss, drift = self._measures.loss, self._measures.drift
        return Point(
            self.strength,
            self.scale,
            self._measures.forecast(),
            None if loss is None else loss(),
            None if drift is None else float(drift()),
        )

    def compared(self) -> tuple[Point, Point]:
        """Measure the model at its tuned weights and at its current weights, and leave it at the current ones.

        Returns:
            The point before the repair, and the point after it.
        """
        after = self.measured()
        try:
            return self.undo().measured(), after
        finally:
            self.at(after.strength, after.scale)

    def path(self, strengths: Sequence[float] = LADDER) -> list[Point]:
        """Measure the model along the path, and restore its current weights.

        Args:
            strengths: The strengths to measure at, with the current scale.

        Returns:
            One point per strength.
        """
        here = self.strength
        try:
            return [self.at(strength, self.scale).measured() for strength in strengths]
        finally:
            self.at(here, self.scale)

    def table(self, strengths: Sequence[float] = LADDER) -> str:
        """Format the new loss, the drift and the forecast along the path as a table.

        Args:
            strengths: The strengths to measure at. The current strength is always added.

        Returns:
            The table as lines of text. Values that could not be measured are shown as "not measured".
        """
        points = self.path(sorted({*strengths, self.strength}))

        def shown(value: float | None) -> str:
            return "not measured" if value is None else f"{value:.4f}"

        cells = [("strength", "new loss", "drift", "forecast", "")] + [
            (f"{p.strength:g}", shown(p.loss), shown(p.drift), shown(p.forecast), "<-" if p.strength == here else "")
            for here in [self.strength]
            for p in points
        ]
        return "\n".join(aligned(cells))

    def __repr__(self) -> str:
        return f"<Repair strength={self.strength:.3g} scale={self.scale:g} blocks={len(self._paths)}>"

    # --- finding the strength ----------------------------------------------------------------------------------

    def within_tolerance(self, tolerance: float | Literal["auto"], scale: float = 1.0) -> Repair:
        """Move the model to the largest strength that increases the loss on held-out new data by at most `tolerance`.

        Args:
            tolerance: The allowed increase over the loss of the tuned weights, in nats per example. "auto": 0.05 nats,
                but at most a tenth of what the update has reduced that loss by.
            scale: Multiplier of the update.

        Returns:
            This repair. If even the smallest strength exceeds the tolerance, the model has its tuned weights.

        Raises:
            LimpetError: If there are no held-out new data to measure the loss on.
            ValueError: If `tolerance` is negative or not finite.
        """
        return self._affording(*self._limit(tolerance, TOLERANCE, SHARE), scale)

    def _affording(self, loss: Callable[[], float], most: float, scale: float) -> Repair:
        """Move the model to the largest strength at which the loss is at most `most`, or undo the repair."""
        affordable, _ = bisected(lambda s: self._measure_at(loss, s, scale) <= most, furthest=FURTHEST, close=CLOSE)
        return self.at(affordable, scale) if self._measure_at(loss, affordable, scale) <= most else self.undo()

    def within_budget(
        self, budget: float, scale: float = 1.0, tolerance: float | Literal["auto"] | None = None
    ) -> Repair:
        """Move the model to the smallest strength at which the measured drift is within a budget.

        The drift on a probe of few examples is uncertain, so the upper end of its confidence interval is held within
        the budget (`Drift.upper`), and the drift itself ends below it.

        Args:
            budget: The allowed KL(before || now), in nats per example or token.
            scale: Multiplier of the update.
            tolerance: If given, the largest increase of the loss on held-out new data that this may cost, in nats per
                example. "auto": 0.3 nats, but at most half of what the update has reduced that loss by. If the budget
                costs more, the drift is reduced as far as this allows, and a warning tells how far that is.

        Returns:
            This repair. If the drift of the tuned weights is already within the budget, the model keeps them.

        Raises:
            LimpetError: If the memory has no probe, or, without a tolerance, if no strength brings the drift within
                the budget. In the latter case the model has its tuned weights.
            ValueError: If `budget` or `tolerance` is negative or not finite.
        """
        measure = self._measures.drift
        if measure is None:
            raise LimpetError(
                "budget= needs a probe to measure drift on, and this memory has no probe: consolidate with "
                "probe=100, or use strength="
            )
        budget = finite_number("budget", budget)

        def drift() -> float:
            return measure().upper

        self.undo()
        if drift() <= budget:
            return self
        if tolerance is not None and (rest := self._measure_at(drift, 0.0, 0.0, refit=False)) > budget:
            warn(
                f"without the update of the weights that the memory covers, the drift is still {rest:.3g} nats, so the "
                "model was repaired as far as the loss on the new data allows: if it has a new head, pass a "
                "probe_forward that measures through the old one",
                LimpetWarning,
            )
            return self._affording(*self._limit(tolerance, LIMIT, MOST), scale)
        # twice as fine as for a tolerance, because the drift falls faster than the strength rises
        enough, found = falls_to(
            lambda s: self._measure_at(drift, s, scale, refit=False), budget, furthest=FURTHEST, close=CLOSE / 2
        )
        self.at(enough, scale)
        if tolerance is not None:
            loss, most = self._limit(tolerance, LIMIT, MOST)
            if found <= budget and self._measure_at(loss, enough, scale) <= most:
                return self
            self._affording(loss, most, scale)
            warn(
                f"the drift may be {drift():.3g} nats, more than the budget of {budget:.3g}: a stronger repair would "
                f"increase the loss on held-out new data to more than {most:.3g}. To give up more of the new task, "
                "pass a larger tolerance= to repair, or repair={'budget': ..., 'tolerance': ...} to protect; to give "
                "up less, train fewer steps or with a lower learning rate, or protect the outputs while the model "
                "trains (limpet.SelfRehearsal, limpet.Distillation)",
                LimpetWarning,
            )
            return self
        if found <= budget:
            return self
        self.undo()
        raise LimpetError(
            f"no strength brings the drift within {budget:g} nats: at strength {enough:g} it may still be {found:.4g} "
            "(1.64 standard errors included). The remaining drift comes from parameters that the memory does not cover "
            "(memory.report() lists them): restore those, or pass a larger budget="
        )

    def _limit(
        self, tolerance: float | Literal["auto"], nats: float, share: float
    ) -> tuple[Callable[[], float], float]:
        """The loss on held-out new data, and how large it may become; the model has its tuned weights afterwards.

        What was learned counts from the weights before, below the trained output layer.

        Args:
            tolerance: The allowed increase, or "auto" for the smaller of `nats` and `share` of what was learned.
            nats: A number of nats per example.
            share: A part of what was learned.
        """
        loss = self._measures.loss
        if loss is None:
            raise LimpetError("tolerance= needs held-out new data: pass batches that can be split, or use strength=")
        self.undo()
        tuned = loss()
        if tolerance != "auto":
            return loss, tuned + finite_number("tolerance", tolerance)
        learned = self._measure_at(loss, 0.0, 0.0, refit=False) - tuned
        self.undo()
        return loss, tuned + max(0.0, min(nats, share * learned))

    def _measure_at(self, measure: Callable[[], float], strength: float, scale: float, *, refit: bool = True) -> float:
        """Move the model to a point of the path and measure it there.

        Args:
            measure: The measurement.
            strength: Multiplier of the old curvature.
            scale: Multiplier of the update.
            refit: Whether to fit the output layer. The drift does not depend on it.
        """
        if refit:
            self.at(strength, scale)
        else:
            self._move(strength, scale)
        return measure()

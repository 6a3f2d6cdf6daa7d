"""Undo what a fine-tune has forgotten, after training: the update that two curvatures agree on, block by block.

Training has moved the weights by D from where the memory knows them. The memory has the curvature O of the old data
there, one pass over the new data gives their curvature N at the tuned weights, and

    X(strength) = argmin over X of  1/2 |X - D|^2_N + strength/2 |X|^2_O

is in closed form for every strength (`limpet.precision.pencil`). Both are sums over examples, so strength 1 is the
Laplace approximation's answer to "what would training on both have given". It needs no old data, no optimizer and no
second training, and since nothing was optimised against O, its blind spots were not sought out.

The method is mode-IMM (Lee et al. 2017) with Kronecker factors. MaTS (Tam et al. 2023) merges models by such systems,
and Safe Delta (Lu et al. 2025) repairs the safety of fine-tuned models with input factors and a budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from limpet.curvature import Fisher
from limpet.curvature.progress import Progress
from limpet.errors import LimpetError, NotProtectedWarning, UnsupportedError, finite_number, warn
from limpet.forgetting.displacement import Displacement, cut_to_rank, displacements, is_direct
from limpet.model import Block
from limpet.posterior import BlockPosterior, Posterior
from limpet.posterior.summary import aligned
from limpet.precision.linalg import bisected
from limpet.precision.pencil import Pencil
from limpet.precision.pencils import pencil

LADDER = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""The strengths that `Repair.table` shows."""

FURTHEST, CLOSE = math.log(1e4), 0.1
"""Strengths are searched between 1e-4 and 1e4, to ten per cent."""


@dataclass(frozen=True)
class Point:
    """One point of the path, and what was measured there.

    Attributes:
        strength: What the old curvature is multiplied by.
        scale: What the update is multiplied by.
        forecast: The rise of the old loss that the memory's quadratic predicts, in nats per example. Repair removes
            just what the quadratic sees, so after a repair it says far too little.
        loss: The mean loss on held-out new data, where it was measured.
        drift: KL(before || now) on the memory's probe, where it has one.
    """

    strength: float
    scale: float
    forecast: float
    loss: float | None = None
    drift: float | None = None


@dataclass(frozen=True)
class Measures:
    """What can be measured at the weights as they are; None where there is nothing to measure it on."""

    forecast: Callable[[], float]
    loss: Callable[[], float] | None = None
    drift: Callable[[], float] | None = None


class Repair:
    """A fine-tuned model, somewhere on the path from its tuned weights to those before.

    Made by `limpet.repair`. `strength` and `scale` say where the model is now, `at` moves it, `undo` takes it back to
    the tuned weights. It keeps the decompositions and a copy of the tuned weights: drop it when you are done.
    """

    def __init__(
        self, paths: Sequence[tuple[Displacement, Pencil]], measures: Measures, *, weight: float, rank: int | None
    ) -> None:
        self._paths, self._measures, self._weight, self._rank = paths, measures, weight, rank
        self._tuned = {p: p.detach().clone() for moved, _ in paths for p in moved.changed}
        self.strength, self.scale = 0.0, 1.0

    @property
    def blocks(self) -> list[str]:
        """The names of the blocks on the path."""
        return [moved.block.name for moved, _ in self._paths]

    @torch.no_grad()
    def at(self, strength: float, scale: float = 1.0) -> Repair:
        """Move the model along the path, without another pass or decomposition.

        Args:
            strength: What the old curvature is multiplied by: 0 gives the tuned weights to the bit, a very large one
                those before.
            scale: What the whole update is multiplied by.

        Returns:
            This repair.
        """
        strength, scale = finite_number("strength", strength), finite_number("scale", scale)
        values: dict[nn.Parameter, Tensor] = {}
        if strength == 0 and scale == 1:
            values = self._tuned
        else:
            for moved, path in self._paths:
                values.update(self._values(moved, path, strength * self._weight, scale))
            if not all(bool(torch.isfinite(value).all()) for value in values.values()):
                raise LimpetError("the repaired weights hold inf or nan: look for inf or nan in the curvature")
        for parameter, value in values.items():
            parameter.copy_(value)
        self.strength, self.scale = strength, scale
        return self

    def _values(self, moved: Displacement, path: Pencil, strength: float, scale: float) -> dict[nn.Parameter, Tensor]:
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
        """Give the model its tuned weights back, to the bit.

        Returns:
            This repair.
        """
        return self.at(0.0)

    def measured(self) -> Point:
        """What can be measured where the model is now."""
        loss, drift = self._measures.loss, self._measures.drift
        return Point(
            self.strength,
            self.scale,
            self._measures.forecast(),
            None if loss is None else loss(),
            None if drift is None else drift(),
        )

    def compared(self) -> tuple[Point, Point]:
        """What is measured at the tuned weights, and where the model is now, where it is left.

        Returns:
            The point before the repair, and the point after it.
        """
        after = self.measured()
        try:
            return self.undo().measured(), after
        finally:
            self.at(after.strength, after.scale)

    def path(self, strengths: Sequence[float] = LADDER) -> list[Point]:
        """What is measured along the path; the model is left where it was.

        Args:
            strengths: Where to measure, at the scale of now.

        Returns:
            A point for every strength.
        """
        here = self.strength
        try:
            return [self.at(strength, self.scale).measured() for strength in strengths]
        finally:
            self.at(here, self.scale)

    def table(self, strengths: Sequence[float] = LADDER) -> str:
        """Forecast and measured drift along the path, and the loss on held-out new data, as a table.

        Args:
            strengths: Where to measure; where the model is now is always among them.

        Returns:
            Lines of text. A column that nothing could be measured for says so.
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

    def within_tolerance(self, tolerance: float, scale: float = 1.0) -> Repair:
        """Move to the largest strength at which the loss on held-out new data is at most so much above the tuned one.

        Args:
            tolerance: The allowed rise, in nats per example.
            scale: What the update is multiplied by.

        Returns:
            This repair. Where even the least strength costs more, the model has its tuned weights.

        Raises:
            LimpetError: Where there are no new data to measure the loss on.
        """
        loss = self._measures.loss
        if loss is None:
            raise LimpetError("tolerance= needs held-out new data: give batches that can be split, or strength=")
        self.undo()
        most = loss() + finite_number("tolerance", tolerance)
        affordable, _ = bisected(lambda s: self._there(loss, s, scale) <= most, furthest=FURTHEST, close=CLOSE)
        return self.at(affordable, scale) if self._there(loss, affordable, scale) <= most else self.undo()

    def within_budget(self, budget: float, scale: float = 1.0) -> Repair:
        """Move to the smallest strength at which the measured drift is within a budget.

        Args:
            budget: The allowed KL(before || now), in nats per example or token.
            scale: What the update is multiplied by.

        Returns:
            This repair; with its tuned weights where their drift is within the budget already.

        Raises:
            LimpetError: Where no strength keeps it; the model then has its tuned weights.
        """
        drift = self._measures.drift
        if drift is None:
            raise LimpetError("budget= is kept by measuring drift, and the memory has no probe to measure it on")
        budget = finite_number("budget", budget)
        self.undo()
        if drift() <= budget:
            return self
        _, enough = bisected(lambda s: self._there(drift, s, scale) > budget, furthest=FURTHEST, close=CLOSE)
        found = self._there(drift, enough, scale)
        if found <= budget:
            return self
        self.undo()
        raise LimpetError(
            f"no strength brings the drift within {budget:g}: at {enough:g} it is {found:.4g}. What is left comes "
            "from parameters that the memory does not hold (memory.report() lists them)"
        )

    def _there(self, measure: Callable[[], float], strength: float, scale: float) -> float:
        """What is measured at a place of the path, where the model is left."""
        self.at(strength, scale)
        return measure()


def solve(
    posterior: Posterior,
    fisher: Fisher,
    measures: Measures,
    *,
    weight: float = 1.0,
    rank: int | None = None,
    progress: bool = True,
) -> Repair:
    """The path of every block that training has moved, the memory knows and the new data use.

    Args:
        posterior: What the memory knows.
        fisher: The Fisher of the new data, measured at the tuned weights.
        measures: What can be measured along the path.
        weight: What every strength is multiplied by: the share of the new data that the Fisher was measured on.
        rank: What adapters are cut to, where it is less than their own.
        progress: Whether a long solution shows a bar.

    Returns:
        The repair, with the model at its tuned weights.
    """
    held = _by_measurement(posterior, fisher)
    moved = list(displacements(posterior.model, held))
    moved = [one for one in moved if bool(one.held.precision.fisher().trace() > 0)]  # others cost the old data nothing
    unseen = [one.block.name for one in moved if not _seen(fisher, one.block)]
    if unseen:
        warn(
            f"the new data do not use {len(unseen)} blocks that training has moved (such as {unseen[0]}), so they are "
            "left as tuned",
            NotProtectedWarning,
        )
    paths = []
    bar = Progress(len(moved), show=progress, label="limpet: repair", unit="blocks")
    try:
        for one in moved:
            if one.block.name not in unseen:
                paths.append((one, _path(one, fisher)))
            bar.update(1)
    finally:
        bar.close()
    return Repair(paths, measures, weight=weight, rank=rank)


def _seen(fisher: Fisher, block: Block) -> bool:
    """Whether the new data say anything about a block."""
    return fisher.speaks_of(block) and any(term.is_positive() for term in fisher.terms[block.name])


def _path(one: Displacement, fisher: Fisher) -> Pencil:
    held = one.held
    linear_term = held.linear_term
    if linear_term is not None:
        linear_term = linear_term / _common_strength(held)
    terms = fisher.terms[one.block.name]
    return pencil(held.precision, terms, one.parts, columns=one.columns, linear_term=linear_term, offset=one.offset)


def _common_strength(held: BlockPosterior) -> float:
    """What every task's Fisher in the block was multiplied by."""
    plain, total = held.precision.diagonals()
    common = float(total.double().sum() / plain.double().sum()) if plain.any() else 1.0
    if not torch.allclose(common * plain, total, rtol=1e-4):
        raise UnsupportedError(
            f"{held.block.name} holds tasks of different strengths, each around weights of its own, and repair weighs "
            "all alike: use OnlineLaplace, or PerTaskLaplace with one strength for all tasks"
        )
    return common


def _by_measurement(posterior: Posterior, fisher: Fisher) -> dict[str, BlockPosterior]:
    """The memory's blocks that hold tasks, as the pass measured them: example by example only as diagonals."""
    structure = posterior.structure
    direct = {b.name for b in fisher.blocks if is_direct(b) and structure.of(b) == "diagonal"}
    found: dict[str, BlockPosterior] = {}
    for name, held in posterior.held.items():
        if not held.tasks:
            continue
        if not is_direct(held.block) and direct.intersection(held.block.parameters):
            found.update({piece.block.name: piece for piece in held.as_diagonals()})
        else:
            found[name] = held
    return found

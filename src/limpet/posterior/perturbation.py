"""Weights around the mode, drawn as the memory's Gaussian lies, and as far away as the loss is predicted to rise.

    z ~ N(0, (L / T + I / v)^-1),    T such that 1/2 z^T F z / N = rise

with L the precision that the task will leave, F the task's own Fisher and v the mean square of the block's weights: in
directions that nothing holds, no weight moves further than weights are large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from limpet.curvature import Fisher
from limpet.model import Block
from limpet.posterior import Posterior
from limpet.precision import KroneckerSum, Precision, Spectrum, Term
from limpet.precision.base import noise

CLOSE = 0.05
"""How near the predicted rise has to come to the one asked for, relatively."""

FLOOR = 1e-6
"""What holds in directions where nothing does, as a share of what holds the most."""


@dataclass(frozen=True)
class BlockPerturbation:
    """A block with the precision that the task will leave, the task's own Fisher, and the weights' mean square."""

    block: Block
    precision: Precision
    fisher: Sequence[Term]
    square: float

    def draw(self, temperature: float, generator: torch.Generator) -> Tensor:
        """One displacement of the block."""
        cooled: Any = self.precision.scale(1 / temperature)
        return replace(cooled, prior=cooled.prior + 1 / self.square).sample(generator)  # type: ignore[no-any-return]

    @cached_property
    def spectrum(self) -> Spectrum:
        """The precision's own."""
        return self.precision.spectrum()

    def push(self, step: float, generator: torch.Generator) -> Tensor:
        """(I + step L)^-1 e with e ~ N(0, 2 square I): towards other weights of the same size, held back.

        Noise is the same in every basis, so it is drawn in that of L.
        """
        drawn = noise(self.spectrum.fisher.shape, self.spectrum.fisher, generator)
        return self.spectrum.back(math.sqrt(2 * self.square) * drawn / self.spectrum.proximal_denominator(step))

    def followed(self, gradient: Mapping[str, Tensor]) -> Tensor:
        """L^-1 gradient: where the block goes that something pulls on and L holds."""
        pulled = self.spectrum.into(self.block.gather(gradient).to(self.spectrum.total))
        held = self.spectrum.prior + self.spectrum.total
        return self.spectrum.back(pulled / held.clamp_min(FLOOR * float(held.max())))

    def rise(self, z: Tensor) -> float:
        """1/2 z^T F z."""
        return sum(float((z * term.apply(z)).sum()) for term in self.fisher) / 2


class Surroundings:
    """Displacements of the weights by number; the same number gives the same one."""

    def __init__(self, places: Sequence[BlockPerturbation], examples: int, rise: float, seed: int) -> None:
        self.places, self.examples, self.seed = places, examples, seed
        self.temperature = self._solve(rise)

    def __repr__(self) -> str:
        return f"<Surroundings seed={self.seed} temperature={self.temperature!r}>"

    def __call__(self, number: int) -> dict[str, Tensor]:
        """Displacement `number`, by parameter."""
        return by_parameter(self.places, self._drawn(self.temperature, number))

    def _drawn(self, temperature: float, number: int) -> list[Tensor]:
        generator = numbered(self.seed, number)
        return [place.draw(temperature, generator) for place in self.places]

    def predicted(self, temperature: float) -> float:
        """The predicted rise of the loss at one displacement, in nats per example."""
        drawn = self._drawn(temperature, 0)
        return sum(place.rise(z) for place, z in zip(self.places, drawn, strict=True)) / self.examples

    def _solve(self, rise: float) -> float:
        """The temperature, by the secant method on logarithms: the rise goes as a power of it, at most the first."""
        at, power, before = 0.0, 1.0, (math.nan, math.nan)
        for _ in range(12):
            off = math.log(max(self.predicted(math.exp(at)), 1e-300) / rise)
            if abs(off) < CLOSE:
                break
            if not math.isnan(before[0]) and at != before[0]:
                power = min(max((off - before[1]) / (at - before[0]), 0.2), 1.0)
            before = at, off
            at = min(max(at - off / power, -30.0), 30.0)
        return math.exp(at)


@torch.no_grad()
def surroundings(posterior: Posterior, fisher: Fisher, strength: float, rise: float, seed: int) -> Surroundings | None:
    """Where the weights may go after a task whose Fisher is this; None where no block has weights and a Fisher."""
    found = places(with_task(posterior, fisher, strength), fisher)
    return Surroundings(found, fisher.examples, rise, seed) if found else None


def places(posterior: Posterior, fisher: Fisher) -> list[BlockPerturbation]:
    """The blocks that have weights and of which the task says something, in a posterior that knows the task."""
    weights, found = posterior.weights(), []
    for held in posterior.held.values():
        square = float(held.matrix(weights).detach().square().mean())
        if square > 0 and fisher.speaks_of(held.block):
            found.append(BlockPerturbation(held.block, held.precision, fisher.terms[held.block.name], square))
    return found


def numbered(seed: int, number: int) -> torch.Generator:
    """The random numbers of one displacement."""
    return torch.Generator().manual_seed(((seed << 20) + number) % 2**63)


def by_parameter(places: Sequence[BlockPerturbation], displacements: Sequence[Tensor]) -> dict[str, Tensor]:
    """A displacement of every place, by parameter."""
    found: dict[str, Tensor] = {}
    for place, z in zip(places, displacements, strict=True):
        found.update(place.block.scatter(z))
    return found


def with_task(posterior: Posterior, fisher: Fisher, strength: float) -> Posterior:
    """The posterior that a task with this Fisher would leave; of growing sums, their form of constant size."""
    trial = copy(posterior)
    trial.held = dict(posterior.held)
    trial.arrange(fisher.blocks)
    trial.held = {
        name: replace(held, precision=_added(held.precision, fisher.terms[name], strength), tasks=held.tasks + 1)
        if fisher.speaks_of(held.block)
        else held
        for name, held in trial.held.items()
    }
    return trial


def _added(precision: Precision, terms: Sequence[Term], strength: float) -> Precision:
    precision = precision.eigenbasis if isinstance(precision, KroneckerSum) else precision
    for term in terms:
        precision = precision.add(term, strength)
    return precision

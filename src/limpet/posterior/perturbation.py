"""Random weight perturbations around the mode, scaled so that the loss is predicted to rise by a given amount.

    z ~ N(0, (L / T + I / v)^-1),    T such that 1/2 z^T F z / N = rise

with L the precision after consolidating the task, F the Fisher of the task alone, N its number of examples and v the
mean square of the block's weights, which bounds the perturbation in directions without curvature by the size of the
weights.
"""

from __future__ import annotations

import hashlib
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
from limpet.model.quantized import with_quantized_part
from limpet.posterior import Posterior
from limpet.posterior.displacer import Displacer
from limpet.precision import KroneckerSum, Precision, Spectrum, Term
from limpet.precision.base import noise

CLOSE = 0.05
"""Relative tolerance of the predicted rise."""

FLOOR = 1e-6
"""Smallest curvature, relative to the largest, that a solve with L divides by."""


@dataclass(frozen=True)
class BlockPerturbation:
    """Distribution of the perturbations of one block.

    Args:
        block: The block.
        precision: The precision L after consolidating the task.
        fisher: The terms of the task's Fisher F. None if the precision has no other task, and so contains it.
        square: The mean square v of the block's weights.
    """

    block: Block
    precision: Precision
    fisher: Sequence[Term] | None
    square: float

    def draw(self, temperature: float, generator: torch.Generator) -> Tensor:
        """Draw one perturbation from N(0, (L / temperature + I / square)^-1).

        Args:
            temperature: The temperature T.
            generator: The random generator.

        Returns:
            The perturbation, in the shape of the block.
        """
        cooled: Any = self.precision.scale(1 / temperature)
        return replace(cooled, prior=cooled.prior + 1 / self.square).sample(generator)  # type: ignore[no-any-return]

    @cached_property
    def spectrum(self) -> Spectrum:
        """Spectrum of the precision."""
        return self.precision.spectrum()

    def push(self, step: float, generator: torch.Generator) -> tuple[Tensor, float]:
        """Draw noise damped by a proximal step: (I + step L)^-1 e with e ~ N(0, 2 square I).

        The noise e is the difference of two independent sets of weights of the same size. It is isotropic, so it is
        drawn in the eigenbasis of L.

        Args:
            step: The step size of the proximal step.
            generator: The random generator.

        Returns:
            The perturbation, in the shape of the block, and its `rise`.
        """
        spectrum = self.spectrum
        drawn = noise(spectrum.fisher.shape, spectrum.fisher_values, generator)
        drawn.mul_(math.sqrt(2 * self.square)).div_(spectrum.proximal_denominator(step))
        z = spectrum.back(drawn)
        # in the eigenbasis if F is diagonal there
        exact = self.fisher is None and not isinstance(self.precision, KroneckerSum)
        return z, float((spectrum.fisher * drawn.square()).sum()) / 2 if exact else self.rise(z)

    def followed(self, gradient: Mapping[str, Tensor]) -> Tensor:
        """Return L^-1 gradient, the displacement at which a linear loss with this gradient balances the penalty."""
        pulled = self.spectrum.into(self.block.gather(gradient).to(self.spectrum.total))
        held = self.spectrum.prior + self.spectrum.total
        return self.spectrum.back(pulled / held.clamp_min(FLOOR * float(held.max())))

    def rise(self, z: Tensor) -> float:
        """Return the predicted increase of the loss, 1/2 z^T F z."""
        if self.fisher is None:
            return float(self.precision.fisher().quadratic(z.to(self.spectrum.fisher_values))) / 2
        return sum(float((z * term.apply(z)).sum()) for term in self.fisher) / 2


class WeightPerturbation:
    """Numbered random perturbations of the weights; the same number always gives the same perturbation.

    In a sharded model, creating it and drawing a perturbation are collectives.

    Args:
        block_perturbations: The perturbation of each block.
        displacer: Brings the perturbations to the weights.
        examples: Number of examples N of the task.
        rise: Target rise of the loss, in nats per example.
        seed: Random seed.
    """

    def __init__(
        self,
        block_perturbations: Sequence[BlockPerturbation],
        displacer: Displacer,
        examples: int,
        rise: float,
        seed: int,
    ) -> None:
        self.block_perturbations, self.examples, self.seed = block_perturbations, examples, seed
        self._displacer = displacer
        self.temperature = self._solve(rise)

    def __repr__(self) -> str:
        return f"<WeightPerturbation seed={self.seed} temperature={self.temperature!r}>"

    def __call__(self, number: int) -> dict[str, Tensor]:
        """Return perturbation `number`, by parameter."""
        drawn = by_parameter(self.block_perturbations, self._drawn(self.temperature, number))
        return self._displacer.scattered(drawn)

    def _drawn(self, temperature: float, number: int) -> list[Tensor]:
        blocks = self.block_perturbations
        return [place.draw(temperature, numbered(self.seed, number, place.block)) for place in blocks]

    def predicted(self, temperature: float) -> float:
        """Return the predicted rise of the loss at one perturbation, in nats per example."""
        drawn = self._drawn(temperature, 0)
        rises = (place.rise(z) for place, z in zip(self.block_perturbations, drawn, strict=True))
        return self._displacer.total(sum(rises)) / self.examples

    def _solve(self, rise: float) -> float:
        """Solve for the temperature by the secant method in log space: the rise is a power of it, at most linear."""
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
def weight_perturbation(
    posterior: Posterior, fisher: Fisher, strength: float, rise: float, seed: int
) -> WeightPerturbation | None:
    """Create the weight perturbations for a task.

    Args:
        posterior: The posterior before the task.
        fisher: The Fisher of the task.
        strength: The strength that the task will be consolidated with.
        rise: Target rise of the loss, in nats per example.
        seed: Random seed.

    Returns:
        The perturbations, or None if no block has both nonzero weights and curvature.
    """
    found = block_perturbations(with_task(posterior, fisher, strength), fisher)
    displacer = displacer_of(posterior, found)
    return WeightPerturbation(found, displacer, fisher.examples, rise, seed) if displacer else None


def displacer_of(posterior: Posterior, blocks: Sequence[BlockPerturbation]) -> Displacer:
    """Return what brings displacements of these blocks to the weights. A collective if the model is sharded."""
    return Displacer(posterior, (name for block in blocks for name in block.block.parameters))


def block_perturbations(posterior: Posterior, fisher: Fisher) -> list[BlockPerturbation]:
    """Collect the blocks that have nonzero weights and curvature from the task.

    Args:
        posterior: The posterior after the task, see `with_task`.
        fisher: The Fisher of the task.

    Returns:
        The perturbation of each of these blocks.
    """
    weights, parameters, found = posterior.weights(), posterior.parameters(), []
    for held in posterior.held.values():
        own = {name: with_quantized_part(parameters[name], weights[name]) for name in held.block.parameters}
        square = float(held.matrix(own).detach().square().mean())
        if square > 0 and fisher.speaks_of(held.block):
            terms = None if held.tasks == 1 else fisher.terms[held.block.name]
            found.append(BlockPerturbation(held.block, held.precision, terms, square))
    return found


def numbered(seed: int, number: int, block: Block) -> torch.Generator:
    """Return a CPU generator for perturbation `number` of a block, whichever other blocks this process has."""
    found = hashlib.blake2b(f"{seed} {number} {block.name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(found, "big") >> 1)


def by_parameter(
    block_perturbations: Sequence[BlockPerturbation], displacements: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Convert one displacement per block to one per parameter, by name."""
    found: dict[str, Tensor] = {}
    for place, z in zip(block_perturbations, displacements, strict=True):
        found.update(place.block.scatter(z))
    return found


def with_task(posterior: Posterior, fisher: Fisher, strength: float) -> Posterior:
    """Return the posterior after consolidating a task, without changing `posterior`.

    A Kronecker sum, which grows with every task, is replaced by its constant-size approximation in one eigenbasis.

    Args:
        posterior: The posterior before the task.
        fisher: The Fisher of the task.
        strength: What the Fisher is multiplied by.

    Returns:
        The new posterior.
    """
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

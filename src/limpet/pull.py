"""What `limpet.protect` works with: a block and its parameters, what goes on from step to step, one proximal map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from limpet.posterior import Held
from limpet.precision import Spectrum


@dataclass
class ProximalState:
    """What is carried from step to step. Part of a memory's saved state."""

    every: int = 1
    count: int = 0
    force: dict[str, Tensor] = field(default_factory=dict)  # h, by parameter
    pending: dict[str, float] = field(default_factory=dict)  # S, by block
    multiplier: float | None = None  # what a budget remembers


@dataclass
class Bound:
    """A block with its parameters, those of them that the optimizer steps, and their groups."""

    held: Held
    parameters: list[nn.Parameter]
    groups: list[dict[str, Any] | None]
    apply: Callable[[Tensor], Tensor] | None = None  # of the precision, ready for many uses
    spectrum: Spectrum | None = None  # where there is a budget

    def weights(self) -> dict[str, Tensor]:
        return dict(zip(self.held.block.parameters, self.parameters, strict=True))


@dataclass
class Pull:
    """A block on its way back: where it was before the penalty, and the step that the penalty takes."""

    bound: Bound
    total: float  # S
    d: Tensor
    step: float  # S / N

    def __post_init__(self) -> None:
        spectrum, slope = self.bound.spectrum, self.bound.held.slope
        if spectrum is not None:
            self.coordinates = spectrum.into(self.d if slope is None else self.d - self.step * slope)

    def rise(self, factor: float) -> float:
        """1/2 d^T F d after the map with the sum of F_t times `factor`."""
        assert self.bound.spectrum is not None
        return self.bound.spectrum.rise(self.coordinates, self.step, factor)

    def pulled(self, factor: float | None) -> Tensor:
        """The displacement after the map."""
        spectrum = self.bound.spectrum
        if factor is None or spectrum is None:
            return self.bound.held.proximal(self.d, self.step)
        return spectrum.back(self.coordinates / spectrum.resistance(self.step, factor))

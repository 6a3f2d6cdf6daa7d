"""What `limpet.protect` works with: a block and its parameters, what goes on from step to step, one proximal map."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from limpet.curvature import Block
from limpet.posterior import Held
from limpet.precision import Spectrum
from limpet.thin import Thin

Group = dict[str, Any]
"""One of an optimizer's groups of parameters."""

Part = tuple[nn.Parameter, Group, Tensor]
"""A parameter that the optimizer steps, its group, and a gradient in it."""


@dataclass
class ProximalState:
    """What is carried from step to step. Part of a memory's saved state."""

    every: int = 1
    count: int = 0
    force: dict[str, Tensor] = field(default_factory=dict)  # h, by parameter
    pending: dict[str, float] = field(default_factory=dict)  # S, by block
    multiplier: float | None = None  # what a budget remembers
    mode: str = "proximal"  # in gradient mode, `force` is the gradient of the penalty as it was made last


@dataclass
class Stepped:
    """A block with its parameters, and the groups of those that the optimizer steps."""

    block: Block
    parameters: list[nn.Parameter]
    groups: list[Group | None]

    @property
    def stepped(self) -> bool:
        """Whether this step reaches it."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters by name."""
        return dict(zip(self.block.parameters, self.parameters, strict=True))


@dataclass
class Bound(Stepped):
    """The same with what is kept of it."""

    held: Held
    apply: Callable[[Tensor], Tensor] | None = None  # of the precision, ready for many uses
    spectrum: Spectrum | None = None  # where there is a budget
    thin: Thin | None = None  # where it trains through adapters,
    adapter_groups: dict[nn.Parameter, Group] = field(default_factory=dict)  # which have groups of their own

    @property
    def stepped(self) -> bool:
        """Whether this step reaches it."""
        return any(parameter.grad is not None for parameter in (*self.parameters, *self.adapter_groups))

    @property
    def targets(self) -> set[nn.Parameter]:
        """The parameters that the optimizer steps."""
        own = {p for p, group in zip(self.parameters, self.groups, strict=True) if group is not None}
        return own | set(self.adapter_groups)

    def displacement(self) -> Tensor:
        """w - mean, in the block's bases where it trains through adapters."""
        return self.held.displacement(self.weights()) if self.thin is None else self.thin.coordinates()

    def coordinates(self) -> Tensor:
        """w - mean in the basis of the spectrum."""
        assert self.spectrum is not None
        d = self.displacement()
        return d if self.thin is not None and self.thin.rotated else self.spectrum.into(d)

    def gradient(self, d: Tensor) -> Tensor:
        """The gradient of the penalty at a displacement."""
        return self.held.gradient(d, self.apply) if self.thin is None else self.thin.pull(d)

    def multiplied_gradient(self, coordinates: Tensor, factor: float) -> Tensor:
        """The same with the sum of strength_t F_t times `factor`, from coordinates in the basis of the spectrum."""
        assert self.spectrum is not None
        spectrum, thin = self.spectrum, self.thin
        gradient = (spectrum.prior + factor * spectrum.total) * coordinates
        gradient = gradient if thin is not None and thin.rotated else spectrum.back(gradient)
        slope = self.held.slope if thin is None else thin.slope
        return gradient if slope is None else gradient + slope

    def penalty_parts(self) -> Iterator[Part]:
        """The gradient of the penalty."""
        short = self._short_way()
        return self.parts(self.gradient(self.displacement())) if short is None else short(1.0)

    def measured(self) -> tuple[float, Callable[[float], Iterator[Part]]]:
        """1/2 d^T F d, and the gradient of the penalty with the sum of strength_t F_t times a factor."""
        short = self._short_way()
        if self.thin is not None and short is not None:
            return self.thin.rise(), short
        assert self.spectrum is not None
        c = self.coordinates()
        return self.spectrum.rise(c, 0.0), lambda factor: self.parts(self.multiplied_gradient(c, factor))

    def _short_way(self) -> Callable[[float], Iterator[Part]] | None:
        """The gradient for a factor, where nothing but adapters trains and it needs nothing of the weight's size."""
        thin = self.thin
        product = None if thin is None or any(group is not None for group in self.groups) else thin.product
        if thin is None or product is None or not thin.starts_at_the_mean:
            return None
        return lambda factor: self._own(thin.penalty_gradients(product.times(factor)))

    def _own(self, gradients: Iterator[tuple[nn.Parameter, Tensor]]) -> Iterator[Part]:
        """Those of the adapters' parameters that the optimizer steps."""
        return ((p, self.adapter_groups[p], part) for p, part in gradients if p in self.adapter_groups)

    def parts(self, gradient: Tensor) -> Iterator[Part]:
        """A gradient in the block, in every parameter that the optimizer steps."""
        if self.thin is not None:
            yield from self._own(self.thin.gradients(gradient))
        if any(group is not None for group in self.groups):
            whole = gradient if self.thin is None else self.thin.back(gradient)
            for parameter, group, part in zip(self.parameters, self.groups, self.held.block.split(whole), strict=True):
                if group is not None:
                    yield parameter, group, part


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

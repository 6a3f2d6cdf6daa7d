"""A block bound to the parameter groups of an optimizer, the state between steps, and one proximal update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from limpet.model import Block
from limpet.posterior import BlockPosterior
from limpet.posterior.lora import LoRAPenalty
from limpet.precision import Spectrum

Group = dict[str, Any]
"""One of an optimizer's groups of parameters."""

Part = tuple[nn.Parameter, Group, Tensor]
"""A parameter that the optimizer steps, its group, and a gradient in it."""


@dataclass
class ProximalState:
    """What is carried from step to step. Part of a memory's saved state."""

    every: int = 1
    count: int = 0
    control_variate: dict[str, Tensor] = field(default_factory=dict)  # h, by parameter
    pending: dict[str, float] = field(default_factory=dict)  # S, by block
    multiplier: float | None = None  # what a budget remembers
    mode: str = "proximal"  # in gradient mode, the control variate is the last gradient of the penalty


@dataclass
class SteppedBlock:
    """A block with its parameters, and the groups of those that the optimizer steps."""

    block: Block
    parameters: list[nn.Parameter]
    groups: list[Group | None]

    @property
    def stepped(self) -> bool:
        """Whether this step reaches it."""
        return any(parameter.grad is not None for parameter in self.parameters)

    @property
    def targets(self) -> set[nn.Parameter]:
        """The parameters that the optimizer steps."""
        return {p for p, group in zip(self.parameters, self.groups, strict=True) if group is not None}

    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters by name."""
        return dict(zip(self.block.parameters, self.parameters, strict=True))


@dataclass
class BoundBlock(SteppedBlock):
    """The same with what is kept of it."""

    held: BlockPosterior
    apply: Callable[[Tensor], Tensor] | None = None  # of the precision, ready for many uses
    spectrum: Spectrum | None = None  # where there is a budget
    lora: LoRAPenalty | None = None  # where it trains through adapters,
    adapter_groups: dict[nn.Parameter, Group] = field(default_factory=dict)  # which have groups of their own

    @property
    def stepped(self) -> bool:
        """Whether this step reaches it."""
        return any(parameter.grad is not None for parameter in (*self.parameters, *self.adapter_groups))

    @property
    def targets(self) -> set[nn.Parameter]:
        """The parameters that the optimizer steps, those of adapters included."""
        return super().targets | set(self.adapter_groups)

    def displacement(self) -> Tensor:
        """w - mean, in the block's bases where it trains through adapters."""
        return self.held.displacement(self.weights()) if self.lora is None else self.lora.coordinates()

    def coordinates(self) -> Tensor:
        """w - mean in the basis of the spectrum."""
        assert self.spectrum is not None
        d = self.displacement()
        return d if self.lora is not None and self.lora.rotated else self.spectrum.into(d)

    def gradient(self, d: Tensor) -> Tensor:
        """The gradient of the penalty at a displacement."""
        return self.held.gradient(d, self.apply) if self.lora is None else self.lora.pull(d)

    def multiplied_gradient(self, coordinates: Tensor, factor: float) -> Tensor:
        """The same with the sum of strength_t F_t times `factor`, from coordinates in the basis of the spectrum."""
        assert self.spectrum is not None
        spectrum, lora = self.spectrum, self.lora
        gradient = (spectrum.prior + factor * spectrum.total) * coordinates
        gradient = gradient if lora is not None and lora.rotated else spectrum.back(gradient)
        linear_term = self.held.linear_term if lora is None else lora.linear_term
        return gradient if linear_term is None else gradient + linear_term

    def penalty_parts(self) -> Iterator[Part]:
        """The gradient of the penalty."""
        short = self._short_way()
        return self.parts(self.gradient(self.displacement())) if short is None else short(1.0)

    def measured(self) -> tuple[float, Callable[[float], Iterator[Part]]]:
        """1/2 d^T F d, and the gradient of the penalty with the sum of strength_t F_t times a factor."""
        short = self._short_way()
        if self.lora is not None and short is not None:
            return self.lora.rise(), short
        assert self.spectrum is not None
        c = self.coordinates()
        return self.spectrum.rise(c, 0.0), lambda factor: self.parts(self.multiplied_gradient(c, factor))

    def _short_way(self) -> Callable[[float], Iterator[Part]] | None:
        """The gradient for a factor, where nothing but adapters trains and it needs nothing of the weight's size."""
        lora = self.lora
        product = None if lora is None or any(group is not None for group in self.groups) else lora.product
        if lora is None or product is None or not lora.starts_at_the_mean:
            return None
        return lambda factor: self._own(lora.penalty_gradients(product.times(factor)))

    def _own(self, gradients: Iterator[tuple[nn.Parameter, Tensor]]) -> Iterator[Part]:
        """Those of the adapters' parameters that the optimizer steps."""
        return ((p, self.adapter_groups[p], part) for p, part in gradients if p in self.adapter_groups)

    def parts(self, gradient: Tensor) -> Iterator[Part]:
        """A gradient in the block, in every parameter that the optimizer steps."""
        if self.lora is not None:
            yield from self._own(self.lora.gradients(gradient))
        if any(group is not None for group in self.groups):
            whole = gradient if self.lora is None else self.lora.back(gradient)
            for parameter, group, part in zip(self.parameters, self.groups, self.held.block.split(whole), strict=True):
                if group is not None:
                    yield parameter, group, part


@dataclass
class ProximalUpdate:
    """A block on its way back: where it was before the penalty, and the step that the penalty takes."""

    bound: BoundBlock
    total: float  # S
    d: Tensor
    step: float  # S / N

    def __post_init__(self) -> None:
        spectrum, linear_term = self.bound.spectrum, self.bound.held.linear_term
        if spectrum is not None:
            self.coordinates = spectrum.into(self.d if linear_term is None else self.d - self.step * linear_term)

    def rise(self, factor: float) -> float:
        """1/2 d^T F d after the map with the sum of F_t times `factor`."""
        assert self.bound.spectrum is not None
        return self.bound.spectrum.rise(self.coordinates, self.step, factor)

    def pulled(self, factor: float | None) -> Tensor:
        """The displacement after the map."""
        spectrum = self.bound.spectrum
        if factor is None or spectrum is None:
            return self.bound.held.proximal(self.d, self.step)
        return spectrum.back(self.coordinates / spectrum.proximal_denominator(self.step, factor))

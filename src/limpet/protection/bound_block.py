"""Blocks bound to the parameter groups of an optimizer, the state carried between steps, and one proximal update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from limpet.model import Block
from limpet.posterior import BlockPosterior
from limpet.posterior.lora import LoRAPenalty
from limpet.precision import Spectrum

Group = dict[str, Any]
"""A parameter group of an optimizer."""

Part = tuple[nn.Parameter, Group, Tensor]
"""A parameter that the optimizer steps, its group, and a gradient with respect to it."""


@dataclass
class ProximalState:
    """State carried from step to step, saved with the memory.

    Attributes:
        every: Apply the penalty every `every` steps.
        count: Number of steps so far.
        control_variate: The control variate h of ProxSkip, by parameter; in gradient mode, the last gradient of the
            penalty.
        pending: S, the sum of the step sizes since the last proximal step, by block.
        multiplier: State of the budget, `Budget.state`; None without a budget.
        mode: "proximal" or "gradient".
        residual: The part of half-precision weights that rounding removed, by parameter (`limpet.protection.rounding`).
    """

    every: int = 1
    count: int = 0
    control_variate: dict[str, Tensor] = field(default_factory=dict)
    pending: dict[str, float] = field(default_factory=dict)
    multiplier: float | None = None
    mode: str = "proximal"
    residual: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class SteppedBlock:
    """A block with its parameters and their parameter groups.

    Attributes:
        block: The block.
        parameters: The parameters of the block.
        groups: The parameter group of each parameter; None if the optimizer does not step it.
        adapter_groups: The parameter groups of the adapters' parameters.
    """

    block: Block
    parameters: list[nn.Parameter]
    groups: list[Group | None]
    adapter_groups: dict[nn.Parameter, Group] = field(default_factory=dict, kw_only=True)

    @property
    def stepped(self) -> bool:
        """Whether a parameter of the block, or of its adapters, has a gradient in this step."""
        return any(parameter.grad is not None for parameter in (*self.parameters, *self.adapter_groups))

    @property
    def targets(self) -> set[nn.Parameter]:
        """Parameters that the optimizer steps, including those of adapters."""
        own = {p for p, group in zip(self.parameters, self.groups, strict=True) if group is not None}
        return own | set(self.adapter_groups)

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the block, by name; sharded if the model is."""
        return dict(zip(self.block.parameters, self.parameters, strict=True))


@dataclass
class BoundBlock(SteppedBlock):
    """A `SteppedBlock` together with its posterior.

    Attributes:
        held: The posterior of the block.
        apply: Multiplies by the precision, prepared for repeated use; None to use the posterior's own.
        spectrum: Spectrum of the Fisher, together with the prior; only with a budget.
        lora: The penalty in terms of the adapters' factors; None if the block has no adapters.
    """

    held: BlockPosterior
    apply: Callable[[Tensor], Tensor] | None = None
    spectrum: Spectrum | None = None
    lora: LoRAPenalty | None = None

    def displacement(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Compute w - mean; with adapters, in the block's eigenbases.

        Args:
            weights: The parameters of blocks without adapters, whole.

        Returns:
            The displacement.
        """
        return self.held.displacement(weights) if self.lora is None else self.lora.coordinates()

    def coordinates(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Compute w - mean in the eigenbasis of the spectrum."""
        assert self.spectrum is not None
        d = self.displacement(weights)
        return d if self.lora is not None and self.lora.rotated else self.spectrum.into(d)

    def gradient(self, d: Tensor) -> Tensor:
        """Compute the gradient of the penalty at a displacement."""
        return self.held.gradient(d, self.apply) if self.lora is None else self.lora.pull(d)

    def multiplied_gradient(self, coordinates: Tensor, factor: float) -> Tensor:
        """Compute the gradient (prior + factor F) d of the penalty with a budget.

        Args:
            coordinates: d = w - mean in the eigenbasis of the spectrum.
            factor: The multiplier of the Fisher.

        Returns:
            The gradient, in the same coordinates as `displacement`.
        """
        assert self.spectrum is not None
        gradient = (self.spectrum.prior + factor * self.spectrum.fisher) * coordinates
        return gradient if self.lora is not None and self.lora.rotated else self.spectrum.back(gradient)

    def penalty_parts(self, weights: Mapping[str, Tensor]) -> Iterator[Part]:
        """Return the gradient of the penalty for every parameter that the optimizer steps.

        Args:
            weights: The parameters of blocks without adapters, whole.

        Returns:
            The gradients.
        """
        if self.lora is not None and self.lora.product is not None and self._only_factors:
            return self._stepped_only(self.lora.penalty_gradients(self.lora.product))
        return self.parts(self.gradient(self.displacement(weights)))

    def measured(self, weights: Mapping[str, Tensor]) -> tuple[float, Callable[[float], Iterator[Part]]]:
        """Compute 1/2 d^T F d at the current weights.

        Args:
            weights: The parameters of blocks without adapters, whole.

        Returns:
            The value, and a function that maps a multiplier of the Fisher to the gradient of the penalty.
        """
        lora = self.lora
        if lora is not None and lora.fisher_product is not None and self._only_factors:
            product, prior = lora.fisher_product, self.held.precision.prior
            return lora.rise(), lambda factor: self._stepped_only(
                lora.penalty_gradients(replace(product.times(factor), prior=prior))
            )
        assert self.spectrum is not None
        c = self.coordinates(weights)
        return self.spectrum.rise(c, 0.0), lambda factor: self.parts(self.multiplied_gradient(c, factor))

    @property
    def _only_factors(self) -> bool:
        """Whether only adapters train and start at the mean, so that gradients have a closed form in their factors.

        The closed form allocates nothing of the size of the weight.
        """
        return self.lora is not None and all(group is None for group in self.groups) and self.lora.starts_at_the_mean

    def _stepped_only(self, gradients: Iterator[tuple[nn.Parameter, Tensor]]) -> Iterator[Part]:
        """Keep the gradients of adapter parameters that the optimizer steps."""
        return ((p, self.adapter_groups[p], part) for p, part in gradients if p in self.adapter_groups)

    def parts(self, gradient: Tensor) -> Iterator[Part]:
        """Split a gradient with respect to the block among the parameters that the optimizer steps."""
        if self.lora is not None:
            yield from self._stepped_only(self.lora.gradients(gradient))
        if any(group is not None for group in self.groups):
            whole = gradient if self.lora is None else self.lora.back(gradient)
            for parameter, group, part in zip(self.parameters, self.groups, self.held.block.split(whole), strict=True):
                if group is not None:
                    yield parameter, group, part


@dataclass
class ProximalUpdate:
    """One proximal step of a block.

    Attributes:
        bound: The block.
        total: S, the sum of the step sizes since the last proximal step.
        d: Displacement from the mean before the proximal step.
        step: The step size of the proximal step, S / N.
    """

    bound: BoundBlock
    total: float
    d: Tensor
    step: float

    def __post_init__(self) -> None:
        if self.bound.spectrum is not None:
            self.coordinates = self.bound.spectrum.into(self.d)

    def rise(self, factor: float) -> float:
        """Compute 1/2 d^T F d after a proximal step of the penalty 1/2 d^T (prior + factor F) d."""
        assert self.bound.spectrum is not None
        return self.bound.spectrum.rise(self.coordinates, self.step, factor)

    def pulled(self, factor: float | None) -> Tensor:
        """Compute the displacement after the proximal step.

        Args:
            factor: The multiplier of the Fisher with a budget; None without one.

        Returns:
            The displacement.
        """
        spectrum = self.bound.spectrum
        if factor is None or spectrum is None:
            return self.bound.held.proximal(self.d, self.step)
        return spectrum.back(self.coordinates / spectrum.proximal_denominator(self.step, factor))

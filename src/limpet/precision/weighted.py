"""The sum of the tasks' Fishers, and the same sum weighted by the tasks' strengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.precision.linalg import widened


@dataclass(frozen=True)
class WeightedSum:
    """The sums `plain` = sum of F_t and `total` = sum of strength_t F_t.

    Training needs the total, forecasts need the plain sum. As long as all tasks have the same strength, one is a
    multiple of the other and only `plain` is stored; `mixed` is created at the first strength that differs.

    Args:
        plain: The sum of F_t.
        mixed: The sum of strength_t F_t. None as long as all strengths are equal.
        strength: The common strength. None before the first task, and once strengths differ.
    """

    plain: Tensor
    mixed: Tensor | None = None
    strength: float | None = None

    @classmethod
    def zero(cls, shape: torch.Size, like: Tensor) -> WeightedSum:
        """Create the sum of no tasks: a single zero expanded to `shape`, which takes no memory.

        Args:
            shape: Shape of the sum.
            like: Tensor with the dtype and device to use.

        Returns:
            The sum before the first task.
        """
        return cls(torch.zeros((), dtype=like.dtype, device=like.device).expand(shape))

    @property
    def total(self) -> Tensor:
        """The sum of strength_t F_t."""
        factor, values = self.factored
        return values if factor == 1 else factor * values

    @property
    def factored(self) -> tuple[float, Tensor]:
        """The total as a number and a tensor, left unmultiplied to avoid allocating the product."""
        if self.mixed is not None:
            return 1.0, self.mixed
        return 1.0 if self.strength is None else self.strength, self.plain

    def largest(self) -> float:
        """Return the largest entry of the total."""
        factor, values = self.factored
        return factor * float(values.max()) if values.numel() else 0.0

    def add(self, plain: Tensor, strength: float, carry: Callable[[Tensor], Tensor] | None = None) -> WeightedSum:
        """Add one task.

        Args:
            plain: Fisher F of the task.
            strength: Strength of the task.
            carry: Linear map that brings the old sums (in float64) into a new basis. Defaults to the identity.

        Returns:
            The new sums.
        """

        def moved(old: Tensor) -> Tensor:
            return widened(old) if carry is None else carry(widened(old))

        def stored(new: Tensor) -> Tensor:
            return new.to(self.plain.device, self.plain.dtype)

        plain = widened(plain)
        summed = stored(moved(self.plain) + plain)
        empty = self.mixed is None and self.strength is None
        if empty or (self.mixed is None and self.strength == strength):
            return WeightedSum(summed, None, strength)
        return WeightedSum(summed, stored(moved(self.total) + strength * plain), None)

    def carried(self, carry: Callable[[Tensor], Tensor]) -> WeightedSum:
        """Return both sums after a linear map, applied in float64.

        Args:
            carry: The map.

        Returns:
            The new sums.
        """

        def stored(old: Tensor) -> Tensor:
            return carry(widened(old)).to(self.plain.device, self.plain.dtype)

        return WeightedSum(stored(self.plain), None if self.mixed is None else stored(self.mixed), self.strength)

    def unweighted(self) -> WeightedSum:
        """Return the sum of F_t, with every strength 1."""
        return WeightedSum(self.plain, None, 1.0)

    def scale(self, factor: float) -> WeightedSum:
        """Return `factor` times both sums."""
        mixed = None if self.mixed is None else factor * self.mixed
        return WeightedSum(factor * self.plain, mixed, self.strength)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""
        kept = {name: self.plain}
        if self.mixed is not None:
            kept[f"{name}.weighted"] = self.mixed
        return kept

    @classmethod
    def restore(cls, name: str, tensors: Mapping[str, Tensor], strength: float | None) -> WeightedSum:
        """Rebuild the sums from saved tensors, the inverse of `tensors`.

        Args:
            name: Name under which they were saved.
            tensors: Tensors by name.
            strength: The common strength, or None.

        Returns:
            The sums.
        """
        return cls(tensors[name], tensors.get(f"{name}.weighted"), strength)

"""A sum of Fishers, and the same sum with every task times its strength."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.precision.linalg import widened


@dataclass(frozen=True)
class WeightedSum:
    """`plain` = sum of F_t, `total` = sum of strength_t F_t.

    Training needs the total, forecasts need the plain sum. While every task had the same strength one is a
    multiple of the other and only `plain` is kept; `mixed` appears with the first strength that differs.
    """

    plain: Tensor
    mixed: Tensor | None = None
    strength: float | None = None  # the common strength; None before the first task and once mixed

    @classmethod
    def zero(cls, shape: torch.Size, like: Tensor) -> WeightedSum:
        """Nothing added yet; takes no memory."""
        return cls(torch.zeros((), dtype=like.dtype, device=like.device).expand(shape))

    @property
    def total(self) -> Tensor:
        """The sum of strength_t F_t."""
        factor, values = self.factored
        return values if factor == 1 else factor * values

    @property
    def factored(self) -> tuple[float, Tensor]:
        """The total as a number times a tensor that is kept, so that nothing has to be multiplied out."""
        if self.mixed is not None:
            return 1.0, self.mixed
        return 1.0 if self.strength is None else self.strength, self.plain

    def add(self, plain: Tensor, strength: float, carry: Callable[[Tensor], Tensor] | None = None) -> WeightedSum:
        """Take one task in. `carry` is the linear map that brings the old sums into a new basis (float64)."""

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

    def unweighted(self) -> WeightedSum:
        """The sum of F_t, every strength 1."""
        return WeightedSum(self.plain, None, 1.0)

    def scale(self, factor: float) -> WeightedSum:
        """`factor` times both sums."""
        mixed = None if self.mixed is None else factor * self.mixed
        return WeightedSum(factor * self.plain, mixed, self.strength)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors to keep, by name."""
        kept = {name: self.plain}
        if self.mixed is not None:
            kept[f"{name}.weighted"] = self.mixed
        return kept

    @classmethod
    def restore(cls, name: str, tensors: Mapping[str, Tensor], strength: float | None) -> WeightedSum:
        """The inverse of `tensors`."""
        return cls(tensors[name], tensors.get(f"{name}.weighted"), strength)

"""Notice that weights were changed by something other than the optimizer that is being protected."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from limpet.distributed import is_sharded, local

SAMPLED = 64
"""Number of entries of a weight that are compared, about."""

FEW = 3
"""Number of weights of which entries are compared with those at the beginning; with the last mark, only the largest."""


class WeightWatch:
    """Compares weights with what they were at the last `mark`.

    Version counters and addresses are compared first, which costs next to nothing but misses fused optimizers and
    writes through `.data`. Where that matters, a few entries of a few weights are compared too.

    Args:
        parameters: The weights.

    Attributes:
        parameters: The weights.
        writes: Number of writes to a weight between a mark and the next `look`, in all.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        by_size = sorted(self.parameters, key=lambda parameter: -parameter.numel())
        self._few = by_size[:: max(len(by_size) // FEW, 1)][:FEW]
        self._addressed = not any(map(is_sharded, self.parameters))
        self.writes = 0
        self._changed: list[Tensor] = []
        self._views: list[Tensor] = []  # of the entries that are compared
        self._viewed: list[int] = []  # the addresses of the weights when the views were made
        self._suspicious = False  # without a reason to suspect something, entries are not compared in every step
        self._start = self._sample(FEW)
        self.mark(sample=True)

    @property
    def changed(self) -> int:
        """Number of times that `look` has found other values than those of the mark before it."""
        return sum(int(one) for one in self._changed)

    def mark(self, *, sample: bool = False) -> None:
        """Remember the weights.

        Args:
            sample: Remember entries too, so that `replaced` notices every kind of change.
        """
        self._state = self._now()
        self._entries = self._sample() if sample or self._suspicious else None

    def look(self) -> None:
        """Count what has happened to the weights since the last mark, without waiting for the device."""
        now = self._now()
        self._suspicious = now != self._state
        if not self._suspicious:
            return
        self.writes += max(new[0] - old[0] for new, old in zip(now, self._state, strict=True))
        if self._entries is not None:
            self._changed = [torch.stack([*self._changed, self._differs(self._entries)]).sum(0)]

    def replaced(self) -> bool:
        """Whether the weights are others than at the last mark."""
        return self._now() != self._state or (self._entries is not None and bool(self._differs(self._entries)))

    def moved(self) -> bool:
        """Whether the weights are others than when this object was created."""
        return bool(self._differs(self._start))

    def _now(self) -> list[tuple[int, int]]:
        """Version counter and address of every weight."""
        if self._addressed:
            return [(parameter._version, parameter.data_ptr()) for parameter in self.parameters]
        return [(parameter._version, 0) for parameter in self.parameters]

    @torch.no_grad()
    def _sample(self, count: int = 1) -> list[Tensor]:
        """Some entries of this many weights."""
        addresses = [parameter.data_ptr() for parameter in self._few] if self._addressed else []
        if not addresses or addresses != self._viewed:
            self._views, self._viewed = [_grid(local(parameter)) for parameter in self._few], addresses
        return [view.clone() for view in self._views[:count]]

    @torch.no_grad()
    def _differs(self, entries: list[Tensor]) -> Tensor:
        """Whether entries differ from those now, 1 or 0; nan counts as equal to nan."""
        device = entries[0].device if entries else None
        found = [
            ~torch.isclose(a.to(device), b.to(device), rtol=0, atol=0, equal_nan=True).all()
            for a, b in zip(entries, self._sample(len(entries)), strict=True)
        ]
        return torch.stack(found).any().long() if found else torch.tensor(0)


def _grid(tensor: Tensor) -> Tensor:
    """Return a view of entries on a regular grid; unlike `reshape`, slices never copy."""
    side = round(SAMPLED ** (1 / max(tensor.dim(), 1)))
    return tensor[tuple(slice(None, None, max(size // side, 1)) for size in tensor.shape)]

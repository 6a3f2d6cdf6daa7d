"""What a method is: something that acts during training, or afterwards on a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from limpet.forgetting.repair import Repair

Extra = Callable[[Any, Tensor], Tensor | float]
"""`extra(batch, outputs)`: what is added to the loss of a batch."""


class Bench(Protocol):
    """What methods may use of a suite."""

    seed: int
    examples: int

    def distilled(self, batch: Any, outputs: Tensor) -> Tensor:
        """KL(before || now) of the old outputs on a new batch, per example."""

    def old_loss(self, model: Any, share: float) -> Tensor:
        """The loss on a few old examples, from a pool of this share of the new ones' number."""

    def rehearsed(self) -> list[Tensor] | None:
        """Rows for self-rehearsal; None if the model is to draw samples."""

    def memory(self, model: Any, structure: str = "kronecker", strength: float | None = None) -> Any:
        """A memory of the model before, for this model."""

    def repaired(self, model: Any, **options: Any) -> Repair:
        """`limpet.repair` with that memory and the inputs that `memory.protect` records."""


@dataclass(frozen=True)
class During:
    """A method that acts while the model trains.

    Attributes:
        name: Its name in tables.
        needs: The data that it needs beside the new ones.
        candidates: Values of its setting that are tried on the development pair.
        chosen: The value that was chosen there; None if there is nothing to choose.
        extra: Makes the further loss for a model and a value.
        protect: Makes the context that training runs in, from the bench, the model, the optimizer and the value.
        rate: Factor of the learning rate, for a value.
        wrapped: Makes the model that trains, if it is not that of plain training.
    """

    name: str
    needs: str
    candidates: tuple[float, ...] = ()
    chosen: float | None = None
    extra: Callable[[Bench, Any, float], Extra] | None = None
    protect: Callable[[Bench, Any, Any, float], AbstractContextManager[Any]] = lambda *_: nullcontext()
    rate: Callable[[float], float] = lambda _: 1.0
    wrapped: Callable[[Any, float], Any] | None = None


@dataclass(frozen=True)
class After:
    """A method that acts on a trained model.

    Attributes:
        name: Its name in tables.
        needs: The data that it needs beside the new ones.
        points: Moves the model along a curve, from the trained weights on, and yields what describes each point.
            When it ends, or is closed, the model has its trained weights again.
        after: The names of the methods whose models it is applied to.
    """

    name: str
    needs: str
    points: Callable[[Bench, Any], Iterator[dict[str, Any]]]
    after: tuple[str, ...] = ("plain",)

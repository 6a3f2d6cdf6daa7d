"""What a method is: something that acts during training, or afterwards on a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from limpet.forgetting.repair import Repair
from retention.pair import Pair
from retention.update import Layer

Extra = Callable[[Any, Tensor], Tensor | float]
"""`extra(batch, outputs)`: what is added to the loss of a batch."""

Go = Callable[[float], None]
"""`go(setting)` moves a model to a point of the path of a method."""


class Bench(Protocol):
    """What methods may use of a suite."""

    seed: int
    examples: int
    kept: dict[str, Any]
    """What a method has kept from before: its `megabytes`, and the `seconds` of making it."""

    def preparing(self) -> AbstractContextManager[None]:
        """Time what a method does with the model before."""

    def distilled(self, model: Any, batch: Any, outputs: Tensor) -> Tensor:
        """KL(before || now) of the old outputs on a new batch, per example."""

    def old_loss(self, model: Any, share: float) -> Tensor:
        """The sum of the losses of a few old examples, from a pool of this share of the new ones' number."""

    def rehearsed(self) -> list[Tensor]:
        """Rows for self-rehearsal."""

    def updates(self, model: Any) -> list[Layer]:
        """What training has changed."""

    def displaced(self, model: Any) -> Tensor:
        """The squared distance of the weights from where they were, as a function of what trains."""

    def memory(self, model: Any) -> Any:
        """A memory of the model before, for this model."""

    def diagonal_memory(self, model: Any) -> Any:
        """A memory with the diagonal Fisher alone, of strength 1."""

    def repaired(self, model: Any, **options: Any) -> Repair:
        """`limpet.repair` with that memory and the inputs that `memory.protect` records."""


@dataclass(frozen=True)
class During:
    """A method that acts while the model trains.

    Attributes:
        name: Its name in tables.
        needs: The data that it needs beside the new ones.
        candidates: Values of its setting that are tried on the development pair.
        chosen: The value that was chosen there, by the name of the settings of a suite.
        fixed: The value of its setting if there is nothing to choose.
        extra: Makes the further loss for a model and a value.
        protect: Makes the context that training runs in, from the bench, the model, the optimizer and the value.
        rate: The learning rate for a pair and a value.
        wrapped: Makes the model that trains, if it is not that of plain training.
        memory: It uses a memory of the model before.
    """

    name: str
    needs: str
    candidates: tuple[float, ...] = ()
    chosen: Mapping[str, float] = field(default_factory=dict)
    fixed: float = 0.0
    extra: Callable[[Bench, Any, float], Extra] | None = None
    protect: Callable[[Bench, Any, Any, float], AbstractContextManager[Any]] = lambda *_: nullcontext()
    rate: Callable[[Pair, float], float] = lambda pair, _: pair.rate
    wrapped: Callable[[Any, float], Any] | None = None
    memory: bool = False


@dataclass(frozen=True)
class After:
    """A method that acts on a trained model.

    Attributes:
        name: Its name in tables.
        needs: The data that it needs beside the new ones.
        path: A context in which a function moves the model to the point of a setting. When it ends, the model has its
            trained weights again.
        settings: From the one that changes the least on.
        default: The setting of somebody who chooses nothing, if there is one.
        after: The names of the methods whose models it is applied to.
        adapters_only: It needs a model with LoRA adapters.
        memory: It uses a memory of the model before.
        chosen: The setting that was chosen on the development pair of a suite without paths, by the name of its
            settings.
    """

    name: str
    needs: str
    path: Callable[[Bench, Any], AbstractContextManager[Go]]
    settings: tuple[float, ...]
    default: float | None = None
    after: tuple[str, ...] = ("plain",)
    adapters_only: bool = False
    memory: bool = False
    chosen: Mapping[str, float] = field(default_factory=dict)

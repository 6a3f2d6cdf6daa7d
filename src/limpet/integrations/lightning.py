"""Hold fast inside Lightning's Trainer.

memory = limpet.OnlineLaplace(module.network)
trainer = lightning.Trainer(callbacks=[MemoryCallback(memory, examples=len(data))])
trainer.fit(module, loader)
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from limpet.errors import LimpetError, NotProtectedWarning, warn
from limpet.integrations.training_session import TrainingSession
from limpet.methods import Memory
from limpet.model import Forward


class MemoryCallback(Callback):
    """Protects while Lightning trains, logs forecast and penalty, and is part of its checkpoints.

    `memory` is of the LightningModule or of a network inside it. `examples`, `budget`, `mode` and `every` are as in
    `memory.protect`; without `examples` it is the length of the training set. Numbers are logged every `log_every`
    steps. With `consolidate=True` the task is taken in at the end, from the training loader (of at most `limit`
    examples); `forward(model, batch)` gives (outputs, targets) for batches that are not pairs or dictionaries.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        examples: int | None = None,
        budget: float | None = None,
        mode: str = "auto",
        every: int = 1,
        log_every: int = 10,
        consolidate: bool = False,
        limit: int | None = None,
        forward: Forward | None = None,
    ) -> None:
        self.memory = memory
        self.examples, self.budget, self.mode, self.every = examples, budget, mode, every
        self.log_every, self.consolidate, self.limit, self.forward = log_every, consolidate, limit, forward
        self._holding: TrainingSession | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to hold."""
        self._let_go(finished=False)
        if len(trainer.optimizers) != 1:
            raise LimpetError(
                f"MemoryCallback holds the parameters of one optimizer, and there are {len(trainer.optimizers)}: put "
                "all parameters that the memory holds into groups of one of them, and call memory.protect(...) by hand"
            )
        if self.memory.sharded:
            warn(
                "Lightning keeps what the first rank has, and this memory is on all of them, so its checkpoints are "
                "without it: call memory.save(path) on every rank",
                NotProtectedWarning,
            )
        examples = _length(trainer.train_dataloader) if self.examples is None else self.examples
        options = {"mode": self.mode, "every": self.every, "budget": self.budget}
        self._holding = TrainingSession(self.memory, trainer.optimizers[0], examples=examples, **options)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what the memory foretells, and the penalty as it stands beside the loss."""
        if self._holding is not None and trainer.global_step % self.log_every == 0:
            pl_module.log_dict({**self._holding.logged()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go; take the task in if asked."""
        holding = self._let_go(finished=True)
        if self.consolidate and holding is not None:
            loader: Any = trainer.train_dataloader
            self.memory.consolidate(loader, examples=holding.examples, limit=self.limit, forward=self.forward)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go."""
        self._let_go(finished=False)

    def _let_go(self, *, finished: bool) -> TrainingSession | None:
        holding, self._holding = self._holding, None
        if holding is not None:
            holding.let_go(finished=finished)
        return holding

    def state_dict(self) -> dict[str, Any]:
        """The memory's state: plain values and tensors."""
        return {} if self.memory.sharded else {**self.memory.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        if not self.memory.sharded:
            self.memory.load_state_dict({"metadata": state_dict["metadata"], "tensors": state_dict["tensors"]})


def _length(loader: Any) -> int:
    dataset = getattr(loader, "dataset", None)
    if dataset is None or not hasattr(dataset, "__len__"):
        raise LimpetError("the training set does not say how long it is: give MemoryCallback(..., examples=N)")
    return len(dataset)

"""Protect a model during training with Lightning's Trainer.

Examples:
    memory = limpet.OnlineLaplace(module.network)
    trainer = lightning.Trainer(callbacks=[MemoryCallback(memory, examples=len(data))])
    trainer.fit(module, loader)
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from limpet.errors import LimpetError, NotProtectedWarning, warn
from limpet.integrations.training_session import Summary, TrainingSession, consolidate_trained, count_examples
from limpet.methods import Memory, OutputMemory
from limpet.model import Forward


class MemoryCallback(Callback):
    """Lightning callback that protects earlier tasks during training, and logs the forecast and the penalty.

    What the protection did is logged when it ends, and kept in `callback.summary`.

    Lightning's checkpoints include the state of the memory, unless it is sharded.

    Args:
        memory: A memory of the LightningModule or of a network inside it. For two memories, such as one of the weights
            and one of the outputs (`limpet.Distillation`), pass two callbacks.
        examples: The number of examples of the new task; if the model predicts at every position, the number of
            positions predicted in one epoch. By default, `memory.count` counts it from the training data.
        budget: As in `memory.protect`.
        mode: As in `memory.protect`.
        every: As in `memory.protect`.
        log_every: Number of optimizer steps between log entries.
        consolidate: Whether to consolidate the task at the end of training, from the training dataloader.
        limit: The maximum number of examples used to estimate curvature in consolidation. Defaults to all.
        forward: A function `forward(model, batch)` that returns (outputs, targets), for batches that are not pairs or
            dictionaries. Used only to count examples and in consolidation.
    """

    def __init__(
        self,
        memory: Memory | OutputMemory,
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
        self._session: TrainingSession | None = None
        self.summary: Summary | None = None

    @property
    def state_key(self) -> str:
        """The key of this callback in checkpoints; callbacks with memories of weights and of outputs have two."""
        own = super().state_key
        return f"{own}[{self.memory.method}]" if isinstance(self.memory, OutputMemory) else own

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the protection."""
        self._end(finished=False)
        if len(trainer.optimizers) != 1:
            raise LimpetError(
                f"MemoryCallback supports one optimizer, and there are {len(trainer.optimizers)}: put all parameters "
                "that the memory protects into parameter groups of one optimizer, and call memory.protect(...) yourself"
            )
        if self.memory.sharded:
            warn(
                "Lightning saves callback state from rank 0 only, and this memory is sharded, so checkpoints will not "
                "include it: call memory.save(path) on every rank",
                NotProtectedWarning,
            )
        loader: Any = trainer.train_dataloader
        examples = count_examples(self.memory, loader, self.examples, self.forward)
        options = {"mode": self.mode, "every": self.every, "budget": self.budget, "batches": loader}
        if self.forward is not None:
            options["repair"] = {"forward": self.forward}
        self._session = TrainingSession(self.memory, trainer.optimizers[0], examples=examples, **options)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the forecast, and the penalty on the scale of the loss."""
        if self._session is not None and trainer.global_step % self.log_every == 0:
            pl_module.log_dict({**self._session.logged()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the protection, and consolidate the task if requested."""
        session = self._end(finished=True)
        if session is not None and self.summary is not None:
            for logger in trainer.loggers:
                logger.log_metrics(self.summary.metrics(), step=trainer.global_step)
        if self.consolidate and session is not None:
            loader: Any = trainer.train_dataloader
            consolidate_trained(self.memory, loader, examples=session.examples, limit=self.limit, forward=self.forward)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the protection."""
        self._end(finished=False)

    def _end(self, *, finished: bool) -> TrainingSession | None:
        session, self._session = self._session, None
        if session is not None:
            self.summary = session.let_go(finished=finished)
        return session

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the memory: plain values and tensors."""
        return {} if self.memory.sharded else {**self.memory.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the memory from a checkpoint."""
        if not self.memory.sharded:
            self.memory.load_state_dict({"metadata": state_dict["metadata"], "tensors": state_dict["tensors"]})

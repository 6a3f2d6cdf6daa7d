"""Protect or repair a model trained with transformers' Trainer or a trainer built on it (trl's SFTTrainer, ...).

Examples:
    memory = limpet.load("memory.safetensors", model)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[MemoryCallback(memory)])
    trainer.train()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from limpet.errors import LimpetError, LimpetWarning, UnsupportedError, logger, warn
from limpet.forgetting.repair import Repair
from limpet.integrations.running_trainer import resumed_folder, run_first
from limpet.integrations.training_session import (
    Summary,
    TrainingSession,
    consolidate_trained,
    count_examples,
    file_name,
)
from limpet.io.atomic import hard_link
from limpet.methods import Memory, OutputMemory, memory_file
from limpet.methods.load import load
from limpet.methods.repair import repair

MEASURED = 10_000
"""Default number of examples (or tokens) from which a repair estimates the curvature."""


class MemoryCallback(TrainerCallback):
    """Trainer callback that protects earlier tasks during training, or repairs the model afterwards.

    The forecast and the penalty are logged with the loss, also to TensorBoard, wandb and the like: when training
    begins, the callback moves to the front of the Trainer's callbacks. Every checkpoint of the Trainer includes the
    memory. `resume_from_checkpoint` restores it, from any folder, and warns if the checkpoint has none.

    What the protection did is logged when it ends, and kept in `callback.summary`.

    With `repair`, the model is trained without protection and repaired at the end. Forecast, loss and drift before and
    after the repair are appended to `trainer.state.log_history`, and the repair can be undone through
    `callback.repaired`.

    Args:
        memory: A memory, or the path of a memory file. For two memories, such as one of the weights and one of the
            outputs (`limpet.SelfRehearsal`), pass two callbacks.
        examples: The number of examples of the new task; if the model predicts at every position, the number of
            positions predicted in one epoch. By default, `memory.count` counts it from the training data.
        budget: As in `memory.protect`.
        mode: As in `memory.protect`.
        every: As in `memory.protect`.
        consolidate: Whether to consolidate the task at the end of training, and save the updated memory in the output
            directory.
        limit: The maximum number of examples or tokens used to estimate curvature, in consolidation and in repair.
        repair: Whether to repair the model at the end of training, or a dictionary of options for `limpet.repair`, such
            as `{"tolerance": 0.02}`.
        protect: Whether to protect during training. Defaults to True without `repair` and to False with it; pass True
            to do both.

    Raises:
        ValueError: If `budget` is given without protection.
    """

    def __init__(
        self,
        memory: Memory | OutputMemory | str | Path,
        *,
        examples: int | None = None,
        budget: float | None = None,
        mode: str = "auto",
        every: int = 1,
        consolidate: bool = False,
        limit: int | None = None,
        repair: bool | Mapping[str, Any] = False,
        protect: bool | None = None,
    ) -> None:
        self._memory = memory
        self.repair: Mapping[str, Any] | None = None if repair is False else {} if repair is True else repair
        self.protect = self.repair is None if protect is None else protect
        if budget is not None and not self.protect:
            raise ValueError(
                "budget= applies to protection, which is off: to repair within a budget, pass repair={'budget': ...}"
            )
        self.repaired: Repair | None = None
        self.summary: Summary | None = None
        self._training = False
        self.examples, self.budget, self.mode, self.every = examples, budget, mode, every
        self.consolidate, self.limit = consolidate, limit
        self._session: TrainingSession | None = None
        self._written: tuple[Path, Any] | None = None  # the last file and its content

    @property
    def memory(self) -> Memory | OutputMemory:
        """The memory. If it was given as a path, it is available once training has begun.

        Raises:
            LimpetError: If the memory has not been loaded yet.
        """
        if not isinstance(self._memory, Memory | OutputMemory):
            raise LimpetError("the memory is not loaded yet: it is read from its file when training begins")
        return self._memory

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Load the memory, from the checkpoint when resuming, and start the protection."""
        self.close()
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        run_first(self)
        if not isinstance(self._memory, Memory | OutputMemory):
            self._memory = load(self._memory, model)
        self._resume(resumed_folder(), args, state)
        if self.repair is not None and not isinstance(self.memory, Memory):
            raise UnsupportedError("repair= needs a memory of the weights, such as limpet.OnlineLaplace: leave it out")
        data: Any = kwargs.get("train_dataloader")
        self._count = count_examples(self.memory, data, self.examples)
        self._training = True
        if self.protect:
            options = {"mode": self.mode, "every": self.every, "budget": self.budget}
            options["batches"] = data
            self._session = TrainingSession(self.memory, optimizer, examples=self._count, **options)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the forecast (nats per old example) and the penalty (on the scale of the loss) to the logs.

        For a memory of outputs, it is the drift and the weighted divergence.
        """
        if logs is None or "loss" not in logs or self._session is None:
            return
        metrics = self._session.logged()
        logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the memory in the checkpoint folder, as a hard link if it has not changed since the last checkpoint."""
        self._write(_checkpoint(args, state) / file_name(self.memory), state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the protection; repair and consolidate if requested."""
        training, self._training = self._training, False
        protected = self._session is not None
        self.close(finished=True)
        if protected and self.summary is not None:
            state.log_history.append({**self.summary.metrics(), "step": state.global_step})
        data: Iterable[Any] = kwargs["train_dataloader"]
        if self.repair is not None and training:
            self._repair(kwargs["model"], data, state)
        if self.consolidate and training:
            consolidate_trained(self.memory, data, examples=self._count, limit=self.limit)
            self._write(_folder(args) / file_name(self.memory), state)

    def _repair(self, model: nn.Module, data: Iterable[Any], state: TrainerState) -> None:
        options = {"examples": self._count, "limit": self.limit or MEASURED, **(self.repair or {})}
        assert isinstance(self.memory, Memory)
        self.repaired = found = repair(model, self.memory, data, **options)
        before, after = found.compared()
        logged: dict[str, Any] = {"repair_strength": after.strength}
        for when, point in (("tuned", before), ("repaired", after)):
            for name in ("forecast", "loss", "drift"):
                value = getattr(point, name)
                if value is not None:
                    logged[f"{when}_{name}"] = value
        state.log_history.append({**logged, "step": state.global_step})

    def close(self, *, finished: bool = False) -> None:
        """End the protection and release the optimizer.

        The Trainer does this at the end of training. After an error in training, call it yourself.

        Args:
            finished: Whether training has completed.
        """
        session, self._session = self._session, None
        if session is not None:
            self.summary = session.let_go(finished=finished)

    def _resume(self, folder: Path | None, args: TrainingArguments, state: TrainerState) -> None:
        """Restore the memory of the checkpoint that training resumes from, which may be in another output folder."""
        if folder is None and not state.global_step:
            return
        kept = (folder or _checkpoint(args, state)) / file_name(self.memory)
        if kept.exists():
            self.memory.load_state_dict(memory_file.read(kept))
            logger.info("restored the memory from %s", kept)
            return
        warn(
            f"training resumes at step {state.global_step}, but {kept} does not exist: the memory is used as it was "
            "passed to MemoryCallback. If the earlier steps were protected, put their memory file there",
            LimpetWarning,
        )

    def _write(self, path: Path, trainer: TrainerState) -> None:
        if not self.memory.sharded and not trainer.is_world_process_zero:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.memory.sharded:  # all ranks write to the same file
            self.memory.save(path)
            return
        state = self.memory._state()
        # the tensors of a memory are never modified in place, so equal ids mean equal content
        content = state["metadata"], {name: id(tensor) for name, tensor in state["tensors"].items()}
        unchanged = self._written is not None and self._written[1] == content
        if self._written is None or not unchanged or not hard_link(self._written[0], path):
            memory_file.write(path, state)
        self._written = path, content


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return _folder(args) / f"checkpoint-{state.global_step}"


def _folder(args: TrainingArguments) -> Path:
    return Path(args.output_dir or "trainer_output")

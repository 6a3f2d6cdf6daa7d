"""Hold fast inside transformers' Trainer, and everything that is built on it (trl's SFTTrainer, ...).

memory = limpet.load("memory.safetensors", model)
trainer = Trainer(model, args, train_dataset=data, callbacks=[MemoryCallback(memory)])
trainer.train()
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from limpet.errors import LimpetError
from limpet.forgetting.repair import Repair
from limpet.integrations.training_session import TrainingSession
from limpet.io.hub import FILE
from limpet.methods import Memory, state_dict
from limpet.methods.load import load
from limpet.methods.repair import repair
from limpet.model import unwrapped
from limpet.model.batch import is_causal

IGNORED = -100
MEASURED = 10_000
"""Examples (or tokens) that a repair measures curvature on, where nobody says how many."""


class MemoryCallback(TrainerCallback):
    """Protects while the Trainer trains, logs forecast and penalty beside the loss, and goes on from its checkpoints.

    `memory` is a memory or the file of one. `examples` is N, the examples of the new task (for a language model the
    tokens that are predicted in one epoch; counted where the data set says so), `budget`, `mode` and `every` are as in
    `memory.protect`. Every checkpoint of the Trainer holds the memory too, and `resume_from_checkpoint` goes on with
    it. With `consolidate=True` the task is taken in at the end (of at most `limit` examples or tokens), and the memory
    that knows it is written beside the model.

    With `repair=True` (or a dictionary of options of `limpet.repair`, such as {"tolerance": 0.02}) training goes as
    usual, with nothing that protects, and is repaired at its end; forecast, loss and drift before and after go into
    `trainer.state.log_history`, and `callback.repaired` can undo it. `protect=True` asks for both.
    """

    def __init__(
        self,
        memory: Memory | str | Path,
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
            raise ValueError("budget= is for protection; for a repair within one give repair={'budget': ...}")
        self.repaired: Repair | None = None
        self._training = False
        self.examples, self.budget, self.mode, self.every = examples, budget, mode, every
        self.consolidate, self.limit = consolidate, limit
        self._holding: TrainingSession | None = None
        self._written: tuple[Path, Any] | None = None  # the last file, and what is in it

    @property
    def memory(self) -> Memory:
        """The memory, once training has begun."""
        if not isinstance(self._memory, Memory):
            raise LimpetError("the memory is read from its file when training begins")
        return self._memory

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to hold, from where a checkpoint stopped."""
        self.close()
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if not isinstance(self._memory, Memory):
            self._memory = load(self._memory, model)
        kept = _checkpoint(args, state) / FILE
        if state.global_step and kept.exists():
            self.memory.load_state_dict(state_dict.read(kept))
        self._count = predicted(model, kwargs["train_dataloader"]) if self.examples is None else self.examples
        self._training = True
        if self.protect:
            options = {"mode": self.mode, "every": self.every, "budget": self.budget}
            self._holding = TrainingSession(self.memory, optimizer, examples=self._count, **options)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Put forecast (nats per old example) and penalty (as it stands beside the loss) into the log."""
        if logs is None or "loss" not in logs or self._holding is None:
            return
        found = self._holding.logged()
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the memory into the checkpoint's folder; one that has not changed is linked, not written again."""
        self._write(_checkpoint(args, state) / FILE, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let go; repair, and take the task in, if asked."""
        training, self._training = self._training, False
        self.close(finished=True)
        data: Iterable[Any] = kwargs["train_dataloader"]
        if self.repair is not None and training:
            self._repair(kwargs["model"], data, state)
        if self.consolidate and training:
            self.memory.consolidate(data, examples=self._count, limit=self.limit)
            self._write(_folder(args) / FILE, state)

    def _repair(self, model: nn.Module, data: Iterable[Any], state: TrainerState) -> None:
        options = {"examples": self._count, "limit": self.limit or MEASURED, **(self.repair or {})}
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
        """Let the optimizer go. The Trainer does it at its end; after an error it is yours to do."""
        holding, self._holding = self._holding, None
        if holding is not None:
            holding.let_go(finished=finished)

    def _write(self, path: Path, trainer: TrainerState) -> None:
        if not self.memory.sharded and not trainer.is_world_process_zero:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.memory.sharded:  # one file, written by all ranks together
            self.memory.save(path)
            return
        state = self.memory.state_dict()
        # a memory's tensors never change, so the same ones hold the same
        content = state["metadata"], {name: id(tensor) for name, tensor in state["tensors"].items()}
        if self._written is not None and self._written[1] == content and self._written[0].exists():
            path.unlink(missing_ok=True)
            os.link(self._written[0], path)
        else:
            state_dict.write(path, state)
        self._written = path, content


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return _folder(args) / f"checkpoint-{state.global_step}"


def _folder(args: TrainingArguments) -> Path:
    return Path(args.output_dir or "trainer_output")


def predicted(model: nn.Module, loader: Any) -> int:
    """The examples of a loader's data set, or the tokens that a causal language model predicts in them."""
    data = loader.dataset
    if not hasattr(data, "__len__"):
        raise LimpetError("the data set does not say how long it is: give MemoryCallback(..., examples=N)")
    if not is_causal(unwrapped(model)):
        return len(data)
    return max(sum(_next_tokens(data[i]) for i in range(len(data))), 1)


def _next_tokens(row: Any) -> int:
    """The tokens of a row that are predicted: all but the first, and but those that are masked."""
    for name in ("labels", "completion_mask", "assistant_masks"):
        if row.get(name) is not None:
            return sum(int(value != IGNORED if name == "labels" else value) for value in row[name][1:])
    if "input_ids" not in row:
        raise LimpetError("rows without input_ids cannot be counted: give MemoryCallback(..., examples=N)")
    return len(row["input_ids"]) - 1

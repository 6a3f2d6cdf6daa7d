"""Find the Trainer that is calling a callback.

A `TrainerCallback` receives arguments, state, model and optimizer, but neither the list of callbacks that it is part of
nor the checkpoint that training resumes from. Both are on the call stack: the callback is called by a
`CallbackHandler`, which is called by a method of the Trainer with an argument `resume_from_checkpoint`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler

RESUME = "resume_from_checkpoint"


def run_first(callback: TrainerCallback) -> None:
    """Move a callback to the front of the Trainer that is calling it.

    The Trainer calls its reporting callbacks (TensorBoard, wandb, ...) before those of the user, and each of them
    reports the logs as they are when it is called. Only what an earlier callback has added is reported.

    Args:
        callback: The callback that is being called. Nothing happens if it is not called by a Trainer.
    """
    for names in _calling_frames():
        handler: Any = names.get("self")
        if isinstance(handler, CallbackHandler):
            # a new list: the handler is iterating over the old one
            handler.callbacks = [callback, *(other for other in handler.callbacks if other is not callback)]
            return


def resumed_folder() -> Path | None:
    """Return the checkpoint that the Trainer which is calling a callback resumes from.

    Returns:
        The folder, or None if training starts from the beginning or no Trainer is calling.
    """
    for names in _calling_frames():
        if isinstance(names.get("self"), Trainer) and RESUME in names:
            folder = names[RESUME]
            return Path(folder) if isinstance(folder, str | Path) else None
    return None


def _calling_frames() -> Iterator[dict[str, Any]]:
    """The local variables of the calling functions, from the innermost to the outermost."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back

"""A memory from its state: what `limpet.load` makes of a file, and how a memory is taken to another copy of a model."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from limpet.errors import LimpetWarning
from limpet.likelihoods import Likelihood, from_description
from limpet.methods import METHODS, Memory

if TYPE_CHECKING:
    from limpet.io.state import State

ARGUMENTS = {"max_side": "max_factor_size", "at_rest": "storage_dtype"}
"""Settings that a file has under other names than the arguments of a memory."""


def restored(state: State, model: nn.Module, likelihood: Likelihood | None = None) -> Memory:
    """The memory that has this state, for a model built as the one that it was made for.

    Args:
        state: What `memory.state_dict()` gave.
        model: The model.
        likelihood: A likelihood of your own, which no state describes.

    Returns:
        A memory of the same method and settings. It shares the state's tensors, which never change.

    Raises:
        MemoryFileError: Where the state is damaged, or was made for another model.
    """
    from limpet.methods import state_dict

    content = state_dict.Content.of(state)
    settings: dict[str, Any] = content.metadata["settings"]
    with state_dict.rejecting_damage(), warnings.catch_warnings():
        warnings.simplefilter("ignore", LimpetWarning)  # said when the memory was made
        kind = METHODS[state_dict.Settings(content).choice("method", METHODS)]
        settings = {ARGUMENTS.get(name, name): value for name, value in settings.items()}
        wanted = inspect.signature(kind.__init__).parameters.keys() & settings.keys()
        options = {name: settings[name] for name in wanted if name != "likelihood"}
        if "likelihood" in wanted:
            options["likelihood"] = likelihood or from_description(settings["likelihood"])
        memory = kind(model, **options)
        memory.load_state_dict(state)
    return memory

"""Build a memory from a state dict: for `limpet.load`, and to move a memory to another copy of its model."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from limpet.errors import LimpetWarning
from limpet.likelihoods import Likelihood, from_description
from limpet.methods import METHODS, OUTPUT_METHODS, Memory, OutputMemory

if TYPE_CHECKING:
    from limpet.io.state import State

ARGUMENTS = {"max_side": "max_factor_size", "at_rest": "storage_dtype"}
"""Settings whose names in files differ from the constructor arguments."""


def restored(state: State, model: nn.Module, likelihood: Likelihood | None = None) -> Memory | OutputMemory:
    """Build the memory that a state dict describes.

    Args:
        state: A state returned by `memory.state_dict()`.
        model: A model with the same architecture as the one the memory was made for.
        likelihood: The likelihood, required if the memory was made with a custom one.

    Returns:
        A memory of the same method and settings. It shares the state's tensors, which are never modified in place.

    Raises:
        MemoryFileError: If the state is corrupted, or was made for another model.
    """
    from limpet.methods import state_header

    content = state_header.Content.of(state)
    settings: dict[str, Any] = content.metadata["settings"]
    with state_header.rejecting_damage(), warnings.catch_warnings():
        warnings.simplefilter("ignore", LimpetWarning)  # they were issued when the memory was created
        kinds: dict[str, type[Memory] | type[OutputMemory]] = {**METHODS, **OUTPUT_METHODS}
        kind = kinds[state_header.Settings(content).choice("method", kinds)]
        settings = {ARGUMENTS.get(name, name): value for name, value in settings.items()}
        wanted = inspect.signature(kind.__init__).parameters.keys() & settings.keys()
        options = {name: settings[name] for name in wanted if name != "likelihood"}
        if "likelihood" in wanted:
            options["likelihood"] = likelihood or from_description(settings["likelihood"])
        memory = kind(model, **options)
        memory.load_state_dict(state)
    return memory

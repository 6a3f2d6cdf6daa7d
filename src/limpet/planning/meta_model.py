"""Build models on the meta device, without loading or allocating any weights."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from limpet.errors import LimpetError
from limpet.io.hub import load_error


def blueprint(name: str) -> nn.Module:
    """Build a model on the meta device.

    A factory is imported (the working directory is searched, too) and called without arguments. For a folder or a name
    on the Hub, only the configuration is read, and remote code is not executed. The model is of the first class in the
    configuration's `architectures`, or a causal language model if it lists none.

    Args:
        name: "package.module:factory", a folder with a config.json, or the name of a model on the Hub.

    Returns:
        The model.

    Raises:
        LimpetError: If the factory cannot be imported or called, the configuration cannot be read, or transformers is
            needed and not installed.

    Examples:
        >>> sum(parameter.numel() for parameter in blueprint("torch.nn:Identity").parameters())
        0
    """
    module, colon, factory = name.partition(":")
    if colon and not Path(name).exists():
        return _called(name, module, factory)
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as missing:
        raise LimpetError(
            f"reading {name} requires {missing.name}: pip install 'limpet[transformers]', or pass "
            "package.module:factory"
        ) from missing
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise load_error(name, error, "has no readable configuration") from error
    return _configured(name, config, transformers)


def _configured(name: str, config: Any, transformers: Any) -> nn.Module:
    """Build the model of the class that the configuration was saved by, on the meta device."""
    listed = next(iter(getattr(config, "architectures", None) or ()), None)
    kind = getattr(transformers, listed, None) if listed else None
    if listed and not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise LimpetError(
            f"{name} is a {listed}, which transformers {transformers.__version__} does not have: install a version "
            "that has it, or pass package.module:factory"
        )
    try:
        with torch.device("meta"):
            if kind is None:
                model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            else:
                model = kind._from_config(config)  # as the Auto classes do, in the dtype of the configuration
    except (OSError, ValueError) as error:
        raise load_error(name, error, "is not a model that can be built from its configuration") from error
    return model


def _called(name: str, module: str, factory: str) -> nn.Module:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
        for part in factory.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise LimpetError(f"{name} cannot be imported: {error}") from error
    finally:
        sys.path.remove(here)
    try:
        with torch.device("meta"):
            model = found()
    except Exception as error:  # the factory is user code and may raise anything
        raise LimpetError(f"{name}() failed on the meta device: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise LimpetError(f"{name}() returned a {type(model).__name__}, not a torch.nn.Module")
    return model

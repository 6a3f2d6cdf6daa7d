"""Build models on the meta device, without loading or allocating any weights."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from limpet.errors import LimpetError


def blueprint(name: str) -> nn.Module:
    """Build a model on the meta device.

    A factory is imported (the working directory is searched, too) and called without arguments. For a folder or a name
    on the Hub, only the configuration is read, and remote code is not executed.

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
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise LimpetError(f"{name} is not a causal language model with a readable configuration: {reason}") from error
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

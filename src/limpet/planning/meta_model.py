"""A model on the meta device: every shape, and not one weight read or allocated."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from limpet.errors import LimpetError


def blueprint(name: str) -> nn.Module:
    """The model of that name: "package.module:factory", a folder with a config.json, or a name on the hub.

    A factory is imported (from the working directory too) and called without arguments. Of a folder or a name on the
    hub only the configuration is read, and no code that comes with it is run.

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
            f"{name} is read by {missing.name}: pip install 'limpet[transformers]', or give package.module:factory"
        ) from missing
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError) as error:
        told = str(error).strip().splitlines()[0]
        raise LimpetError(f"{name} is no causal language model whose configuration could be read: {told}") from error
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
    except Exception as error:  # the factory is the user's, and so is what it raises
        raise LimpetError(f"{name}() failed on the meta device: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise LimpetError(f"{name}() gave a {type(model).__name__}, not a torch.nn.Module")
    return model

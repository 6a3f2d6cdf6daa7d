"""Load and save fine-tuned language models: transformers checkpoints and peft adapters, through one interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from limpet.errors import LimpetError
from limpet.io.hub import load_error, unreachable

ADAPTER = "adapter_config.json"


def read_base(name: str, dtype: str = "float32", device: str | None = None) -> Any:
    """Load a causal language model.

    Args:
        name: A folder, or the name of a model on the Hub.
        dtype: The name of the dtype to load it in.
        device: The device to load it on. Defaults to a GPU if one is available.

    Returns:
        The model.

    Raises:
        LimpetError: If `name` is not a causal language model that can be loaded, or has another kind of head.
    """
    auto: Any = transformers.AutoModelForCausalLM
    try:
        model, loaded = auto.from_pretrained(name, dtype=getattr(torch, dtype), output_loading_info=True)
    except (OSError, ValueError) as error:
        raise load_error(name, error, "is not a causal language model that can be loaded") from error
    missing = sorted(loaded["missing_keys"])
    if missing:
        made_for = " or ".join(getattr(model.config, "architectures", None) or ["another class"])
        raise LimpetError(
            f"{name} is not a causal language model: it was saved as {made_for}, and {len(missing)} parameters of "
            f"{type(model).__name__} are missing (such as {missing[0]})"
        )
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def read_tokenizer(*names: str) -> Any:
    """Load the tokenizer of the first model that has one.

    Args:
        *names: Folders, or names of models on the Hub.

    Returns:
        The tokenizer.

    Raises:
        LimpetError: If none of them has a tokenizer, or the Hub cannot be reached to look for it.
    """
    found = next((one for one in map(_tokenizer, names) if one is not None), None)
    if found is None:
        raise LimpetError(f"no tokenizer found in {' or '.join(names)}: save it there with tokenizer.save_pretrained()")
    return found


def _tokenizer(name: str) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        if unreachable(error) is not None:
            raise load_error(name, error, "has no tokenizer") from error
        return None


def read_tuned(base: str, tuned: Path, dtype: str = "float32", device: str | None = None) -> Any:
    """Load a fine-tuned model: the base model with a peft adapter, or a full checkpoint.

    Args:
        base: The base model, as a folder or a name on the Hub. Used only with an adapter.
        tuned: A folder with a peft adapter or a transformers checkpoint.
        dtype: The name of the dtype to load it in.
        device: The device to load it on. Defaults to a GPU if one is available.

    Returns:
        The model; with an adapter, a `peft.PeftModel`.

    Raises:
        LimpetError: If `tuned` is not a folder, does not fit the base model, or needs peft, which is not installed.
    """
    if not tuned.is_dir():
        raise LimpetError(f"{tuned} is not a folder: pass the folder of an adapter or a checkpoint")
    if not (tuned / ADAPTER).exists():
        return read_base(str(tuned), dtype, device)
    try:
        import peft
    except ImportError as missing:
        raise LimpetError("adapters require peft: pip install 'limpet[transformers]'") from missing
    model = read_base(base, dtype, device)
    try:
        return peft.PeftModel.from_pretrained(model, str(tuned))
    except (OSError, ValueError, RuntimeError) as error:
        raise LimpetError(f"{tuned} does not contain an adapter for {base}: {_first_line(error)}") from error


def write_tuned(model: Any, out: Path, like: Path) -> None:
    """Save a model loaded by `read_tuned` in the same form: adapter or checkpoint, in the dtype of the original file.

    Args:
        model: The model.
        out: The folder to write to.
        like: The folder it was loaded from. Its tokenizer, if it has one, is copied.
    """
    dtype = _dtype(like)
    if dtype is not None:
        for name, parameter in model.named_parameters():
            if "lora_" in name or not (like / ADAPTER).exists():
                parameter.data = parameter.data.to(dtype)
    model.save_pretrained(out)
    tokenizer = _tokenizer(str(like))  # adapters are often saved without one
    if tokenizer is not None:
        tokenizer.save_pretrained(out)


def _dtype(folder: Path) -> torch.dtype | None:
    """The dtype of the first floating-point tensor in a folder's safetensors files, or None if there is none."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found: torch.dtype = file.get_tensor(name).dtype
                if found.is_floating_point:
                    return found
    return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)

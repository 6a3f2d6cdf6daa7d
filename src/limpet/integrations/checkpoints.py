"""Fine-tuned language models as folders: transformers' checkpoints and peft's adapters, read and written alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from limpet.errors import LimpetError

ADAPTER = "adapter_config.json"


def read_base(name: str, dtype: str = "float32", device: str | None = None) -> Any:
    """A causal language model.

    Args:
        name: A folder, or its name on the hub.
        dtype: What it computes in.
        device: Where it runs; by default a GPU if there is one.

    Returns:
        The model.

    Raises:
        LimpetError: Where there is none.
    """
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise LimpetError(f"{name} is not a causal language model that can be read: {_first_line(error)}") from error
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def read_tokenizer(*names: str) -> Any:
    """The tokenizer of the first of these that has one."""
    found = next((one for one in map(_tokenizer, names) if one is not None), None)
    if found is None:
        raise LimpetError(f"there is no tokenizer in {' or '.join(names)}")
    return found


def _tokenizer(name: str) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None


def read_tuned(base: str, tuned: Path, dtype: str = "float32", device: str | None = None) -> Any:
    """A fine-tuned model: the base with its adapter, or a checkpoint of its own.

    Args:
        base: The model that was fine-tuned, a folder or a name on the hub.
        tuned: A folder with an adapter of peft or with a checkpoint of transformers.
        dtype: What it computes in.
        device: Where it runs.

    Returns:
        The model; with an adapter, peft's model around it.
    """
    if not tuned.is_dir():
        raise LimpetError(f"{tuned} is not a folder: give that of an adapter or of a checkpoint")
    if not (tuned / ADAPTER).exists():
        return read_base(str(tuned), dtype, device)
    try:
        import peft
    except ImportError as missing:
        raise LimpetError("adapters need peft: pip install 'limpet[transformers]'") from missing
    model = read_base(base, dtype, device)
    try:
        return peft.PeftModel.from_pretrained(model, str(tuned))
    except (OSError, ValueError, RuntimeError) as error:
        raise LimpetError(f"{tuned} holds no adapter that fits {base}: {_first_line(error)}") from error


def write_tuned(model: Any, out: Path, like: Path) -> None:
    """Write a model as it was read by `read_tuned`: adapter or checkpoint, in the dtype of the file.

    Args:
        model: The model.
        out: The folder to write.
        like: The folder that it was read from, whose tokenizer goes along.
    """
    dtype = _dtype(like)
    if dtype is not None:
        for name, parameter in model.named_parameters():
            if "lora_" in name or not (like / ADAPTER).exists():
                parameter.data = parameter.data.to(dtype)
    model.save_pretrained(out)
    tokenizer = _tokenizer(str(like))  # adapters are often kept without one
    if tokenizer is not None:
        tokenizer.save_pretrained(out)


def _dtype(folder: Path) -> torch.dtype | None:
    """The dtype of the floating-point tensors in a folder's first safetensors file; None where there is none."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found: torch.dtype = file.get_tensor(name).dtype
                if found.is_floating_point:
                    return found
    return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)

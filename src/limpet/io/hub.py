"""Memories beside models on the Hugging Face hub: a file `memory.safetensors`, and a section of the model card."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from limpet.errors import LimpetError

FILE = "memory.safetensors"
NAME = re.compile(r"[\w.-]+/[\w.-]+")


def local_file(path: str | Path, *, revision: str | None = None) -> Path:
    """The file of a memory: a file, a folder that has one, or (downloaded) that of a model on the hub."""
    found = Path(path)
    if found.is_dir():
        return found / FILE
    if found.exists() or found.suffix == ".safetensors" or not NAME.fullmatch(str(path)):
        return found
    return Path(_hub().hf_hub_download(str(path), FILE, revision=revision))


def upload(path: str | Path, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
    """Upload a memory file to a repository on the hub.

    Args:
        path: The file that `memory.save` wrote.
        repo_id: The repository, as "user/model". It is created if it does not exist.
        private: Whether a new repository is private. Defaults to the organization's setting.
        token: A token of the hub. Defaults to the one that is logged in.

    Returns:
        The URL of the commit.
    """
    api = _hub().HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    return str(api.upload_file(path_or_fileobj=str(path), path_in_repo=FILE, repo_id=repo_id))


def model_card(examples: int, model: str, data: str) -> str:
    """A section for the model card of a model that is published with its memory."""
    return f"""## Fine-tune without forgetting

`{FILE}` is a memory of this model, made by limpet (`pip install limpet`) from {examples:,} tokens of {data}: a
Gaussian over the weights that says which changes would hurt what the model knows. Training that holds fast to it, with
LoRA or without:

```python
import limpet
from limpet.integrations.transformers import MemoryCallback

memory = limpet.load("{model}", model)  # before or after get_peft_model(model, ...)
trainer = Trainer(model, args, train_dataset=data, callbacks=[MemoryCallback(memory)])
```

A fine-tune that was made without it can be repaired afterwards, `limpet.repair(model, memory, batches)`.

`memory.forecast()` estimates how much of the old loss has been given up, in nats per token;
`MemoryCallback(memory, budget=0.05)` holds just hard enough to keep that estimate within 0.05.
"""


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as missing:
        raise LimpetError("the hub needs huggingface_hub: pip install 'limpet[transformers]'") from missing
    return huggingface_hub

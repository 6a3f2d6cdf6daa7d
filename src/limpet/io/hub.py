"""Share memories on the Hugging Face Hub: `memory.safetensors` next to the model, and a section for its model card."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from limpet.errors import LimpetError

FILE = "memory.safetensors"
NAME = re.compile(r"[\w.-]+/[\w.-]+")


def local_file(path: str | Path, *, revision: str | None = None) -> Path:
    """Locate the file of a memory, downloading it from the Hub if necessary.

    Args:
        path: A memory file, a folder that contains `memory.safetensors`, or the name of a model on the Hub.
        revision: The branch, tag or commit on the Hub. Ignored for local files.

    Returns:
        The path of the local file. It is not checked whether a local file exists.

    Raises:
        LimpetError: If `path` is a name on the Hub and huggingface_hub is not installed.
    """
    found = Path(path)
    if found.is_dir():
        return found / FILE
    if found.exists() or found.suffix == ".safetensors" or not NAME.fullmatch(str(path)):
        return found
    return Path(_hub().hf_hub_download(str(path), FILE, revision=revision))


def upload(path: str | Path, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
    """Upload a memory file to a repository on the Hugging Face Hub.

    Args:
        path: The file that `memory.save` wrote.
        repo_id: The repository, as "user/model". It is created if it does not exist.
        private: Whether a new repository is private. Defaults to the organization's setting.
        token: An access token for the Hub. Defaults to the token of the logged-in user.

    Returns:
        The URL of the commit.

    Raises:
        LimpetError: If huggingface_hub is not installed.
    """
    api = _hub().HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    return str(api.upload_file(path_or_fileobj=str(path), path_in_repo=FILE, repo_id=repo_id))


def model_card(examples: int, model: str, data: str) -> str:
    """Write a model card section for a model that is published with its memory.

    Args:
        examples: The number of tokens the memory was computed from.
        model: The name of the model on the Hub.
        data: A description of the text the tokens come from.

    Returns:
        The section, as Markdown.
    """
    return f"""## Fine-tune without forgetting

`{FILE}` is a memory of this model, computed by limpet (`pip install limpet`) from {examples:,} tokens of {data}: a
Gaussian over the weights that shows which changes would harm what the model knows. To protect the model during
fine-tuning, with or without LoRA:

```python
import limpet
from limpet.integrations.transformers import MemoryCallback

memory = limpet.load("{model}", model)  # before or after get_peft_model(model, ...)
trainer = Trainer(model, args, train_dataset=data, callbacks=[MemoryCallback(memory)])
```

A model that was fine-tuned without protection can be repaired afterwards: `limpet.repair(model, memory, batches)`.

`memory.forecast()` estimates how much the loss on the old data has increased, in nats per token;
`MemoryCallback(memory, budget=0.05)` protects just enough to keep this estimate within 0.05.
"""


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as missing:
        raise LimpetError("access to the Hub requires huggingface_hub: pip install 'limpet[transformers]'") from missing
    return huggingface_hub

"""Share memories on the Hugging Face Hub: `memory.safetensors` next to the model, and a section for its model card."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from limpet.errors import LimpetError, MemoryFileError

FILE = "memory.safetensors"
PREFIX = "hub://"
NAME = re.compile(r"[\w.-]+/[\w.-]+")
UNREACHABLE = ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout", "ReadTimeout")
"""Classes of huggingface_hub and its HTTP client that are raised without a connection, besides Python's own."""


def local_file(path: str | Path, *, revision: str | None = None) -> Path:
    """Locate the file of a memory, downloading it from the Hub if asked to.

    Only names with the prefix "hub://" are looked up on the network. A name such as "user/model" may as well be a path
    that does not exist here. It is found if it was downloaded before, with a DeprecationWarning.

    Args:
        path: A memory file, a folder that contains `memory.safetensors`, or "hub://user/model".
        revision: The branch, tag or commit on the Hub.

    Returns:
        The path of the local file. It is not checked whether a local file exists.

    Raises:
        LimpetError: If the memory cannot be downloaded, or huggingface_hub is not installed.
        MemoryFileError: If nothing has this name here, and it could be that of a model on the Hub.
        ValueError: If `revision` is given for a local file, or "hub://" is not followed by "user/model".
    """
    if str(path).startswith(PREFIX):
        return _download(str(path).removeprefix(PREFIX), revision)
    if revision is not None:
        raise ValueError(f"revision= applies to names on the Hub only, such as {PREFIX}user/model, not to {path}")
    found = Path(path)
    if found.is_dir():
        return found / FILE
    if found.exists() or found.suffix == ".safetensors" or not NAME.fullmatch(str(path)):
        return found
    return _downloaded_before(str(path))


def _download(name: str, revision: str | None) -> Path:
    """Download the memory of a model on the Hub, or find it in the cache."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{PREFIX}{name} is not a name on the Hub: write {PREFIX}user/model")
    hub = _hub()
    try:
        return Path(hub.hf_hub_download(name, FILE, revision=revision))
    except (OSError, ValueError) as error:
        raise load_error(f"{PREFIX}{name}", error, f"is not a model on the Hub with a {FILE}") from error


def _downloaded_before(name: str) -> Path:
    """Find the memory of a model in the cache of huggingface_hub, without the network."""
    advice = f"there is no file or folder {name}: check the path, or write {PREFIX}{name} for a model on the Hub"
    try:
        found = Path(_hub().hf_hub_download(name, FILE, local_files_only=True))
    except (OSError, ValueError, LimpetError) as error:
        raise MemoryFileError(advice) from error
    warnings.warn(
        f"{name} is not a local path, but a model on the Hub that was downloaded before. Names without {PREFIX} are "
        f"deprecated: write {PREFIX}{name}",
        DeprecationWarning,
        stacklevel=5,  # the caller of limpet.load
    )
    return found


def load_error(name: str, error: Exception, otherwise: str) -> LimpetError:
    """Describe why something could not be loaded from the Hub.

    Args:
        name: The name on the Hub, or the path, that was asked for.
        error: The error that huggingface_hub, transformers or datasets raised.
        otherwise: What is wrong with `name` if the Hub could be reached, such as "is not a causal language model".

    Returns:
        An error that names the actual cause.
    """
    reason = unreachable(error)
    if reason is None:
        return LimpetError(f"{name} {otherwise}: {_first_line(error)}")
    if name.startswith(PREFIX):
        return LimpetError(
            f"the Hub cannot be reached to look for {name} ({reason}): check the connection and HF_HUB_OFFLINE"
        )
    return LimpetError(
        f"{name} is not a local path, and the Hub cannot be reached to look for it ({reason}): check the name, the "
        "connection and HF_HUB_OFFLINE"
    )


def unreachable(error: Exception) -> str | None:
    """Return why the Hub could not be reached, or None if that is not the cause of an error.

    Args:
        error: The error that huggingface_hub, transformers or datasets raised.

    Returns:
        The first line of the error at the end of the chain of causes, such as "Connection refused".
    """
    chain = [error, *_causes(error)]
    failed = any(isinstance(one, ConnectionError | TimeoutError) or type(one).__name__ in UNREACHABLE for one in chain)
    return _first_line(chain[-1]) if failed else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    found = error.__cause__ or error.__context__
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


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
        LimpetError: If the file cannot be uploaded, or huggingface_hub is not installed.
    """
    api = _hub().HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.upload_file(path_or_fileobj=str(path), path_in_repo=FILE, repo_id=repo_id))
    except Exception as error:  # of huggingface_hub, or of the HTTP client that it uses
        reason = unreachable(error)
        why = f"the Hub cannot be reached ({reason})" if reason is not None else _first_line(error)
        raise LimpetError(
            f"{path} could not be uploaded to {repo_id}: {why}. Check the name, the connection and `hf auth whoami`, "
            f"then upload it with `hf upload {repo_id} {path} {FILE}`"
        ) from error


def model_card(examples: int, model: str, data: str | None = None, *, sha256: str | None = None) -> str:
    """Write a model card section for a model that is published with its memory.

    Args:
        examples: The number of tokens the memory was computed from.
        model: The name of the model on the Hub.
        data: A description of the text the tokens come from, if it may be published.
        sha256: The SHA-256 of the file, if it is known.

    Returns:
        The section, as Markdown.
    """
    source = "" if data is None else f" of {data}"
    checked = "" if sha256 is None else f', sha256="{sha256}"'
    name = f"{PREFIX}{model}" if NAME.fullmatch(model) and not Path(model).exists() else model
    return f"""## Fine-tune without forgetting

`{FILE}` is a memory of this model, computed by limpet (`pip install limpet`) from {examples:,} tokens{source}: a
Gaussian over the weights that shows which changes would harm what the model knows. To protect the model during
fine-tuning, with or without LoRA, quantized or not:

```python
import limpet
from limpet.integrations.transformers import MemoryCallback

memory = limpet.load("{name}", model{checked})  # before or after get_peft_model(model, ...)
trainer = Trainer(model, args, train_dataset=data, callbacks=[MemoryCallback(memory)])
```

A model that was fine-tuned without protection can be repaired afterwards: `limpet.repair(model, memory, batches)`.

`memory.drift()` measures how far its predictions have moved, in nats per token, if the file contains a probe.
"""


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as missing:
        raise LimpetError("access to the Hub requires huggingface_hub: pip install 'limpet[transformers]'") from missing
    return huggingface_hub

"""Bring a memory back from its file."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from limpet.likelihoods import Likelihood
from limpet.methods import Memory
from limpet.methods.restore import restored


def load(path: str | Path, model: nn.Module, *, likelihood: Likelihood | None = None) -> Memory:
    """The memory that `memory.save(path)` kept, for the same model. A likelihood of your own has to be given again.

    `path` is a file, a folder with a memory.safetensors in it, a checkpoint of torch.distributed.checkpoint, or the
    name of a model on the Hugging Face hub that is published with its memory, such as "user/model". Where the model
    lies on many ranks in pieces, every rank reads the blocks that it is to keep.

    >>> import tempfile, torch, limpet
    >>> model = torch.nn.Linear(3, 2)
    >>> memory = limpet.OnlineLaplace(model)
    >>> memory.consolidate([(torch.randn(20, 3), torch.randint(0, 2, (20,)))])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     memory.save(f"{folder}/memory.safetensors")
    ...     again = limpet.load(f"{folder}/memory.safetensors", model)
    >>> again
    <OnlineLaplace structure='kronecker' strength=1 tasks=1 examples=20 bytes=168>
    """
    from limpet.io import dcp
    from limpet.io.hub import FILE, local_file
    from limpet.methods import state_dict

    has_file = (Path(path) / FILE).is_file()
    state = dcp.read(path) if dcp.is_checkpoint(path) and not has_file else state_dict.read(local_file(path))
    return restored(state, model, likelihood)

"""Load a memory from a file, a checkpoint or the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from limpet.likelihoods import Likelihood
from limpet.methods import Memory
from limpet.methods.restore import restored


def load(path: str | Path, model: nn.Module, *, likelihood: Likelihood | None = None) -> Memory:
    """Load a memory that `memory.save` wrote.

    If the model is sharded (`fully_shard`), every rank reads only the blocks that it owns.

    Args:
        path: A file, a folder that contains a `memory.safetensors`, a `torch.distributed.checkpoint` folder, or the
            name of a model on the Hugging Face hub that is published with its memory, such as "user/model".
        model: A model with the same architecture as the one the memory was made for.
        likelihood: The likelihood, required if the memory was made with a custom one, which files cannot describe.

    Returns:
        A memory of the same method, with the same settings.

    Raises:
        MemoryFileError: If the file is not a limpet memory, is corrupted, or was made for another model.

    Examples:
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

"""Load a memory from a file, a checkpoint or the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from limpet.distributed import current, is_sharded, reshard, together
from limpet.errors import LimpetWarning, MemoryFileError, logger, warn
from limpet.likelihoods import Likelihood
from limpet.methods import Memory, OutputMemory
from limpet.methods.restore import restored
from limpet.posterior.sharding import reject_quantized_and_sharded

if TYPE_CHECKING:
    from limpet.io.state import State

UNRELATED = 0.2
"""Cosine similarity between weights and mean below which `load` warns. Measured on small MLPs and convolutions:
another initialization or another training on the same data has at most 0.07, fine-tuning on a random task at a distance
of up to 1.5 times the norm of the mean has at least 0.4. The distance itself does not tell them apart."""


def load(
    path: str | Path,
    model: nn.Module,
    *,
    likelihood: Likelihood | None = None,
    revision: str | None = None,
    sha256: str | None = None,
    base: nn.Module | Callable[[], nn.Module] | None = None,
) -> Memory | OutputMemory:
    """Load a memory that `memory.save` wrote.

    If the model is sharded (`fully_shard`), every rank reads only the blocks that it owns.

    The model should have the weights that the memory was made at, or weights fine-tuned from them. A warning with the
    relative distance |w - mean| / |mean| is issued if the weights seem unrelated to the mean, which is if their cosine
    similarity is below 0.2 in the blocks that hold most of the weights.

    Args:
        path: A file, a folder that contains a `memory.safetensors`, a `torch.distributed.checkpoint` folder, or
            "hub://user/model" for a model on the Hugging Face Hub that is published with its memory. Only names with
            "hub://" are looked up on the network.
        model: A model with the same architecture as the one the memory was made for.
        likelihood: The likelihood, required if the memory was made with a custom one, which files cannot describe.
        revision: The branch, tag or commit on the Hub. Defaults to the main branch.
        sha256: The SHA-256 of the file, as `limpet inspect` prints it. Any other file is rejected before its content is
            used.
        base: The published model, or a function that loads it, if `model` was fine-tuned from it and the file names its
            weights instead of containing them (`memory.save(base=)`). A function is called only in that case.

    Returns:
        A memory of the same method, with the same settings.

    Raises:
        MemoryFileError: If the file is not a limpet memory, is corrupted, was made for another model, or has another
            SHA-256.
        LimpetError: If the memory cannot be downloaded from the Hub.
        ValueError: If `revision` is given for a local path, or `sha256` for a folder of torch.distributed or in another
            form than 64 hexadecimal digits.

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
    from limpet.methods.base_weights import names_its_base
    from limpet.methods.state_header import rejecting_damage

    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise ValueError(f"sha256 must consist of 64 hexadecimal digits, not {sha256!r}")
    reshard(model)
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    if sharded:
        reject_quantized_and_sharded(model)
    with together("load", current() if sharded else None):
        try:
            state = _read(path, revision, sha256)
        except OSError as error:
            raise MemoryFileError(f"{path} cannot be read: {error.strerror}") from error
        with rejecting_damage():
            named = names_its_base(state)
        if base is not None and named:
            published = restored(state, base if isinstance(base, nn.Module) else base(), likelihood)
            assert isinstance(published, Memory)
            state = published._state()
        memory = restored(state, model, likelihood)
        if isinstance(memory, Memory):
            _warn_if_unrelated(memory)
    logger.info("loaded the memory of %d tasks from %s", memory.tasks, path)
    return memory


def _read(path: str | Path, revision: str | None, sha256: str | None) -> State:
    """Read the state of a memory from a file, a checkpoint or the Hub."""
    from limpet.io import dcp
    from limpet.io.hub import FILE, local_file
    from limpet.methods import memory_file

    if not dcp.is_checkpoint(path) or (Path(path) / FILE).is_file():
        return memory_file.read(local_file(path, revision=revision), sha256=sha256)
    if sha256 is not None or revision is not None:
        raise ValueError(f"sha256= and revision= do not apply to {path}, a folder of torch.distributed.checkpoint")
    return dcp.read(path)


def _warn_if_unrelated(memory: Memory) -> None:
    """Warn if the model's weights do not seem to descend from those that the memory was made at."""
    cosine, distance = similarity(memory)
    if cosine < UNRELATED:
        warn(
            "the model's weights seem unrelated to those that the memory was made at: their relative distance from the "
            f"memory's mean is {distance:.2f}, and the cosine similarity {cosine:.2f}. Load the original or fine-tuned "
            "weights into the model before limpet.load",
            LimpetWarning,
        )


@torch.no_grad()
def similarity(memory: Memory) -> tuple[float, float]:
    """Compare the model's weights w with the mean m of the memory.

    Args:
        memory: The memory. If it is sharded, this is a collective.

    Returns:
        The cosine similarity w.m / (|w| |m|) and the relative distance |w - m| / |m|. Each is the median over the
        blocks that have a task, weighted by their sizes, because a few blocks say nothing about the others: a replaced
        head, or the gains of normalisation layers, which are near 1 in every model.
    """
    posterior = memory.posterior
    weights = posterior.weights()
    found = []
    for held in posterior.held.values():
        mean = held.mean
        norm = float(mean.norm())
        if held.tasks and norm:  # the norm of denormal numbers is 0
            w = held.matrix(weights)
            cosine = float((w * mean).sum() / (w.norm() * norm).clamp_min(torch.finfo(w.dtype).tiny))
            found.append((cosine, float((w - mean).norm()) / norm, mean.numel()))
    if posterior.sharding is not None:
        found = [one for some in posterior.sharding.ranks.gather(found) for one in some]
    if not found:
        return 1.0, 0.0
    return _median([(c, n) for c, _, n in found]), _median([(d, n) for _, d, n in found])


def _median(weighted: list[tuple[float, int]]) -> float:
    """The median of values with weights."""
    half, seen = sum(weight for _, weight in weighted) / 2, 0
    ordered = iter(sorted(weighted))
    while seen < half:
        value, weight = next(ordered)
        seen += weight
    return value

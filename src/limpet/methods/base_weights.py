"""Memories of published weights, whose files name the weights instead of containing them.

The mean of a memory that was made at a published model is the model. With `memory.save(path, base="owner/model")` the
file has the name of the model and the SHA-256 of every parameter in float32 (in which bfloat16 and float16 have the
same values), and `limpet.load` takes the mean from the model that it is given, after it has checked them. For weights
that the model has in quantized form, their sketches are checked instead (`limpet.methods.quantized_base`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from limpet.errors import LimpetError, MemoryFileError
from limpet.io.state import State
from limpet.io.tensor_file import raw_bytes
from limpet.methods.quantized_base import check_sketches, joined, sketch_of, sketches
from limpet.model import Block
from limpet.model.quantized import QuantizedWeight
from limpet.posterior import Posterior


def sha256_of(weight: Tensor) -> str:
    """Return the SHA-256 of a weight in float32, or in float64 if float32 does not have its values.

    Args:
        weight: The weight.

    Returns:
        The hexadecimal digest.
    """
    narrow = weight.float()
    exact = weight.dtype != torch.float64 or torch.equal(narrow.double(), weight)
    return hashlib.sha256(raw_bytes(narrow if exact else weight)).hexdigest()


def without_means(state: State, posterior: Posterior, base: str) -> State:
    """Replace the means in a state by the name of the model and the checksums of its weights.

    Args:
        state: The state of a memory.
        posterior: The posterior of the memory.
        base: Name of the published model, with its revision if it has one.

    Returns:
        The state without means.

    Raises:
        LimpetError: If the mean of a block is not the current weight of the model.
    """
    weights = posterior.parameters()
    metadata, tensors = json.loads(state["metadata"]), dict(state["tensors"])
    entries = {entry["name"]: entry for entry in metadata["blocks"]}
    for name, held in posterior.held.items():
        if not held.tasks:
            continue  # its mean is that of the prior
        matrix = held.block.gather(weights).detach()
        if not torch.equal(matrix.to(held.mean), held.mean):
            raise LimpetError(
                f"base= is for a memory whose mean is the published model, but the mean of {name} is not its current "
                "weight: save right after consolidating the published model, or omit base="
            )
        entry = entries[name]
        if "quantized" in entry:
            raise LimpetError(
                f"base= is for a memory made at the published weights, but those of {name} are quantized: omit base="
            )
        own = {parameter: weights[parameter].detach() for parameter in held.block.parameters}
        entry["base"] = {
            "name": base,
            "sha256": {parameter: sha256_of(weight) for parameter, weight in own.items()},
            "sketch": {parameter: sketch_of(weight) for parameter, weight in own.items() if weight.dim() > 1},
        }
        entry["mean_square"] = float(held.mean.double().square().mean())
        entry["tensors"] = [key for key in entry["tensors"] if key != "mean"]
        del tensors[f"{name}/mean"]
    metadata["settings"]["base"] = base
    return {"metadata": json.dumps(metadata, allow_nan=False), "tensors": tensors}


def names_its_base(state: State) -> bool:
    """Whether a state has the checksums of published weights instead of a mean."""
    found = json.loads(state["metadata"])
    return isinstance(found, dict) and any("base" in entry for entry in found.get("blocks", ()))


def mean_from_model(block: Block, base: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Tensor:
    """Return the mean of a block of which a file has only the checksums.

    Args:
        block: The block.
        base: Name of the published model, and the SHA-256 of each parameter of the block.
        weights: The parameters of the model, by name.

    Returns:
        A copy of the weights, in the shape of the block.

    Raises:
        MemoryFileError: If a parameter is not the published one.
    """
    if sketches(block, weights):
        if "sketch" not in base:
            raise MemoryFileError(
                f"{block.name} of the model is quantized, and this file has no sketches to compare it with: load the "
                "memory into the published model and save it again"
            )
        check_sketches(block, base["sketch"], weights)
    for parameter in block.parameters:
        weight = weights[parameter].detach()
        quantized = isinstance(weights[parameter], QuantizedWeight)
        if not quantized and sha256_of(weight) != base["sha256"][parameter]:
            raise MemoryFileError(
                f"this file has no weights of its own, and {parameter} of the model is not that of {base['name']}: "
                "load the memory into the published model, in the dtype that it was consolidated in, or pass that "
                "model as limpet.load(path, model, base=published)"
            )
    if len(sketches(block, weights)) == len(block.parameters):
        return joined(block, {}, weights[block.parameters[0]].detach())
    matrix = block.gather(weights).detach()
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32), copy=True)

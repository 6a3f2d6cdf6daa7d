"""The mean of a memory on a quantized base, which is the base itself.

A memory of the published weights is loaded onto their quantized version with the quantized weights as its mean
(`limpet.model.quantized`), so that the displacement is what training changes, without the error of the quantization.
A file of such a memory has no mean of these weights, but a sketch: random sums of each weight W,

    s_i = u_i^T W v_i / sqrt(numel),    u_i, v_i random signs,    E[s_i^2] = mean square of W,

by which the distance of two weights can be told from 16 numbers to within a factor of 1.5, in any format or dtype.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from limpet.errors import MemoryFileError
from limpet.model import Block
from limpet.model.quantized import QuantizedWeight

SKETCHES = 16
DIFFERENT = 0.5
"""Relative distance of weights from the mean above which they are another model's. Quantization to 4 bits moves weights
by 0.09 (NF4) of their norm, to 8 bits by 0.004; unrelated weights are 1.4 apart."""


def sketch_of(weight: Tensor) -> list[float]:
    """Compute random sums of a weight, the same ones for all weights of its shape.

    Args:
        weight: The weight, a matrix or more.

    Returns:
        `SKETCHES` numbers, to five digits.
    """
    matrix = weight.detach().flatten(1)
    generator = torch.Generator().manual_seed(0)
    left, right = (
        (2 * torch.randint(2, (SKETCHES, size), generator=generator) - 1).to(matrix.device, torch.float32)
        for size in matrix.shape
    )
    sums = ((left @ matrix.float()) * right).double().sum(1)
    return [float(f"{one:.5g}") for one in (sums / math.sqrt(max(matrix.numel(), 1))).tolist()]


def sketches(block: Block, parameters: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return the sketches of the quantized weights of a block, by parameter; empty if it has none."""
    found = {}
    for name in block.parameters:
        weight = parameters[name]
        if isinstance(weight, QuantizedWeight):
            if weight.sketch is None:
                weight.sketch = sketch_of(weight.values())
            found[name] = weight.sketch
    return found


def check_sketches(block: Block, stored: Mapping[str, Sequence[float]], parameters: Mapping[str, Tensor]) -> None:
    """Check the quantized weights of a block against stored sketches.

    Args:
        block: The block.
        stored: The sketches of its parameters, of the quantized ones at least.
        parameters: The parameters of the model.

    Raises:
        MemoryFileError: If the weights are those of another model.
    """
    for name, mine in sketches(block, parameters).items():
        size = _rms(mine)
        if not _rms([a - float(b) for a, b in zip(mine, stored[name], strict=True)]) <= DIFFERENT * size:
            raise _other_model(name)


def mean_relative_to_base(block: Block, mean: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the mean of a block relative to its quantized weights, after checking that they are its weights.

    Args:
        block: The block.
        mean: The mean as a file has it.
        parameters: The parameters of the model.

    Returns:
        The mean itself if no weight of the block is quantized; otherwise with zeros for the quantized ones.

    Raises:
        MemoryFileError: If the quantized weights are those of another model.
    """
    parts = block.scatter(mean)
    rest = {}
    for name, part in parts.items():
        weight = parameters[name]
        if not isinstance(weight, QuantizedWeight):
            rest[name] = part
        elif not float((weight.values() - part).norm()) <= DIFFERENT * float(part.norm()):
            raise _other_model(name)
    return mean if len(rest) == len(parts) else joined(block, rest, mean)


def stored_mean(block: Block, mean: Tensor, quantized: Collection[str]) -> Tensor | None:
    """Return the part of a mean that a file has to contain.

    Args:
        block: The block.
        mean: Its mean.
        quantized: Its quantized parameters.

    Returns:
        The columns of the other parameters, or all if the mean is not at the quantized weights because adapters had an
        update when the memory was made; None if there is nothing to store.
    """
    columns = list(zip(block.parameters, torch.split(mean, block.widths, -1), strict=True))
    if not quantized or any(bool(part.any()) for name, part in columns if name in quantized):
        return mean
    kept = [part for name, part in columns if name not in quantized]
    return torch.cat(kept, -1) if kept else None


def mean_from_sketches(
    block: Block, stored: Mapping[str, Sequence[float]], mean: Tensor, parameters: Mapping[str, Tensor]
) -> Tensor:
    """Return the mean of a block from a file that has sketches of its quantized weights.

    Args:
        block: The block.
        stored: The sketches, by parameter.
        mean: What `stored_mean` returned; a tensor without columns for None.
        parameters: The parameters of the model.

    Returns:
        The mean, relative to the quantized weights.

    Raises:
        MemoryFileError: If the weights of the model are not quantized, or those of another model.
    """
    found = sketches(block, parameters)
    if found.keys() != stored.keys():
        raise MemoryFileError(
            f"the memory was saved on a quantized base, whose weights it does not contain, and {block.name} of this "
            "model is not quantized in the same way: load it onto the quantized model"
        )
    check_sketches(block, stored, parameters)
    if mean.shape == block.shape:
        return mean
    rest = [i for i, name in enumerate(block.parameters) if name not in stored]
    parts = torch.split(mean, [block.widths[i] for i in rest], -1)
    named = {block.parameters[i]: part.reshape(block.shapes[i]) for i, part in zip(rest, parts, strict=True)}
    return joined(block, named, mean)


def joined(block: Block, rest: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Return a mean with zeros for all parameters but some.

    Args:
        block: The block.
        rest: The other parameters.
        like: A tensor with the device and dtype of the mean.

    Returns:
        The mean, which takes no memory if there are only zeros.
    """
    zero = like.new_zeros(())
    if not rest:
        return zero.expand(block.shape)
    shapes = zip(block.parameters, block.shapes, strict=True)
    return block.gather({name: rest[name].to(zero) if name in rest else zero.expand(shape) for name, shape in shapes})


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def _other_model(name: str) -> MemoryFileError:
    return MemoryFileError(
        f"the memory was made for another model: the quantized {name} is not a quantized version of the weight that "
        "the memory was made at. Load the memory onto the model that it was made for"
    )

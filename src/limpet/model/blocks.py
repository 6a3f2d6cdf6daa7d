"""Blocks: which parameters of a model are grouped together, and how each group is viewed as a matrix."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from limpet.distributed import is_fsdp_unit
from limpet.errors import CurvatureError
from limpet.layers import Layer, layer_type
from limpet.model.adapters import adapter_parameters, is_adapted
from limpet.model.names import every_name, is_excluded, module_names, named_parameters
from limpet.model.quantized import own_parameters

Users = dict[nn.Parameter, list[tuple[nn.Module, str]]]
"""For every parameter, the modules that hold it and its name in each of them."""

PER_SAMPLE = "direct"
"""Kind of a block whose parameter no layer class supports: an exact diagonal from per-sample gradients."""


@dataclass(frozen=True)
class Block:
    """Parameters viewed as one matrix: each is reshaped to (*rows, -1), and their columns are concatenated.

    Attributes:
        name: Name of the module, or of the parameter if the block does not cover a whole module.
        kind: Kind of the layers, or `PER_SAMPLE`.
        parameters: Names of the parameters.
        shapes: Shapes of the parameters.
        rows: Leading dimensions of the matrix.
        layers: The layers that use the parameters; empty for a per-sample block.
    """

    name: str
    kind: str
    parameters: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    rows: tuple[int, ...]
    layers: tuple[Layer, ...] = ()

    @cached_property
    def widths(self) -> list[int]:
        """Number of columns of each parameter."""
        height = torch.Size(self.rows).numel()
        return [shape.numel() // max(height, 1) for shape in self.shapes]

    @cached_property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return torch.Size([*self.rows, sum(self.widths)])

    @property
    def factored(self) -> bool:
        """Whether the block has Kronecker factors."""
        return bool(self.layers) and all(layer.factored for layer in self.layers)

    def matrix(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate tensors in the shapes of the parameters, in order, to the matrix."""
        columns = [tensor.reshape(*self.rows, width) for tensor, width in zip(tensors, self.widths, strict=True)]
        return columns[0] if len(columns) == 1 else torch.cat(columns, -1)

    def split(self, matrix: Tensor) -> list[Tensor]:
        """Split a matrix into tensors in the shapes of the parameters: the inverse of `matrix`."""
        parts = torch.split(matrix, self.widths, -1)
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def gather(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Concatenate tensors given by parameter name to the matrix."""
        return self.matrix([tensors[name] for name in self.parameters])

    def scatter(self, matrix: Tensor) -> dict[str, Tensor]:
        """Split a matrix into tensors by parameter name: the inverse of `gather`."""
        return dict(zip(self.parameters, self.split(matrix), strict=True))

    @property
    def bias(self) -> int:
        """Number of bias columns: 1 if the block has Kronecker factors and covers a bias, otherwise 0."""
        return int(self.factored and "bias" in self.layers[0].names)

    def use(self, layer: Layer) -> str:
        """Return a name for one of the layers that use the weights: its kind, numbered if several have the same."""
        same = [other for other in self.layers if other.kind == layer.kind]
        number = next(i for i, other in enumerate(same) if other is layer)
        return f"{layer.kind} {number + 1}" if number else layer.kind

    def as_per_sample(self) -> list[Block]:
        """Return one per-sample block for each of the parameters."""
        return [direct(name, shape) for name, shape in zip(self.parameters, self.shapes, strict=True)]


def direct(name: str, shape: torch.Size) -> Block:
    """Return a per-sample block, for a parameter that no layer class supports.

    Args:
        name: Name of the parameter.
        shape: Shape of the parameter.

    Returns:
        The block, a matrix with one row.
    """
    return Block(name, PER_SAMPLE, (name,), (shape,), (1,))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's module without the wrappers of torch.compile, DistributedDataParallel and PEFT.

    A wrapper of PEFT to which `fully_shard` was applied stays, because only its own forward gathers the parameters.
    """
    while True:
        inner: Any = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        tuner: Any = getattr(model, "base_model", None) if hasattr(model, "peft_config") else None
        if inner is None and hasattr(tuner, "inject_adapter") and not is_fsdp_unit(model):
            inner = tuner.model
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def discover(
    model: nn.Module, exclude: Collection[str] = (), also: Collection[str] = (), *, through_adapters: bool = True
) -> list[Block]:
    """Group all trainable parameters that are not excluded into blocks.

    Weight and bias of a layer form one block if exactly the same modules use both. Parameters that modules share in any
    other way (a tied weight with two biases, an embedding tied to a head) get one block each, to which all modules that
    use them contribute.

    Args:
        model: The model.
        exclude: Names or patterns of parameters or modules to leave out.
        also: Names of parameters to include even if they are frozen or excluded.
        through_adapters: Whether a layer with low-rank adapters is represented by its base layer; otherwise the
            parameters of the adapters get blocks.

    Returns:
        The blocks, in the order of the model's modules.

    Raises:
        CurvatureError: If the curvature of a module cannot be measured.
    """
    left_out = {parameter for name, parameter in every_name(model) if is_excluded(name, exclude)}
    bases = _base_parameters(model) if through_adapters else set()
    left_out |= adapter_parameters(model) if through_adapters else set()
    names = {
        parameter: name
        for name, parameter in named_parameters(model).items()
        if name in also or ((parameter.requires_grad or parameter in bases) and parameter not in left_out)
    }
    named_modules = module_names(model)
    users: Users = {}
    for module in named_modules:
        for local, parameter in own_parameters(module):
            if parameter in names:
                users.setdefault(parameter, []).append((module, local))
    blocks: dict[tuple[nn.Parameter, ...], list[Block]] = {}
    for parameter, places in users.items():
        together = _companions(parameter, users)
        if together not in blocks:
            blocks[together] = _blocks(together, places, names, named_modules)
    return [block for found in blocks.values() for block in found]


def _base_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights that are trained through adapters, and the biases of their layers."""
    return {
        parameter
        for module in model.modules()
        if is_adapted(module)
        for _, parameter in own_parameters(module.base_layer)  # type: ignore[arg-type]
    }


def _companions(parameter: nn.Parameter, users: Users) -> tuple[nn.Parameter, ...]:
    """Return the weight and the bias that form one block with a parameter, or only the parameter."""
    module, local = users[parameter][0]
    own = dict(own_parameters(module))
    weight, bias = own.get("weight"), own.get("bias")
    if local not in ("weight", "bias") or weight not in users or bias not in users:
        return (parameter,)
    assert weight is not None and bias is not None
    as_weight = [(module, "weight") for module, _ in users[bias]]
    return (weight, bias) if users[weight] == as_weight else (parameter,)


def _blocks(
    parameters: tuple[nn.Parameter, ...],
    places: list[tuple[nn.Module, str]],
    names: Mapping[nn.Parameter, str],
    module_names: Mapping[nn.Module, str],
) -> list[Block]:
    """Return one block of all the parameters, or one per-sample block each if no layer class supports them.

    A module without a layer class may hold a parameter only to share it with one that has (the bias of BERT's head).
    Whether it uses the parameter itself is found out by the audit.
    """
    full = tuple(names[parameter] for parameter in parameters)
    shapes = tuple(parameter.shape for parameter in parameters)
    layers = []
    for module, local in places:
        found = layer_type(module)
        local_names = ("weight", "bias") if len(parameters) == 2 else (local,)
        if found is None or not set(local_names) <= {"weight", "bias"}:
            continue
        reason = found.refuse(module)
        if reason is not None:
            raise CurvatureError(
                f"the curvature of {module_names[module] or type(module).__name__} cannot be measured: {reason}"
            )
        layers.append(found(module, local_names))
    if len({(layer.rows, layer.factored) for layer in layers}) != 1:
        return list(map(direct, full, shapes))
    kind = "+".join(dict.fromkeys(layer.kind for layer in layers))
    module = layers[0].module
    whole = sum(parameter in names for _, parameter in own_parameters(module)) == len(parameters)
    name = (module_names[module] or "model") if whole else full[0]
    return [Block(name, kind, full, shapes, layers[0].rows, tuple(layers))]

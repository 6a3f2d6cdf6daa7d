"""Convert a memory to a state dict and back.

The metadata record method, structure, strength, prior, likelihood, examples and tasks seen, the layer map and the
version of the library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from limpet.distributed import shard_like
from limpet.errors import MemoryFileError, finite_number, positive_whole, signed_number, whole_number
from limpet.forgetting.probe import Probe
from limpet.io.shared_tensors import SharedTensors
from limpet.io.state import State
from limpet.methods.base_weights import mean_from_model
from limpet.methods.limits import check_block, check_proximal, finite
from limpet.methods.quantized_base import mean_from_sketches, mean_relative_to_base, sketches, stored_mean
from limpet.methods.state_header import Content, Settings, rejecting_damage
from limpet.model import Block
from limpet.posterior import BlockPosterior, Posterior
from limpet.precision import STRUCTURES, Kronecker, Precision
from limpet.protection.bound_block import ProximalState
from limpet.version import __version__

PROBE = "probe/"
"""Prefix of the names of a probe's tensors."""
INPUTS = "/precision/inputs.reflections"
"""What follows the name of a block in the name of its input eigenvectors."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8)


# --- from a memory to a state ----------------------------------------------------------------------------------


def collect(
    posterior: Posterior, settings: dict[str, Any], proximal: ProximalState | None, extra: Mapping[str, Tensor]
) -> State:
    """Collect the state of a memory. If the memory is sharded, this is a collective.

    Args:
        posterior: Mean and precision of every block.
        settings: The settings of the memory.
        proximal: State of the running protection, if any.
        extra: Tensors of the method that are not part of a block.

    Returns:
        The state. It shares the memory's tensors, which are never modified in place.
    """
    sharding = posterior.sharding
    tensors = {f"extra/{name}": tensor.clone() for name, tensor in extra.items()}
    blocks, parameters = [], posterior.parameters()
    for name, held in posterior.held.items():
        quantized = sketches(held.block, parameters)
        own = {} if held.linear_term is None else {"slope": held.linear_term}
        if (mean := stored_mean(held.block, held.mean, quantized)) is not None:
            own["mean"] = mean
        own |= {f"precision/{key}": tensor for key, tensor in held.precision.tensors().items()}
        tensors.update({f"{name}/{key}": tensor for key, tensor in own.items()})
        blocks.append(
            {
                "name": name,
                "kind": held.block.kind,
                "parameters": dict(zip(held.block.parameters, map(list, held.block.shapes), strict=True)),
                "structure": held.precision.structure,
                "shape": list(held.block.shape),
                "tasks": held.tasks,
                "precision": held.precision.metadata(),
                "tensors": sorted(own),
                **({"quantized": quantized} if quantized else {}),
            }
        )
    running: dict[str, Any] | None = None
    if proximal is not None and proximal.count:
        running = {"every": proximal.every, "count": proximal.count, "pending": dict(proximal.pending)}
        if proximal.mode != "proximal":
            running["mode"] = proximal.mode
        if proximal.multiplier is not None:
            running["multiplier"] = proximal.multiplier
        control_variate = proximal.control_variate
        if sharding is not None:
            control_variate = sharding.exchange(posterior.parameters()).bring(control_variate)
        tensors.update({f"force/{name}": tensor.clone() for name, tensor in control_variate.items()})
        tensors.update({f"residual/{name}": tensor.clone() for name, tensor in proximal.residual.items()})
    if sharding is not None:
        found = {entry["name"]: entry for some in sharding.ranks.gather(blocks) for entry in some}
        blocks = [found[name] for name in posterior.names if name in found]
    metadata = {
        "library": __version__,
        "settings": settings,
        "blocks": blocks,
        "constant": posterior.constant,
        "proximal": running,
    }
    # zero tensors may be expanded views of a single number
    solid = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return {"metadata": json.dumps(metadata, allow_nan=False), "tensors": solid}


# --- from a state to a memory ----------------------------------------------------------------------------------


def restore(
    content: Content, blocks: Sequence[Block], posterior: Posterior
) -> tuple[dict[str, BlockPosterior], float, ProximalState | None, dict[str, Tensor]]:
    """Restore the blocks of a state on the model's devices. If the model is sharded, each rank restores its own.

    Args:
        content: The decoded state.
        blocks: The blocks of the model.
        posterior: The posterior to restore for. It is not modified.

    Returns:
        The posterior of every block by name, the constant of the penalty, the state of the running protection (None
        if there is none), and the extra tensors of the method.

    Raises:
        MemoryFileError: If the state is corrupted, or its blocks differ from those of the model.
    """
    with rejecting_damage():
        metadata, sharding = content.metadata, posterior.sharding
        _compare(metadata["blocks"], posterior)
        by_parameters = {block.parameters: block for block in blocks}
        kept = blocks if sharding is None else sharding.settle(blocks, posterior.structure, posterior.parameters())
        weights = posterior.weights()  # a collective if the model is sharded
        base_weights = posterior.parameters() if sharding is None else posterior.base_weights(sharding)
        tensors = Untaken(content.tensors)
        held: dict[str, BlockPosterior] = {}
        for entry in metadata["blocks"]:
            block = by_parameters.get(tuple(entry["parameters"]))
            if block is None or block.kind != entry["kind"] or list(block.shape) != entry["shape"]:
                raise MemoryFileError(
                    f"{entry['name']}: the memory has {', '.join(entry['parameters'])} as one {entry['kind']} block, "
                    "but the model uses them differently: load it into a model with the original architecture"
                )
            if block in kept:
                held[block.name] = _restore_block(entry, block, tensors, posterior, base_weights)
            else:
                tensors.leave(f"{entry['name']}/")
        proximal = _restore_proximal(metadata["proximal"], tensors, posterior)
        if proximal is not None:
            check_proximal(proximal, held.values())
        if isinstance(content.tensors, SharedTensors):
            names = {entry["name"]: by_parameters[tuple(entry["parameters"])].name for entry in metadata["blocks"]}
            _share_inputs(held, names, content.tensors.shared)
        for block in kept:
            held.setdefault(block.name, posterior.start(block, weights))
        extra = {key.removeprefix("extra/"): tensors.take(key) for key in tensors.under("extra/")}
        left = tensors.under("")
        if left:
            raise MemoryFileError(f"tensors that do not belong to any block: {', '.join(left[:3])}")
        return held, signed_number("constant", metadata["constant"]), proximal, extra


def _compare(entries: Sequence[Mapping[str, Any]], posterior: Posterior) -> None:
    """Raise if the model lacks a parameter of the memory, or has it in another shape."""
    weights = posterior.parameters()
    missing, other = [], []
    for entry in entries:
        for name, shape in entry["parameters"].items():
            if name not in weights:
                missing.append(name)
            elif list(weights[name].shape) != shape:
                other.append(f"{name} has shape {tuple(weights[name].shape)}, in the memory {tuple(shape)}")
    parts = []
    if missing:
        parts.append(f"the model has no {', '.join(missing[:5])}" + (" and more" if len(missing) > 5 else ""))
    if other:
        parts.append("; ".join(other[:5]) + (" and more" if len(other) > 5 else ""))
    if parts:
        raise MemoryFileError(
            f"the memory was made for another model: {'; '.join(parts)}. Load it into a model with the original "
            "architecture; if the model has a new head, make the memory without the old one, with exclude=[its name]"
        )


class Untaken:
    """The tensors of a state that have not been used yet.

    Args:
        tensors: All tensors of the state.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors, self._names = tensors, set(tensors)

    def under(self, prefix: str) -> list[str]:
        """Return the sorted names of the unused tensors with this prefix."""
        return sorted(name for name in self._names if name.startswith(prefix))

    def take(self, name: str) -> Tensor:
        """Return a tensor and mark it as used; raises MemoryFileError if it is missing."""
        self.expect(name)
        self._names.remove(name)
        return self._tensors[name]

    def expect(self, *names: str) -> None:
        """Raise MemoryFileError if one of these tensors is missing."""
        missing = [name for name in names if name not in self._names]
        if missing:
            raise MemoryFileError(
                f"the tensor {missing[0]} is missing. Read a torch.distributed.checkpoint folder with "
                "limpet.load(folder, model), which finds out first what it contains"
            )

    def leave(self, prefix: str) -> None:
        """Skip the tensors with this prefix, which belong to another rank."""
        self._names.difference_update(self.under(prefix))


def _restore_block(
    entry: Mapping[str, Any], block: Block, tensors: Untaken, posterior: Posterior, weights: Mapping[str, Tensor]
) -> BlockPosterior:
    weight = posterior.parameters()[block.parameters[0]]
    dtype = torch.promote_types(weight.dtype, torch.float32)
    prefix = f"{entry['name']}/"

    def take(key: str) -> Tensor:
        tensor = tensors.take(prefix + key)
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{prefix}{key} has the unsupported dtype {tensor.dtype}")
        return finite(f"{prefix}{key}", tensor.to(weight.device, dtype))  # after the conversion, which may overflow

    tensors.expect(*(prefix + key for key in entry.get("tensors", ())))  # files from before 0.1 do not list them
    if "quantized" in entry:
        given = take("mean") if "mean" in entry["tensors"] else weight.new_zeros((*block.rows, 0), dtype=dtype)
        mean = mean_from_sketches(block, entry["quantized"], given, weights)
    elif "base" in entry:
        mean = mean_from_model(block, entry["base"], weights)
    else:
        mean = take("mean")
        mean = mean_relative_to_base(block, mean, weights) if mean.shape == block.shape else mean
    linear_term = take("slope") if tensors.under(f"{prefix}slope") else None
    for name, tensor in (("mean", mean), ("slope", linear_term)):
        if tensor is not None and tensor.shape != block.shape:
            raise ValueError(f"{prefix}{name} has shape {tuple(tensor.shape)}, expected {tuple(block.shape)}")
    inner = f"{prefix}precision/"
    kept = {key.removeprefix(inner): take(key.removeprefix(prefix)) for key in tensors.under(inner)}
    kind = STRUCTURES[entry["structure"]]
    if kind.structure != posterior.structure.of(block):
        raise ValueError(f"{block.name} has structure {kind.structure}, expected {posterior.structure.of(block)}")
    tasks = whole_number("tasks", entry["tasks"])
    precision: Precision = kind.restore(block.shape, kept, entry["precision"])
    held = BlockPosterior(block, mean, precision, linear_term, tasks)
    check_block(held)
    return held


def _share_inputs(held: dict[str, BlockPosterior], names: Mapping[str, str], shared: Mapping[str, str]) -> None:
    """Let blocks share the input eigenvectors that are stored once in the file, as they did when it was written.

    Args:
        held: The restored blocks by name; blocks are replaced.
        names: Names of the blocks of the model, by their names in the file.
        shared: Names of tensors in the file, with those of the tensors that they are equal to.
    """
    for name, other in shared.items():
        if not name.endswith(INPUTS) or not other.endswith(INPUTS):
            continue
        block, first = (held.get(names.get(one.removesuffix(INPUTS), "")) for one in (name, other))
        if block is None or first is None:
            continue  # of another rank
        if isinstance(block.precision, Kronecker) and isinstance(first.precision, Kronecker):
            precision = block.precision.with_inputs_of(first.precision)
            held[block.block.name] = replace(block, precision=precision)


def _restore_proximal(
    running: Mapping[str, Any] | None, tensors: Untaken, posterior: Posterior
) -> ProximalState | None:
    if running is None:
        return None
    weights, sharding = posterior.parameters(), posterior.sharding
    pending = {str(name): finite_number("pending", size) for name, size in running["pending"].items()}
    every, count = positive_whole("every", running["every"]), positive_whole("count", running["count"])
    multiplier = running.get("multiplier")
    multiplier = None if multiplier is None else signed_number("multiplier", multiplier)
    mode = str(running.get("mode", "proximal"))
    if mode not in ("proximal", "gradient"):
        raise ValueError(f"mode must be proximal or gradient, not {mode!r}")
    state = ProximalState(every, count, pending=pending, multiplier=multiplier, mode=mode)
    whole: dict[str, Tensor] = {}
    for key in tensors.under("force/"):
        name = key.removeprefix("force/")
        if sharding is not None and sharding.owners[name] != sharding.ranks.rank:
            tensors.leave(key)
            continue
        control_variate, weight = finite(key, tensors.take(key)), weights[name]
        if control_variate.shape != weight.shape:
            raise ValueError(f"{key} has shape {tuple(control_variate.shape)}, expected {tuple(weight.shape)}")
        whole[name] = control_variate if sharding is not None else control_variate.to(weight)
    if sharding is None:
        state.control_variate = whole
    else:
        names = set().union(*sharding.ranks.gather(set(whole)))
        pieces = sharding.exchange(weights).give(whole, names)
        state.control_variate = {name: shard_like(weights[name], piece) for name, piece in pieces.items()}
    for key in tensors.under("residual/"):
        residual, weight = finite(key, tensors.take(key)), weights[key.removeprefix("residual/")]
        if residual.shape != weight.shape:
            raise ValueError(f"{key} has shape {tuple(residual.shape)}, expected {tuple(weight.shape)}")
        state.residual[key.removeprefix("residual/")] = residual.to(weight.device, torch.float32)
    return state


# --- probes ------------------------------------------------------------------------------------------------------


def read_probes(settings: Settings, tensors: dict[str, Tensor]) -> tuple[Probe, ...]:
    """Restore the probes of a state.

    Args:
        settings: The settings of the state.
        tensors: The extra tensors of the state.

    Returns:
        The probes.
    """
    metadata = settings.list("probes")
    if not metadata:
        return ()
    found = []
    for i, one in enumerate(metadata):
        prefix = f"{PROBE}{i}/"
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        found.append(Probe.restore(own, one))
    return tuple(found)

"""Keep a memory in a file, and bring it back.

What the file says about itself: method, structure, strength, prior, likelihood, examples and tasks seen, the layer map,
the library's version. `limpet.files` says how it is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from limpet import files
from limpet.curvature import DIRECT, Block
from limpet.errors import LimpetError, MemoryFileError, finite_number, positive_whole, signed_number, whole_number
from limpet.posterior import Held, Posterior
from limpet.precision import STRUCTURES
from limpet.pull import ProximalState
from limpet.version import __version__

FORMAT = "limpet memory"
NEVER_NEGATIVE = ("diagonal", "diagonal.weighted", "eigenvalues", "eigenvalues.weighted", "trace")
DTYPES = (torch.float32, torch.float64)


class State(TypedDict):
    """What `memory.state_dict()` gives."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


# --- from a memory to a state ----------------------------------------------------------------------------------


def collect(
    posterior: Posterior, settings: dict[str, Any], proximal: ProximalState | None, extra: Mapping[str, Tensor]
) -> State:
    """The state of a memory. Its tensors are the memory's own, which never change."""
    tensors = {f"extra/{name}": tensor.clone() for name, tensor in extra.items()}
    blocks = []
    for name, held in posterior.held.items():
        blocks.append(
            {
                "name": name,
                "kind": held.block.kind,
                "parameters": dict(zip(held.block.parameters, map(list, held.block.shapes), strict=True)),
                "structure": held.precision.structure,
                "shape": list(held.block.shape),
                "tasks": held.tasks,
                "precision": held.precision.facts(),
            }
        )
        tensors[f"{name}/mean"] = held.mean
        if held.slope is not None:
            tensors[f"{name}/slope"] = held.slope
        for key, tensor in held.precision.tensors().items():
            tensors[f"{name}/precision/{key}"] = tensor
    running: dict[str, Any] | None = None
    if proximal is not None and proximal.count:
        running = {"every": proximal.every, "count": proximal.count, "pending": dict(proximal.pending)}
        if proximal.mode != "proximal":
            running["mode"] = proximal.mode
        if proximal.multiplier is not None:
            running["multiplier"] = proximal.multiplier
        tensors.update({f"force/{name}": tensor.clone() for name, tensor in proximal.force.items()})
    metadata = {
        "library": __version__,
        "settings": settings,
        "blocks": blocks,
        "constant": posterior.constant,
        "proximal": running,
    }
    return {"metadata": metadata, "tensors": tensors}


# --- from a state to a memory ----------------------------------------------------------------------------------


@contextmanager
def refusing() -> Iterator[None]:
    """Whatever goes wrong while a state is read is the state's fault, and said so."""
    try:
        yield
    except MemoryFileError:
        raise
    except (LimpetError, KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, OverflowError) as e:
        raise MemoryFileError(f"the memory is damaged, or not one of ours: {type(e).__name__}: {e}") from e


class Settings:
    """The settings of a state, each checked for what it has to be."""

    def __init__(self, state: State) -> None:
        self._values: Mapping[str, Any] = state["metadata"]["settings"]

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number >= 0; the default where an older file does not have it."""
        return finite_number(name, self._values.get(name, default))

    def whole(self, name: str) -> int:
        """A whole number >= 0."""
        return whole_number(name, self._values[name])

    def flag(self, name: str) -> bool:
        """Yes or no; no where an older file does not have it."""
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, not {value!r}")
        return value

    def choice(self, name: str, choices: Collection[str]) -> str:
        """One of some words."""
        value = self._values[name]
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        return value

    def names(self, name: str) -> list[str]:
        """A list of names."""
        value = self._values[name]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{name} must be a list of names, not {value!r}")
        return value

    def part(self, name: str) -> Mapping[str, Any] | None:
        """A group of further settings, or None."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a group of settings, not {value!r}")
        return value


def check_settings(state: State, expected: Mapping[str, Any]) -> None:
    """Refuse a state that another kind of memory made."""
    with refusing():
        for name, value in expected.items():
            found = state["metadata"]["settings"][name]
            if found != value:
                raise MemoryFileError(
                    f"the memory has {name} {found!r}, this one is {value!r}: use limpet.load(path, model), which "
                    "makes the right one"
                )


def direct_parameters(state: State) -> set[str]:
    """The parameters that were found to be used by no layer class."""
    with refusing():
        return {p for block in state["metadata"]["blocks"] if block["kind"] == DIRECT for p in block["parameters"]}


def parameter_names(state: State) -> set[str]:
    """The parameters that the state speaks of."""
    with refusing():
        return {p for block in state["metadata"]["blocks"] for p in block["parameters"]}


def restore(
    state: State, blocks: Sequence[Block], posterior: Posterior
) -> tuple[dict[str, Held], float, ProximalState | None, dict[str, Tensor]]:
    """The blocks, constant, running protection and a method's own tensors, on the model's devices.

    `blocks` are those of the model; where they differ from the state's, the error says in what.
    """
    with refusing():
        metadata = state["metadata"]
        _compare(metadata["blocks"], posterior)
        by_parameters = {block.parameters: block for block in blocks}
        tensors = dict(state["tensors"])
        held: dict[str, Held] = {}
        for entry in metadata["blocks"]:
            block = by_parameters.get(tuple(entry["parameters"]))
            if block is None or block.kind != entry["kind"] or list(block.shape) != entry["shape"]:
                raise MemoryFileError(
                    f"{entry['name']}: the memory has {', '.join(entry['parameters'])} as one {entry['kind']} block, "
                    "and the model uses them in another way: load it into a model built as the one it was made for"
                )
            held[block.name] = _restore_block(entry, block, tensors, posterior)
        proximal = _restore_proximal(metadata["proximal"], held, tensors, posterior)
        for block in blocks:
            held.setdefault(block.name, posterior.start(block))
        extra = {key.removeprefix("extra/"): tensors.pop(key) for key in list(tensors) if key.startswith("extra/")}
        if tensors:
            raise MemoryFileError(f"tensors that belong to no block: {', '.join(sorted(tensors)[:3])}")
        return held, signed_number("constant", metadata["constant"]), proximal, extra


def _compare(entries: Sequence[Mapping[str, Any]], posterior: Posterior) -> None:
    """Say what the memory knows that the model does not have, or has in another shape."""
    weights = posterior.parameters()
    missing, other = [], []
    for entry in entries:
        for name, shape in entry["parameters"].items():
            if name not in weights:
                missing.append(name)
            elif list(weights[name].shape) != shape:
                other.append(f"{name} is {tuple(weights[name].shape)}, in the memory {tuple(shape)}")
    parts = []
    if missing:
        parts.append(f"the model has no {', '.join(missing[:5])}" + (" and more" if len(missing) > 5 else ""))
    if other:
        parts.append("; ".join(other[:5]) + (" and more" if len(other) > 5 else ""))
    if parts:
        raise MemoryFileError(
            f"the memory was made for another model: {'; '.join(parts)}. Load it into a model built as that one was"
        )


def _restore_block(entry: Mapping[str, Any], block: Block, tensors: dict[str, Tensor], posterior: Posterior) -> Held:
    weight = posterior.parameters()[block.parameters[0]]
    dtype = torch.promote_types(weight.dtype, torch.float32)
    prefix = f"{entry['name']}/"

    def take(key: str) -> Tensor:
        tensor = tensors.pop(prefix + key)
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{prefix}{key} is of {tensor.dtype}")
        return tensor.to(weight.device, dtype)

    if not all(bool(torch.isfinite(tensor).all()) for key, tensor in tensors.items() if key.startswith(prefix)):
        raise ValueError(f"{block.name} holds inf or nan")
    mean = take("mean")
    slope = take("slope") if f"{prefix}slope" in tensors else None
    for name, tensor in (("mean", mean), ("slope", slope)):
        if tensor is not None and tensor.shape != block.shape:
            raise ValueError(f"{prefix}{name} has shape {tuple(tensor.shape)}, expected {tuple(block.shape)}")
    inner = f"{prefix}precision/"
    kept = {key.removeprefix(inner): take(key.removeprefix(prefix)) for key in list(tensors) if key.startswith(inner)}
    for key, tensor in kept.items():
        square = tensor.dim() >= 2 and (key.startswith(("terms.", "matrix")))
        entries = tensor.diagonal(dim1=-2, dim2=-1) if square else tensor
        if (square or key.endswith(NEVER_NEGATIVE)) and bool((entries < 0).any()):
            raise ValueError(f"{inner}{key} is negative somewhere")
    kind = STRUCTURES[entry["structure"]]
    if kind.structure != posterior.structure.of(block):
        raise ValueError(f"{block.name} is {kind.structure}, expected {posterior.structure.of(block)}")
    tasks = whole_number("tasks", entry["tasks"])
    return Held(block, mean, kind.restore(block.shape, kept, entry["precision"]), slope, tasks)


def _restore_proximal(
    running: Mapping[str, Any] | None, held: Mapping[str, Held], tensors: dict[str, Tensor], posterior: Posterior
) -> ProximalState | None:
    if running is None:
        return None
    weights = posterior.parameters()
    pending = {held[name].block.name: finite_number("pending", size) for name, size in running["pending"].items()}
    every, count = positive_whole("every", running["every"]), positive_whole("count", running["count"])
    multiplier = running.get("multiplier")
    multiplier = None if multiplier is None else signed_number("multiplier", multiplier)
    mode = str(running.get("mode", "proximal"))
    state = ProximalState(every, count, pending=pending, multiplier=multiplier, mode=mode)
    for key in [key for key in tensors if key.startswith("force/")]:
        force, weight = tensors.pop(key), weights[key.removeprefix("force/")]
        if force.shape != weight.shape:
            raise ValueError(f"{key} has shape {tuple(force.shape)}, expected {tuple(weight.shape)}")
        state.force[key.removeprefix("force/")] = force.to(weight)
    return state


# --- files -----------------------------------------------------------------------------------------------------


def write(path: str | Path, state: State) -> None:
    """Write a state; the file appears whole or not at all."""
    files.write(path, FORMAT, state["metadata"], state["tensors"])


def read(path: str | Path) -> State:
    """Read a state, after every check that needs no model."""
    metadata, tensors = files.read(path, FORMAT)
    if not isinstance(metadata.get("settings"), dict):
        raise MemoryFileError(f"{Path(path).name} has a header that is not one of ours")
    return {"metadata": metadata, "tensors": tensors}

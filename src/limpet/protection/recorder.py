"""Record a sample of the inputs that a model is trained on, to measure the curvature of the new data with later."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from limpet.model import part
from limpet.model.batch import batch_size, call, plain_batch, prepared, result_field, target_key
from limpet.model.context import AutocastState, autocast_state, is_measuring, preserve_state

ROWS = 256
"""Number of examples (whole sequences) that are recorded, about."""

NOT_INPUTS = ("num_items_in_batch",)
"""Arguments that transformers' Trainer passes for the loss."""


class InputRecorder:
    """Keeps a uniform sample of the batches that a model is called on with gradients enabled, by the user.

    Reservoir sampling (Vitter 1985, algorithm R) over batches, so that the sample covers the whole training run. The
    model's arguments are copied to the CPU. Targets are recorded only if they are among these arguments.

    Args:
        model: The model.
        rows: Number of examples to keep.
        seed: Seed of the sample. The global random state is not used.

    Attributes:
        batches: The sample. Each batch is a pair `(inputs, None)`, a dictionary of keyword arguments, or, for all other
            calls, a dictionary `{"args": ..., "kwargs": ...}` for `forward`.
        seen: Number of batches that the model was called on.
    """

    def __init__(self, model: nn.Module, rows: int = ROWS, seed: int = 0) -> None:
        self.model, self.rows = model, rows
        self.batches: list[Any] = []
        self.seen = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._handle: Any = None

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the sample. Its length is not that of the data, so it has none."""
        return iter(self.batches)

    def start(self) -> None:
        """Start recording, after the hooks that the model already has."""
        hook: Any = torch.compiler.disable(self._record)  # type: ignore[no-untyped-call]
        self._handle = self.model.register_forward_pre_hook(hook, with_kwargs=True)

    def stop(self) -> None:
        """Stop recording, and keep the sample."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _record(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or is_measuring():
            return
        self._add(args, kwargs)

    def _add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen += 1
        size = None if not self.batches else batch_size(self.batches[0])
        capacity = max(self.rows // (size or 1), 1)
        place = len(self.batches)
        if place >= capacity:
            place = int(torch.randint(0, self.seen, (), generator=self._generator))
        if place < capacity:
            self.batches[place : place + 1] = [self._copied(args, kwargs)]

    def _copied(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Copy the arguments of a call to the CPU, as a batch of at most `rows` examples."""
        batch = self._batch(args, {key: value for key, value in kwargs.items() if key not in NOT_INPUTS})
        size = batch_size(batch)
        some = part(batch, slice(0, self.rows)) if size and size > self.rows else plain_batch(batch)
        return tree_map(lambda leaf: _on_cpu(leaf) if isinstance(leaf, Tensor) else leaf, some)

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and hasattr(self.model, "config"):  # a model of transformers, whose arguments have known names
            bound = inspect.signature(self.model.forward).bind_partial(*args, **kwargs)
            variable = [p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_KEYWORD]
            named = {name: value for name, value in bound.arguments.items() if name not in variable}
            return named | {k: v for name in variable for k, v in bound.arguments.get(name, {}).items()}
        if not args:
            return kwargs
        if len(args) == 1 and not kwargs:
            return args[0], None
        return {"args": args, "kwargs": kwargs}

    def prepare_replay(self) -> None:
        """Convert the batches on which the default would call the model in another way than it was called."""
        known: dict[str, bool] = {}
        self.batches = [as_called(self.model, batch, known) for batch in self.batches]

    @property
    def forward(self) -> Any:
        """The `forward` function for the sample: None where the default works."""
        return called_as_recorded if any(map(is_call, self.batches)) else None


def is_call(batch: Any) -> bool:
    """Whether a batch has the form `{"args": ..., "kwargs": ...}`."""
    return isinstance(batch, dict) and set(batch) == {"args", "kwargs"}


def called_as_recorded(model: nn.Module, batch: Any) -> Any:
    """Call a model as it was called: a `forward` for `{"args": ..., "kwargs": ...}`, and for all other batches.

    Args:
        model: The model.
        batch: The arguments.

    Returns:
        Outputs and targets; None for the targets of a call.
    """
    if not is_call(batch):
        return call(model, batch, None)
    return _output(model(*batch["args"], **batch["kwargs"])), None


def as_called(model: nn.Module, batch: Any, known: dict[str, bool]) -> Any:
    """Return a recorded batch in a form that the model is called on in the same way again.

    A mapping as the only positional argument is not taken for keyword arguments. An argument that is named like targets
    may be an input, such as the class to generate, `y`: whether the outputs depend on it is found out by running the
    model without it. Models of transformers have targets of these names.

    Args:
        model: The model.
        batch: The batch.
        known: What was found out for which name; it is added to.

    Returns:
        The batch, or `{"args": ..., "kwargs": ...}`.
    """
    if isinstance(batch, tuple) and isinstance(batch[0], Mapping):
        return {"args": batch[:1], "kwargs": {}}
    if not isinstance(batch, Mapping) or is_call(batch) or hasattr(model, "config"):
        return batch
    name = target_key(batch)
    if name is None:
        return batch
    if name not in known:
        known[name] = _changes_outputs(model, prepared(batch, next(model.parameters()).device), name)
    return {"args": (), "kwargs": batch} if known[name] else batch


def _changes_outputs(model: nn.Module, batch: Mapping[str, Any], name: str) -> bool:
    """Whether the outputs depend on an argument."""
    with preserve_state(model), torch.no_grad():
        found = _output(model(**batch))
        try:
            without = _output(model(**{key: value for key, value in batch.items() if key != name}))
        except TypeError:  # it is required
            return isinstance(found, Tensor) and found.dim() > 0
    both = isinstance(found, Tensor) and isinstance(without, Tensor) and found.shape == without.shape
    return both and not torch.equal(found, without)


def _output(result: Any) -> Any:
    logits = result_field(result, "logits")
    return result if logits is None else logits


def _on_cpu(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, under autocast in the precision of the weights, which it may be used without later."""
    half = tensor.is_floating_point() and tensor.itemsize < 4
    dtype = torch.float32 if half and torch.is_autocast_enabled(tensor.device.type) else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True)


class StepInputs(InputRecorder):
    """Keeps the batches that a model is called on with gradients enabled, until they are cleared.

    Args:
        model: The model.
        keep: Whether to keep batches; otherwise only the autocast state is.

    Attributes:
        keep: Whether to keep batches. It may be changed while recording.
        autocast: The state of autocast in the last call; None before the first one.
    """

    LIMIT = 64
    """Maximum number of batches: more accumulate only if the model is called without the optimizer stepping."""

    def __init__(self, model: nn.Module, *, keep: bool) -> None:
        super().__init__(model)
        self.keep = keep
        self.autocast: AutocastState | None = None

    def _add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.autocast = autocast_state()
        if self.keep:
            self.seen += 1
            batch = self._batch(args, {key: value for key, value in kwargs.items() if key not in NOT_INPUTS})
            # copied, because loaders may reuse the memory of a batch
            self.batches.append(
                tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, plain_batch(batch))
            )
            del self.batches[: -self.LIMIT]

    def clear(self) -> None:
        """Forget the batches."""
        self.batches.clear()

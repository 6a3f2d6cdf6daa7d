"""Batches of any form: where their tensors go, how many examples they hold, and how a model is called on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from limpet.errors import CurvatureError

Forward = Callable[[nn.Module, Any], Any]
"""forward(model, batch) -> (outputs, targets), or the outputs alone where no targets are needed."""

TARGET_KEYS = ("labels", "label", "targets", "target", "y")


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device of the model."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def batch_size(batch: Any) -> int | None:
    """The examples in a batch: the first dimension that all its tensors share; None where there is none."""
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else None


def part(batch: Any, examples: slice) -> Any:
    """Some examples of a batch."""
    return tree_map(lambda leaf: leaf[examples] if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf, batch)


def call(model: nn.Module, batch: Any, forward: Forward | None) -> tuple[Any, Any]:
    """Outputs and targets (None where there are none) of a batch."""
    if forward is not None:
        result = forward(model, batch)
        return result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if isinstance(batch, Mapping):
        target_key = next((key for key in TARGET_KEYS if key in batch), None)
        inputs = {key: value for key, value in batch.items() if key != target_key}
        return _outputs(model(**inputs)), None if target_key is None else batch[target_key]
    if isinstance(batch, Tensor):
        return _outputs(model(batch)), None
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = batch
        return _outputs(model(**inputs) if isinstance(inputs, Mapping) else model(inputs)), targets
    raise CurvatureError(
        f"a batch is a pair (inputs, targets), a dictionary or a tensor, not {_describe(batch)}: pass "
        "forward=lambda model, batch: (outputs, targets)"
    )


def _outputs(result: Any) -> Any:
    """What a model gives; the logits where it gives a record with a field of that name."""
    if isinstance(result, Mapping) and "logits" in result:
        return result["logits"]
    return getattr(result, "logits", result)


def _describe(batch: Any) -> str:
    kind = type(batch).__name__
    return f"a {kind} of {len(batch)}" if isinstance(batch, tuple | list) else f"a {kind}"


def total_examples(batches: Iterable[Any]) -> int | None:
    """How many examples a loader holds, where it can say so without being read."""
    dataset = getattr(batches, "dataset", None)
    sampler = getattr(batches, "sampler", None)
    if dataset is None or getattr(batches, "drop_last", False):
        return None
    try:
        return len(sampler if sampler is not None else dataset)
    except TypeError:
        return None

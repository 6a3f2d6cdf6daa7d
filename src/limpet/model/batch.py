"""Batches of any form: moving them to a device, counting their examples, and calling a model on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import BatchSampler, DataLoader

from limpet.errors import CurvatureError, LimpetWarning, warn

Forward = Callable[[nn.Module, Any], Any]
"""forward(model, batch) -> (outputs, targets), or only the outputs if no targets are needed."""

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
"""Keys that are looked up, in this order, to find the targets of a dictionary batch."""

_SHIFTED: WeakKeyDictionary[type[nn.Module], bool] = WeakKeyDictionary()
"""Whether the outputs of a type of model predict the next token, as the model's own loss has shown."""


def check_batches(batches: Any) -> None:
    """Raise a `CurvatureError` if the argument is not iterable, or looks like a single batch."""
    if not isinstance(batches, Iterable):
        raise CurvatureError(
            f"batches must be a DataLoader, a list or another iterable of batches, not a {type(batches).__name__}"
        )
    pair = isinstance(batches, tuple) and all(isinstance(item, Tensor) for item in batches)
    if pair or isinstance(batches, Tensor | Mapping):
        raise CurvatureError(
            "batches is a single batch, not an iterable of batches: put it into a list, [(inputs, targets)]"
        )


def prepared(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch to a device, and convert every mapping to a plain dictionary.

    Args:
        batch: The batch.
        device: Device of the model.

    Returns:
        The batch, with tensors that can be used in a backward pass.
    """

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # tensors created under torch.inference_mode cannot be saved for a backward pass
        return leaf.to(device).clone() if leaf.is_inference() else leaf.to(device)

    return _mapped(moved, batch)


def plain_batch(batch: Any) -> Any:
    """Convert every mapping in a batch to a plain dictionary.

    Args:
        batch: The batch.

    Returns:
        The batch, with the same tensors.
    """
    return _mapped(lambda leaf: leaf, batch)


def batch_size(batch: Any) -> int | None:
    """Return the number of examples: the first dimension of all tensors of the batch, or None if it is not the same."""
    sizes = {leaf.shape[0] for leaf in _leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else None


def _leaves(batch: Any) -> Iterator[Any]:
    """Yield the leaves of a batch. Mappings, tuples and lists are read here, which is faster than a pytree."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif type(batch) in (tuple, list):
        for item in batch:
            yield from _leaves(item)
    else:
        yield from tree_leaves(batch)


def _mapped(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to the leaves of a batch, and convert every mapping to a plain dictionary."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: _mapped(function, value) for key, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(_mapped(function, item) for item in batch)
    return tree_map(function, batch)


def first_example(batch: Any) -> Any:
    """Return the first example of a batch, as a batch; the whole batch if its rows cannot be counted."""
    return part(batch, slice(0, 1)) if batch_size(batch) else batch


def part(batch: Any, examples: slice) -> Any:
    """Return some examples of a batch.

    Args:
        batch: The batch.
        examples: The examples to select along the first dimension of every tensor.

    Returns:
        A batch of the same form.
    """
    return _mapped(lambda leaf: leaf[examples] if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf, batch)


class FirstBatches:
    """The first examples of a pass over the data, stored for reuse."""

    LIMIT = 1000
    """Maximum number of examples stored."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.rows = 0
        self._next = 0

    def add(self, number: int, batch: Any) -> None:
        """Store a batch, or as many of its examples as the limit allows.

        Args:
            number: Index of the batch in the pass; a batch that was added before is not added again.
            batch: The batch.
        """
        if self.rows < self.LIMIT and number == self._next:
            self._next += 1
            size = batch_size(batch)
            if size == 0:
                return
            wanted = self.LIMIT - self.rows
            self.batches.append(batch if size is None else part(batch, slice(0, wanted)))
            self.rows += 1 if size is None else min(size, wanted)

    def take(self, rows: int) -> list[Any]:
        """Return batches with the first `rows` examples; a batch of unknown size is not split and counts as one."""
        taken: list[Any] = []
        for batch in self.batches:
            if rows <= 0:
                break
            size = batch_size(batch)
            taken.append(batch if size is None else part(batch, slice(0, rows)))
            rows -= 1 if size is None else min(size, rows)
        return taken


def call(model: nn.Module, batch: Any, forward: Forward | None) -> tuple[Any, Any]:
    """Call a model on a batch.

    Args:
        model: The model.
        batch: A pair (inputs, targets), a dictionary or a tensor; any batch that `forward` accepts if it is given.
        forward: Function that computes outputs and targets; by default they are inferred from the batch.

    Returns:
        Outputs and targets; the targets are None if the batch has none.

    Raises:
        CurvatureError: If the form of the batch is not supported.
    """
    if forward is not None:
        result = forward(model, batch)
        return result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if isinstance(batch, Mapping) and _has_tokens(batch) and is_causal(model):
        return next_tokens(model, batch)
    if isinstance(batch, Mapping):
        target = target_key(batch)
        if target is not None and is_encoder_decoder(model):
            return _outputs(model(**batch)), batch[target]  # the model derives the decoder inputs from the labels
        if not hasattr(model, "config") and type(model) not in _SHIFTED:
            _warn_of_shifted_labels(batch, target)
        inputs = {key: value for key, value in batch.items() if key != target}
        return _outputs(model(**inputs)), None if target is None else batch[target]
    if isinstance(batch, Tensor):
        return _outputs(model(batch)), None
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = batch
        return _outputs(model(**inputs) if isinstance(inputs, Mapping) else model(inputs)), targets
    raise CurvatureError(
        f"a batch must be a pair (inputs, targets), a dictionary or a tensor, not {_describe(batch)}: pass "
        "forward=lambda model, batch: (outputs, targets)"
    )


def targets_of(model: nn.Module, batch: Any) -> Any:
    """Return the targets that `call` would return without a `forward`, without running the model.

    Args:
        model: The model.
        batch: A pair (inputs, targets), a dictionary or a tensor.

    Returns:
        The targets, or None if the batch has none.
    """
    if isinstance(batch, Mapping):
        if _has_tokens(batch) and is_causal(model):
            return _following_tokens(batch)
        key = target_key(batch)
        return None if key is None else batch[key]
    return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None


def target_key(batch: Mapping[str, Any]) -> str | None:
    """Return the key of the targets in a batch, or None if it has none."""
    return next((key for key in TARGET_KEYS if key in batch), None)


def is_causal(model: nn.Module) -> bool:
    """Return whether the outputs of a model of transformers predict the next token.

    The model's own loss decides once it is known (`limpet.model.own_loss`), and before that its name.
    """
    known = _SHIFTED.get(type(model))
    if known is not None:
        return known
    kinds = [kind for kind in (getattr(model, "loss_type", None), type(model).__name__) if isinstance(kind, str)]
    if any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds):
        return True
    # models of text and images are named like encoder-decoders
    return any(kind.endswith("ForConditionalGeneration") for kind in kinds) and not is_encoder_decoder(model)


def remember_shift(model: nn.Module, shifted: bool) -> None:
    """Record for this type of model whether its labels are predicted from the position before."""
    _SHIFTED[type(model)] = shifted


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return whether a model of transformers has an encoder and a decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def accepts(model: nn.Module, argument: str) -> bool:
    """Return whether a model's forward has an argument of this name."""
    return argument in inspect.signature(model.forward).parameters


def _has_tokens(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch has the inputs of a language model, and labels or tokens to predict."""
    return "input_ids" in batch or ("inputs_embeds" in batch and "labels" in batch)


def next_tokens(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Compute the outputs of a causal language model at every token but the last, and the tokens that follow.

    Args:
        model: The language model.
        batch: A batch with `input_ids` and, optionally, `attention_mask` and `labels`.

    Returns:
        Logits and targets. The targets are the shifted `labels` if the batch has them, otherwise the shifted
        `input_ids` with -100 at padding.
    """
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if hasattr(model, "config"):
        inputs["use_cache"] = False
    logits = _outputs(model(**inputs))
    return logits[:, :-1], _following_tokens(batch)


def _following_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Return the token that follows each position but the last, from the labels or, without padding, the inputs."""
    labels = batch.get("labels")
    if labels is None:
        real = without_padding(batch)
        labels = batch["input_ids"] if real is None else batch["input_ids"].masked_fill(~real, -100)
    following: Tensor = labels[:, 1:]
    return following


def without_padding(batch: Any) -> Tensor | None:
    """Return a mask that is False at padding, from the attention mask; None if there is no padding or no mask."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool(mask.all()):
        return None
    return mask.bool()


def _warn_of_shifted_labels(batch: Mapping[str, Any], target_key: str | None) -> None:
    """Warn if a batch looks like one for a causal language model, whose labels have to be shifted by one position."""
    tokens, labels = batch.get("input_ids"), batch.get(target_key) if target_key else None
    if isinstance(tokens, Tensor) and isinstance(labels, Tensor) and tokens.shape == labels.shape:
        warn(
            "labels are used without a shift, one per position; for a causal language model shift them: "
            "forward=lambda model, batch: (model(input_ids=batch['input_ids']).logits[:, :-1], batch['labels'][:, 1:])",
            LimpetWarning,
        )


def _outputs(result: Any) -> Any:
    """Return the field `logits` of a model's result if it has one, otherwise the result itself."""
    logits = result_field(result, "logits")
    return result if logits is None else logits


def result_field(result: Any, name: str) -> Any:
    """Return a field of a model's result, which may be a mapping or an object; None if it has no such field."""
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)


def _describe(batch: Any) -> str:
    """Describe the type of a batch for an error message."""
    kind = type(batch).__name__
    return f"a {kind} of {len(batch)}" if isinstance(batch, tuple | list) else f"a {kind}"


def counted_examples(batches: Iterable[Any]) -> int | None:
    """Count the examples of all batches; None if that is not possible without consuming the data.

    Args:
        batches: A DataLoader, a sequence of batches or another iterable.

    Returns:
        The size that `total_examples` finds, otherwise the total size of the batches if they are a sequence.
    """
    total = total_examples(batches)
    if total is None and isinstance(batches, Sequence):
        sizes = [batch_size(batch) for batch in batches]
        total = None if None in sizes else sum(size for size in sizes if size is not None)
    return total


def total_examples(batches: Iterable[Any]) -> int | None:
    """Return the number of examples of a loader if it is known without reading the data, otherwise None.

    A custom loader can provide it as an integer attribute `examples`.
    """
    stated = getattr(batches, "examples", None)
    if isinstance(stated, int):
        return stated
    if not isinstance(batches, DataLoader) or batches.drop_last or not hasattr(batches.dataset, "__len__"):
        return None
    if type(batches.batch_sampler) is not BatchSampler or batches.batch_sampler.sampler is not batches.sampler:
        return None  # a custom batch sampler may not visit all of the data
    try:
        return len(batches.sampler)  # type: ignore[arg-type]
    except TypeError:
        return None


def needed_total(batches: Iterable[Any], examples: int | None, limit: int | None) -> int | None:
    """Return the number of examples of all batches if `limit` restricts the pass to some of them.

    Args:
        batches: A DataLoader, a sequence of batches or another iterable.
        examples: Number of examples of the task, if the user gave it.
        limit: Maximum number of examples to read, or None.

    Returns:
        The number of examples, or None if there is no limit or it is not known.

    Raises:
        CurvatureError: If there is a limit, and the number is neither given nor known.
    """
    if limit is None:
        return None
    total = counted_examples(batches)
    if examples is None and total is None:
        raise CurvatureError(
            "limit= requires the total number of examples of the task, which cannot be determined from these batches: "
            "pass examples="
        )
    return total

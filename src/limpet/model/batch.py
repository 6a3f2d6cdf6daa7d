"""Batches of any form: where their tensors go, how many examples they hold, and how a model is called on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import BatchSampler, DataLoader

from limpet.errors import CurvatureError, LimpetWarning, warn

Forward = Callable[[nn.Module, Any], Any]
"""forward(model, batch) -> (outputs, targets), or the outputs alone where no targets are needed."""

TARGET_KEYS = ("labels", "label", "targets", "target", "y")


def check_batches(batches: Any) -> None:
    """Refuse what looks like one batch where many are expected."""
    if not isinstance(batches, Iterable):
        raise CurvatureError(
            f"batches must be a loader, a list or another iterable of batches, not a {type(batches).__name__}"
        )
    pair = isinstance(batches, tuple) and all(isinstance(item, Tensor) for item in batches)
    if pair or isinstance(batches, Tensor | Mapping):
        raise CurvatureError("this is one batch, not an iterable of batches: put it into a list, [(inputs, targets)]")


def prepared(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device of the model, and every mapping a plain dictionary."""

    def there(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # what was made under torch.inference_mode has no place in a backward pass
        return leaf.to(device).clone() if leaf.is_inference() else leaf.to(device)

    return tree_map(there, _plain(batch))


def _plain(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {key: _plain(value) for key, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(_plain(item) for item in batch)
    return batch


def batch_size(batch: Any) -> int | None:
    """The examples in a batch: the first dimension that all its tensors share; None where there is none."""
    sizes = {leaf.shape[0] for leaf in tree_leaves(_plain(batch)) if isinstance(leaf, Tensor) and leaf.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else None


def part(batch: Any, examples: slice) -> Any:
    """Some examples of a batch."""
    return tree_map(lambda leaf: leaf[examples] if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf, _plain(batch))


class FirstBatches:
    """The first examples that were read, to look at once more."""

    LIMIT = 1000

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.rows = 0
        self._next = 0

    def add(self, number: int, batch: Any) -> None:
        """Keep batch `number`, or as many of its examples as are still wanted; one that is known is not kept twice."""
        if self.rows < self.LIMIT and number == self._next:
            self._next += 1
            size = batch_size(batch)
            if size == 0:
                return
            wanted = self.LIMIT - self.rows
            self.batches.append(batch if size is None else part(batch, slice(0, wanted)))
            self.rows += 1 if size is None else min(size, wanted)

    def take(self, rows: int) -> list[Any]:
        """So many examples; batches that cannot be cut are taken whole."""
        taken: list[Any] = []
        for batch in self.batches:
            if rows <= 0:
                break
            size = batch_size(batch)
            taken.append(batch if size is None else part(batch, slice(0, rows)))
            rows -= 1 if size is None else min(size, rows)
        return taken


def call(model: nn.Module, batch: Any, forward: Forward | None) -> tuple[Any, Any]:
    """Outputs and targets (None where there are none) of a batch."""
    if forward is not None:
        result = forward(model, batch)
        return result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if isinstance(batch, Mapping) and "input_ids" in batch and is_causal(model):
        return next_tokens(model, batch)
    if isinstance(batch, Mapping):
        target = target_key(batch)
        if target is not None and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            return _outputs(model(**batch)), batch[target]  # it makes the decoder's inputs from them
        if not hasattr(model, "config"):
            _warn_of_shifted_labels(batch, target)
        inputs = {key: value for key, value in batch.items() if key != target}
        return _outputs(model(**inputs)), None if target is None else batch[target]
    if isinstance(batch, Tensor):
        return _outputs(model(batch)), None
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = batch
        return _outputs(model(**inputs) if isinstance(inputs, Mapping) else model(inputs)), targets
    raise CurvatureError(
        f"a batch is a pair (inputs, targets), a dictionary or a tensor, not {_describe(batch)}: pass "
        "forward=lambda model, batch: (outputs, targets)"
    )


def target_key(batch: Mapping[str, Any]) -> str | None:
    """The key under which a batch has its targets."""
    return next((key for key in TARGET_KEYS if key in batch), None)


def is_causal(model: nn.Module) -> bool:
    """Whether a model is one of transformers' causal language models, whose outputs are for the next token."""
    kinds = getattr(model, "loss_type", None), type(model).__name__
    return any(isinstance(kind, str) and kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds)


def next_tokens(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The outputs of a causal language model for every token but the last, and the tokens that come next.

    These are the labels where the batch has them; else all tokens that are no padding.
    """
    labels = batch.get("labels")
    if labels is None:
        real = without_padding(batch)
        labels = batch["input_ids"] if real is None else batch["input_ids"].masked_fill(~real, -100)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = _outputs(model(**inputs, use_cache=False))
    return logits[:, :-1], labels[:, 1:]


def without_padding(batch: Any) -> Tensor | None:
    """Which positions of a batch are no padding, by its attention mask; None where all are or nothing is said."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool(mask.all()):
        return None
    return mask.bool()


def _warn_of_shifted_labels(batch: Mapping[str, Any], target_key: str | None) -> None:
    """The labels of a causal language model stand one position further than its outputs."""
    tokens, labels = batch.get("input_ids"), batch.get(target_key) if target_key else None
    if isinstance(tokens, Tensor) and isinstance(labels, Tensor) and tokens.shape == labels.shape:
        warn(
            "labels are taken as they stand, one for each position; for a causal language model shift them: "
            "forward=lambda model, batch: (model(input_ids=batch['input_ids']).logits[:, :-1], batch['labels'][:, 1:])",
            LimpetWarning,
        )


def _outputs(result: Any) -> Any:
    """What a model gives; the logits where it gives a record with a field of that name."""
    if isinstance(result, Mapping) and "logits" in result:
        return result["logits"]
    return getattr(result, "logits", result)


def _describe(batch: Any) -> str:
    kind = type(batch).__name__
    return f"a {kind} of {len(batch)}" if isinstance(batch, tuple | list) else f"a {kind}"


def counted_examples(batches: Iterable[Any]) -> int | None:
    """How many examples there are, where a loader says so or a list can be gone through."""
    total = total_examples(batches)
    if total is None and isinstance(batches, Sequence):
        sizes = [batch_size(batch) for batch in batches]
        total = None if None in sizes else sum(size for size in sizes if size is not None)
    return total


def total_examples(batches: Iterable[Any]) -> int | None:
    """How many examples a loader holds, where it can say so without being read.

    A loader of one's own says it with a whole number called `examples`.
    """
    stated = getattr(batches, "examples", None)
    if isinstance(stated, int):
        return stated
    if not isinstance(batches, DataLoader) or batches.drop_last or not hasattr(batches.dataset, "__len__"):
        return None
    if type(batches.batch_sampler) is not BatchSampler or batches.batch_sampler.sampler is not batches.sampler:
        return None  # a batch sampler of one's own need not go through all of the data
    try:
        return len(batches.sampler)  # type: ignore[arg-type]
    except TypeError:
        return None


def needed_total(batches: Iterable[Any], examples: int | None, limit: int | None) -> int | None:
    """The examples that all batches hold together, where `limit` makes it needed."""
    if limit is None:
        return None
    total = counted_examples(batches)
    if examples is None and total is None:
        raise CurvatureError(
            "with limit=, the pass has to know how many examples the task has altogether, and these batches do "
            "not say: pass examples="
        )
    return total

"""Compare limpet's loss with the one that the model computes itself from the labels of a batch.

A model of transformers returns its loss next to its outputs. What limpet takes as outputs and targets was inferred from
the form of the batch; if that is right, the cross-entropy of the two is the model's own loss. The comparison also shows
whether the labels of a language model are meant for the same position or for the next one, which its name does not
always tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from limpet.errors import CurvatureError
from limpet.likelihoods import Categorical, Likelihood
from limpet.model.batch import accepts, batch_size, call, is_encoder_decoder, part, remember_shift, result_field

EXAMPLES = 8
"""Number of examples of the batch on which the losses are compared."""

TOLERANCE = {torch.float64: (1e-4, 1e-6), torch.float32: (1e-3, 1e-5)}
HALF_TOLERANCE = (3e-2, 5e-3)
"""Largest difference of the losses, relative to the loss and absolute, by dtype of the outputs."""


def has_own_loss(model: nn.Module, batch: Any, likelihood: Likelihood) -> bool:
    """Return whether the model may return a loss for the batch that can be compared with that of the likelihood."""
    if not isinstance(likelihood, Categorical) or not isinstance(batch, Mapping) or not accepts(model, "labels"):
        return False
    labels = batch.get("labels")
    return isinstance(labels, Tensor) and bool((labels != likelihood.ignore_index).any())


@torch.no_grad()
def check_own_loss(model: nn.Module, batch: Any, likelihood: Any) -> None:
    """Raise if the model returns a loss for the batch that is not the loss of limpet's outputs and targets.

    Requires `has_own_loss`. The first few examples are compared, or the whole batch if it cannot be split.

    Args:
        model: The model.
        batch: A batch that is passed to the model without a `forward` of the user.
        likelihood: The likelihood.

    Raises:
        CurvatureError: If the losses differ.
    """
    if batch_size(batch) is not None:
        few = part(batch, slice(0, EXAMPLES))
        batch = few if has_own_loss(model, few, likelihood) else batch
    config: Any = getattr(model, "config", None)
    inputs = {key: value for key, value in batch.items() if key != "num_items_in_batch"}
    if getattr(config, "output_router_logits", False):
        inputs["output_router_logits"] = False  # with them, the loss includes that of the router
    result = model(**inputs)
    theirs, logits = result_field(result, "loss"), result_field(result, "logits")
    if not isinstance(theirs, Tensor) or theirs.numel() != 1 or not isinstance(logits, Tensor):
        return
    _find_shift(model, batch, logits, float(theirs), likelihood)
    outputs, targets = call(model, batch, None)
    ours = float(likelihood.negative_log_likelihood(outputs, targets)) / max(likelihood.count(outputs, targets), 1)
    if not abs(ours - float(theirs)) <= _tolerance(logits, float(theirs)):
        raise CurvatureError(
            f"the loss that {type(model).__name__} computes for the first batch is {float(theirs):.5g}, but the "
            f"cross-entropy of the outputs and targets that limpet takes from it is {ours:.5g}, so its Fisher would be "
            "that of another loss: pass forward=lambda model, batch: (outputs, targets) with the outputs and targets "
            "of your loss, and the likelihood that fits it (likelihood='bernoulli' for several labels per example, "
            "'gaussian' for regression). With a forward, this is not checked"
        )


def _find_shift(
    model: nn.Module, batch: Mapping[str, Any], logits: Tensor, loss: float, likelihood: Categorical
) -> None:
    """Find out whether the labels are predicted from their own position or from the one before."""
    labels = batch["labels"]
    per_position = labels.dim() == 2 and logits.dim() == 3 and labels.shape == logits.shape[:2] and labels.shape[1] > 1
    if is_encoder_decoder(model) or not per_position:
        return
    distances = {}
    for shifted in (True, False):
        pair = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
        count = likelihood.count(*pair)
        distances[shifted] = abs(float(likelihood.negative_log_likelihood(*pair)) / max(count, 1) - loss)
    told_apart = abs(distances[True] - distances[False]) > 1e-5 * abs(loss)
    if told_apart and min(distances.values()) <= _tolerance(logits, loss):
        remember_shift(model, distances[True] < distances[False])


def _tolerance(logits: Tensor, loss: float) -> float:
    """Difference from a loss that rounding explains."""
    relative, absolute = TOLERANCE.get(logits.dtype, HALF_TOLERANCE)
    return relative * abs(loss) + absolute

"""Count the examples N of a task from its batches, in the unit that the mean loss averages over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import SubsetRandomSampler

from limpet.errors import CurvatureError
from limpet.likelihoods import Count, Likelihood
from limpet.model.batch import Forward, batch_size, call, part, prepared, targets_of
from limpet.model.context import preserve_state
from limpet.model.own_loss import check_own_loss, has_own_loss

ROWS = 20_000
"""Number of rows from which the count of a larger data set is extrapolated."""

ROWS_THROUGH_MODEL = 512
"""The same, if the model has to be run to count."""

CHUNK = 64
"""Number of rows of a data set that are collated at once."""


@torch.no_grad()
def count_examples(
    model: nn.Module, batches: Iterable[Any], likelihood: Likelihood, forward: Forward | None = None
) -> Count:
    """Count the examples of a task without training on it.

    The count is taken from the targets of real, collated batches: what `likelihood.count` says for the model's outputs
    on the first batch must be what `likelihood.count_targets` says for its targets, otherwise the model is run on the
    batches that are counted. Data sets of more than `ROWS` rows are counted on evenly spaced rows and extrapolated.

    Args:
        model: The model. Its mode, buffers and the random states are preserved.
        batches: A DataLoader of a data set with a length, or a sequence of batches.
        likelihood: The likelihood.
        forward: As for `Memory.consolidate`.

    Returns:
        N with its rows.

    Raises:
        CurvatureError: If the batches can be read only once, have no length, or contain no examples.
    """
    device = next(model.parameters()).device
    with preserve_state(model, batches):
        first = next(_read(batches, ROWS)[0], None)
        if first is None:
            raise CurvatureError("the batches contain no examples: pass a loader that yields (inputs, targets)")
        start = prepared(_start(first[0]), device)
        if forward is None and has_own_loss(model, start, likelihood):
            check_own_loss(model, start, likelihood)  # it also finds out whether labels are shifted
        by_targets = forward is None and _targets_suffice(model, start, likelihood)
        terms = rows = 0
        found, total = _read(batches, ROWS if by_targets else ROWS_THROUGH_MODEL)
        for batch, size in found:
            if by_targets:
                counted = likelihood.count_targets(targets_of(model, batch))
            else:
                counted = likelihood.count(*call(model, prepared(batch, device), forward))
            if counted is None:
                raise CurvatureError("some batches have targets and others have none: pass examples=N")
            terms += counted
            rows += size or counted
    count = Count(max(terms, 1), rows)
    return count if total is None or total == rows else count.scaled(total)


def _start(batch: Any) -> Any:
    """Return the first two rows of a batch, enough to tell rows from positions."""
    return batch if batch_size(batch) is None else part(batch, slice(0, 2))


def _targets_suffice(model: nn.Module, batch: Any, likelihood: Likelihood) -> bool:
    """Return whether a batch's targets alone give the count that outputs and targets give."""
    counted = likelihood.count_targets(targets_of(model, batch))
    return counted is not None and counted == likelihood.count(*call(model, batch, None))


def _read(batches: Iterable[Any], most: int) -> tuple[Iterator[tuple[Any, int | None]], int | None]:
    """Return batches with about `most` rows, spread over the data, each with its rows, and the rows of all the data.

    The latter are None if the batches are all there are. A collator may join the rows of a data set (packing).
    """
    data: Any = getattr(batches, "dataset", None)
    collate = getattr(batches, "collate_fn", None)
    if collate is not None and hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        sampler = getattr(batches, "sampler", None)
        indices = sampler.indices if isinstance(sampler, SubsetRandomSampler) else range(len(data))
        chosen = indices[:: -(-len(indices) // most)] if len(indices) > most else indices
        chunks = (chosen[start : start + CHUNK] for start in range(0, len(chosen), CHUNK))
        return ((collate([data[i] for i in chunk]), len(chunk)) for chunk in chunks), len(indices)
    if isinstance(batches, Sequence):
        return ((batch, batch_size(batch)) for batch in batches), None
    raise CurvatureError(
        "the examples of these batches cannot be counted without consuming them: pass examples=N, the number of "
        "examples (or predicted positions) in one epoch"
    )

"""Samples of a causal language model itself, which stand for what it knows where its data are not available."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from limpet.curvature.progress import Progress
from limpet.errors import LimpetError, UnsupportedError
from limpet.model import preserve_state

NOT_CAUSAL = 0.05
"""Change of the output for a token by the token after it, relative to that token's own, above which a model is not
causal. Quantized activations share a scale among tokens, which changes them a little."""


@torch.no_grad()
def self_samples(
    model: Any,
    tokens: int,
    *,
    length: int = 96,
    prefixes: Sequence[Sequence[int]] | None = None,
    batch_size: int = 32,
    temperature: float = 1.0,
    seed: int = 0,
    progress: bool = True,
) -> Tensor:
    """Sample text from a causal language model, to represent what it knows when the original data are not available.

    Tokens are sampled from the model's own distribution. The random number of a token depends only on the seed and its
    position, so the samples do not depend on the batch size. The end-of-text token is treated like any other token, and
    the row continues with the next text.

    Args:
        model: The model. Its state is preserved.
        tokens: The number of tokens to sample, not counting prefixes. Rounded up to whole rows.
        length: The number of tokens per row, including its prefix.
        prefixes: Token ids that the rows start with, used in turn. Defaults to the model's beginning-of-text token (or
            end-of-text token, if it has none).
        batch_size: The number of rows to sample at a time, with a key-value cache if the model has one.
        temperature: The sampling temperature, by which the logits are divided.
        seed: The random seed.
        progress: Whether to show a progress bar.

    Returns:
        Token ids of shape (rows, length).

    Raises:
        LimpetError: If a prefix is empty or does not fit into a row, or the model has no beginning-of-text token.
        UnsupportedError: If the model is not causal.
        ValueError: If `temperature` is not positive.
    """
    starts = [list(prefix) for prefix in prefixes or [[_first_token(model)]]]
    if not all(0 < len(start) < length for start in starts):
        raise LimpetError(f"prefixes must have from 1 to {length - 1} tokens: use shorter prefixes, or a larger length")
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, not {temperature!r}")
    lengths: list[int] = []
    left = tokens
    while left > 0:
        lengths.append(length - len(starts[len(lengths) % len(starts)]))
        left -= lengths[-1]
    uniform = torch.rand(len(lengths), length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = torch.zeros(len(lengths), length, dtype=torch.long)
    bar = Progress(sum(lengths), show=progress, label="limpet: samples", unit="tokens")
    try:
        with preserve_state(model):
            _check_causal(model, starts[0][0])
            for size in sorted(set(lengths)):  # batch rows whose prefixes have equal lengths
                same = [i for i, one in enumerate(lengths) if one == size]
                for begin in range(0, len(same), batch_size):
                    some = same[begin : begin + batch_size]
                    prefix = torch.tensor([starts[i % len(starts)] for i in some])
                    rows[some] = _continued(model, prefix, uniform[some], temperature, bar)
    finally:
        bar.close()
    return rows


def _first_token(model: Any) -> int:
    for name in ("bos_token_id", "eos_token_id"):
        found = getattr(model.config, name, None)
        if isinstance(found, int):
            return found
    raise LimpetError("the model's config has no single bos_token_id or eos_token_id: pass prefixes=")


def _check_causal(model: Any, first: int) -> None:
    """Raise if the output for a token depends on the token after it."""
    rows = torch.tensor([[first, 0], [first, 1]], device=next(model.parameters()).device)
    logits = model(input_ids=rows).logits.float()
    before, after = (logits[0] - logits[1]).abs().mean(-1).tolist()
    if before > NOT_CAUSAL * after:
        raise UnsupportedError(
            "the model is not a causal language model: its output for a token depends on the token after it, so text "
            "cannot be sampled from it; pass text as batches to SelfRehearsal.consolidate, or use limpet.Distillation"
        )


def _continued(model: Any, prefix: Tensor, uniform: Tensor, temperature: float, bar: Progress) -> Tensor:
    """Continue the prefixes with sampled tokens, given a uniform random number for every position."""
    device = next(model.parameters()).device
    row, cache, given = prefix, None, prefix
    while row.shape[1] < uniform.shape[1]:
        cached: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
        output = model(input_ids=given.to(device), use_cache=True, **cached)
        cache = getattr(output, "past_key_values", None)
        cumulative = (output.logits[:, -1].double().cpu() / temperature).softmax(-1).cumsum(-1)
        place = uniform[:, row.shape[1], None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, place).clamp_max(cumulative.shape[1] - 1)
        row = torch.cat([row, drawn], 1)
        given = row if cache is None else drawn  # GPT-1 and Mamba return no cache under this name
        bar.update(len(row))
    return row

"""Padding: which positions of a batch count in the input factors of the layers.

An attention mask tells it for the positions of the input. An encoder-decoder model has a second sequence, whose padding
is that of the labels (and of `decoder_attention_mask`). Its layers see one or the other, and the cross-attention of a
decoder sees both, so names do not tell which. Lengths do; if both sequences have the same length, one example is passed
through the model again with a decoder sequence that is one position shorter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from limpet.curvature.hooks import Recorder
from limpet.errors import CurvatureError
from limpet.layers import Call
from limpet.model.batch import Forward, batch_size, call, is_encoder_decoder, part, without_padding
from limpet.model.blocks import Block

IGNORED = -100
"""Label of the positions that transformers ignores."""

Decoding = Mapping[str, Sequence[bool]]
"""For every block, which of its calls see the sequence of the decoder."""

UNCLEAR = (
    "the sequences of encoder and decoder have the same length and different padding, and which layer sees which could "
    "not be found out ({reason}): pad them to different lengths"
)


@dataclass(frozen=True)
class Padding:
    """Masks of the positions of a batch, False at padding.

    Attributes:
        inputs: Mask of the input, of shape (examples, positions); None if it has no padding.
        decoder: Mask of the decoder's sequence; None if the model has no decoder, or its sequence no padding.
    """

    inputs: Tensor | None
    decoder: Tensor | None = None

    @classmethod
    def of(cls, model: nn.Module, batch: Any) -> Padding:
        """Read the masks from a batch."""
        inputs = without_padding(batch)
        if not isinstance(batch, Mapping) or not is_encoder_decoder(model):
            return cls(inputs)
        decoder = _decoder_positions(batch)
        tokens = batch.get("input_ids")
        if decoder is not None and inputs is None and isinstance(tokens, Tensor) and tokens.shape == decoder.shape:
            inputs = torch.ones_like(decoder)
        if decoder is None or (bool(decoder.all()) and (inputs is None or inputs.shape != decoder.shape)):
            return cls(inputs)
        return cls(inputs, decoder)

    @property
    def unclear(self) -> bool:
        """Whether the shape of a call does not tell which of the masks applies to it."""
        a, b = self.inputs, self.decoder
        return a is not None and b is not None and a.shape == b.shape and not torch.equal(a, b)

    def mark(self, calls: Mapping[str, Sequence[Call]], decoding: Decoding) -> None:
        """Give every call the mask of the positions that it sees.

        Args:
            calls: The calls of every block.
            decoding: Which of them see the sequence of the decoder; used only if the masks are `unclear`.
        """
        if self.inputs is None and self.decoder is None:
            return
        unclear = self.unclear
        for name, some in calls.items():
            for i, each in enumerate(some):
                masks = (self.inputs, self.decoder)
                if unclear:
                    masks = (self.decoder if decoding[name][i] else self.inputs, None)
                shape = each.shape[:2] if len(each.shape) <= 3 else None
                each.real = next((mask for mask in masks if mask is not None and mask.shape == shape), None)


def _decoder_positions(batch: Mapping[str, Any]) -> Tensor | None:
    """Mask of the decoder's positions up to the last label; those behind it change nothing that is predicted."""
    labels, mask = batch.get("labels"), batch.get("decoder_attention_mask")
    found = None
    if isinstance(labels, Tensor) and labels.dim() == 2:
        found = (labels != IGNORED).flip(1).cumsum(1).flip(1) > 0
    if isinstance(mask, Tensor) and mask.dim() == 2:
        found = mask.bool() if found is None or found.shape != mask.shape else found & mask.bool()
    return found


def find_decoding(
    model: nn.Module, blocks: Sequence[Block], batch: Mapping[str, Any], forward: Forward | None
) -> dict[str, list[bool]]:
    """Find out which calls see the sequence of the decoder, by passing one example with a shorter one.

    Args:
        model: An encoder-decoder model.
        blocks: The blocks whose layers are observed.
        batch: A batch with labels.
        forward: The user's forward function, if any.

    Returns:
        For every block, whether each of its calls sees fewer positions then.

    Raises:
        CurvatureError: If the batch cannot be split into examples, or its sequence cannot be shortened.
    """
    if batch_size(batch) is None:
        raise CurvatureError(UNCLEAR.format(reason="the batch cannot be split into examples"))
    one = part(batch, slice(0, 1))
    length = next(t.shape[1] for t in (one.get("labels"), one.get("decoder_attention_mask")) if isinstance(t, Tensor))
    shorter = {key: _shortened(value, length) if _of_decoder(key) else value for key, value in one.items()}
    recorder, positions = Recorder(), []
    try:
        with recorder.attached([block for block in blocks if block.layers]):
            for each in (one, shorter):
                with recorder.recording():
                    call(model, each, forward)
                rows = {name: [c.layer.row_count(c) for c in calls] for name, calls in recorder.calls.items()}
                positions.append(rows)
    except (RuntimeError, ValueError, IndexError) as error:
        raise CurvatureError(UNCLEAR.format(reason=str(error))) from error
    whole, less = positions
    return {name: [a != b for a, b in zip(counts, less[name], strict=True)] for name, counts in whole.items()}


def _of_decoder(key: str) -> bool:
    """Whether an entry of a batch belongs to the sequence of the decoder."""
    return key == "labels" or key.startswith("decoder_")


def _shortened(value: Any, length: int) -> Any:
    """Remove the last position of a tensor that has one for every position."""
    return value[:, :-1] if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length else value

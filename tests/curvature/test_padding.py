"""Padding of encoder and decoder: it counts in no factor, whichever of the two sequences a layer sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import limpet
from limpet.curvature import Fisher, FisherPass, Structure
from limpet.errors import CurvatureError
from limpet.model import discover

transformers = pytest.importorskip("transformers")
from language_models import VOCABULARY  # noqa: E402


def t5() -> Any:
    torch.manual_seed(0)
    small = {"d_model": 8, "d_ff": 10, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**small, decoder_start_token_id=0)).double()


def bart() -> Any:
    torch.manual_seed(0)
    sizes = {"layers": 1, "attention_heads": 2, "ffn_dim": 10}
    both = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in sizes.items()}
    config = transformers.BartConfig(vocab_size=VOCABULARY, d_model=8, max_position_embeddings=64, **both)
    return transformers.BartForConditionalGeneration(config).double()


MODELS = {"T5": t5, "BART": bart}
APART = ["*relative_attention_bias*", "*embed_positions*"]
"""Embeddings of positions, which are no part of this: they are measured per sample."""


def pair(inputs: int = 7, labels: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(3, VOCABULARY, (4, n), generator=generator) for n in (inputs, labels))  # type: ignore


def behind(x: Tensor, columns: int, value: int) -> Tensor:
    return torch.cat([x, x.new_full((len(x), columns), value)], 1)


def batch(encoder: int, decoder: int) -> dict[str, Tensor]:
    """The same four pairs, with so many columns of padding."""
    x, y = pair()
    mask = behind(torch.ones_like(x), encoder, 0)
    return {"input_ids": behind(x, encoder, 1), "attention_mask": mask, "labels": behind(y, decoder, -100)}


def fisher(model: Any, batches: list[Any], **options: Any) -> Fisher:
    blocks = discover(model, APART)
    return FisherPass(
        model, blocks, limpet.Categorical(), Structure("kronecker", 4096), fisher="empirical", **options
    ).run(batches, progress=False)


def far(a: Fisher, b: Fisher) -> float:
    """The largest relative difference between the factors of two passes."""
    worst = 0.0
    for name, terms in b.terms.items():
        for ours, theirs in zip(a.terms[name], terms, strict=True):
            for part, x in vars(theirs).items():
                if isinstance(x, Tensor):
                    worst = max(worst, float((getattr(ours, part) - x).norm() / x.norm().clamp_min(1e-30)))
    return worst


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("encoder", "decoder"), [(6, 0), (0, 9), (6, 9), (0, 2), (5, 7), (2, 4)])
def test_padding_of_either_sequence_changes_no_factor(name: str, encoder: int, decoder: int) -> None:
    """The last three make both sequences equally long."""
    model = MODELS[name]()
    plain, padded = (fisher(model, [batch(*columns)]) for columns in ((0, 0), (encoder, decoder)))
    assert padded.examples == plain.examples == 20
    assert far(padded, plain) < 1e-8


@pytest.mark.parametrize("equal", [False, True])
def test_sequences_of_several_lengths_are_as_if_alone(equal: bool) -> None:
    model = t5()
    x, y = pair(5 if equal else 7, 5)
    lengths = [(3, 5), (5, 2), (4, 4), (2, 3)]
    mask = torch.stack([(torch.arange(x.shape[1]) < n).long() for n, _ in lengths])
    labels = torch.stack([row.masked_fill(torch.arange(5) >= n, -100) for row, (_, n) in zip(y, lengths, strict=True)])
    together = fisher(model, [{"input_ids": x * mask, "attention_mask": mask, "labels": labels}])
    alone = fisher(
        model,
        [{"input_ids": x[i : i + 1, :n], "labels": y[i : i + 1, :m]} for i, (n, m) in enumerate(lengths)],
    )
    assert together.examples == alone.examples == 14
    assert far(together, alone) < 1e-8


def test_a_mask_of_the_decoder_counts_too() -> None:
    """Decoder inputs of one's own, with labels up to the end of a shorter mask."""
    model = t5()
    x, y = pair(7, 5)
    inputs = torch.cat([torch.zeros(4, 1, dtype=torch.long), y[:, :-1]], 1)
    short = fisher(model, [{"input_ids": x, "labels": y, "decoder_input_ids": inputs}])
    ones = torch.ones_like(inputs)
    long = fisher(
        model,
        [
            {
                "input_ids": x,
                "labels": behind(y, 2, -100),
                "decoder_input_ids": behind(inputs, 2, 0),
                "decoder_attention_mask": behind(ones, 2, 0),
            }
        ],
    )
    assert far(long, short) < 1e-8


def test_several_batches_of_equal_lengths_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from limpet.curvature import batch_step

    asked: list[int] = []
    find = batch_step.find_decoding
    monkeypatch.setattr(batch_step, "find_decoding", lambda *args: asked.append(1) or find(*args))
    model = t5()
    fisher(model, [batch(5, 7)] * 3)
    assert asked == [1]
    fisher(model, [batch(0, 9)] * 3)  # shapes tell
    assert asked == [1]


def test_what_cannot_be_found_out_raises() -> None:
    model = t5()
    data: dict[str, Any] = {**batch(5, 7), "decoder_head_mask": None, "extra": torch.zeros(3)}

    def forward(model: Any, batch: Any) -> Any:
        inputs = {key: value for key, value in batch.items() if key != "extra"}
        return model(**inputs).logits, batch["labels"]

    with pytest.raises(CurvatureError, match="pad them to different lengths"):
        fisher(model, [data], forward=forward)

"""Samples of models that have no key-value cache, and of models that are not causal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import limpet
from limpet.errors import UnsupportedError
from limpet.forgetting.self_samples import self_samples

transformers = pytest.importorskip("transformers")

from language_models import llama  # noqa: E402


def test_without_a_cache_the_samples_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(initializer_range=0.5, bos_token_id=1, eos_token_id=2)
    rows = self_samples(model, 70, length=8, progress=False)
    forward, lengths = model.forward, []

    def without_cache(input_ids: Any, use_cache: bool = False) -> Any:
        lengths.append(input_ids.shape[1])
        return SimpleNamespace(logits=forward(input_ids=input_ids).logits)

    monkeypatch.setattr(model, "forward", without_cache)
    assert torch.equal(rows, self_samples(model, 70, length=8, progress=False))
    assert lengths == [2, *range(1, 8)]  # the check, and then whole rows


def test_a_recurrent_model_rehearses_what_it_samples() -> None:
    config = transformers.MambaConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, state_size=4, bos_token_id=1)
    torch.manual_seed(0)
    memory = limpet.SelfRehearsal(transformers.MambaForCausalLM(config))
    memory.consolidate(tokens=200, length=9, held_out=8, progress=False)
    assert memory.rehearsed is not None and memory.rehearsed.rows == 25 and abs(float(memory.drift())) < 1e-6


def test_a_model_that_is_not_causal_is_rejected() -> None:
    config = transformers.XLNetConfig(vocab_size=30, d_model=16, n_layer=1, n_head=2, d_inner=32, bos_token_id=1)
    config.initializer_range = 0.5
    torch.manual_seed(0)
    model = transformers.XLNetLMHeadModel(config)
    with pytest.raises(UnsupportedError, match="not a causal language model"):
        self_samples(model, 70, length=8, progress=False)

"""A language model in small, as transformers has it."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 23


def llama(**options: Any) -> Any:
    """Two blocks of twelve features, the same every time."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        **options,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))

"""Small language models with quantized layers, and the same models with the weights that these layers have."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from language_models import llama
from limpet.model.quantized import is_quantized, quantized_weight

KINDS = ("nf4", "fp4", "int8", "torchao")
TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj", "up_proj"]


def quantized_layer(layer: nn.Linear, kind: str) -> nn.Linear:
    """A layer of bitsandbytes or torchao with the quantized weights of another."""
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        found = nn.Sequential(copy.deepcopy(layer))
        quantize_(found, Int8WeightOnlyConfig())
        return found[0]  # type: ignore[return-value]
    import bitsandbytes

    sizes: Any = layer.in_features, layer.out_features, layer.bias is not None
    quantized: Any
    if kind == "int8":
        quantized = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
    else:
        quantized = bitsandbytes.nn.Linear4bit(*sizes, quant_type=kind, compute_dtype=torch.float32)
    quantized.load_state_dict(layer.state_dict())
    return quantized.to("cpu").requires_grad_(False)  # type: ignore[no-any-return]


def quantized_llama(kind: str, seed: int = 0) -> Any:
    """A small Llama, all linear layers but the head quantized."""
    model = llama(hidden_size=64, intermediate_size=128, attention_bias=True, num_attention_heads=4)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            nn.init.normal_(parameter, std=0.1)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, quantized_layer(layer, kind))
    # as transformers sets them, for peft to choose its layers by
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind in ("nf4", "fp4"), kind == "int8"
    return model


def dequantized(model: Any) -> Any:
    """The same model with plain linear layers."""
    found = llama(hidden_size=64, intermediate_size=128, attention_bias=True, num_attention_heads=4)
    plain = {name: parameter for name, parameter in model.state_dict().items() if name in found.state_dict()}
    for name, layer in model.named_modules():
        if is_quantized(layer):
            plain[f"{name}.weight"] = quantized_weight(layer).values()
    found.load_state_dict(plain)
    return found


def with_adapters(model: Any, update: float = 0.05) -> Any:
    """The model with LoRA, whose updates are the same in every call."""
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM")
    found = peft.get_peft_model(model, config)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=update) if update else nn.init.zeros_(parameter)
    return found

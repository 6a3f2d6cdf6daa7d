"""A language model learns a second language by LoRA and keeps the first. Its memory was made before it had adapters.

python examples/lora.py      # needs limpet[transformers]; the model is made here, nothing is downloaded
"""

import copy
from contextlib import nullcontext

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import limpet

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def text(language: int, n: int = 400, length: int = 13) -> torch.Tensor:
    """Each language has twenty words of its own, and an order in which they mostly follow each other."""
    g = torch.Generator().manual_seed(language)
    after, words = torch.randperm(20, generator=g), [torch.randint(0, 20, (n,), generator=g)]
    while len(words) < length:
        slip = torch.rand(n, generator=g) < 0.1
        words.append(torch.where(slip, torch.randint(0, 20, (n,), generator=g), after[words[-1]]))
    return 20 * language + torch.stack(words, 1)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    """Ten epochs of an ordinary loop."""
    for part in (part for _ in range(10) for part in rows[torch.randperm(len(rows))].split(40)):
        optimizer.zero_grad()
        model(input_ids=part, labels=part).loss.backward()
        optimizer.step()


torch.manual_seed(0)
old, new = text(0), text(1)
base = LlamaForCausalLM(LlamaConfig(vocab_size=40, initializer_range=0.3, **SIZES))
train(base, torch.optim.AdamW(base.parameters(), lr=5e-3), old)
for hold in (False, True):
    model = copy.deepcopy(base)
    memory = limpet.OnlineLaplace(model, exclude=["*embed_tokens*", "lm_head"], prior_mean="initial", strength=10.0)
    memory.consolidate([{"input_ids": part} for part in old.split(40)], progress=False)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    with memory.protect(optimizer, examples=new[:, 1:].numel()) if hold else nullcontext():  # so many are predicted
        train(model, optimizer, new)
    first, second = (model(input_ids=rows, labels=rows).loss.item() for rows in (old, new))
    print(f"{'with' if hold else 'without'} the memory: old {first:.3f}, new {second:.3f} nats per word")

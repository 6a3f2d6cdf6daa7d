"""A language model learns a second language by LoRA, and keeps the first.

python docs/tutorials/language.py       # needs limpet[transformers]; the model is made here, nothing is downloaded
"""

# %% [markdown]
# # LoRA on a language model
#
# LoRA trains few parameters, and forgets all the same: what counts is how the weight changes, not how many numbers
# say so. A memory of the model, made before it has adapters, holds the change of the whole weight.
#
# To run in seconds, the model here is a small Llama that is made and trained on the spot, on a language of twenty
# words. With a real one all that follows is the same; [what a memory keeps on
# SmolLM2-135M](../../results/language/README.md) is among the results.

# %%
import copy
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import limpet


def text(language: int, n: int = 400, length: int = 13) -> Tensor:
    """Each language has twenty words of its own, and an order in which they mostly follow each other."""
    g = torch.Generator().manual_seed(language)
    after, words = torch.randperm(20, generator=g), [torch.randint(0, 20, (n,), generator=g)]
    while len(words) < length:
        slip = torch.rand(n, generator=g) < 0.1
        words.append(torch.where(slip, torch.randint(0, 20, (n,), generator=g), after[words[-1]]))
    return 20 * language + torch.stack(words, 1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
    """Ten epochs of an ordinary loop."""
    for part in (part for _ in range(10) for part in rows[torch.randperm(len(rows))].split(40)):
        optimizer.zero_grad()
        model(input_ids=part, labels=part).loss.backward()
        optimizer.step()


def loss(model: nn.Module, rows: Tensor) -> float:
    """Nats per word."""
    with torch.no_grad():
        return float(model(input_ids=rows, labels=rows).loss)


torch.manual_seed(0)
old, new = text(0), text(1)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
published = LlamaForCausalLM(LlamaConfig(vocab_size=40, initializer_range=0.3, **sizes))
train(published, torch.optim.AdamW(published.parameters(), lr=5e-3), old)
print(f"the model as it is published: old {loss(published, old):.3f} nats per word")

# %% [markdown]
# ## The memory, once
#
# Whoever has text that stands for what the model should keep makes its memory, once. Embedding and head are left out:
# they are the largest blocks and the last that fine-tuning has to change. `prior_mean="initial"` says that the model
# comes trained. For a real model that is the command
#
# ```bash
# limpet consolidate --model HuggingFaceTB/SmolLM2-135M-Instruct --data general-english.txt -o memory.safetensors
# ```
#
# which looks at 20,000 tokens unless you say otherwise.

# %%
folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "memory.safetensors"
memory = limpet.OnlineLaplace(published, exclude=["*embed_tokens*", "lm_head"], prior_mean="initial", strength=10.0)
memory.consolidate([{"input_ids": part} for part in old.split(40)], progress=False)
memory.save(path)
print(f"the memory: {path.stat().st_size / 1e3:.0f} kB, of {memory.examples} predicted words")

# %% [markdown]
# ## Fine-tuning, by anybody
#
# From here on nobody needs the old text. The memory is loaded for the plain model, then the adapters are put on:
# names are seen through them. `examples` are predicted tokens, so a row of 13 words has 12.


# %%
def fine_tune(**how: float) -> tuple[float, float]:
    """Loss on the old and the new language."""
    torch.manual_seed(1)
    model = copy.deepcopy(published)
    memory = limpet.load(path, model)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    if how.pop("hold"):
        with memory.protect(optimizer, examples=new[:, 1:].numel(), **how):
            train(model, optimizer, new)
    else:
        train(model, optimizer, new)
    return loss(model, old), loss(model, new)


for name, how in {
    "plain LoRA": {"hold": False},
    "with the memory": {"hold": True},
    "with a budget of 0.1 nats": {"hold": True, "budget": 0.1},
}.items():
    kept, learned = fine_tune(**how)
    print(f"{name}: old {kept:.3f}, new {learned:.3f} nats per word")
folder.cleanup()

# %% [markdown]
# ## In a Trainer
#
# With transformers' Trainer or trl's SFTTrainer it is a callback, which counts the tokens, logs the forecast beside
# the loss, and is part of the checkpoints:
#
# ```python
# from limpet.integrations.transformers import MemoryCallback
#
# trainer = Trainer(model, args, train_dataset=new_text, callbacks=[MemoryCallback("memory.safetensors", budget=0.05)])
# ```
#
# `every=4` makes the gradient of the penalty anew every fourth step and costs a fourth. Several adapters,
# rank-stabilised scaling and merged adapters are right; DoRA and quantised bases are refused.

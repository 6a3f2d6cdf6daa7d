"""Restore what a fine-tuned language model has forgotten.

python docs/tutorials/repair.py         # needs limpet[transformers]; the model is made here, nothing is downloaded
"""

# %% [markdown]
# # I have fine-tuned already
#
# Forgetting is often noticed only after the fine-tune. It can still be undone: train as usual, with any optimizer, and
# call `limpet.repair` afterwards. It needs a memory of the model *before* fine-tuning, which can be created from
# nothing but the model's own samples, and the data that you fine-tuned on. It needs no old data and no second training
# run.
#
# To run in seconds, this tutorial builds and trains a small Llama on a language of twenty words. See also [the results
# of repair on SmolLM2-135M and MiniLM](../../results/repair/README.md).

# %%
import copy
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import limpet
from limpet.integrations.causal_lm import consolidate_lm, self_samples


def text(language: int, n: int = 400, length: int = 13) -> Tensor:
    """Each language has twenty words of its own, and an order in which they mostly follow each other."""
    g = torch.Generator().manual_seed(language)
    after, words = torch.randperm(20, generator=g), [torch.randint(0, 20, (n,), generator=g)]
    while len(words) < length:
        slip = torch.rand(n, generator=g) < 0.1
        words.append(torch.where(slip, torch.randint(0, 20, (n,), generator=g), after[words[-1]]))
    return 20 * language + torch.stack(words, 1)


def train(model: nn.Module, rows: Tensor) -> None:
    """Ten epochs of an ordinary loop."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
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
published = LlamaForCausalLM(LlamaConfig(vocab_size=40, initializer_range=0.3, bos_token_id=0, **sizes))
train(published, old)

# %% [markdown]
# ## An ordinary fine-tune, without limpet

# %%
torch.manual_seed(1)
model = get_peft_model(copy.deepcopy(published), LoraConfig(r=4, target_modules="all-linear"))
train(model, new)
print(f"before:   old {loss(published, old):.3f}, new {loss(published, new):.3f} nats per word")
print(f"tuned:    old {loss(model, old):.3f}, new {loss(model, new):.3f}")

# %% [markdown]
# ## A memory without data
#
# The model generates text that represents what it knows, and its curvature is measured on that text. Some additional
# samples form the *probe*: inputs, stored with the outputs of the original model, on which drift is measured. For a
# real model the command is
#
# ```bash
# limpet consolidate --model HuggingFaceTB/SmolLM2-135M-Instruct --self-samples 12000 -o memory.safetensors
# ```

# %%
rows = self_samples(published, 12_000, length=13, prefixes=[[word] for word in range(20)], progress=False)
folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "memory.safetensors"
consolidate_lm(published, rows[100:].split(40), probe=[rows[:100]], progress=False).save(path)

# %% [markdown]
# ## Measure, repair, measure
#
# Drift is KL(before || now) per token and takes only forward passes. Repair makes one pass over the new data, solves
# for the update that balances the curvature of the old and the new data, and writes it back into the adapters at their
# own rank.

# %%
memory = limpet.load(path, model)
print(f"drift, tuned: {memory.drift()}")
batches = [{"input_ids": part} for part in new.split(40)]
repair = limpet.repair(model, memory, batches, progress=False)
print(f"repaired: old {loss(model, old):.3f}, new {loss(model, new):.3f}")
print(f"drift, repaired: {memory.drift()}")

# %% [markdown]
# ## Along the path
#
# One decomposition serves every strength. `tolerance=` chooses the largest strength that the loss on the new data
# allows, `budget=` the smallest that reduces the drift enough, and `undo()` restores the tuned weights bit for bit.
# The drift is measured on the probe; the forecast comes from the memory alone, and after a repair it is not trusted
# (`memory.forecast().trusted` is False): repair removes exactly what the memory's quadratic can see. Here it is two to
# five times too high.

# %%
print(repair.table(strengths=(0.0, 0.1, 1.0, 10.0)))
repair.undo()
limpet.repair(model, memory, batches, budget=0.2, progress=False)
print(f"within a budget of 0.2: old {loss(model, old):.3f}, new {loss(model, new):.3f}")
folder.cleanup()

# %% [markdown]
# ## On the command line and in a Trainer
#
# ```bash
# limpet drift  --model BASE --tuned my-adapter --memory memory.safetensors --at-most 0.05    # exits 1 above it
# limpet repair --model BASE --tuned my-adapter --memory memory.safetensors --data new.txt -o repaired
# ```
#
# Both read peft adapters and transformers checkpoints, and `limpet repair` writes the same format that it read. In a
# Trainer, `MemoryCallback(memory, repair=True)` trains as usual and repairs at the end.

"""Teach a language model a second language with LoRA without losing the first.

python docs/tutorials/language.py       # needs limpet[transformers]; the model is made here, nothing is downloaded
"""

# %% [markdown]
# # LoRA on a language model
#
# LoRA trains few parameters, and forgets all the same: what matters is how the weight changes, not how many numbers
# parameterize the change. A memory of the model, created before it has adapters, penalizes the change of the full
# weight.
#
# To run in seconds, this tutorial builds and trains a small Llama on a language of twenty words. With a real model
# everything below is the same; see [the results on SmolLM2-135M](../../results/language/README.md).

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
# ## Create the memory once
#
# The memory is created once, by someone who has text that represents what the model should retain. Embedding and head
# are excluded: they are the largest blocks and the last that fine-tuning has to change. `prior_mean="initial"` states
# that the model is already trained. For a real model the command is
#
# ```bash
# limpet consolidate --model HuggingFaceTB/SmolLM2-135M-Instruct --data general-english.txt -o memory.safetensors
# ```
#
# which reads 20,000 tokens by default.

# %%
folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "memory.safetensors"
memory = limpet.OnlineLaplace(published, exclude=["*embed_tokens*", "lm_head"], prior_mean="initial", strength=10.0)
memory.consolidate([{"input_ids": part} for part in old.split(40)], progress=False)
memory.save(path)
print(f"the memory: {path.stat().st_size / 1e3:.0f} kB, of {memory.examples} predicted words")

# %% [markdown]
# ## Fine-tune without the old text
#
# From here on the old text is not needed. Load the memory for the plain model, then add the adapters: parameter names
# are resolved through them. `examples` is the number of predicted tokens, so a row of 13 words counts 12. The budget
# limits the forecast, which is not trusted for this model and too high here: less than the budget is lost.


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
# With transformers' Trainer or trl's SFTTrainer, use the callback. It counts the tokens, logs the forecast next to the
# loss, and is included in the checkpoints:
#
# ```python
# from limpet.integrations.transformers import MemoryCallback
#
# trainer = Trainer(model, args, train_dataset=new_text, callbacks=[MemoryCallback("memory.safetensors", budget=0.05)])
# ```
#
# `every=4` recomputes the gradient of the penalty only every fourth step, at a quarter of the cost. Multiple adapters,
# rank-stabilized scaling, merged adapters and quantized base models are supported; DoRA is not.

"""LoRA under `fully_shard`: the memory of a language model, on any number of ranks. Run by many_ranks.py.

transformers and peft are imported where they are used, because most processes of many_ranks.py do not need them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import limpet
from limpet.distributed import whole

RUNS: dict[str, dict[str, Any]] = {
    "gradient": {"mode": "gradient"},
    "every 3": {"mode": "gradient", "every": 3},
    "budget": {"mode": "gradient", "budget": 0.0005},
    "repair": {"mode": "repair", "repair": {"strength": 1.0}},
    "repair to a budget": {"mode": "repair", "budget": 0.0006},
    "recorded": {"mode": "repair", "repair": {"budget": 0.0006, "tolerance": "auto"}},
}


def runs_on(size: int) -> list[str]:
    """All on up to two ranks, and on more, where processes share cores, those that differ the most."""
    return list(RUNS) if size <= 2 else ["gradient", "budget", "repair to a budget"]


def rows(seed: int, count: int) -> Tensor:
    from language_models import VOCABULARY

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (count, 8), generator=generator)


def remember(folder: Path) -> None:
    """The memory of the model, made by one process."""
    from language_models import llama

    model = llama().double()
    memory = limpet.OnlineLaplace(model, strength=2.0, exclude=["lm_head", "*embed_tokens*"])
    batches = [{"input_ids": part, "labels": part} for part in rows(1, 32).split(8)]
    memory.consolidate(batches, probe=8, progress=False)
    memory.save(folder / "memory.safetensors")


def adapted(size: int) -> Any:
    """The model with adapters, in pieces if there are several ranks."""
    import peft

    from language_models import llama

    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(llama(attention_bias=False).double(), config).double()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            seed = torch.Generator().manual_seed(parameter.numel())
            nn.init.normal_(parameter, std=0.2 if "lora_A" in name else 0.02, generator=seed)
    if size > 1:
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def make(folder: Path, rank: int, size: int) -> None:
    """A memory that is made of the model with adapters, in pieces."""
    memory = limpet.OnlineLaplace(adapted(size), strength="auto", prior_mean="initial")
    own = rows(1, 32)[rank::size].split(4)
    memory.consolidate([{"input_ids": part, "labels": part} for part in own], progress=False)
    memory.save(folder / f"made {size}.safetensors")


def repaired(repair: Any, model: nn.Module) -> dict[str, float]:
    """What a repair measures, and that it can be undone and done again."""
    before, after = repair.compared()
    here = {name: whole(p) for name, p in model.named_parameters()}
    strength = repair.strength
    repair.undo()
    assert repair.measured() == before
    repair.at(strength)
    assert all(torch.equal(whole(p), here[name]) for name, p in model.named_parameters())
    return {"strength": strength, "tuned": before.drift, "new loss": after.loss, "tuned loss": before.loss}


def run(folder: Path, rank: int, size: int) -> None:
    """Twelve protected steps of every kind; every rank takes its part of the same global batches."""
    make(folder, rank, size)
    new = rows(2, 16)
    for name in runs_on(size):
        model, options = adapted(size), RUNS[name]
        memory = limpet.load(folder / "memory.safetensors", model)
        assert isinstance(memory, limpet.Memory)
        with torch.no_grad():
            outputs = model(input_ids=new).logits
            found = {"drift before": float(memory.drift()), "forecast before": float(memory.forecast())}
            assert torch.equal(model(input_ids=new).logits, outputs)  # the root keeps what it has gathered
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
        if name.startswith("repair"):  # all rows; one rank has more batches than another
            parts = new[rank::size].split(2 if rank else 1)
            options = options | {"batches": [{"input_ids": part, "labels": part} for part in parts]}
        with memory.protect(optimizer, examples=112, **options) as protection:
            for step in range(12):
                own = new[(torch.arange(4) + 4 * step) % 16][rank::size]
                optimizer.zero_grad()
                torch.autograd.backward(model(input_ids=own, labels=own).loss)
                optimizer.step()
            found["reached"] = len(protection.binding.reached)
            if name == "budget":
                found["penalty"] = protection.penalty()
        if protection.repair is not None:
            found |= repaired(protection.repair, model)
        found |= {"drift": float(memory.drift()), "forecast": float(memory.forecast())}
        found["quadratic"] = memory.forecast().quadratic
        found["penalised"] = protection.summary().penalised
        if name == "gradient":  # most of the blocks that were loaded are frozen
            memory.consolidate(
                [{"input_ids": part, "labels": part} for part in new[rank::size].split(2)], progress=False
            )
        tensors = {n: whole(p).contiguous() for n, p in model.named_parameters() if p.requires_grad}
        tensors |= {n: torch.tensor(value, dtype=torch.float64) for n, value in found.items()}
        memory.save(folder / f"{name} {size} memory.safetensors")
        if rank == 0:
            save_file(tensors, folder / f"{name} {size}.safetensors")

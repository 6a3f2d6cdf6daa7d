"""How the benchmarks fine-tune a language model: its texts in rows, adapters, optimizer, losses and samples."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from limpet.integrations.causal_lm import iter_texts, self_samples
from limpet.io.atomic import write_text

LENGTH, BATCH = 64, 4
MEMORY_TOKENS, HELD_OUT, NEW_BLOCKS = 12_000, 40, 400
RANK = 8
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def read(path: Path) -> str:
    """The text of a file, without tags."""
    text = "\n\n".join(iter_texts(str(path)))
    return re.sub(r"[ \t]+", " ", re.sub(r"<[^>]*>", " ", text)) if path.suffix in (".csv", ".html") else text


def blocks(tokenizer: Any, paths: list[Path], count: int, seed: int) -> Tensor:
    """Pieces of LENGTH tokens from all over the files, as many from each, that do not overlap."""
    generator = torch.Generator().manual_seed(seed)
    each, window, pieces = -(-count // len(paths)), 5 * LENGTH, []
    for path in paths:
        text, found = read(path), []
        for start in torch.randperm(len(text) // window, generator=generator).tolist():
            ids = tokenizer(text[start * window : (start + 1) * window])["input_ids"]
            if len(ids) >= LENGTH:
                found.append(torch.tensor(ids[:LENGTH]))
            if len(found) == each:
                break
        pieces += found
    return torch.stack([pieces[i] for i in torch.randperm(len(pieces), generator=generator).tolist()][:count])


@torch.no_grad()
def loss(model: nn.Module, rows: Tensor, size: int = BATCH) -> float:
    """The mean loss per predicted token, of so many rows at a time."""
    mode, total = model.training, 0.0
    model.eval()
    for part in torch.split(rows, size):
        logits = model(input_ids=part, use_cache=False).logits[:, :-1]
        total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    model.train(mode)
    return total / (rows.shape[0] * (LENGTH - 1))


def fresh(source: str) -> Any:
    """The model as it was published."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.config.use_cache = False
    return model


def adapted(model: Any) -> Any:
    """The model with LoRA adapters on all linear layers of its blocks."""
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LINEAR, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def adamw(
    model: Any, rate: float, steps: int, rest: float = 0.02
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW for what trains, and a schedule: ten steps of warmup, then a linear decay.

    Args:
        model: The model.
        rate: The largest learning rate.
        steps: Number of steps.
        rest: The share of the learning rate that is left at the end.

    Returns:
        The optimizer and its schedule.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, 1) * (1 - step / steps) + rest
    )
    return optimizer, schedule


def distilled(teacher: Any, rows: Tensor, logits: Tensor) -> Tensor:
    """KL(before || now) per token: the teacher's outputs on these rows, and the logits of the model that trains."""
    with torch.no_grad():
        before = teacher(input_ids=rows, use_cache=False).logits.log_softmax(-1)
    now = logits.log_softmax(-1)
    return F.kl_div(now.flatten(0, 1), before.flatten(0, 1), log_target=True, reduction="batchmean")


def stored_samples(source: str, path: Path, rows: int, seed: int) -> Tensor:
    """Samples of the model as it was published, drawn once and kept.

    Args:
        source: The model.
        path: The file that keeps them.
        rows: Number of samples.
        seed: Seed of the samples.

    Returns:
        Token ids, (rows, LENGTH).
    """
    if not path.exists():
        drawn = self_samples(fresh(source), rows * (LENGTH - 1), length=LENGTH, seed=seed)
        write_text(path, json.dumps(drawn.tolist()))
    found = torch.tensor(json.loads(path.read_text()))
    if found.shape != (rows, LENGTH):
        raise SystemExit(f"{path} has {len(found)} samples instead of {rows}; remove it to draw them again")
    return found

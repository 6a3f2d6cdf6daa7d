"""A training of a tiny language model with a memory, as a process of its own that a test can kill.

    python train_with_callback.py TRAINER OUT [die_at]

TRAINER is "trainer" or "sft". With a checkpoint in OUT it goes on from there.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model

import limpet
from language_models import llama
from limpet.integrations.transformers import MemoryCallback

STEPS = 12


class DieAt(transformers.TrainerCallback):
    """kill -9, in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def model_and_memory(folder: Path) -> tuple[Any, Path]:
    """The tiny model with adapters, and the file of what it knew before them."""
    model = llama(initializer_range=0.5, bos_token_id=1, eos_token_id=2)
    path = folder / "before.safetensors"
    memory = limpet.OnlineLaplace(model, strength=30.0, exclude=["model.embed_tokens", "lm_head"])
    memory.consolidate([{"input_ids": rows(1)}], progress=False)
    memory.save(path)
    return get_peft_model(model, LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "down_proj"])), path


def rows(seed: int) -> torch.Tensor:
    return torch.randint(3, 23, (40, 9), generator=torch.Generator().manual_seed(seed))


def build(kind: str, folder: Path, callbacks: list[Any]) -> tuple[Any, MemoryCallback]:
    """The trainer, and the callback in it."""
    model, path = model_and_memory(folder)
    data = Dataset.from_dict({"input_ids": rows(2).tolist(), "labels": rows(2).tolist()})
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3,
        "save_steps": 4,
        "logging_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 7,
    }
    callback = MemoryCallback(path, consolidate=True)
    if kind == "trainer":
        args = transformers.TrainingArguments(**settings)
        return transformers.Trainer(model, args, train_dataset=data, callbacks=[callback, *callbacks]), callback
    from tokenizers import Tokenizer, models
    from trl import SFTConfig, SFTTrainer

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 23)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="</s>"
    )
    args = SFTConfig(**settings, max_length=16, dataset_kwargs={"skip_prepare_dataset": True}, bf16=False)
    trainer = SFTTrainer(
        model, args=args, train_dataset=data, processing_class=tokenizer, callbacks=[callback, *callbacks]
    )
    return trainer, callback


def main() -> None:
    warnings.simplefilter("ignore")
    kind, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    callbacks = [DieAt(int(sys.argv[3]))] if len(sys.argv) > 3 else []
    trainer, callback = build(kind, folder, callbacks)
    resume = any(folder.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=resume or None)
    tensors = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    from safetensors.torch import save_file

    save_file(tensors, folder / "trained.safetensors")
    assert callback.memory.tasks == 2
    logged = [entry for entry in trainer.state.log_history if "memory_forecast" in entry]
    assert logged and all(entry["memory_forecast"] >= 0 and entry["memory_penalty"] >= 0 for entry in logged)
    assert "loss" in logged[-1]
    before = rows(1).numel() - len(rows(1))  # every token but the first of a row is predicted
    print(f"examples {callback.memory.examples - before}")


if __name__ == "__main__":
    main()

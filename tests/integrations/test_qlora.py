"""QLoRA as people run it: a model in 4 bits from transformers, in its Trainer and in trl's SFTTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import limpet
from language_models import VOCABULARY, llama

pytest.importorskip("bitsandbytes")
peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")
trl: Any = pytest.importorskip("trl")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def rows(seed: int, count: int = 32) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards, by another step for every seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(3, VOCABULARY, (count, 1), generator=generator)
    ids = 3 + (starts - 3 + seed * torch.arange(12)) % (VOCABULARY - 3)
    return [{"input_ids": one, "labels": one, "attention_mask": torch.ones_like(one)} for one in ids]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that counts by ones, and its memory, which names the model instead of containing its weights."""
    folder = tmp_path_factory.mktemp("published")
    model = llama(hidden_size=64, intermediate_size=128, num_attention_heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = torch.stack([row["input_ids"] for row in rows(1, 64)])
    for _ in range(60):
        optimizer.zero_grad()
        torch.autograd.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
    model.save_pretrained(folder)
    memory = limpet.OnlineLaplace(model, strength="auto", exclude=["lm_head", "*embed_tokens*"])
    memory.consolidate([{"input_ids": part, "labels": part} for part in batch.split(16)], probe=32, progress=False)
    memory.save(folder / "memory.safetensors", base="owner/model")
    return folder


def tuned(folder: Path, out: Path, kind: str, callbacks: list[Any], steps: int = 24, resume: bool = False) -> Any:
    """The quantized model after training to count by threes."""
    torch.manual_seed(0)
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    base = peft.prepare_model_for_kbit_training(base, gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=layers, task_type="CAUSAL_LM")
    settings = {
        "output_dir": str(out),
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "learning_rate": 2e-3,
        "save_steps": 12,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 7,
    }
    trainer: Any
    if kind == "trainer":
        trainer = transformers.Trainer(
            peft.get_peft_model(base, lora),
            transformers.TrainingArguments(**settings),
            train_dataset=rows(3),
            callbacks=callbacks,
        )
    else:
        from datasets import Dataset
        from tokenizers import Tokenizer, models

        words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="</s>"
        )
        trainer = trl.SFTTrainer(
            base,
            args=trl.SFTConfig(**settings, max_length=16, dataset_kwargs={"skip_prepare_dataset": True}, bf16=False),
            train_dataset=Dataset.from_list([{name: t.tolist() for name, t in row.items()} for row in rows(3)]),
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=callbacks,
        )
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer.model


@pytest.mark.parametrize("kind", ["trainer", "sft"])
def test_protection_and_repair_of_a_model_in_4_bits(kind: str, published: Path, tmp_path: Path) -> None:
    from limpet.integrations.transformers import MemoryCallback

    file = published / "memory.safetensors"
    drifts = {}
    runs: dict[str, Any] = {"plain": None, "gradient": {"mode": "gradient"}, "repair": {"repair": {"budget": 0.1}}}
    for name, options in runs.items():
        callbacks = [] if options is None else [MemoryCallback(file, **options)]
        model = tuned(published, tmp_path / name, kind, callbacks)
        memory = limpet.load(file, model)
        assert isinstance(memory, limpet.Memory)
        drifts[name] = float(memory.drift())
        assert memory.posterior.held
    assert drifts["plain"] > 0.2
    assert drifts["gradient"] < 0.85 * drifts["plain"]
    assert drifts["repair"] < 0.1


def test_a_run_in_4_bits_resumes_from_its_checkpoint(published: Path, tmp_path: Path) -> None:
    from limpet.integrations.transformers import MemoryCallback

    file = published / "memory.safetensors"
    whole = tuned(published, tmp_path / "whole", "trainer", [MemoryCallback(file, mode="gradient")])
    stored = tmp_path / "whole" / "checkpoint-12" / "memory.safetensors"
    assert stored.stat().st_size <= file.stat().st_size + 100_000
    (tmp_path / "whole" / "checkpoint-24").rename(tmp_path / "end")
    resumed = tuned(published, tmp_path / "whole", "trainer", [MemoryCallback(file, mode="gradient")], resume=True)
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(one, other, msg=name)

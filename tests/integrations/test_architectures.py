"""N, loss and Fisher of real architectures equal those of a plain loop, in every trainer, with padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import limpet

transformers: Any = pytest.importorskip("transformers")
F = nn.functional
VOCABULARY, ROWS = 40, 12
Row = dict[str, Any]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # the libraries warn of many things; limpet's counts are compared instead
]

DECODER = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 0}
BERT = {**DECODER, "num_attention_heads": 2, "max_position_embeddings": 32, "num_labels": 5}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def gemma3() -> nn.Module:
    text = transformers.Gemma3TextConfig(**DECODER, **HEADS, head_dim=8)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = transformers.SiglipVisionConfig(**vision, image_size=28, patch_size=14)
    special = {"image_token_index": 37, "boi_token_index": 38, "eoi_token_index": 39}
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=images.to_dict(), **special)
    return transformers.Gemma3ForConditionalGeneration(config)  # type: ignore[no-any-return]


def whisper() -> nn.Module:
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 4, "vocab_size": VOCABULARY}
    positions = {"max_source_positions": 10, "max_target_positions": 20}
    return transformers.WhisperForConditionalGeneration(  # type: ignore[no-any-return]
        transformers.WhisperConfig(**layers, **sizes, **positions, **SPECIAL, dropout=0.0)
    )


def made(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**options))


BART = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "gpt2": (
        "causal",
        made("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=32),
    ),
    "llama": ("causal", made("LlamaForCausalLM", "LlamaConfig", **DECODER, **HEADS)),
    "gemma3": ("causal", gemma3),
    "mixtral": (
        "causal",
        made(
            "MixtralForCausalLM", "MixtralConfig", **DECODER, **HEADS, num_local_experts=2, router_aux_loss_coef=0.0
        ),
    ),
    "t5": (
        "seq2seq",
        made(
            "T5ForConditionalGeneration", "T5Config", d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2,
            vocab_size=VOCABULARY, **SPECIAL,
        ),
    ),
    "bart": (
        "seq2seq",
        made(
            "BartForConditionalGeneration", "BartConfig", d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16,
            vocab_size=VOCABULARY, max_position_embeddings=32, forced_eos_token_id=None, **BART, **SPECIAL,
        ),
    ),
    "bert masked": ("masked", made("BertForMaskedLM", "BertConfig", **BERT)),
    "bert sequence": ("sequence", made("BertForSequenceClassification", "BertConfig", **BERT)),
    "bert tokens": ("tokens", made("BertForTokenClassification", "BertConfig", **BERT)),
    "vit": (
        "image",
        made(
            "ViTForImageClassification", "ViTConfig", hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, image_size=8, patch_size=4, num_labels=5,
        ),
    ),
    "whisper": ("speech", whisper),
}  # fmt: skip
PROJECTIONS = {
    "gpt2": "lm_head",
    "llama": "model.layers.0.mlp.down_proj",
    "gemma3": "model.language_model.layers.0.mlp.down_proj",
    "mixtral": "model.layers.0.self_attn.o_proj",
}
CAUSAL = [name for name, (kind, _) in MODELS.items() if kind == "causal"]


def rows(kind: str) -> list[Row]:
    """Rows of different lengths, some of whose labels are ignored."""
    generator = torch.Generator().manual_seed(1)

    def drawn(length: int, most: int = 36) -> list[int]:
        return torch.randint(3, most, (length,), generator=generator).tolist()

    found: list[Row] = []
    for number in range(ROWS):
        tokens = drawn(5 + number % 4)
        row: Row = {"input_ids": tokens, "attention_mask": [1] * len(tokens)}
        if kind in ("image", "speech"):
            name, shape = ("pixel_values", (3, 8, 8)) if kind == "image" else ("input_features", (4, 20))
            row = {name: torch.randn(shape, generator=generator)}
        if kind in ("sequence", "image"):
            row["labels"] = number % 5
        elif kind in ("seq2seq", "speech"):
            row["labels"] = drawn(3 + number % 5)
        elif kind == "tokens":
            row["labels"] = [-100, *(token % 5 for token in tokens[1:])]
        elif kind == "masked":
            row["labels"] = [token if place % 3 == 1 else -100 for place, token in enumerate(tokens)]
        else:
            row["labels"] = [-100, -100, *tokens[2:]]
        found.append(row)
    return found


def padded(some: Sequence[Row]) -> dict[str, Tensor]:
    """Pad on the right: inputs with 0, labels with -100."""
    batch: dict[str, Tensor] = {}
    for name in some[0]:
        values = [torch.as_tensor(row[name]) for row in some]
        fill = -100 if name == "labels" else 0
        if values[0].dim() == 1:
            batch[name] = nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
        else:
            batch[name] = torch.stack(values)
    return batch


def by_hand(model: nn.Module, kind: str, data: Sequence[Row]) -> tuple[int, float, dict[str, Tensor]]:
    """N, the mean loss, and the diagonal of the empirical Fisher, one row at a time."""
    model.eval()
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    count, total = 0, 0.0
    squares = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for row in data:
        batch = padded([row])
        logits, labels = model(**batch).logits, batch["labels"]
        if kind == "causal":
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
        count += int((labels != -100).sum())
        total += float(loss)
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        for name, gradient in zip(named, gradients, strict=True):
            if gradient is not None:
                squares[name] += gradient.square()
    return count, total / count, squares


def diagonal(memory: limpet.Memory) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for held in memory.posterior.held.values():
        values = held.precision.dense().diagonal().reshape(held.block.shape)
        found.update(zip(held.block.parameters, held.block.split(values), strict=True))
    return found


def compare(memory: limpet.Memory, model: nn.Module, kind: str, data: Sequence[Row]) -> None:
    count, loss, squares = by_hand(model, kind, data)
    assert memory.tasks == 1 and memory.examples == count
    batch = padded(data)
    with torch.no_grad():
        assert float(model(**batch).loss) == pytest.approx(loss, rel=1e-4)
    found = diagonal(memory)
    scale = max(float(one.abs().max()) for one in squares.values())
    for name, values in found.items():
        torch.testing.assert_close(values, squares[name], rtol=2e-3, atol=1e-5 * scale)
    missing = {name for name, one in squares.items() if bool(one.any())} - set(found)
    assert not missing


def compare_packed(memory: limpet.Memory, model: nn.Module, layer: str, batches: Sequence[dict[str, Any]]) -> None:
    """Packed sequences have no rows of their own: compare N and the trace of a Kronecker block, tr(Q) tr(H)."""
    model.eval()
    seen: list[tuple[Tensor, Tensor]] = []
    module = model.get_submodule(layer)
    handle = module.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    count, positions, data, gradients = 0, 0, 0.0, 0.0
    for batch in batches:
        seen.clear()
        labels = batch["labels"][:, 1:]
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        ((inputs, output),) = seen
        (gradient,) = torch.autograd.grad(loss, output)
        count += int((labels != -100).sum())
        positions += inputs[..., 0].numel()
        data += float(inputs.detach().square().sum())
        gradients += float(gradient.square().sum())
    handle.remove()
    bias = getattr(module, "bias", None) is not None
    trace = (data / positions + bias) * gradients
    assert memory.tasks == 1 and memory.examples == count
    if layer in memory.posterior.held:  # GPT-2's Conv1D has no Kronecker block, and its head is tied to the embedding
        assert float(memory.posterior.held[layer].precision.trace()) == pytest.approx(trace, rel=1e-3)


def model_and_memory(name: str, structure: str = "diagonal") -> tuple[nn.Module, limpet.OnlineLaplace, str]:
    kind, make = MODELS[name]
    torch.manual_seed(0)
    model = make()
    options: dict[str, Any] = {"structure": structure, "fisher": "empirical", "prior_precision": 0.0}
    return model, limpet.OnlineLaplace(model, prior_mean="initial", **options), kind


def settings(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2,
        "learning_rate": 0.0, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, **options,
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_in_the_trainer(name: str, tmp_path: Path) -> None:
    from limpet.integrations.transformers import MemoryCallback

    model, memory, kind = model_and_memory(name)
    data = rows(kind)
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(**settings(tmp_path, gradient_checkpointing=True, remove_unused_columns=False)),
        train_dataset=data,
        data_collator=padded,
        callbacks=[MemoryCallback(memory, consolidate=True)],
    )
    trainer.train()
    compare(memory, model, kind, data)


@pytest.mark.parametrize("name", MODELS)
def test_in_lightning(name: str, tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("lightning")
    from limpet.integrations.lightning import MemoryCallback

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.network(**batch).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.0)

    model, memory, kind = model_and_memory(name)
    data: Any = rows(kind)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=1,
        accumulate_grad_batches=2,
        callbacks=[MemoryCallback(memory, consolidate=True)],
        accelerator="cpu",
        default_root_dir=tmp_path,
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(Module(model), torch.utils.data.DataLoader(data, batch_size=3, shuffle=True, collate_fn=padded))
    compare(memory, model, kind, data)


@pytest.mark.parametrize("options", [{}, {"packing": True, "max_length": 16}], ids=["padding", "packing"])
@pytest.mark.parametrize("name", CAUSAL)
def test_in_trl(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    trl: Any = pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers

    from limpet.integrations.transformers import MemoryCallback

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    processing = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w2"
    )
    model, memory, kind = model_and_memory(name, structure="kronecker" if options else "diagonal")
    texts = [
        {"prompt": " ".join(f"w{3 + i}" for i in range(2 + n % 3)), "completion": f" w{9 + n} w{10 + n}"}
        for n in range(ROWS)
    ]
    trainer = trl.SFTTrainer(
        model,
        args=trl.SFTConfig(**settings(tmp_path, bf16=False, **options)),
        train_dataset=Dataset.from_list(texts),
        processing_class=processing,
        callbacks=[MemoryCallback(memory, consolidate=True)],
    )
    trainer.train()
    loader = trainer.get_train_dataloader()
    if options:
        compare_packed(memory, model, PROJECTIONS[name], [loader.collate_fn([row]) for row in loader.dataset])
        return
    data = [{key: value[0] for key, value in loader.collate_fn([row]).items()} for row in loader.dataset]
    assert len(data) == ROWS
    compare(memory, model, kind, data)

"""The model's own loss shows whether limpet takes the right outputs and targets from a batch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import limpet
from limpet.errors import CurvatureError, LimpetError
from limpet.model import batch as batches
from limpet.model import call
from limpet.model.batch import is_causal
from limpet.model.own_loss import check_own_loss, has_own_loss

transformers = pytest.importorskip("transformers")
from language_models import VOCABULARY, llama  # noqa: E402

CATEGORICAL = limpet.Categorical()
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 32,
}
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 8,
    "max_position_embeddings": 32,
    **{f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 2))},
    **{f"{part}_ffn_dim": 10 for part in ("encoder", "decoder")},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2},
}


def tokens(n: int = 6, length: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (n, length), generator=torch.Generator().manual_seed(seed))


def padded() -> dict[str, Tensor]:
    ids = tokens()
    mask = (torch.arange(9) < torch.tensor([9 - i % 4 for i in range(6)])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def gemma3() -> Any:
    text = transformers.Gemma3TextConfig(**{**SMALL, "num_key_value_heads": 1, "head_dim": 4})
    vision = transformers.SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict())
    config.image_token_id = config.image_token_index = VOCABULARY - 1
    return transformers.Gemma3ForConditionalGeneration(config)


def llava() -> Any:
    text = transformers.LlamaConfig(**SMALL)
    vision = transformers.CLIPVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=VOCABULARY - 1)
    )


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=1, num_local_experts=2, output_router_logits=True, router_aux_loss_coef=0.5
    )
    return transformers.MixtralForCausalLM(config)


def whisper() -> Any:
    config = {**BART, "num_mel_bins": 4, "max_source_positions": 10, "max_target_positions": 32}
    del config["max_position_embeddings"]
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**config))


def bert(kind: str, **options: Any) -> Any:
    return getattr(transformers, f"BertFor{kind}")(transformers.BertConfig(**SMALL, **options))


def labelled(labels: Tensor) -> dict[str, Tensor]:
    return {**padded(), "labels": labels}


def t5() -> Any:
    small = {"d_model": 8, "d_ff": 10, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**small, decoder_start_token_id=0))


def gpt2(kind: str = "GPT2LMHeadModel") -> Any:
    config = transformers.GPT2Config(
        n_embd=8, n_layer=1, n_head=2, vocab_size=VOCABULARY, n_positions=32, pad_token_id=0, num_labels=3
    )
    return getattr(transformers, kind)(config)


SPEECH = {"input_features": torch.randn(6, 4, 20, generator=torch.Generator().manual_seed(0)), "labels": tokens()}
CLASSES = torch.tensor([0, 1, 0, 1, 1, 0])

MODELS: dict[str, tuple[Callable[[], Any], dict[str, Tensor], bool]] = {
    "Llama": (llama, padded(), True),
    "GPT-2": (gpt2, padded(), True),
    "GPT-2 for sequences": (lambda: gpt2("GPT2ForSequenceClassification"), labelled(CLASSES), False),
    "Gemma 3": (gemma3, {**padded(), "token_type_ids": torch.zeros(6, 9, dtype=torch.long)}, True),
    "LLaVA": (llava, padded(), True),
    "Mixtral": (mixtral, padded(), True),
    "T5": (t5, padded(), False),
    "BART": (lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)), padded(), False),
    "Whisper": (whisper, SPEECH, False),
    "BERT for masked tokens": (lambda: bert("MaskedLM"), padded(), False),
    "BERT for tokens": (lambda: bert("TokenClassification", num_labels=VOCABULARY), padded(), False),
    "BERT for sequences": (lambda: bert("SequenceClassification"), labelled(CLASSES), False),
}


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    batches._SHIFTED.clear()


@pytest.mark.parametrize("name", MODELS)
def test_our_loss_is_the_models_own(name: str) -> None:
    build, batch, causal = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    batch = {key: value.clone() for key, value in batch.items()}
    if name in ("Gemma 3", "LLaVA"):
        batch["labels"] = batch["labels"].masked_fill(batch["labels"] == VOCABULARY - 1, 3)
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] == VOCABULARY - 1, 3)
    assert is_causal(model) == causal  # by name
    assert has_own_loss(model, batch, CATEGORICAL)
    check_own_loss(model, batch, CATEGORICAL)
    assert is_causal(model) == causal  # by proof
    with torch.no_grad():
        outputs, targets = call(model, batch, None)
        extra = {"output_router_logits": False} if name == "Mixtral" else {}
        expected = model(**batch, **extra).loss
    assert float(CATEGORICAL.loss(outputs, targets)) == pytest.approx(float(expected), rel=1e-5)


def test_a_decoder_that_does_not_shift_is_found_out() -> None:
    """BartForCausalLM takes its labels as they are, whatever its name says."""
    torch.manual_seed(0)
    model = transformers.BartForCausalLM(transformers.BartConfig(**BART, is_decoder=True, is_encoder_decoder=False))
    model.eval()
    assert is_causal(model)
    check_own_loss(model, padded(), CATEGORICAL)
    assert not is_causal(model)
    with torch.no_grad():
        outputs, targets = call(model, padded(), None)
        assert float(CATEGORICAL.loss(outputs, targets)) == pytest.approx(float(model(**padded()).loss), rel=1e-5)


class Own(nn.Module):
    """A language model of one's own that returns a loss."""

    def __init__(self, shifted: bool, smoothing: float = 0.0) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)
        self.shifted, self.smoothing, self.runs = shifted, smoothing, 0

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        self.runs += 1
        logits = self.head(self.table(input_ids))
        if labels is None:
            return SimpleNamespace(logits=logits, loss=None)
        pair = (logits[:, :-1], labels[:, 1:]) if self.shifted else (logits, labels)
        loss = F.cross_entropy(pair[0].flatten(0, 1), pair[1].flatten(), label_smoothing=self.smoothing)
        return {"logits": logits, "loss": loss}


class Shifted(Own):
    """Another type, since what is found out holds for a type."""


@pytest.mark.parametrize("kind", [Own, Shifted])
def test_a_pass_follows_the_loss_of_a_model_of_ones_own(kind: type[Own]) -> None:
    torch.manual_seed(0)
    model, ids = kind(kind is Shifted), tokens()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([{"input_ids": ids, "labels": ids}], progress=False)
    assert memory.examples == 6 * (8 if kind is Shifted else 9)


@pytest.mark.filterwarnings("ignore:limpet. labels are used without a shift")
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_another_loss_is_rejected_and_a_forward_settles_it(smoothing: float) -> None:
    torch.manual_seed(0)
    model, ids = Own(True, smoothing), tokens()
    memory = limpet.OnlineLaplace(model)
    data = [{"input_ids": ids, "labels": ids}]
    if smoothing:
        with pytest.raises(CurvatureError, match=r"the loss that Own computes .* pass forward="):
            memory.consolidate(data, progress=False)
        assert memory.tasks == 0
    memory.consolidate(
        data, progress=False, forward=lambda m, b: (m(b["input_ids"]).logits[:, :-1], b["labels"][:, 1:])
    )
    assert memory.examples == 48


@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        ("regression", torch.zeros(6, dtype=torch.long)),
        ("regression", torch.rand(6)),
        ("multi", torch.rand(6, 3).round()),
    ],
)
def test_other_problems_than_classification_raise(problem: str, labels: Tensor) -> None:
    torch.manual_seed(0)
    options = {"num_labels": 1} if problem == "regression" else {"num_labels": 3}
    model = bert("SequenceClassification", **options)
    nn.init.constant_(model.classifier.bias, 0.5)
    memory = limpet.OnlineLaplace(model)
    with pytest.raises(LimpetError):
        memory.consolidate([labelled(labels)], progress=False)


def test_only_the_first_batch_is_compared() -> None:
    torch.manual_seed(0)
    model, ids = Shifted(True), tokens()

    def runs(number: int) -> int:
        model.runs = 0
        limpet.OnlineLaplace(model)._pass(None, None).run([{"input_ids": ids, "labels": ids}] * number, progress=False)
        return model.runs

    assert runs(5) - runs(2) == 3


def test_dropout_does_not_disturb_the_comparison() -> None:
    torch.manual_seed(0)
    model = gpt2().train()
    memory = limpet.OnlineLaplace(model)
    state = torch.get_rng_state()
    memory.consolidate([padded()], progress=False)
    assert all(module.training for module in model.modules()) and torch.equal(torch.get_rng_state(), state)

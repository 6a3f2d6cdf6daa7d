"""Every adapter type of the installed peft: either the numbers are those of the effective weights, or limpet raises."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import limpet
from limpet.errors import LimpetError, UnsupportedError

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING  # noqa: E402

from language_models import VOCABULARY, llama  # noqa: E402

LAYERS = ["q_proj", "v_proj", "o_proj", "down_proj"]

PROMPTS: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}

OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"target_modules": LAYERS, "init_r": 4, "target_r": 2, "total_step": 10},
    "ADAMSS": {"r": 4, "num_subspaces": 2},
    "ADAPTION_PROMPT": {"task_type": "CAUSAL_LM", "adapter_len": 4, "adapter_layers": 1},
    "C3A": {"block_size": 4},
    "CARTRIDGE": PROMPTS,
    "CPT": {"task_type": "CAUSAL_LM", "cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]},
    "FOURIERFT": {"n_frequency": 10},
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    "LORA": {"target_modules": LAYERS},
    "MISS": {"r": 4},
    "MULTITASK_PROMPT_TUNING": {**PROMPTS, "num_tasks": 2},
    "OFT": {"oft_block_size": 4},
    "P_TUNING": {**PROMPTS, "encoder_hidden_size": 8},
    "PREFIX_TUNING": PROMPTS,
    "PSOFT": {"r": 4},
    "PROMPT_TUNING": PROMPTS,
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 4},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2]},
    "VBLORA": {"num_vectors": 8, "vector_length": 4},
    "WAVEFT": {"n_frequency": 10},
}
"""What the configs need besides their defaults, for a model as small as this one."""

SUPPORTED = {"LORA"}
AROUND_THE_MODEL = {"CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "PROMPT_TUNING"}
"""Types that leave the model as it is, and put something before its input."""

PLAIN: list[dict[str, Any]] = [
    {},
    {"use_rslora": True, "lora_dropout": 0.3},
    {"init_lora_weights": False},
    {"init_lora_weights": "gaussian"},
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "olora"},
    {"init_lora_weights": "orthogonal"},
    {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    {"target_modules": [*LAYERS, "embed_tokens", "lm_head"]},
    {"modules_to_save": ["lm_head"]},
    {"bias": "all"},
]
"""Options with which LoRA adds scaling B A to the weight."""

OTHER: list[dict[str, Any]] = [
    {"use_dora": True},
    {"lora_bias": True},
    {"trainable_token_indices": [1, 2]},
    {"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"},
]
"""Options with which it does not."""


def tokens() -> Tensor:
    return torch.randint(1, VOCABULARY, (8, 9), generator=torch.Generator().manual_seed(1))


def consolidated(**options: Any) -> tuple[Any, limpet.OnlineLaplace]:
    """A model and its memory, made once and copied."""
    model, memory = copy.deepcopy(_consolidated(**options))
    assert memory.model is model
    return model, memory


@cache
def _consolidated(**options: Any) -> tuple[Any, limpet.OnlineLaplace]:
    settings = {"hidden_size": 16, "intermediate_size": 32, "num_key_value_heads": 2, **options}
    dtype = settings.pop("dtype", torch.float64)
    model = llama(**settings).to(dtype)
    memory = limpet.OnlineLaplace(model, prior_mean="initial")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        memory.consolidate([{"input_ids": tokens()}], progress=False)
    return model, memory


def wrapped_in(kind: str, model: nn.Module, **options: Any) -> Any:
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind](**{**OPTIONS.get(kind, {}), **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def shaken(model: nn.Module, size: float = 0.05) -> None:
    """Move everything that trains."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter)


def agrees_with_the_merged(memory: limpet.OnlineLaplace, wrapped: Any, rel: float = 1e-6) -> None:
    """The same memory of a plain model with the weights that the adapters make."""
    merged = copy.deepcopy(wrapped).merge_and_unload().requires_grad_(True)
    ids = tokens()
    with torch.no_grad():
        modes = [(module, module.training) for module in wrapped.modules()]
        wrapped.eval()
        assert torch.allclose(merged.eval()(ids).logits, wrapped(ids).logits, atol=1e-6)
        for module, mode in modes:
            module.training = mode
    other = limpet.OnlineLaplace(merged, prior_mean="initial")
    other.load_state_dict(memory.state_dict())
    assert float(memory.forecast()) == pytest.approx(float(other.forecast()), rel=rel, abs=rel * 1e-6)
    assert memory.forecast().blocks == pytest.approx(other.forecast().blocks, rel=rel, abs=rel * 1e-6)
    assert memory.penalty().item() == pytest.approx(other.penalty().item(), rel=rel, abs=rel * 1e-6)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.0)


def raises_everywhere(memory: limpet.OnlineLaplace, wrapped: Any) -> str:
    """No number comes out, whatever is asked, and no block is lost."""
    before = dict(memory.posterior.held)
    uses = (
        memory.forecast,
        memory.penalty,
        lambda: memory.protect(optimizer_of(wrapped), examples=10),
        lambda: memory.consolidate([{"input_ids": tokens()}], progress=False),
    )
    for use in uses:
        with pytest.raises(UnsupportedError, match="LoRA") as caught:
            use()
    assert memory.posterior.held == before and memory.tasks == 1
    return str(caught.value)


@pytest.mark.parametrize("kind", sorted(str(kind.value) for kind in PEFT_TYPE_TO_CONFIG_MAPPING))
def test_every_type_is_right_or_raises(kind: str, tmp_path: Path) -> None:
    if kind == "ADAMSS":
        pytest.importorskip("sklearn")
    model, memory = consolidated(dtype=torch.float32 if kind == "PSOFT" else torch.float64)
    if kind == "XLORA":
        wrapped_in("LORA", copy.deepcopy(model)).save_pretrained(tmp_path)
        model.requires_grad_(False)
        model.config.use_cache = False
        wrapped = wrapped_in("XLORA", model, task_type="CAUSAL_LM", hidden_size=16, adapters={"a": str(tmp_path)})
    else:
        wrapped = wrapped_in(kind, model)
    if kind in SUPPORTED:
        assert float(memory.forecast()) == 0
        shaken(wrapped)
        assert float(memory.forecast()) > 1e-4
        agrees_with_the_merged(memory, wrapped)
    elif kind in AROUND_THE_MODEL:
        shaken(wrapped)
        assert float(memory.forecast()) == 0  # the model itself is as it was
        with pytest.raises(LimpetError, match="none of the parameters"):
            memory.protect(optimizer_of(wrapped), examples=10).__enter__()
    else:
        raises_everywhere(memory, wrapped)


@pytest.mark.parametrize("options", PLAIN, ids=str)
def test_lora_is_held_against_the_merged_weights(options: dict[str, Any]) -> None:
    single = options.get("init_lora_weights") in ("pissa", "olora")  # peft has no double precision for them
    model, memory = consolidated(dtype=torch.float32 if single else torch.float64)
    ids = tokens()
    with torch.no_grad():
        before = model.eval()(ids).logits
        wrapped = wrapped_in("LORA", model, **options)
        unchanged = torch.allclose(wrapped.eval()(ids).logits, before, atol=1e-6)
    assert unchanged == (options.get("init_lora_weights") is not False)
    if unchanged:
        assert float(memory.forecast()) == pytest.approx(0, abs=1e-9)
    agrees_with_the_merged(memory, wrapped, 1e-3 if single else 1e-6)
    shaken(wrapped)
    assert float(memory.forecast()) > 1e-4
    agrees_with_the_merged(memory, wrapped, 1e-3 if single else 1e-6)


@pytest.mark.parametrize("options", OTHER, ids=str)
def test_what_lora_adds_otherwise_is_rejected(options: dict[str, Any]) -> None:
    model, memory = consolidated()
    raises_everywhere(memory, wrapped_in("LORA", model, **options))


def test_the_error_names_the_layer_and_the_type() -> None:
    model, memory = consolidated()
    said = raises_everywhere(memory, wrapped_in("ADALORA", model))
    assert "model.layers.0.self_attn.q_proj" in said and "peft.tuners.adalora.layer.SVDLinear" in said
    assert "merge_and_unload" in said
    model, memory = consolidated()
    said = raises_everywhere(memory, wrapped_in("IA3", model))
    assert "model.layers.0.self_attn.k_proj.weight" in said and "peft.tuners.ia3.layer.Linear" in said


def test_merged_first_every_type_can_be_judged() -> None:
    model, memory = consolidated()
    wrapped = wrapped_in("IA3", model)
    shaken(wrapped)
    merged = wrapped.merge_and_unload()
    assert merged is model
    assert float(memory.forecast()) > 0


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["lm_head", "q_proj"]}])
def test_a_tied_weight_that_an_adapter_unties_is_rejected(options: dict[str, Any]) -> None:
    """The head of the memory's block would train on, unseen: only the embedding still has the parameter."""
    model, memory = consolidated(tie_word_embeddings=True)
    assert memory.posterior.held["model.embed_tokens"].block.kind == "embedding+linear"
    wrapped = wrapped_in("LORA", model, **options)
    for use in (memory.forecast, memory.penalty, lambda: memory.protect(optimizer_of(wrapped), examples=10)):
        with pytest.raises(UnsupportedError, match=r"shared|measured as the weight of 2 layers"):
            use()


def test_of_a_disabled_copy_the_original_counts() -> None:
    model, memory = consolidated()
    wrapped = wrapped_in("LORA", model, modules_to_save=["lm_head"])
    shaken(wrapped)
    assert float(memory.forecast()) > 1e-4
    with wrapped.disable_adapter():
        assert float(memory.forecast()) == 0


def test_the_check_leaves_no_trace() -> None:
    model, memory = consolidated()
    wrapped = wrapped_in("LORA", model, lora_dropout=0.5)
    wrapped.train()
    called: list[nn.Module] = []
    for module in wrapped.modules():
        module.register_forward_hook(lambda module, *_: called.append(module))
    state = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    parameters, flags = dict(wrapped.named_parameters()), [p.requires_grad for p in wrapped.parameters()]
    rng = torch.get_rng_state()
    assert float(memory.forecast()) == 0
    assert not called and torch.equal(torch.get_rng_state(), rng)
    assert all(module.training for module in wrapped.modules())
    assert all(p is parameters[name] for name, p in wrapped.named_parameters())
    assert [p.requires_grad for p in wrapped.parameters()] == flags
    assert all(torch.equal(tensor, state[name]) for name, tensor in wrapped.state_dict().items())


def test_a_layer_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from limpet.model import adapters

    model, memory = consolidated()
    wrapped = wrapped_in("LORA", model)
    seen: list[str] = []
    check = adapters.check_update
    monkeypatch.setattr(adapters, "check_update", lambda m, name, *rest: (seen.append(name), check(m, name, *rest)))
    memory.forecast()
    assert len(seen) == 2 * len(LAYERS)
    memory.forecast()
    shaken(wrapped)
    memory.penalty()
    assert len(seen) == 2 * len(LAYERS)
    wrapped.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] = 3.0
    memory.forecast()
    assert seen[2 * len(LAYERS) :] == ["model.layers.0.self_attn.q_proj"]


def test_another_forward_patched_into_a_layer_is_found() -> None:
    model, memory = consolidated()
    wrapped = wrapped_in("LORA", model)
    assert float(memory.forecast()) == 0
    layer = wrapped.base_model.model.model.layers[1].mlp.down_proj
    plain = layer.forward
    layer.forward = lambda x: 2 * plain(x)
    with pytest.raises(UnsupportedError, match=r"model.layers.1.mlp.down_proj.*does not compute"):
        memory.forecast()
    del layer.forward
    assert float(memory.forecast()) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_check_passes_in_every_dtype(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    memory = limpet.OnlineLaplace(model, prior_mean="initial")
    wrapped_in("LORA", model, target_modules=[*LAYERS, "embed_tokens"])
    assert float(memory.penalty().detach()) == 0

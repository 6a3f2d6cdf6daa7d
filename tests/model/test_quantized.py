"""Memories on quantized bases: the numbers are those of the same memory on the dequantized base."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import limpet
from language_models import VOCABULARY
from limpet.errors import LimpetError, MemoryFileError, UnsupportedError
from limpet.forgetting.drift import measured_drift
from limpet.methods.inspect import inspect
from limpet.methods.quantized_base import SKETCHES, sketch_of
from limpet.model.quantized import QuantizedWeight, is_quantized, quantized_weight

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")
pytest.importorskip("peft")

from quantized_models import KINDS, dequantized, quantized_layer, quantized_llama, with_adapters

pytestmark = pytest.mark.filterwarnings(
    "ignore:not protected", "ignore:MatMul8bitLt", "ignore:TorchaoLoraLinear was instantiated"
)


def batches(count: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(1, VOCABULARY, (4, 12), generator=generator)} for _ in range(count)]


def pair(kind: str, update: float = 0.05) -> tuple[Any, Any]:
    """A quantized model and its dequantized twin, with the same adapters."""
    quantized = quantized_llama(kind)
    plain = dequantized(quantized)  # before peft replaces its layers in place
    return with_adapters(quantized, update), with_adapters(plain, update)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.fixture(scope="module")
def memory_file(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that makes the memory of a dequantized model, once for each kind."""
    folder = tmp_path_factory.mktemp("quantized")

    def made(kind: str, **options: Any) -> Path:
        path: Path = folder / f"{kind}{len(options)}.safetensors"
        if not path.exists():
            memory = limpet.OnlineLaplace(dequantized(quantized_llama(kind)), exclude=["lm_head", "*embed_tokens*"])
            memory.consolidate(batches(), probe=8, progress=False)
            memory.save(path, **options)
        return path

    return made


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_what_the_library_dequantizes(kind: str) -> None:
    import bitsandbytes.functional as bnb

    torch.manual_seed(0)
    plain = nn.Linear(640, 96)
    layer: Any = quantized_layer(plain, kind)
    assert is_quantized(layer) and not is_quantized(plain)
    found = quantized_weight(layer)
    assert found is quantized_weight(layer) and isinstance(found, QuantizedWeight)
    assert found.shape == (96, 640) and not found.any() and found.untyped_storage().nbytes() == 4
    if kind == "torchao":
        expected = layer.weight.dequantize()
    elif kind == "int8":
        expected = layer.weight.SCB.unsqueeze(1) * layer.weight.CB / 127
    else:
        expected = bnb.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    torch.testing.assert_close(found.values(), expected, rtol=1e-5, atol=1e-7)
    error = float((expected - plain.weight).detach().norm() / plain.weight.detach().norm())
    assert error == pytest.approx({"nf4": 0.09, "fp4": 0.13, "int8": 0.004, "torchao": 0.004}[kind], rel=0.3)


def test_weights_are_not_repacked_for_inference() -> None:
    """As bitsandbytes does in eval mode, on a CPU with AVX512-BF16."""
    model = with_adapters(quantized_llama("nf4"), update=0.0)
    layers = [layer for layer in model.modules() if is_quantized(layer)]
    for layer in layers:
        vars(layer)["support_avx512bf16_for_cpu"] = True
    before = [layer.weight.data.clone() for layer in layers]
    memory = limpet.OnlineLaplace(model, prior_mean="initial")
    memory.consolidate(batches(2), probe=8, progress=False)
    rehearsal = limpet.SelfRehearsal(model)
    rehearsal.consolidate(tokens=30, length=8, progress=False)
    model.eval()
    assert memory.drift() == 0 and abs(rehearsal.drift()) < 1e-6
    assert all(vars(layer)["support_avx512bf16_for_cpu"] for layer in layers)
    assert all(torch.equal(layer.weight.data, data) for layer, data in zip(layers, before, strict=True))


def test_weights_that_were_repacked_for_inference_have_no_gradients() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    model = with_adapters(quantized_llama("nf4"))
    memory = limpet.OnlineLaplace(model, prior_mean="initial")
    weight = next(layer for layer in model.modules() if is_quantized(layer)).weight
    weight.data, weight.quant_state = functional._convert_weight_packed_for_cpu(weight.data, weight.quant_state)
    with pytest.raises(UnsupportedError, match="load the model again, and set `support_avx512bf16_for_cpu = False`"):
        memory.consolidate(batches(2), progress=False)


@pytest.mark.parametrize("kind", KINDS)
def test_penalty_gradients_and_forecast_are_those_on_the_dequantized_base(kind: str, memory_file: Any) -> None:
    quantized, plain = pair(kind)
    found, expected = (limpet.load(memory_file(kind), model) for model in (quantized, plain))
    assert isinstance(found, limpet.Memory) and isinstance(expected, limpet.Memory)
    assert found.penalty().item() == pytest.approx(expected.penalty().item(), rel=1e-4)
    assert float(found.forecast()) == pytest.approx(float(expected.forecast()), rel=1e-4)
    for memory, model in ((found, quantized), (expected, plain)):
        torch.autograd.backward(memory.penalty())
        assert all(parameter.grad is not None for parameter in trainable(model))
    for one, other in zip(trainable(quantized), trainable(plain), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["nf4", "torchao"])
def test_training_drift_and_repair_are_those_on_the_dequantized_base(kind: str, memory_file: Any) -> None:
    found = []
    for model in pair(kind, update=0.0):
        memory = limpet.load(memory_file(kind), model)
        assert isinstance(memory, limpet.Memory)
        optimizer = torch.optim.AdamW(trainable(model), lr=1e-2, weight_decay=0.0)
        with memory.protect(optimizer, examples=176, mode="gradient"):
            for batch in batches() * 2:
                optimizer.zero_grad()
                torch.autograd.backward(model(**batch, labels=batch["input_ids"]).loss)
                optimizer.step()
        drift = float(memory.drift())
        limpet.repair(model, memory, batches(), strength=3.0, progress=False)
        found.append((drift, float(memory.drift()), memory.penalty().item()))
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    drift, repaired, _ = found[0]
    assert 0 < repaired < drift


@pytest.mark.parametrize(
    ("kind", "strength"),
    # not int8 with "auto", which draws noise along eigenvectors, whose signs such gradients do not determine
    [
        ("nf4", "auto"),
        *(pytest.param(*p, marks=pytest.mark.slow) for p in (("int8", 1.0), ("torchao", 1.0), ("torchao", "auto"))),
    ],
)
def test_a_memory_made_on_a_quantized_model(kind: str, strength: float | str) -> None:
    models, memories = pair(kind), []
    for model in models:
        before = _state(model)
        memory = limpet.OnlineLaplace(model, strength=strength, prior_mean="initial", fisher="empirical")
        memory.consolidate([{**batch, "labels": batch["input_ids"]} for batch in batches()], progress=False)
        assert _state(model) == before
        memories.append(memory)
    # layers of 8 bits round their inputs too, so gradients differ from those of the dequantized layers by one percent
    tolerance = 0.05 if kind == "int8" else 1e-3
    for name, held in memories[0].posterior.held.items():
        x = torch.randn(held.block.shape, generator=torch.Generator().manual_seed(4))
        found, expected = held.precision.apply(x), memories[1].posterior.held[name].precision.apply(x)
        assert float((found - expected).norm()) <= tolerance * float(expected.norm())
    for model in models:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.mul_(2)
    forecasts = [memory.forecast() for memory in memories]
    assert float(forecasts[0]) == pytest.approx(float(forecasts[1]), rel=3 * tolerance)
    samples = [memory.sample_weights(torch.Generator().manual_seed(0)) for memory in memories]
    if kind != "int8":
        for name, weight in samples[0].items():
            assert float((weight - samples[1][name]).norm()) <= 1e-2 * float(weight.norm())


def _state(model: nn.Module) -> Any:
    """What a user would notice: values, requires_grad, gradients, modes and hooks."""
    values = [
        (name, p.requires_grad, p.grad, p.dtype, hashlib.sha256(p.detach().reshape(-1).numpy().tobytes()).hexdigest())
        for name, p in model.named_parameters()
        if type(p.data) is Tensor or (type(p) is not nn.Parameter and not hasattr(p, "__tensor_flatten__"))
    ]
    return values, [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def test_a_saved_memory_has_no_quantized_weights_and_fits_its_base_only(memory_file: Any, tmp_path: Path) -> None:
    quantized = with_adapters(quantized_llama("nf4"))
    memory = limpet.load(memory_file("nf4"), quantized)
    assert isinstance(memory, limpet.Memory)
    path = tmp_path / "memory.safetensors"
    memory.save(path)
    means = [held.mean.numel() * 4 for held in memory.posterior.held.values()]
    assert path.stat().st_size < memory_file("nf4").stat().st_size - 0.9 * sum(means) + 40_000
    again = limpet.load(path, quantized)
    assert isinstance(again, limpet.Memory)
    assert again.penalty().item() == memory.penalty().item()
    with pytest.raises(MemoryFileError, match="not quantized in the same way: load it onto the quantized model"):
        limpet.load(path, with_adapters(dequantized(quantized_llama("nf4"))))
    other = with_adapters(quantized_llama("nf4", seed=7))
    for file in (path, memory_file("nf4"), memory_file("nf4", base="owner/model")):
        with pytest.raises(MemoryFileError, match="is not a quantized version of the weight"):
            limpet.load(file, other)
    with pytest.raises(LimpetError, match="are quantized: omit base="):
        memory.save(path, base="owner/model")


def test_a_file_that_names_its_base_is_loaded_onto_any_quantized_version(memory_file: Any) -> None:
    path = memory_file("nf4", base="owner/model")
    penalties = []
    for kind in ("nf4", "int8"):
        memory = limpet.load(path, with_adapters(requantized(kind)))
        assert isinstance(memory, limpet.Memory)
        penalties.append(memory.penalty().item())
    assert penalties[0] == pytest.approx(penalties[1], rel=1e-5)  # of the adapters alone


def requantized(kind: str) -> Any:
    """The weights that `memory_file("nf4")` is a memory of, quantized to another format."""
    model = dequantized(quantized_llama("nf4"))
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, quantized_layer(layer, kind))
    return model


@pytest.mark.parametrize("options", [{}, {"base": "owner/model"}])
def test_drift_is_measured_from_the_quantized_base(options: Any, memory_file: Any, tmp_path: Path) -> None:
    untuned = with_adapters(requantized("fp4"), update=0.0)
    memory = limpet.load(memory_file("nf4", **options), untuned)
    assert isinstance(memory, limpet.Memory)
    assert float(measured_drift(untuned, memory.probes, memory.likelihood)) > 0.005  # the error of the quantization
    assert float(memory.drift()) == pytest.approx(0, abs=1e-6)

    tuned = with_adapters(requantized("fp4"))
    memory = limpet.load(memory_file("nf4", **options), tuned)
    assert isinstance(memory, limpet.Memory)
    with torch.no_grad():
        tuned.base_model.model.model.norm.weight.mul_(1.1)  # trained without an adapter
    state = _state(tuned)
    expected = float(memory.drift(reference=requantized("fp4")))
    assert expected > 0.01
    assert float(memory.drift()) == pytest.approx(expected, rel=1e-4)
    assert _state(tuned) == state

    path = tmp_path / "memory.safetensors"
    memory.save(path)
    again = limpet.load(path, tuned)
    assert isinstance(again, limpet.Memory) and again.probes[0].quantized
    assert float(again.drift()) == pytest.approx(expected, rel=1e-4)


def test_a_mean_with_an_update_of_the_adapters_is_stored(tmp_path: Path) -> None:
    model = with_adapters(quantized_llama("nf4"))
    memory = limpet.OnlineLaplace(model, prior_mean="initial")
    memory.consolidate(batches(2), progress=False)
    assert float(memory.forecast()) < 1e-9
    memory.save(tmp_path / "memory.safetensors")
    again = limpet.load(tmp_path / "memory.safetensors", model)
    assert isinstance(again, limpet.Memory)
    assert float(again.forecast()) < 1e-9
    found = inspect(tmp_path / "memory.safetensors")
    assert len(found.blocks) == len(memory.posterior.held)


def test_adapters_merged_into_quantized_weights_are_rejected(memory_file: Any) -> None:
    model = with_adapters(quantized_llama("nf4"))
    memory = limpet.load(memory_file("nf4"), model)
    assert isinstance(memory, limpet.Memory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says that merging rounds, in some versions
        model.merge_adapter()
    with pytest.raises(LimpetError, match=r"hides its update: call unmerge_adapter\(\)"):
        memory.penalty()


def test_4_bits_in_numbers_of_another_dtype_are_recognized() -> None:
    import bitsandbytes

    torch.manual_seed(0)
    plain = nn.Linear(128, 96)
    options: Any = {"quant_type": "nf4", "compute_dtype": torch.float32, "quant_storage": torch.bfloat16}
    layer = bitsandbytes.nn.Linear4bit(128, 96, **options)
    layer.load_state_dict(plain.state_dict())
    layer = layer.to("cpu")
    assert layer.weight.is_floating_point() and is_quantized(layer)
    error = quantized_weight(layer).values() - plain.weight.detach()
    assert float(error.norm()) == pytest.approx(0.09 * float(plain.weight.detach().norm()), rel=0.1)


def test_layers_keep_the_dtype_that_they_compute_in() -> None:
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(64, 32, quant_type="nf4").to("cpu")
    assert layer.compute_dtype is None and not layer.compute_type_is_set
    quantized_weight(layer).values()
    assert layer.compute_dtype is None and not layer.compute_type_is_set


def test_a_layer_that_is_followed_by_an_operation_in_place() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 64), torch.randint(0, 3, (40,))
    first = quantized_layer(nn.Linear(64, 32), "nf4")
    model = nn.Sequential(first, nn.ReLU(inplace=True), nn.Linear(32, 3))
    plain = nn.Sequential(nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, 3))
    plain.load_state_dict({**model[2].state_dict(prefix="2."), "0.bias": first.bias, "0.weight": first_values(first)})
    plain[0].weight.requires_grad_(False)
    memories = []
    for one in (model, plain):
        memory = limpet.OnlineLaplace(one, prior_mean="initial")
        memory.consolidate([(x, y)], progress=False)
        memories.append(memory)
    held = [memory.posterior.held["2"].precision.dense() for memory in memories]
    torch.testing.assert_close(*held)


def first_values(layer: nn.Module) -> Tensor:
    return quantized_weight(layer).values()


def test_a_model_that_is_quantized_later_is_rejected() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 3))
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(torch.randn(40, 64), torch.randint(0, 3, (40,)))], progress=False)
    quantize_(model, Int8WeightOnlyConfig())
    for call in (memory.forecast, memory.penalty, lambda: memory.save("nowhere")):
        with pytest.raises(LimpetError, match=r"0\.weight was quantized or dequantized after the memory was made"):
            call()


def test_sketches_tell_the_distance_of_weights() -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 200)
    for distance in (0.0, 0.1, 1.0):
        moved = weight + distance * torch.randn(300, 200)
        found = torch.tensor(sketch_of(moved)) - torch.tensor(sketch_of(weight))
        assert len(found) == SKETCHES
        assert distance / 1.5 <= float(found.square().mean().sqrt()) <= distance * 1.5
    assert torch.tensor(sketch_of(weight)).square().mean().sqrt() == pytest.approx(1, rel=0.4)

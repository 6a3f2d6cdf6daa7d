"""`limpet publish`: a memory is checked against its model, stripped of the weights, and uploaded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from typer.testing import CliRunner, Result

import limpet
from limpet.cli import app
from limpet.io import hub
from limpet.methods.inspect import inspect

transformers = pytest.importorskip("transformers")
from language_models import llama  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:not protected", "ignore:the examples of")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and the memory of the first, with a probe."""
    place = tmp_path_factory.mktemp("publish")
    for seed in (0, 1):
        model = llama(hidden_size=32, intermediate_size=64)
        torch.manual_seed(seed)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(place / f"model-{seed}")
        if not seed:
            memory = limpet.OnlineLaplace(model, exclude=["lm_head", "*embed_tokens*"], rank=3, storage_dtype="float16")
            memory.consolidate(
                [{"input_ids": torch.randint(1, 23, (4, 12))} for _ in range(3)], probe=8, progress=False
            )
            memory.save(place / "memory.safetensors")
    return place


def publish(folder: Path, out: Path, *more: str, model: str = "model-0") -> Result:
    words = ["publish", str(folder / "memory.safetensors"), "--model", str(folder / model), "-o", str(out), *more]
    return CliRunner().invoke(app, words)


def test_the_published_file_has_no_weights_and_loads_onto_the_model(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.safetensors"
    done = publish(folder, out, "--probe", "keep", "--data", "its own samples")
    assert done.exit_code == 0, done.output
    assert "tokens of its own samples: a" in out.with_suffix(".md").read_text()
    assert "not uploaded: pass --to user/model" in done.output
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model-0", dtype=torch.float32)
    before, after = (limpet.load(path, model) for path in (folder / "memory.safetensors", out))
    assert isinstance(before, limpet.Memory) and isinstance(after, limpet.Memory)
    means = sum(held.mean.nbytes for held in before.posterior.held.values())
    assert out.stat().st_size < (folder / "memory.safetensors").stat().st_size - 0.8 * means
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter += 0.01
    assert after.penalty().item() == before.penalty().item() > 0
    assert after.drift() == before.drift() > 0
    digest = inspect(out).sha256
    assert digest in done.output and f'sha256="{digest}"' in out.with_suffix(".md").read_text()


def test_inputs_are_published_only_if_asked_for(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.safetensors"
    asked = publish(folder, out)
    assert asked.exit_code != 0 and "contains 8 inputs as they are" in str(asked.exception)
    assert not out.exists()
    assert publish(folder, out, "--probe", "drop").exit_code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model-0", dtype=torch.float32)
    found = limpet.load(out, model)
    assert isinstance(found, limpet.Memory) and not found.probes


@pytest.mark.filterwarnings("ignore:limpet. the model's weights seem unrelated")
def test_the_memory_of_another_model_is_rejected(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.safetensors"
    done = publish(folder, out, "--probe", "keep", model="model-1")
    assert done.exit_code != 0 and isinstance(done.exception, limpet.LimpetError)
    assert not out.exists()


def test_what_is_uploaded_is_the_checked_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, sent = tmp_path / "small.safetensors", list[Any]()
    monkeypatch.setattr(hub, "upload", lambda *given, **options: sent.append((given, options)) or "the commit")
    done = publish(folder, out, "--probe", "keep", "--to", "user/model", "--private")
    assert done.exit_code == 0 and "uploaded: the commit" in done.output
    assert sent == [((out, "user/model"), {"private": True})]
    assert 'limpet.load("hub://user/model", model, sha256=' in out.with_suffix(".md").read_text()


def test_without_a_connection_the_error_says_how_to_upload_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = partial(huggingface_hub.HfApi, endpoint="http://127.0.0.1:9")
    monkeypatch.setattr(hub, "_hub", lambda: SimpleNamespace(HfApi=closed))
    out = tmp_path / "small.safetensors"
    out.touch()
    with pytest.raises(limpet.LimpetError, match=r"cannot be reached.*hf upload user/model .*small.safetensors memory"):
        hub.upload(out, "user/model", token="hf_x")

"""Tests of MemoryCallback inside a real Trainer: what is reported, and which checkpoint's memory is restored."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import limpet
from limpet.errors import LimpetWarning

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROWS = 40


def rows(seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 30, (ROWS, 6), generator=generator)
    return [{"input_ids": row, "labels": (row[0] > 15).long()} for row in tokens]


def classifier() -> Any:
    transformers.set_seed(0)
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=6,
    )
    return transformers.BertForSequenceClassification(config)


def with_task(model: Any) -> limpet.OnlineLaplace:
    memory = limpet.OnlineLaplace(model, prior_mean="initial", strength=100.0)
    batch = {key: torch.stack([row[key] for row in rows(0)]) for key in ("input_ids", "labels")}
    memory.consolidate([batch], progress=False)
    return memory


def trainer(memory: limpet.OnlineLaplace, folder: Path, *callbacks: Any, **options: Any) -> Any:
    from limpet.integrations.transformers import MemoryCallback

    args = transformers.TrainingArguments(
        str(folder),
        max_steps=8,
        per_device_train_batch_size=10,
        save_steps=4,
        logging_steps=2,
        use_cpu=True,
        disable_tqdm=True,
        **{"report_to": [], **options},
    )
    callback = MemoryCallback(memory, examples=ROWS)
    return transformers.Trainer(memory.model, args, train_dataset=rows(1), callbacks=[*callbacks, callback])


def forecasts(of: Any) -> list[tuple[int, float]]:
    return [(entry["step"], entry["memory_forecast"]) for entry in of.state.log_history if "memory_forecast" in entry]


def test_the_forecast_reaches_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    one = trainer(with_task(classifier()), tmp_path, report_to=["tensorboard"])
    names = [type(callback).__name__ for callback in one.callback_handler.callbacks]
    one.train()
    after = [type(callback).__name__ for callback in one.callback_handler.callbacks]
    assert after == ["MemoryCallback", *(name for name in names if name != "MemoryCallback")]
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    for name in ("memory_forecast", "memory_penalty"):
        written = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        expected = [(entry["step"], entry[name]) for entry in one.state.log_history if name in entry]
        assert [step for step, _ in written] == [2, 4, 6, 8] == [step for step, _ in expected]
        assert written == [(step, pytest.approx(value)) for step, value in expected]


def test_every_other_callback_sees_the_forecast_and_is_called_once_per_event(tmp_path: Path) -> None:
    seen: list[str] = []

    class Before(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            seen.append("begin")

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            seen.append("forecast" if "memory_forecast" in logs else "")

    class After(Before):
        pass

    one = trainer(with_task(classifier()), tmp_path, Before())
    one.add_callback(After())
    one.train()
    assert seen == ["begin"] * 2 + ["forecast"] * 8 + [""] * 2  # the summary at the end has no loss of a step


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished training with checkpoints after 4 and 8 steps."""
    one = trainer(with_task(classifier()), tmp_path_factory.mktemp("first"))
    one.train()
    return one


@pytest.mark.parametrize("copied", [False, True])
def test_a_checkpoint_in_another_folder_restores_its_memory(first: Any, tmp_path: Path, copied: bool) -> None:
    checkpoint = Path(first.args.output_dir) / "checkpoint-4"
    if copied:
        checkpoint = Path(shutil.copytree(checkpoint, tmp_path / "kept"))
    memory = limpet.OnlineLaplace(classifier(), prior_mean="initial", strength=100.0)
    second = trainer(memory, tmp_path / "second")
    second.train(resume_from_checkpoint=str(checkpoint))
    assert memory.tasks == 1
    assert forecasts(second) == [(step, pytest.approx(value)) for step, value in forecasts(first)]
    assert all(value > 0 for _, value in forecasts(second))
    for name, weight in first.model.state_dict().items():
        assert torch.allclose(weight, second.model.state_dict()[name], atol=1e-6), name


def test_a_checkpoint_without_a_memory_is_resumed_with_a_warning(first: Any, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(Path(first.args.output_dir) / "checkpoint-4", tmp_path / "kept"))
    (checkpoint / "memory.safetensors").unlink()
    memory = limpet.OnlineLaplace(classifier())
    with pytest.warns(LimpetWarning, match=r"resumes at step 4, but .*kept.memory.safetensors does not exist"):
        trainer(memory, tmp_path / "second").train(resume_from_checkpoint=str(checkpoint))
    with warnings.catch_warnings():
        warnings.simplefilter("error", LimpetWarning)
        trainer(memory, tmp_path / "third").train()  # from the beginning: nothing to restore


def test_a_file_system_without_hard_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    memory = with_task(classifier())
    trainer(memory, tmp_path).train()
    files = [tmp_path / f"checkpoint-{step}" / "memory.safetensors" for step in (4, 8)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_ino != files[1].stat().st_ino
    assert limpet.load(files[1], memory.model).tasks == 1

"""Tests of the callbacks for the trainers of transformers, trl and Lightning."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import limpet
from limpet.errors import LimpetError

pytest.importorskip("transformers")
pytest.importorskip("lightning")
SCRIPT = Path(__file__).parents[1].joinpath("train_with_callback.py")


def train(kind: str, folder: Path, *die_at: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), kind, str(folder), *map(str, die_at)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainer", "sft"])
def test_a_training_that_is_killed_goes_on_to_the_same_weights_and_memory(kind: str, tmp_path: Path) -> None:
    whole = train(kind, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.splitlines()[-1] == "examples 320"  # 40 rows of 9 tokens, of which the first is not predicted
    killed = train(kind, tmp_path / "killed", 9)
    assert killed.returncode == -9
    folders = {path.name for path in (tmp_path / "killed").glob("checkpoint-*")}
    assert folders == {"checkpoint-4", "checkpoint-8"}
    files = [tmp_path / "killed" / folder / "memory.safetensors" for folder in sorted(folders)]
    assert files[0].stat().st_ino == files[1].stat().st_ino  # nothing had changed, so nothing was written again
    resumed = train(kind, tmp_path / "killed")
    assert resumed.returncode == 0, resumed.stderr
    for name in ("trained.safetensors", "memory.safetensors"):
        first, second = (load_file(tmp_path / run / name) for run in ("whole", "killed"))
        assert first.keys() == second.keys()
        assert all(torch.equal(tensor, second[key]) for key, tensor in first.items()), name


def tiny() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(60, 5), torch.randint(0, 3, (60,))


def lightning_run(
    model: nn.Module, callback: Any, folder: Path, epochs: int, resume: Path | None = None, logger: Any = False
) -> Any:
    import lightning.pytorch as pl

    _, x, y = tiny()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=[callback],
        default_root_dir=folder,
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x.flip(0), y), batch_size=20)
    trainer.fit(Module(), loader, ckpt_path=resume)
    return trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [1, 2])
def test_lightning_trains_as_a_loop_by_hand_does_and_goes_on_from_its_checkpoints(tmp_path: Path, every: int) -> None:
    from limpet.integrations.lightning import MemoryCallback

    model, x, y = tiny()
    memory = limpet.OnlineLaplace(model, strength=5.0)
    memory.consolidate([(x, y)], progress=False)
    kept, start = copy.deepcopy(memory.state_dict()), copy.deepcopy(model.state_dict())

    def remembered(network: nn.Module) -> limpet.OnlineLaplace:
        found = limpet.OnlineLaplace(network, strength=5.0)
        found.load_state_dict(copy.deepcopy(kept))
        return found

    by_hand = copy.deepcopy(model)
    own = remembered(by_hand)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    with own.protect(optimizer, examples=60, every=every):
        for _ in range(4):
            for rows, labels in zip(x.flip(0).split(20), y.split(20), strict=True):
                optimizer.zero_grad()
                F.cross_entropy(by_hand(rows), labels).backward()
                optimizer.step()
    callback = MemoryCallback(memory, every=every, log_every=1, consolidate=True)
    trainer = lightning_run(model, callback, tmp_path, 4)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), by_hand.parameters(), strict=True))
    assert memory.tasks == 2 and memory.examples == 120
    assert trainer.callback_metrics["memory_forecast"] > 0 and trainer.callback_metrics["memory_penalty"] > 0

    half = copy.deepcopy(model)
    half.load_state_dict(start)
    first = lightning_run(half, MemoryCallback(remembered(half), every=every), tmp_path / "half", 2)
    path = tmp_path / "half" / "two.ckpt"
    first.save_checkpoint(path)
    again = copy.deepcopy(model)
    again.load_state_dict(start)
    other = limpet.OnlineLaplace(again, strength=5.0)
    lightning_run(again, MemoryCallback(other, every=every), tmp_path / "again", 4, resume=path)
    if every == 1:
        assert all(
            torch.allclose(a, b, atol=1e-6) for a, b in zip(again.parameters(), by_hand.parameters(), strict=True)
        )
    assert other.tasks == 1


@pytest.mark.filterwarnings("ignore")
def test_several_optimizers_are_refused_with_a_word(tmp_path: Path) -> None:
    from limpet.integrations.lightning import MemoryCallback

    model, x, y = tiny()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, y)], progress=False)

    class Trainer:
        optimizers = (1, 2)

    with pytest.raises(LimpetError, match="one optimizer"):
        MemoryCallback(memory).on_train_start(Trainer(), None)  # type: ignore[arg-type]


def test_every_training_has_its_own_number_of_examples(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from limpet.integrations.lightning import MemoryCallback

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Linear(5, 3)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.network.parameters(), lr=0.1)

    torch.manual_seed(0)
    module = Module()
    memory = limpet.OnlineLaplace(module.network)
    callback = MemoryCallback(memory, consolidate=True)
    for count in (100, 400):
        data = torch.utils.data.TensorDataset(torch.randn(count, 5), torch.randint(0, 3, (count,)))
        loader = torch.utils.data.DataLoader(data, batch_size=50)
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(
            max_epochs=1, callbacks=[callback], accelerator="cpu", default_root_dir=tmp_path, **options
        )
        trainer.fit(module, loader)
    assert callback.examples is None and memory.examples == 500


@pytest.mark.filterwarnings("ignore")
def test_the_best_model_is_returned_as_it_was_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`load_best_model_at_end` replaces the weights between the last step and the end of the protection."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from limpet.integrations.transformers import MemoryCallback

    torch.manual_seed(0)
    rows = [{"input_ids": ids, "labels": int(ids[0] % 2)} for ids in torch.randint(2, 50, (32, 8))]
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=32, **sizes))
    memory = limpet.OnlineLaplace(model, strength=100.0, prior_mean="initial", fisher="sampled")
    memory.consolidate(torch.utils.data.DataLoader(rows, batch_size=16), progress=False)
    args = TrainingArguments(
        str(tmp_path),
        num_train_epochs=3,
        per_device_train_batch_size=8,
        learning_rate=0.5,
        optim="sgd",
        save_strategy="epoch",
        eval_strategy="epoch",
        load_best_model_at_end=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = MemoryCallback(memory, every=7)
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows, callbacks=[callback])
    with caplog.at_level("INFO", logger="limpet"):
        trainer.train()
    best = load_file(Path(str(trainer.state.best_model_checkpoint)) / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in best.items())
    assert callback.summary is not None
    assert (callback.summary.steps, callback.summary.penalised) == (12, 7)  # 5 steps belong to weights that are gone
    assert "replaced after the last step" in callback.summary.warnings[0]
    (logged,) = (entry for entry in trainer.state.log_history if "memory_steps" in entry)
    assert logged["memory_steps"] == logged["step"] == 12 and logged["memory_penalised_steps"] == 7
    assert logged["memory_forecast_after"] == pytest.approx(float(memory.forecast()))
    assert "12 steps, 7 with the penalty" in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_lightning_logs_what_the_protection_did(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    from limpet.integrations.lightning import MemoryCallback

    model, x, y = tiny()
    memory = limpet.OnlineLaplace(model, strength=5.0)
    memory.consolidate([(x, y)], progress=False)

    callback, logger = MemoryCallback(memory), CSVLogger(tmp_path)
    lightning_run(model, callback, tmp_path, 2, logger=logger)
    logger.save()
    assert callback.summary is not None and callback.summary.steps == callback.summary.penalised == 6
    written = Path(logger.log_dir, "metrics.csv").read_text()
    assert "memory_penalised_steps" in written and "memory_forecast_after" in written

"""Protection in the outputs through the callbacks of transformers and Lightning, alone and with a Laplace memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import limpet
from limpet.errors import UnsupportedError

pytest.importorskip("transformers")
pytest.importorskip("lightning")
pytest.importorskip("peft")


def language_model() -> Any:
    from language_models import llama

    return llama(initializer_range=0.5, bos_token_id=1, eos_token_id=2)


def trainer(model: Any, folder: Path, callbacks: list[Any], **options: Any) -> Any:
    import transformers
    from datasets import Dataset

    ids = torch.randint(3, 23, (24, 9), generator=torch.Generator().manual_seed(2)).tolist()
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "logging_steps": 2,
        "save_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "data_seed": 0,
        **options,
    }
    arguments = transformers.TrainingArguments(**settings)
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})
    return transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_rehearses_logs_drift_and_resumes(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    from limpet.integrations.transformers import MemoryCallback

    def parts() -> tuple[Any, limpet.SelfRehearsal]:
        base = language_model()
        memory = limpet.SelfRehearsal(base, batch_size=8)
        memory.consolidate(tokens=800, length=9, held_out=16, progress=False)
        torch.manual_seed(0)
        return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"])), memory

    model, memory = parts()
    callback = MemoryCallback(memory, consolidate=True)
    run = trainer(model, tmp_path / "whole", [callback])
    run.train()
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    assert len(logs) == 3 and all(entry["outputs_drift"] > 0 and entry["outputs_penalty"] >= 0 for entry in logs)
    last = run.state.log_history[-1]
    assert last["outputs_steps"] == last["outputs_penalised_steps"] == 6 and last["outputs_drift"] > 0
    assert memory.tasks == 2 and float(memory.drift()) < 1e-6  # consolidated again, at the trained weights
    assert limpet.load(tmp_path / "whole" / "self-rehearsal.safetensors", model).tasks == 2
    assert (tmp_path / "whole" / "checkpoint-3" / "self-rehearsal.safetensors").is_file()

    resumed, fresh = parts()
    again = trainer(resumed, tmp_path / "again", [MemoryCallback(fresh)])
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for (name, one), other in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_protects_weights_and_outputs_together(tmp_path: Path) -> None:
    from limpet.integrations.transformers import MemoryCallback

    model = language_model()
    laplace = limpet.OnlineLaplace(model, exclude=["model.embed_tokens", "lm_head"], prior_mean="initial")
    laplace.consolidate([{"input_ids": torch.randint(3, 23, (20, 9))}], progress=False)
    rehearsal = limpet.SelfRehearsal(model)
    rehearsal.consolidate(tokens=400, length=9, held_out=8, progress=False)
    path = tmp_path / "rehearsal.safetensors"
    rehearsal.save(path)
    one, other = MemoryCallback(laplace, mode="gradient"), MemoryCallback(path, every=2)
    run = trainer(model, tmp_path, [one, other])
    run.train()
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    assert all({"memory_forecast", "memory_penalty", "outputs_drift", "outputs_penalty"} <= e.keys() for e in logs)
    assert one.summary is not None and one.summary.penalised == 6
    assert other.summary is not None and other.summary.penalised == 3
    found = {file.name for file in (tmp_path / "checkpoint-3").glob("*.safetensors")}
    assert {"memory.safetensors", "self-rehearsal.safetensors"} <= found
    with pytest.raises(UnsupportedError, match="repair="):
        trainer(model, tmp_path / "repair", [MemoryCallback(rehearsal, repair=True)]).train()


@pytest.mark.filterwarnings("ignore")
def test_lightning_distils_as_a_loop_by_hand_does(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from limpet.integrations.lightning import MemoryCallback

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(60, 5), torch.randint(0, 3, (60,))
    by_hand = copy.deepcopy(model)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def memories(network: nn.Module) -> tuple[limpet.Distillation, limpet.OnlineLaplace]:
        outputs, weights = limpet.Distillation(network), limpet.OnlineLaplace(network)
        outputs.consolidate([(x, y)], probe=20)
        weights.consolidate([(x, y)], progress=False)
        return outputs, weights

    outputs, weights = memories(by_hand)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    with outputs.protect(optimizer), weights.protect(optimizer, examples=60, mode="gradient"):
        for _ in range(3):
            for rows, labels in zip(x.flip(0).split(20), y.split(20), strict=True):
                optimizer.zero_grad()
                F.cross_entropy(by_hand(rows), labels).backward()
                optimizer.step()
    outputs, weights = memories(model)
    callbacks = [MemoryCallback(outputs, log_every=1), MemoryCallback(weights, mode="gradient", log_every=1)]
    run = pl.Trainer(
        max_epochs=3,
        callbacks=list(callbacks),
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    run.fit(Module(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x.flip(0), y), batch_size=20))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), by_hand.parameters(), strict=True))
    assert run.callback_metrics["outputs_drift"] > 0 and run.callback_metrics["memory_forecast"] > 0
    assert callbacks[0].summary is not None and callbacks[0].summary.steps == 9
    path = tmp_path / "end.ckpt"
    run.save_checkpoint(path)
    kept = torch.load(path, weights_only=True)["callbacks"]
    assert {key for key in kept if key.startswith("MemoryCallback")} == {
        "MemoryCallback",
        "MemoryCallback[distillation]",
    }

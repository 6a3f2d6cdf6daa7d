"""The lines of the README that need a model: run as they stand, on a small one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import limpet

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.filterwarnings("ignore")
def test_the_lines_for_language_models_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset

    from language_models import llama

    (code,) = re.findall(r"<!-- tested: language -->\n```python\n(.*?)```", README.read_text(), flags=re.S)
    assert len([line for line in code.splitlines() if line and "import" not in line]) <= 10
    monkeypatch.chdir(tmp_path)
    model = llama(initializer_range=0.5)
    model.save_pretrained("small")
    memory = limpet.OnlineLaplace(model, exclude=["model.embed_tokens", "lm_head"], prior_mean="initial")
    memory.consolidate([{"input_ids": torch.randint(0, 23, (30, 9))}], progress=False)
    memory.save("memory.safetensors")
    ids = torch.randint(0, 23, (40, 9)).tolist()
    space: dict[str, Any] = {"new_text": Dataset.from_dict({"input_ids": ids, "labels": ids})}
    exec(code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "small"), space)
    assert 0 < float(space["memory"].forecast()) <= 0.05 * 1.001
    assert space["trainer"].state.global_step == 5
    assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in space["model"].named_parameters())

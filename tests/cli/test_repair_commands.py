"""Test `limpet consolidate --self-samples`, `drift` and `repair` on real files, and the Trainer callback."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import command_line
import limpet
from limpet.errors import LimpetError
from limpet.integrations import causal_lm
from limpet.io.lock import FileLock
from limpet.methods.inspect import inspect

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from language_models import llama  # noqa: E402

WORDS = [f"w{i}" for i in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model with its tokenizer, an adapter and a checkpoint tuned on a text, the text, and prompts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    place = tmp_path_factory.mktemp("repair")
    words = {"<unk>": 0, "<s>": 1, **{word: i + 2 for i, word in enumerate(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>")
    base = llama(vocab_size=22, bos_token_id=1, eos_token_id=1)
    fitted(base, words_in_order(1, 40), steps=60)
    base.save_pretrained(place / "base")
    fast.save_pretrained(place / "base")
    rows = words_in_order(3, 40)
    (place / "new.txt").write_text(" ".join(WORDS[int(token) - 2] for row in rows for token in row))
    (place / "prompts.txt").write_text("w1 w2\nw3\n\n")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj", "up_proj"])
    adapted = peft.get_peft_model(copy.deepcopy(base), config)
    fitted(adapted, rows, steps=40, lr=0.02)
    adapted.save_pretrained(place / "adapter")
    whole = copy.deepcopy(base)
    whole.get_input_embeddings().requires_grad_(False)
    whole.get_output_embeddings().requires_grad_(False)
    fitted(whole, rows, steps=40, lr=0.005)
    whole.save_pretrained(place / "checkpoint")
    fast.save_pretrained(place / "checkpoint")
    return place


def words_in_order(step: int, count: int) -> Tensor:
    """Rows of eight words, each so many after the one before it."""
    starts = torch.arange(count) * 7
    return 2 + (starts[:, None] + step * torch.arange(8)) % 20


def fitted(model: Any, rows: Tensor, steps: int, lr: float = 0.01) -> None:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "limpet", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def memory(folder: Path) -> Path:
    path = folder / "memory.safetensors"
    sizes = ["--self-samples", "1400", "--length", "8", "--probe", "50", "--with-vocabulary"]
    done = command("consolidate", "--model", str(folder / "base"), *sizes, "-o", str(path))
    assert done.returncode == 0, done.stderr
    assert "200 sequences of 8 tokens from its own samples" in done.stdout
    return path


def kl(before: Any, now: Any, rows: Tensor) -> float:
    with torch.no_grad():
        p, q = (model(input_ids=rows).logits[:, :-1].log_softmax(-1) for model in (before, now))
    return float((p.exp() * (p - q)).sum(-1).mean())


def base_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "base").eval()


def tuned_of(folder: Path, kind: str) -> Any:
    if kind == "adapter":
        return peft.PeftModel.from_pretrained(base_of(folder), folder / "adapter").eval()
    return transformers.AutoModelForCausalLM.from_pretrained(folder / kind).eval()


def probe_of(path: Path, model: Any) -> Tensor:
    loaded: Any = limpet.load(path, model)
    return torch.cat([batch["input_ids"] for batch in loaded.probes[0].batches])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapter", "checkpoint"])
def test_drift_is_kl_and_a_release_can_be_gated_on_it(folder: Path, memory: Path, kind: str) -> None:
    tuned = tuned_of(folder, kind)
    wanted = kl(base_of(folder), tuned, probe_of(memory, tuned))
    words = ["drift", "--model", str(folder / "base"), "--tuned", str(folder / kind), "--memory", str(memory)]
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert math.isclose(float(done.stdout.split()[1]), wanted, abs_tol=5.1e-5)
    assert "50 sequences" in done.stdout and done.stdout.count("%") == 5
    loaded: Any = limpet.load(memory, tuned)
    assert math.isclose(loaded.drift(reference=base_of(folder)), wanted, abs_tol=1e-5)
    assert math.isclose(loaded.drift(), wanted, abs_tol=1e-5)  # so small a vocabulary is remembered whole
    assert command(*words, "--at-most", str(wanted / 2), "--layers", "0").returncode == 1
    assert command(*words, "--at-most", str(wanted * 2), "--layers", "0").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapter", "checkpoint"])
def test_the_command_repairs_what_a_person_would_and_writes_what_it_read(
    folder: Path, memory: Path, kind: str, tmp_path: Path
) -> None:
    sizes = ["--length", "8", "--tokens", "320"]
    words = ["repair", "--model", str(folder / "base"), "--tuned", str(folder / kind), "--memory", str(memory)]
    words += ["--data", str(folder / "new.txt"), *sizes]
    done = command(*words, "--strength", "2", "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    files = {path.name for path in (tmp_path / "out").iterdir()}
    weights = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
    assert weights in files and (kind == "adapter" or "tokenizer.json" in files)
    before, after = (load_file(place / weights) for place in (folder / kind, tmp_path / "out"))
    assert {name: (t.shape, t.dtype) for name, t in before.items()} == {
        name: (t.shape, t.dtype) for name, t in after.items()
    }
    # the same in Python
    model = tuned_of(folder, kind)
    loaded = limpet.load(memory, model)
    rows = torch.split(words_in_order(3, 40), 4)
    batches = [{"input_ids": part} for part in rows]
    limpet.repair(model, loaded, batches, examples=320, strength=2.0, progress=False)  # all tokens of the text
    ours = dict(model.state_dict())
    for name, tensor in after.items():
        own = ours[
            name.replace("lora_A.weight", "lora_A.default.weight").replace("lora_B.weight", "lora_B.default.weight")
        ]
        torch.testing.assert_close(own, tensor, rtol=1e-4, atol=1e-5)
    tuned, base = tuned_of(folder, kind), base_of(folder)
    again = (
        peft.PeftModel.from_pretrained(base_of(folder), tmp_path / "out").eval()
        if kind == "adapter"
        else transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    )
    fresh = causal_lm.self_samples(base, 700, length=8, seed=77, progress=False)
    assert kl(base, again, fresh) < 0.6 * kl(base, tuned, fresh)
    shown = next(line for line in done.stdout.splitlines() if line.startswith("drift"))
    numbers = [float(word) for word in shown.replace(",", "").split() if word[0].isdigit()]
    assert numbers[1] < numbers[0]


@pytest.mark.slow
def test_a_compressed_memory_repairs_a_full_checkpoint(folder: Path, memory: Path, tmp_path: Path) -> None:
    base, small = ["--model", str(folder / "base")], tmp_path / "small.safetensors"
    done = command("compress", str(memory), *base, "--energy", "0.95", "--storage-dtype", "int8", "-o", str(small))
    assert done.returncode == 0, done.stderr
    assert "blocks of ranks" in done.stdout and small.stat().st_size < 0.75 * memory.stat().st_size
    tuned, new = ["--tuned", str(folder / "checkpoint")], ["--data", str(folder / "new.txt")]
    drifts = []
    for number, path in enumerate((memory, small)):
        words = ["--length", "8", "--tokens", "320", "--strength", "1", "-o", str(tmp_path / str(number))]
        done = command("repair", *base, *tuned, *new, "--memory", str(path), *words)
        assert done.returncode == 0, done.stderr
        shown = next(line for line in done.stdout.splitlines() if line.startswith("drift"))
        drifts.append([float(word) for word in shown.replace(",", "").split() if word[0].isdigit()])
    (before, whole), (_, truncated) = drifts
    assert truncated - whole < 0.1 * (before - whole)
    words = ["--self-samples", "140", "--length", "8", "--probe", "5", "--rank", "3", "--storage-dtype", "int8"]
    done = command("consolidate", *base, *words, "-o", str(tmp_path / "ranked.safetensors"))
    assert done.returncode == 0, done.stderr
    blocks = inspect(tmp_path / "ranked.safetensors").blocks
    assert any(block.structure == "kronecker (inputs of rank 3, outputs of rank 3)" for block in blocks)
    contradiction = command("compress", str(memory), *base, "--rank", "2", "--energy", "0.5", "-o", str(small))
    assert contradiction.returncode == 2 and "pass exactly one of --rank" in contradiction.stderr


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.2, 0.1, 0.05])
def test_a_budget_is_kept_on_other_samples(folder: Path, memory: Path, budget: float, tmp_path: Path) -> None:
    words = ["repair", "--model", str(folder / "base"), "--tuned", str(folder / "checkpoint"), "--memory", str(memory)]
    words += ["--data", str(folder / "new.txt"), "--length", "8", "--tokens", "320", "--budget", str(budget)]
    done = command(*words, "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    base = base_of(folder)
    assert 0.7 * budget <= kl(base, model, probe_of(memory, model)) <= budget
    fresh = causal_lm.self_samples(base, 14_000, length=8, seed=5, progress=False)
    assert 0.7 * budget <= kl(base, model, fresh) <= 1.1 * budget


@pytest.mark.slow
def test_a_model_that_gives_nan_does_not_pass_the_gate(folder: Path, memory: Path, tmp_path: Path) -> None:
    broken = tuned_of(folder, "checkpoint")
    with torch.no_grad():
        broken.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    broken.save_pretrained(tmp_path / "broken")
    words = ["drift", "--model", str(folder / "base"), "--tuned", str(tmp_path / "broken"), "--memory", str(memory)]
    assert command(*words, "--at-most", "100", "--layers", "0").returncode == 1


def test_samples_come_from_the_model_and_do_not_depend_on_the_batch(folder: Path) -> None:
    model = base_of(folder).double()
    model.train()
    rows = causal_lm.self_samples(model, 3500, length=8, batch_size=64, progress=False)
    assert model.training and rows.shape == (500, 8)
    assert bool((rows[:, 0] == 1).all())
    assert torch.equal(rows, causal_lm.self_samples(model, 3500, length=8, batch_size=7, progress=False))
    assert not torch.equal(rows, causal_lm.self_samples(model, 3500, length=8, seed=1, progress=False))
    # the loss of the model on its own samples is the entropy of what it says there
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=rows).logits[:, :-1]
        found = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        p = logits.log_softmax(-1)
        entropy = -(p.exp() * p).sum(-1).flatten()
    assert abs(float((found - entropy).mean())) < 3 * float((found - entropy).std()) / math.sqrt(len(found))
    cold = causal_lm.self_samples(model, 70, length=8, temperature=1e-4, progress=False)
    with torch.no_grad():
        assert torch.equal(model(input_ids=cold).logits[:, :-1].argmax(-1), cold[:, 1:])


def test_samples_begin_with_the_prompts(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    starts = causal_lm.prefixes(tokenizer, folder / "prompts.txt")
    assert starts == [[1, 3, 4], [1, 5]]  # after the token that texts begin with
    rows = causal_lm.self_samples(base_of(folder), 60, length=8, prefixes=starts, progress=False)
    assert [row[:3].tolist() for row in rows[::2]] == [[1, 3, 4]] * len(rows[::2])
    assert [row[:2].tolist() for row in rows[1::2]] == [[1, 5]] * len(rows[1::2])
    with pytest.raises(LimpetError, match="from 1 to 7 tokens"):
        causal_lm.self_samples(base_of(folder), 60, length=8, prefixes=[[1] * 8])
    tokenizer.chat_template = "{% for m in messages %}w4 w5 {{ m['content'] }}{% endfor %}"
    assert causal_lm.chat_prefix(tokenizer) == [6, 7]
    assert causal_lm.prefixes(tokenizer, folder / "prompts.txt")[1] == [6, 7, 5]


@pytest.mark.slow
def test_what_is_wrong_is_one_line(
    folder: Path, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--model", str(folder / "base")]
    tuned = [*base, "--tuned", str(folder / "adapter"), "--memory", str(memory)]
    data = ["--data", str(folder / "new.txt"), "--length", "8"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.pass").write_bytes(b"not a checkpoint of a pass")
    cases = [
        (["consolidate", *base, *data, "-o", str(tmp_path / "no" / "memory")], "there is no folder"),
        (["consolidate", *base, *data, "-o", str(tmp_path / "damaged.safetensors")], "damaged.pass is not a limpet"),
        (["consolidate", *base, *data, "-o", str(tmp_path / "used")], f"used is in use by process {os.getpid()}"),
        (["consolidate", *base], "pass either --data"),
        (["consolidate", *base, "--self-samples", "10", "--data", "x"], "pass either --data"),
        (["consolidate", *base, "--data", "x", "--chat"], "only apply to --self-samples"),
        (["repair", *tuned, *data, "-o", str(folder / "adapter")], "choose another output folder"),
        (["repair", *tuned, *data, "-o", str(folder / "base")], "choose another output folder"),
        (["repair", *tuned, *data, "-o", str(tmp_path / "o"), "--strength", "1", "--budget", "1"], "or strength="),
        (["drift", *base, "--tuned", str(tmp_path / "no"), "--memory", str(memory)], "is not a folder"),
        (["drift", *base, "--tuned", str(tmp_path / "empty"), "--memory", str(memory)], "not a causal language model"),
        (["drift", *tuned, "--dtype", "int8"], "--dtype must be one of"),
        (["drift", *tuned, "--sha256", "0" * 64], "it is not the file that you expect"),
        (["drift", *tuned, "--revision", "v2"], "revision= applies to names on the Hub only"),
    ]
    for words, told in cases:
        with FileLock(tmp_path / "used.lock", tmp_path / "used"):
            code, _, printed = command_line.limpet(monkeypatch, capsys, *words)
        assert code == 2, words
        assert told in " ".join(printed.split()), printed
        assert "Traceback" not in printed


@pytest.mark.parametrize("options", [True, {"tolerance": 0.05}], ids=["strength 1", "tolerance"])
def test_the_trainer_repairs_at_its_end_and_logs_both_numbers(folder: Path, tmp_path: Path, options: Any) -> None:
    from limpet.integrations.transformers import MemoryCallback

    model, base = base_of(folder), base_of(folder)
    memory = causal_lm.consolidate_lm(
        model,
        torch.split(causal_lm.self_samples(base, 700, length=8, progress=False), 10),
        probe=[causal_lm.self_samples(base, 350, length=8, seed=3, progress=False)],
        with_vocabulary=True,  # which trains, too
        progress=False,
    )
    rows = [{"input_ids": row, "labels": row} for row in words_in_order(3, 40)]
    callback = MemoryCallback(memory, repair=options)
    args = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=4, per_device_train_batch_size=8, learning_rate=5e-3, report_to=[],
        disable_tqdm=True, use_cpu=True, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model, args, train_dataset=rows, callbacks=[callback])
    trainer.train()
    logged = next(line for line in trainer.state.log_history if "repair_strength" in line)
    assert logged["repaired_drift"] < (0.7 if options is True else 1.0) * logged["tuned_drift"]
    if options is not True:
        assert 0 < logged["repaired_loss"] - logged["tuned_loss"] <= options["tolerance"]
    assert {"tuned_loss", "repaired_loss", "tuned_forecast", "repaired_forecast"} <= logged.keys()
    assert math.isclose(float(memory.drift()), logged["repaired_drift"], rel_tol=1e-6)
    assert callback.repaired is not None
    callback.repaired.undo()
    assert math.isclose(float(memory.drift()), logged["tuned_drift"], rel_tol=1e-6)
    # nothing held while it trained: the tuned weights are those of a training without a memory
    plain = base_of(folder)
    transformers.Trainer(plain, args, train_dataset=rows).train()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    json.dumps(trainer.state.log_history)

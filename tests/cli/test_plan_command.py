"""Test `limpet plan`: it prints the numbers of `limpet.planning.plan` and allocates no weights."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_cli import limpet as limpet_command

from limpet.planning.meta_model import blueprint
from limpet.planning.plan import plan
from limpet.planning.table import in_bytes

STRUCTURES = ["diagonal", "kronecker", "kronecker-sum"]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Command]:
    """`limpet plan ...` in a folder of its own: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    yield lambda *words: limpet_command(monkeypatch, capsys, "plan", *words)
    sys.modules.pop("mine", None)


def column(told: str, line: str) -> list[str]:
    """The cells of a line of the totals, from the table of every structure."""
    return [
        cell for found in told.splitlines() if found.startswith(f"{line}  ") for cell in re.split(r"  +", found)[1:]
    ]


def test_the_command_reads_a_configuration_and_nothing_else(tmp_path: Path, command: Command) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "small")
    model = blueprint(str(tmp_path / "small"))
    assert all(parameter.is_meta for parameter in model.parameters())
    code, told, error = command("--model", "small", "--ranks", "4", "--max-side", "128", "--tokens", "512")
    assert code == 0, error
    plans = [plan(model, structure=name, ranks=4, max_factor_size=128, tokens=512) for name in STRUCTURES]
    for name, found in zip(STRUCTURES, plans, strict=True):
        assert found.table(most=12) in told, name
    assert "dense: not supported: structure='dense' supports at most 20000 weights per block" in told
    loads = [load for found in plans for load in (found.replicated, found.sharded)]
    assert column(told, "memory") == [in_bytes(load.memory) for load in loads]
    assert column(told, "peak of a consolidate, without activations") == [in_bytes(load.peak) for load in loads]
    assert column(told, "sent in a protected step") == [in_bytes(load.sent_step) for load in loads]
    # by hand: 4 bytes for mean and diagonal of 64 x 400 (twice), 7 norms of 64, and 3 layers
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160
    assert plans[0].nbytes == 2 * 4 * (2 * 400 * 64 + 7 * 64 + 3 * layer)
    _, adapted, _ = command("--model", "small", "--rank", "4", "--structure", "kronecker", "--tasks", "1")
    by_hand = 3 * (2 * 4 * 4 * (64**2 + 64**2) + 2 * 4 * 4 * (64**2 + 32**2) + 3 * 4 * 4 * (64**2 + 160**2))
    by_hand += 3 * 8 * 4**2 * (2 * 128 + 2 * 96 + 3 * 224)
    assert plan(model, rank=4, tasks=1).replicated.step == by_hand
    assert column(adapted, "protection adds to a training step") == [
        f"{100 * by_hand / (4 * sum(p.numel() for p in model.parameters()) * 4096):.2g} %"
    ]


@pytest.mark.parametrize(
    "listed", ["BertForSequenceClassification", "BertForMaskedLM", "BertForTokenClassification", "BertModel"]
)
def test_the_model_is_of_the_class_that_the_configuration_names(tmp_path: Path, listed: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, num_labels=3)
    original = getattr(transformers, listed)(config)
    original.save_pretrained(tmp_path / "small")
    model = blueprint(str(tmp_path / "small"))
    assert type(model).__name__ == listed
    shapes = {name: parameter.shape for name, parameter in original.named_parameters()}
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_configuration_without_a_class_is_planned_as_a_causal_language_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    config.save_pretrained(tmp_path / "small")
    assert type(blueprint(str(tmp_path / "small"))).__name__ == "GPT2LMHeadModel"


def test_a_class_that_transformers_does_not_have_is_named(tmp_path: Path, command: Command) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(architectures=["SomebodysOwnModel"]).save_pretrained(tmp_path / "small")
    code, _, error = command("--model", "small")
    assert code == 2 and "small is a SomebodysOwnModel, which transformers" in error


def test_an_unreachable_hub_is_the_reason(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, error = command("--model", "somebody/some-model")
    assert code == 2 and "somebody/some-model is not a local path, and the Hub cannot be reached" in error
    assert "configuration" not in error and "language model" not in error


FACTORY = """
from torch import nn

def network():
    return nn.Sequential(nn.Linear(2_000_000, 100), nn.ReLU(), nn.Linear(100, 1000))  # 800 MB, were it made
"""


def test_the_command_calls_a_factory_on_the_meta_device(tmp_path: Path, command: Command) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    code, told, error = command("--model", "mine:network", "--structure", "kronecker", "--at-rest", "bfloat16")
    assert code == 0, error
    first, second = 100 * 2_000_001, 1000 * 101
    bases = 100**2 + 1000**2 + 101**2
    by_hand = 4 * 2 * (first + second) + 2 * bases + 4 * (2_000_001 + 100 + 1000 + 101)
    assert column(told, "memory") == [in_bytes(by_hand)]
    assert "0 is longer than 4,096 on a side, whose factor is block-diagonal, or diagonal above 28,672" in told


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model", "nowhere:network"], "cannot be imported: No module named 'nowhere'"),
        (["--model", "torch.nn:Linear"], "failed on the meta device: TypeError"),
        (["--model", "torch:zeros_like"], "failed on the meta device"),
        (["--model", "builtins:dict"], "returned a dict, not a torch.nn.Module"),
        (["--model", "."], "has no readable configuration"),
        (["--model", "torch.nn:Identity"], "nothing to protect"),
        (["--model", "mine:network", "--structure", "diag"], "structure must be one of"),
        (["--model", "mine:network", "--structure", "dense"], "use structure='kronecker'"),
        (["--model", "mine:network", "--storage-dtype", "int8"], "pass factor_rank= as well"),
        (["--model", "mine:network", "--quantized"], "train through adapters"),
        (["--model", "mine:network", "--at-rest", "int4"], "storage_dtype must be"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path: Path, command: Command, words: list[str], line: str) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    code, told, error = command(*words)
    assert code == 2 and told == "" and line in error
    assert error.startswith("limpet: ") and error.count("\n") == 1

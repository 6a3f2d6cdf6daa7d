"""What a memory file says of itself, held against the memory that wrote it."""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console

import command_line
import limpet
import networks
from limpet.errors import MemoryFileError
from limpet.experiments.console import show_inspection
from limpet.methods.inspect import inspect


def saved(path: Path, structure: str) -> limpet.OnlineLaplace:
    model, x, y = networks.build("linear")
    memory = limpet.OnlineLaplace(model, structure=structure, strength=2.0, prior_precision=0.5)
    memory.consolidate([(x, y)])
    memory.consolidate([(x.flip(0), y)])
    memory.save(path)
    return memory


@pytest.mark.parametrize("structure", ["kronecker", "diagonal", "dense"])
def test_the_facts_of_a_file_are_those_of_its_memory(tmp_path: Path, structure: str) -> None:
    memory = saved(tmp_path / "memory.safetensors", structure)
    found = inspect(tmp_path / "memory.safetensors")
    assert found.settings["method"] == "online-laplace" and found.history == memory.history
    assert [block.name for block in found.blocks] == list(memory.posterior.held)
    for block, held in zip(found.blocks, memory.posterior.held.values(), strict=True):
        F, L = held.precision.fisher().dense(), held.precision.dense()
        n = len(L)
        square = float(held.mean.square().mean())
        assert block.decided == pytest.approx(float((2 * F @ torch.linalg.inv(L)).trace()) / n, rel=1e-5)
        assert block.at_stake == pytest.approx(square * float(F.trace()) / memory.examples, rel=1e-5)
        assert torch.equal(block.stakes, block.stakes.sort(descending=True).values) and len(block.stakes) == n
        assert block.nbytes == held.nbytes and block.tasks == 2


def test_the_command_shows_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "memory.safetensors", "kronecker")
    words = ["inspect", str(tmp_path / "memory.safetensors"), "--plot", str(tmp_path / "stakes.png")]
    code, said, _ = command_line.limpet(monkeypatch, capsys, *words)
    assert code == 0
    found = inspect(tmp_path / "memory.safetensors")
    for block in found.blocks:
        assert block.name in said and f"{100 * block.decided:.0f} %" in said and f"{block.at_stake:.3g}" in said
    assert "online-laplace, kronecker, strength 2: 2 tasks, 12 examples" in said
    assert f"SHA-256 {hashlib.sha256((tmp_path / 'memory.safetensors').read_bytes()).hexdigest()}\n" in said
    with Image.open(tmp_path / "stakes.png") as picture:
        assert picture.width > 600 and len(set(picture.convert("L").tobytes())) > 50  # a map, not a blank


def test_repeated_layers_share_a_line_unless_all_are_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stages = [torch.nn.Sequential(OrderedDict(fc=torch.nn.Linear(4, 4), act=torch.nn.Tanh())) for _ in range(3)]
    model = torch.nn.Sequential(*stages)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(torch.randn(20, 4), torch.randint(0, 4, (20,)))], progress=False)
    memory.save(tmp_path / "memory.safetensors")
    blocks = inspect(tmp_path / "memory.safetensors").blocks
    told = {}
    for full in (False, True):
        console = Console(width=160, record=True, file=io.StringIO())
        show_inspection(console, inspect(tmp_path / "memory.safetensors"), full=full)
        told[full] = [line.split() for line in console.export_text().splitlines() if ".fc" in line]
    assert [line[:2] for line in told[True]] == [[f"{i}.fc", "1"] for i in range(3)]
    ((name, number, *_, share, percent, stake, size),) = told[False]
    assert (name, number, percent) == ("*.fc", "3", "%") and size == f"{sum(block.nbytes for block in blocks):,}"
    assert float(share) == pytest.approx(100 * sum(block.decided for block in blocks) / 3, abs=0.51)
    assert float(stake) == pytest.approx(sum(block.at_stake for block in blocks), rel=6e-3)


def test_what_is_no_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.safetensors").write_bytes(b"nothing of ours")
    with pytest.raises(MemoryFileError):
        inspect(tmp_path / "other.safetensors")

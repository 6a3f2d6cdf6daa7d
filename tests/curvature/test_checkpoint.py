"""A pass that is killed resumes from its checkpoint with bit-identical results."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import limpet
import networks
from limpet.curvature.checkpoint import FORMAT, Checkpoint, batch_hash
from limpet.errors import CurvatureError, MemoryFileError
from limpet.io import tensor_file
from limpet.likelihoods import Categorical
from limpet.precision import Term
from reference import measure

KILLED = """
import os, signal, sys
sys.path[:0] = [{tests!r}, {tests!r} + "/curvature"]
import test_checkpoint as t
t.one_pass({structure!r}, {network!r}, {path!r}, kill_at=4)
"""


class Batches(list[Any]):
    """Batches in a fixed order; the process is killed, with no word to anybody, when it asks for the one given."""

    kill_at: int | None = None

    def __iter__(self) -> Any:
        import os

        for number, batch in enumerate(super().__iter__()):
            if number == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch


def one_pass(structure: str, network: str, path: str | None, kill_at: int | None = None) -> dict[str, list[Term]]:
    torch.set_num_threads(1)
    model, x, y = networks.build(network)
    x = x.float() if x.is_floating_point() else x
    batches = Batches((x[i : i + 1], y[i : i + 1]) for i in range(len(x)))
    batches.kill_at = kill_at
    checkpoint = None if path is None else Checkpoint(path, seconds=0.0)
    found = measure(model.float(), batches, Categorical(), structure, fisher="sampled", checkpoint=checkpoint)
    return found.terms


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


STRUCTURES = ("diagonal", "kronecker", "dense")
PAIRS = [("diagonal", "embedding"), ("kronecker", "conv2d"), ("dense", "attention")]  # for the quick run
OTHERS = [(s, n) for s in STRUCTURES for n in ("conv2d", "attention", "embedding") if (s, n) not in PAIRS]


@pytest.mark.parametrize(
    ("structure", "network"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS)]
)
def test_killed_and_resumed(structure: str, network: str, tmp_path: Path) -> None:
    path = str(tmp_path / "pass.safetensors")
    script = KILLED.format(tests=str(Path(__file__).parents[1]), structure=structure, network=network, path=path)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL and Path(path).exists()
    resumed, whole = one_pass(structure, network, path), one_pass(structure, network, None)
    for name, terms in whole.items():
        for term, other in zip(terms, resumed[name], strict=True):
            assert all(map(same, vars(term).values(), vars(other).values()))


def test_consolidate_takes_the_file_away_and_refuses_that_of_another_pass(tmp_path: Path) -> None:
    model, x, y = networks.build("linear")
    path = tmp_path / "pass.safetensors"
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, y)], checkpoint=path)
    assert not path.exists() and memory.tasks == 1
    measure(model, [(x, y)], Categorical(), checkpoint=Checkpoint(path, seconds=0.0))
    with pytest.raises(CurvatureError, match="another pass"):
        memory.consolidate([(x, y)], checkpoint=path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(MemoryFileError):
        memory.consolidate([(x, y)], checkpoint=path)
    assert memory.tasks == 1
    approximate = limpet.ApproximateLaplace(model)
    approximate.consolidate([(x, y)], checkpoint=tmp_path / "a")
    approximate.consolidate([(x, y)], earlier=[[(x, y)]], checkpoint=tmp_path / "a")
    assert not list(tmp_path.glob("a*"))


@pytest.mark.parametrize("key", ["ab", "a|b"])
def test_any_name_of_a_module_and_of_a_file_will_do(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "SECONDS", 0.0)
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({key: torch.nn.Linear(3, 2)})
    x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
    batches = list(zip(x.split(10), y.split(10), strict=True))
    calls = 0

    def forward(model: Any, batch: Any, dies: bool = False) -> Any:
        nonlocal calls
        calls += 1
        if dies and calls == 5:
            raise KeyboardInterrupt
        return model[key](batch[0]), batch[1]

    path = tmp_path / "pass[lr=0.1].safetensors"
    with pytest.raises(KeyboardInterrupt):
        limpet.OnlineLaplace(model).consolidate(
            batches, forward=lambda model, batch: forward(model, batch, dies=True), checkpoint=path
        )
    assert path.exists()
    resumed, whole = limpet.OnlineLaplace(model), limpet.OnlineLaplace(model)
    resumed.consolidate(batches, forward=forward, checkpoint=path)
    whole.consolidate(batches, forward=forward)
    assert not path.exists()
    traces = [float(memory.posterior.held[key].precision.trace()) for memory in (resumed, whole)]
    assert traces[0] == pytest.approx(traces[1], rel=1e-6)


def batches_of(seed: int, count: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(5, 3, generator=generator), "y": torch.arange(5) % 2, "id": str(seed)}] * count


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (batches_of(1), "batch 0 is not the one"),
        (batches_of(0)[:2] + batches_of(1), "batch 2 is not the one"),
        ([{**batch, "id": "x"} for batch in batches_of(0)], "batch 0 is not the one"),
        (batches_of(0, 2), "there are 2 batches, fewer than those"),
    ],
)
def test_other_data_are_rejected_on_resume(
    other: list[Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "SECONDS", 0.0)
    model, path = torch.nn.Linear(3, 2), tmp_path / "pass.safetensors"

    def forward(model: Any, batch: Any) -> Any:
        return model(batch["x"]), batch["y"]

    def interrupted() -> Any:
        yield from batches_of(0, 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        limpet.OnlineLaplace(model).consolidate(interrupted(), examples=20, forward=forward, checkpoint=path)
    before = path.read_bytes()
    memory = limpet.OnlineLaplace(model)
    with pytest.raises(CurvatureError, match=message):
        memory.consolidate(other, examples=30, forward=forward, checkpoint=path)
    assert memory.tasks == 0 and path.read_bytes() == before
    memory.consolidate(batches_of(0), examples=20, forward=forward, checkpoint=path)
    assert memory.tasks == 1 and not path.exists()


def test_a_checkpoint_without_hashes_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of earlier versions have none."""
    model, x, y = networks.build("linear")
    path = tmp_path / "pass.safetensors"
    measure(model, [(x, y)], Categorical(), checkpoint=Checkpoint(path, seconds=0.0))
    described, tensors = tensor_file.read(path, FORMAT)
    tensor_file.write(path, FORMAT, described, {name: tensors[name] for name in tensors if name != "hashes"})
    found = measure(model, [(x, y)], Categorical(), checkpoint=Checkpoint(path, seconds=0.0))
    assert found.seen == len(x)


def test_the_hash_of_a_batch() -> None:
    x = torch.arange(6.0)
    assert batch_hash((x, 1)) == batch_hash((x.clone(), 1))
    others = [(x, 2), (x, True), [x, 1], (x.double(), 1), (x.reshape(2, 3), 1), (x + 1e-6, 1), {"a": x, "b": 1}, (x,)]
    assert len({batch_hash(other) for other in [(x, 1), *others]}) == 9

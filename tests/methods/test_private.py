"""Private data in memories: the warning, what is refused, what a file records, and the attack itself."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import limpet
from limpet.curvature import privacy
from limpet.experiments.console import show_inspection
from limpet.methods.inspect import inspect
from limpet.precision.kronecker import Kronecker

BUDGET = limpet.Privacy(8.0, 1e-5)


def task(count: int, width: int = 6, classes: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(count)
    x = torch.rand(count, width, generator=generator)
    return [(x, torch.arange(count) % classes)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def warned(memory: limpet.Memory, data: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        memory.consolidate(data, **options)
    return [str(one.message) for one in found if one.category is limpet.PrivacyWarning]


@pytest.mark.parametrize("structure", ["kronecker", "kronecker-sum", "diagonal", "dense"])
def test_the_warning_is_given_exactly_below_the_side(structure: str) -> None:
    """The input factor of the first layer has 7 rows, 6 inputs and the bias; that of the second has 5."""
    for count, blocks in ((1, 2), (4, 2), (5, 1), (6, 1), (7, 0), (20, 0)):
        found = warned(limpet.OnlineLaplace(network(), structure=structure), task(count))
        assert len(found) == bool(blocks), (count, found)
        if blocks:
            assert f"{count} examples" in found[0] and "privacy=limpet.Privacy" in found[0]
            assert ("1 more block" in found[0]) == (blocks == 2)


def test_positions_count_as_inputs() -> None:
    memory = limpet.OnlineLaplace(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), exclude=["2"])
    assert not warned(memory, [(torch.randn(3, 1, 4, 4), torch.arange(3))])  # 12 patches of 9 pixels
    assert warned(memory, [(torch.randn(2, 1, 4, 4), torch.arange(2))])


def test_no_warning_about_what_is_left_out_or_private() -> None:
    assert not warned(limpet.OnlineLaplace(network(), exclude=["0"]), task(5))
    assert not warned(limpet.OnlineLaplace(network()), task(5), privacy=BUDGET)


def test_a_delta_that_promises_nothing_is_warned_about() -> None:
    found = warned(limpet.OnlineLaplace(network()), task(200), privacy=limpet.Privacy(8.0, 0.01))
    assert len(found) == 1 and "1 / N" in found[0]


@pytest.mark.parametrize(
    ("settings", "options", "match"),
    [
        ({}, {"probe": 5}, "probe"),
        ({}, {"checkpoint": "pass.ckpt"}, "checkpoint"),
        ({"smoothing": 0.1}, {}, "smoothing"),
        ({"strength": "auto"}, {}, "strength"),
    ],
)
def test_what_the_budget_does_not_cover_is_refused(
    settings: dict[str, Any], options: dict[str, Any], match: str
) -> None:
    memory = limpet.OnlineLaplace(network(), **settings)
    with pytest.raises(limpet.UnsupportedError, match=match):
        memory.consolidate(task(50), privacy=BUDGET, **options)
    assert memory.tasks == 0 and memory.privacy == ()


def test_other_refusals() -> None:
    with pytest.raises(TypeError, match=r"limpet\.Privacy"):
        limpet.OnlineLaplace(network()).consolidate(task(50), privacy=3.0)  # type: ignore[arg-type]
    with pytest.raises(limpet.UnsupportedError, match="OnlineLaplace"):
        limpet.ApproximateLaplace(network()).consolidate(task(50), privacy=BUDGET)
    memory = limpet.OnlineLaplace(network())
    memory.consolidate(task(50), probe=5)
    with pytest.raises(limpet.UnsupportedError, match="probe"):
        memory.consolidate(task(50), privacy=BUDGET)
    private = limpet.OnlineLaplace(network())
    private.consolidate(task(50), privacy=BUDGET)
    with pytest.raises(limpet.UnsupportedError, match="private"):
        private.add_probe(task(50))


@pytest.mark.parametrize("method", [limpet.OnlineLaplace, limpet.PerTaskLaplace])
def test_a_file_says_what_is_private(method: type[limpet.OnlineLaplace], tmp_path: Path) -> None:
    model = network()
    memory = method(model)
    memory.consolidate(task(300), privacy=BUDGET)
    assert "curvature private (epsilon 8, delta 1e-05 each)" in str(memory.report())
    assert memory.history.tasks[0].curve.predicted == ()  # the loss curve is measured on the data
    memory.consolidate(task(300))
    assert "curvature private in 1 of 2 tasks" in str(memory.report())
    memory.save(tmp_path / "memory.safetensors")
    expected = [{"epsilon": 8.0, "delta": 1e-05, "clip": 0.9}, None]
    assert inspect(tmp_path / "memory.safetensors").settings["privacy"] == expected
    shown = Console(file=io.StringIO(), width=120)
    show_inspection(shown, inspect(tmp_path / "memory.safetensors"))
    assert "curvature private in 1 of 2 tasks" in shown.file.getvalue()  # type: ignore[attr-defined]
    loaded = limpet.load(tmp_path / "memory.safetensors", model)
    assert loaded.privacy == memory.privacy == (BUDGET, None)  # type: ignore[attr-defined]
    assert str(loaded.report()) == str(memory.report())


def test_files_without_budgets_load_and_wrong_ones_do_not() -> None:
    model = network()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate(task(300))
    state = memory.state_dict()
    assert "privacy" not in json.loads(state["metadata"])["settings"]
    other = limpet.OnlineLaplace(model)
    other.load_state_dict(state)
    assert other.privacy == (None,) and "private" not in str(other.report())
    for wrong in ([None, None], [{"epsilon": -1, "delta": 1e-5}], [{"budget": 1}], "all"):
        metadata = json.loads(memory._state()["metadata"])
        metadata["settings"]["privacy"] = wrong
        with pytest.raises(limpet.MemoryFileError):
            other.load_state_dict({"metadata": json.dumps(metadata), "tensors": memory._state()["tensors"]})


def recovered(memory: limpet.Memory) -> Tensor | None:
    """The input of the only example, from the input factor: its eigenvector, scaled so that the bias input is 1."""
    precision = memory.posterior.held["0"].precision
    assert isinstance(precision, Kronecker)
    if precision.inputs.vectors is None:
        return None
    vectors = precision.inputs.vectors
    assert isinstance(vectors, Tensor)
    largest = vectors[:, precision.inputs.trace.argmax()]
    return largest[:-1] / largest[-1]


def test_one_example_is_recovered_unless_the_memory_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy, "random_bytes", np.random.default_rng(0).bytes)
    data = task(1)
    plain, private = limpet.OnlineLaplace(network()), limpet.OnlineLaplace(network())
    plain.consolidate(data)
    torch.testing.assert_close(recovered(plain), data[0][0][0], rtol=1e-4, atol=1e-4)
    private.consolidate(data, privacy=BUDGET)
    guess = recovered(private)
    assert guess is None or not float((guess - data[0][0][0]).norm()) < 0.3  # nan if the factor is zero

"""Names that have changed still work, and say what they are called now."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import limpet
from limpet.deprecation import MODULES
from limpet.methods.inspect import inspect
from limpet.planning import plan

X, Y = torch.randn(20, 3), torch.randint(0, 2, (20,))


@pytest.fixture
def memory() -> limpet.OnlineLaplace:
    memory = limpet.OnlineLaplace(nn.Linear(3, 2))
    memory.consolidate([(X, Y)], progress=False)
    return memory


@pytest.mark.parametrize("old", MODULES)
def test_a_module_is_found_under_its_old_name(old: str) -> None:
    sys.modules.pop(old, None)
    new, names = MODULES[old]
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated: use {new}"):
        found = importlib.import_module(old)
    target = importlib.import_module(new)
    for name in names:
        assert getattr(found, name) is getattr(target, names[name])
    public = next(name for name in vars(target) if not name.startswith("_") and name != "annotations")
    assert getattr(found, public) is getattr(target, public)


def test_old_imports_read_as_they_did() -> None:
    for name in ("limpet.language", "limpet.parallel"):
        sys.modules.pop(name, None)
    with pytest.warns(DeprecationWarning):
        from limpet.language import remember  # type: ignore[import-not-found]
        from limpet.parallel import Shared  # type: ignore[import-not-found]
    assert remember.__name__ == "consolidate_lm" and Shared.__name__ == "ReplicatedBatches"
    with pytest.warns(DeprecationWarning, match=r"limpet\.Several is deprecated: use limpet\.MultiOutput"):
        assert limpet.Several is limpet.MultiOutput
    with pytest.raises(AttributeError, match="nothing_like_it"):
        limpet.nothing_like_it  # noqa: B018


def test_old_arguments_do_what_they_did(memory: limpet.OnlineLaplace) -> None:
    with pytest.warns(DeprecationWarning, match="max_side= is deprecated: use max_factor_size="):
        assert limpet.OnlineLaplace(nn.Linear(3, 2), max_side=2).posterior.structure.max_factor_size == 2
    with pytest.warns(DeprecationWarning, match="at_rest= is deprecated: use storage_dtype="):
        assert limpet.PerTaskLaplace(nn.Linear(3, 2), at_rest="float16").posterior.structure.rest.dtype == "float16"
    with pytest.warns(DeprecationWarning, match="how= is deprecated: use link_approximation="):
        old = memory.predictive(X, how="probit")
    assert torch.equal(old, memory.predictive(X, link_approximation="probit"))
    with pytest.warns(DeprecationWarning, match="max_side"):
        assert plan(nn.Linear(3, 2), max_side=2).rows == plan(nn.Linear(3, 2), max_factor_size=2).rows
    with pytest.raises(TypeError, match="pass only max_factor_size="):
        limpet.OnlineLaplace(nn.Linear(3, 2), max_side=2, max_factor_size=3)


def test_files_keep_their_keys(memory: limpet.OnlineLaplace, tmp_path: Path) -> None:
    small = limpet.OnlineLaplace(memory.model, max_factor_size=2, storage_dtype="float16")
    small.consolidate([(X, Y)], progress=False)
    small.save(tmp_path / "memory.safetensors")
    settings = inspect(tmp_path / "memory.safetensors").settings
    assert (settings["max_side"], settings["at_rest"]) == (2, "float16")
    again = limpet.load(tmp_path / "memory.safetensors", memory.model)
    assert again.posterior.structure == small.posterior.structure

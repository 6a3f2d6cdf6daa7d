"""States of memories that say something else of themselves than they should."""

from __future__ import annotations

import json
from typing import Any

import limpet
from limpet.io.state import State


def metadata(memory: limpet.Memory) -> dict[str, Any]:
    """What a memory's state says of itself."""
    found: dict[str, Any] = json.loads(memory.state_dict()["metadata"])
    return found


def changed(state: State, *, without: str | None = None, settings: dict[str, Any] | None = None, **other: Any) -> State:
    """A state with other metadata: other settings among them, or without one."""
    told = {**json.loads(state["metadata"]), **other}
    told["settings"] = {**told["settings"], **(settings or {})}
    told["settings"].pop(without, None)
    for name in ("sha256", "checksums"):
        told.pop(name, None)
    return {"metadata": json.dumps(told), "tensors": state["tensors"]}

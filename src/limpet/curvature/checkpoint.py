"""Stop a pass and go on: the sums so far, and how far they go, in a file."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from limpet import files
from limpet.errors import CurvatureError, MemoryFileError

if TYPE_CHECKING:
    from limpet.curvature.fisher import FisherPass

FORMAT = "limpet curvature pass"


class Checkpoint:
    """Writes a pass to its file now and then. A pass killed at any moment goes on from the last time, bit for bit."""

    def __init__(self, path: str | Path, *, seconds: float = 60.0) -> None:
        self.path = Path(path)
        self.seconds = seconds
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to write again."""
        return time.monotonic() - self._last >= self.seconds

    def save(self, one_pass: FisherPass) -> None:
        """Write where the pass is."""
        assert one_pass.generator is not None
        tensors = one_pass.named_sums()
        tensors |= {"generator": one_pass.generator.get_state(), "tally": one_pass.tally}
        description = {
            "fingerprint": fingerprint(one_pass),
            "direct": sorted(block.name for block in one_pass.blocks if not block.layers),
            "fisher": one_pass.fisher,
            "used": sorted(one_pass.used),
            "seen": one_pass.seen,
            "rows": one_pass.rows,
            "batches": one_pass.batches,
            "roots": one_pass.roots,
        }
        files.write(self.path, FORMAT, description, tensors)
        self._last = time.monotonic()

    def resume(self, one_pass: FisherPass) -> None:
        """Bring a pass to where the file says it was; nothing happens where there is no file."""
        if not self.path.exists():
            return
        described, kept = files.read(self.path, FORMAT)
        tensors = dict(kept)
        try:
            if described["fingerprint"] != fingerprint(one_pass):
                raise CurvatureError(
                    f"{self.path.name} belongs to another pass (other weights or settings): delete it, or give this "
                    "pass a checkpoint file of its own"
                )
            self._restore(one_pass, described, tensors)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise MemoryFileError(f"{self.path.name} is no checkpoint of this pass: {error}") from error

    def _restore(self, one_pass: FisherPass, described: dict[str, Any], tensors: dict[str, Any]) -> None:
        direct = set(described["direct"])
        one_pass.begin_anew({b.name for b in one_pass.blocks if b.layers and direct & set(b.parameters)})
        one_pass.fisher = described["fisher"]
        one_pass.used = set(described["used"])
        one_pass.seen, one_pass.rows = int(described["seen"]), int(described["rows"])
        one_pass.batches, one_pass.roots = int(described["batches"]), int(described["roots"])
        one_pass.tally = tensors.pop("tally")
        device = next(iter(one_pass.parameters.values())).device
        one_pass.generator = torch.Generator(device)
        one_pass.generator.set_state(tensors.pop("generator"))
        one_pass.make_sums()
        one_pass.load_sums(tensors)

    def remove(self) -> None:
        """The pass is done, and what it found is in the memory."""
        self.path.unlink(missing_ok=True)


def fingerprint(one_pass: FisherPass) -> str:
    """What must be the same for two passes to be one: the weights, and how they are measured."""
    digest = hashlib.sha256()
    measured = [one_pass.asked, one_pass.draws, one_pass.seed, one_pass.displacement]
    settings = [one_pass.structure, one_pass.likelihood.describe(), *measured]
    digest.update(repr(settings).encode())
    for name, parameter in sorted(one_pass.parameters.items()):
        digest.update(f"{name} {parameter.requires_grad}".encode())
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

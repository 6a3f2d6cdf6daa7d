"""Stop a pass and go on, on as many ranks or on others: the sums so far, and which batches are in them, in files.

Every rank writes a file of its own, whose sums and batches belong together, so any complete set of files says what has
been read and what has not. A set that another number of ranks left behind is written anew by those who take it over,
as the next generation, before it is deleted. Where the ranks share one model each has the sums of its own blocks
alone, for what all of them read; then every save is a generation, which counts when all ranks have written it.
"""

from __future__ import annotations

import glob
import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limpet.curvature.batch_step import block_of
from limpet.curvature.fisher_pass import FisherPass
from limpet.distributed import Ranks, current
from limpet.errors import CurvatureError, MemoryFileError
from limpet.io import tensor_file
from limpet.model.fingerprint import fingerprint_of_weights

FORMAT = "limpet curvature pass"


@dataclass(frozen=True)
class Saved:
    """A complete set of files: one of each rank."""

    generation: int
    size: int


class Checkpoint:
    """Writes a pass to files now and then. A pass killed at any moment goes on from the last time."""

    SECONDS = 60.0

    def __init__(self, path: str | Path, *, seconds: float | None = None) -> None:
        self.path = Path(path)
        self.seconds = self.SECONDS if seconds is None else seconds
        self.generation = 0
        self._last = time.monotonic()
        self._fingerprint: str | None = None

    def file(self, generation: int, rank: int, size: int) -> Path:
        """The file of a rank; one process alone has the plain name."""
        if size == 1:
            return self.path
        return self.path.with_name(f"{self.path.name}.{generation}.rank{rank}of{size}")

    def due(self) -> bool:
        """Whether it is time to write again."""
        return time.monotonic() - self._last >= self.seconds

    def _own(self, one_pass: FisherPass) -> str:
        """The fingerprint of the pass that this checkpoint is for."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(one_pass)
        return self._fingerprint

    # --- writing ---------------------------------------------------------------------------------------------

    def save(self, one_pass: FisherPass) -> None:
        """Write where the pass is."""
        ranks = current()
        if ranks is None or not one_pass.in_step:
            self._write(one_pass, ranks)
        else:
            self._next_generation(one_pass, ranks)

    def _next_generation(self, one_pass: FisherPass, ranks: Ranks | None) -> None:
        """Write a set that takes the place of all there are, once it is complete."""
        self.generation += 1
        self._write(one_pass, ranks)
        if ranks is not None:
            ranks.gather(None)  # all have written
        self._leave_only(1 if ranks is None else ranks.size, ranks)

    def _write(self, one_pass: FisherPass, ranks: Ranks | None) -> None:
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        tensors = {**one_pass.named_sums(), "tally": one_pass.tally}
        if one_pass.generator is not None:
            tensors["generator"] = one_pass.generator.get_state()
        tensors["done"] = torch.tensor(sorted(one_pass.done), dtype=torch.int64)
        description = {
            "fingerprint": self._own(one_pass),
            "generation": self.generation,
            "rank": rank,
            "size": size,
            "shared": one_pass.shared,
            "direct": sorted(block.name for block in one_pass.blocks if not block.layers),
            "fisher": one_pass.fisher,
            "used": sorted(one_pass.used),
            "seen": one_pass.seen,
            "rows": one_pass.rows,
            "roots": one_pass.roots,
        }
        tensor_file.write(self.file(self.generation, rank, size), FORMAT, description, tensors)
        self._last = time.monotonic()

    # --- going on --------------------------------------------------------------------------------------------

    def resume(self, one_pass: FisherPass) -> None:
        """Bring a pass to where the files say it was; nothing happens where there are none."""
        ranks = current()
        found = self._newest() if ranks is None else ranks.gather(self._newest())[0]
        if found is None:
            return
        read = [tensor_file.read(self.file(found.generation, rank, found.size), FORMAT) for rank in range(found.size)]
        try:
            self._check(one_pass, [described for described, _ in read], found, 1 if ranks is None else ranks.size)
            self._restore(one_pass, read, ranks)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise MemoryFileError(f"{self.path.name} is no checkpoint of this pass: {error}") from error
        self.generation = found.generation
        size = 1 if ranks is None else ranks.size
        if ranks is not None:
            ranks.gather(None)  # all have read
        if found.size != size:
            self._next_generation(one_pass, ranks)
        else:
            self._leave_only(size, ranks)

    def _leave_only(self, size: int, ranks: Ranks | None) -> None:
        """Delete what is not of this generation: those before, and the beginnings of one that was never complete."""
        if ranks is None or not ranks.rank:
            kept = {self.file(self.generation, rank, size) for rank in range(size)}
            for path in set(self._files()) - kept:
                path.unlink(missing_ok=True)
        if ranks is not None:
            ranks.gather(None)

    def _files(self) -> list[Path]:
        beside = self.path.parent.glob(f"{glob.escape(self.path.name)}*")
        return [path for path in beside if path == self.path or self._numbers(path)]

    def _numbers(self, path: Path) -> tuple[int, int, int] | None:
        """Generation, rank and size of a rank's file, from its name."""
        match = re.fullmatch(r"\.(\d+)\.rank(\d+)of(\d+)", path.name.removeprefix(self.path.name))
        return None if match is None else (int(match[1]), int(match[2]), int(match[3]))

    def _newest(self) -> Saved | None:
        """The complete set of the highest generation."""
        ranks_of: dict[Saved, set[int]] = {}
        for generation, rank, size in filter(None, map(self._numbers, self._files())):
            ranks_of.setdefault(Saved(generation, size), set()).add(rank)
        complete = [saved for saved, there in ranks_of.items() if len(there) == saved.size]
        if self.path.exists():
            complete.append(Saved(int(tensor_file.read(self.path, FORMAT)[0].get("generation", 0)), 1))
        return max(complete, key=lambda saved: saved.generation, default=None)

    def _check(self, one_pass: FisherPass, told: list[dict[str, Any]], found: Saved, size: int) -> None:
        own = self._own(one_pass)
        if any(described["fingerprint"] != own for described in told):
            raise CurvatureError(
                f"{self.path.name} belongs to another pass (other weights or settings): delete it, or give this "
                "pass a checkpoint file of its own"
            )
        if any(described["shared"] != one_pass.shared for described in told):
            raise CurvatureError(f"{self.path.name} was begun with other data: delete it, or give the batches as then")
        if found.size != size and not one_pass.shared:
            raise CurvatureError(
                f"{self.path.name} was begun on {found.size} processes, each with data of its own: go on with as many, "
                "or give every process all data, limpet.distributed.ReplicatedBatches(batches), from the start"
            )

    def _restore(self, one_pass: FisherPass, read: list[tuple[dict[str, Any], Any]], ranks: Ranks | None) -> None:
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        direct = [described["direct"] for described, _ in read]
        if any(names != direct[0] for names in direct):
            return  # ranks that had not agreed yet how to measure would have begun anew
        one_pass.restart({b.name for b in one_pass.blocks if b.layers and set(direct[0]) & set(b.parameters)})
        one_pass.make_sums()
        sums: dict[str, Tensor] = {}
        for number, (described, tensors) in enumerate(read):
            mine = number % size == rank  # of several sets of sums, each goes to one rank
            if mine or one_pass.in_step:
                _add(sums, tensors, {name for name in tensors if block_of(name) in one_pass.sums})
            if mine or one_pass.shared:
                one_pass.before |= set(tensors["done"].tolist())
            if mine:
                self._count(one_pass, described, tensors)
        one_pass.load_sums(sums)

    def _count(self, one_pass: FisherPass, described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        one_pass.fisher, one_pass.roots = described["fisher"], int(described["roots"])
        one_pass.used |= set(described["used"])
        one_pass.seen += int(described["seen"])
        one_pass.rows += int(described["rows"])
        one_pass.done |= set(tensors["done"].tolist())
        one_pass.tally = one_pass.tally + tensors["tally"]
        if "generator" in tensors:
            one_pass.generator = torch.Generator(next(iter(one_pass.parameters.values())).device)
            one_pass.generator.set_state(tensors["generator"])

    def remove(self) -> None:
        """The pass is done, and what it found is in the memory."""
        ranks = current()
        if ranks is not None:
            ranks.gather(None)  # nobody reads any more
        for path in self._files() if ranks is None or not ranks.rank else ():
            path.unlink(missing_ok=True)


def _add(sums: dict[str, Tensor], tensors: Mapping[str, Tensor], names: set[str]) -> None:
    for name in names:
        sums[name] = sums[name] + tensors[name] if name in sums else tensors[name]


def fingerprint(one_pass: FisherPass) -> str:
    """What must be the same for two passes to be one: the weights, and how they are measured."""
    digest = hashlib.sha256()
    measured = [one_pass.asked, one_pass.draws, one_pass.seed, one_pass.displacement]
    settings = [one_pass.structure, one_pass.likelihood.describe(), *measured]
    digest.update(repr(settings).encode())
    digest.update(fingerprint_of_weights(one_pass.parameters).encode())
    return digest.hexdigest()

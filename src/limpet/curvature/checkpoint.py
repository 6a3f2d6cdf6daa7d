"""Checkpoints of a curvature pass: the sums so far and the batches they include. World size may change on resume.

Every rank writes its own file, in which sums and batches are consistent, so any complete set of files determines what
has been read. A set written by a different number of ranks is rewritten by the resuming ranks as the next generation
before it is deleted. If the ranks share one sharded model, each has the sums of its own blocks only, over the batches
of all ranks; every save is then a new generation, which is valid once all ranks have written it.

A resumed pass reads all batches again, to skip those that the sums include. Their hashes are compared with the saved
ones, because other data, or the same data in another order, would be counted twice or not at all.
"""

from __future__ import annotations

import glob
import hashlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limpet.curvature.batch_hash import batch_hash
from limpet.curvature.batch_step import block_of
from limpet.curvature.fisher_pass import FisherPass
from limpet.distributed import Ranks, current, rank_and_size
from limpet.errors import CurvatureError, MemoryFileError
from limpet.io import atomic, tensor_file
from limpet.model.fingerprint import fingerprint_of_weights

FORMAT = "limpet curvature pass"
UNKNOWN = 0
"""In place of the hash of a batch that a file of an earlier version has none for."""


@dataclass(frozen=True)
class Saved:
    """A complete set of checkpoint files, one per rank.

    Args:
        generation: The generation of the set.
        size: The number of ranks that wrote it.
    """

    generation: int
    size: int


class Checkpoint:
    """Periodic checkpoint of a pass. A pass that is killed resumes from the last save with identical results.

    Args:
        path: The checkpoint file. With several ranks, each appends a suffix to its name.
        seconds: Minimum time between two saves. Default: `Checkpoint.SECONDS`.
    """

    SECONDS = 60.0

    def __init__(self, path: str | Path, *, seconds: float | None = None) -> None:
        self.path = Path(path)
        self.seconds = self.SECONDS if seconds is None else seconds
        self.generation = 0
        self._last = time.monotonic()
        self._fingerprint: str | None = None
        self._hashes: dict[int, int] = {}  # of the batches, by number

    def file(self, generation: int, rank: int, size: int) -> Path:
        """Path of a rank's file.

        Args:
            generation: The generation of the set of files.
            rank: The rank.
            size: The number of ranks. A single process uses the plain path.

        Returns:
            The path.
        """
        if size == 1:
            return self.path
        return self.path.with_name(f"{self.path.name}.{generation}.rank{rank}of{size}")

    def due(self) -> bool:
        """Whether the next save is due."""
        return time.monotonic() - self._last >= self.seconds

    def _own(self, one_pass: FisherPass) -> str:
        """The fingerprint of the pass, computed once."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(one_pass)
        return self._fingerprint

    def verified(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Hash the batches of the pass, and compare those that were read before it was interrupted.

        Args:
            batches: The batches.

        Yields:
            The batches.

        Raises:
            CurvatureError: If a batch differs from the one that was read before.
        """
        number = -1
        for number, batch in enumerate(batches):
            found = batch_hash(batch)
            if self._hashes.setdefault(number, found) != found:
                raise self._other_data(f"batch {number} is not the one")
            yield batch
        if number < max(self._hashes, default=-1):
            raise self._other_data(f"there are {number + 1} batches, fewer than those")

    def _other_data(self, what: str) -> CurvatureError:
        return CurvatureError(
            f"{what} that {self.path.name} was saved with: resume with the same data in the same order (shuffle=False, "
            "or a generator with the same seed), or delete the file to start again"
        )

    # --- saving ----------------------------------------------------------------------------------------------

    def save(self, one_pass: FisherPass) -> None:
        """Save the state of the pass."""
        ranks = current()
        if ranks is None or not one_pass.in_step:
            self._write(one_pass, ranks)
        else:
            self._next_generation(one_pass, ranks)

    def _next_generation(self, one_pass: FisherPass, ranks: Ranks | None) -> None:
        """Write a set of files that replaces all others once it is complete."""
        self.generation += 1
        self._write(one_pass, ranks)
        if ranks is not None:
            ranks.gather(None)  # barrier: all ranks have written
        self._leave_only(1 if ranks is None else ranks.size, ranks)

    def _write(self, one_pass: FisherPass, ranks: Ranks | None) -> None:
        rank, size = rank_and_size()
        tensors = {**one_pass.named_sums(), "tally": one_pass.tally, "occurrences": one_pass.occurrences.tensors()}
        if one_pass.generator is not None:
            tensors["generator"] = one_pass.generator.get_state()
        done = sorted(one_pass.done)
        tensors["done"] = torch.tensor(done, dtype=torch.int64)
        tensors["hashes"] = torch.tensor([self._hashes.get(number, UNKNOWN) for number in done], dtype=torch.int64)
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

    # --- resuming --------------------------------------------------------------------------------------------

    def resume(self, one_pass: FisherPass) -> None:
        """Restore the state of a pass. Does nothing if there are no files.

        Args:
            one_pass: The pass to restore, with the settings and weights that it was saved with.

        Raises:
            CurvatureError: If the files belong to a pass with other weights, settings or data.
            MemoryFileError: If the files are corrupted.
        """
        ranks = current()
        found = self._newest() if ranks is None else ranks.gather(self._newest())[0]
        if found is None:
            return
        read = [tensor_file.read(self.file(found.generation, rank, found.size), FORMAT) for rank in range(found.size)]
        try:
            self._check(one_pass, [described for described, _ in read], found, 1 if ranks is None else ranks.size)
            self._restore(one_pass, read, ranks)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise MemoryFileError(f"{self.path.name} is not a checkpoint of this pass: {error}") from error
        self.generation = found.generation
        size = 1 if ranks is None else ranks.size
        if ranks is not None:
            ranks.gather(None)  # barrier: all ranks have read
        if found.size != size:
            self._next_generation(one_pass, ranks)
        else:
            self._leave_only(size, ranks)

    def _leave_only(self, size: int, ranks: Ranks | None) -> None:
        """Delete the files of all other generations: earlier ones, and incomplete later ones."""
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
        """Parse generation, rank and number of ranks from the name of a rank's file."""
        match = re.fullmatch(r"\.(\d+)\.rank(\d+)of(\d+)", path.name.removeprefix(self.path.name))
        return None if match is None else (int(match[1]), int(match[2]), int(match[3]))

    def _newest(self) -> Saved | None:
        """The complete set with the highest generation."""
        ranks_of: dict[Saved, set[int]] = {}
        for generation, rank, size in filter(None, map(self._numbers, self._files())):
            ranks_of.setdefault(Saved(generation, size), set()).add(rank)
        complete = [saved for saved, present in ranks_of.items() if len(present) == saved.size]
        if self.path.exists():
            complete.append(Saved(int(tensor_file.read(self.path, FORMAT)[0].get("generation", 0)), 1))
        return max(complete, key=lambda saved: saved.generation, default=None)

    def _check(self, one_pass: FisherPass, descriptions: list[dict[str, Any]], found: Saved, size: int) -> None:
        """Check that the files belong to this pass."""
        own = self._own(one_pass)
        if any(described["fingerprint"] != own for described in descriptions):
            raise CurvatureError(
                f"{self.path.name} belongs to another pass (different weights or settings): delete it, or use another "
                "checkpoint file for this pass"
            )
        if any(described["shared"] != one_pass.shared for described in descriptions):
            raise CurvatureError(
                f"{self.path.name} was saved by a pass that was given its batches differently (with or without "
                "ReplicatedBatches): delete it, or pass the batches in the same way again"
            )
        if found.size != size and not one_pass.shared:
            raise CurvatureError(
                f"{self.path.name} was saved by {found.size} ranks, each with its own data: resume with {found.size} "
                "ranks, or start again with all data on every rank, limpet.distributed.ReplicatedBatches(batches)"
            )

    def _restore(self, one_pass: FisherPass, read: list[tuple[dict[str, Any], Any]], ranks: Ranks | None) -> None:
        rank, size = rank_and_size()
        direct = [described["direct"] for described, _ in read]
        if any(names != direct[0] for names in direct):
            return  # the ranks had not yet agreed which blocks to measure per sample, so they would have restarted
        one_pass.restart({b.name for b in one_pass.blocks if b.layers and set(direct[0]) & set(b.parameters)})
        one_pass.make_sums()
        sums: dict[str, Tensor] = {}
        for number, (described, tensors) in enumerate(read):
            mine = number % size == rank  # each saved file is assigned to exactly one rank
            if mine or one_pass.in_step:
                _add(sums, tensors, {name for name in tensors if block_of(name) in one_pass.sums})
            if mine or one_pass.shared:
                done = tensors["done"].tolist()
                one_pass.before |= set(done)
                if "hashes" in tensors:  # files of earlier versions have none
                    saved = zip(done, tensors["hashes"].tolist(), strict=True)
                    self._hashes |= {number: value for number, value in saved if value != UNKNOWN}
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
        if "occurrences" in tensors:  # files of earlier versions have none
            one_pass.occurrences.add(tensors["occurrences"])
        if "generator" in tensors:
            one_pass.generator = torch.Generator(next(iter(one_pass.parameters.values())).device)
            one_pass.generator.set_state(tensors["generator"])

    def remove(self) -> None:
        """Delete all files, once the result of the pass is in the memory."""
        ranks = current()
        if ranks is not None:
            ranks.gather(None)  # barrier: no rank reads the files any more
        if ranks is None or not ranks.rank:
            for path in (*self._files(), self.path):
                atomic.remove(path)


def _add(sums: dict[str, Tensor], tensors: Mapping[str, Tensor], names: set[str]) -> None:
    for name in names:
        sums[name] = sums[name] + tensors[name] if name in sums else tensors[name]


def fingerprint(one_pass: FisherPass) -> str:
    """Hash of the weights and the settings of a pass. A checkpoint can be resumed only with an equal fingerprint."""
    digest = hashlib.sha256()
    measured = [one_pass.asked, one_pass.draws, one_pass.seed, one_pass.displacement]
    settings = [one_pass.structure, one_pass.likelihood.describe(), *measured]
    digest.update(repr(settings).encode())
    digest.update(fingerprint_of_weights(one_pass.parameters).encode())
    return digest.hexdigest()

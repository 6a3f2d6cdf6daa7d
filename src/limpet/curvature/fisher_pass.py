"""One pass over the data that computes the Fisher of every block.

Normalization: the Fisher is that of the whole task, a sum over its N examples. A Kronecker block is Q (x) H with Q the
mean of a a^T over examples and positions and H the sum of g g^T (K-FAC). If only some of the examples were seen, the
sums are scaled by N / seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from limpet.curvature.accumulators import KroneckerAccumulator
from limpet.curvature.batch_hash import batch_hash
from limpet.curvature.batch_step import BatchStep, StepOptions, UnforeseenError
from limpet.curvature.ddp import compare_batches, read_on_all_ranks
from limpet.curvature.progress import Progress
from limpet.curvature.structure import Structure
from limpet.distributed import Ranks, ReplicatedBatches, current, rank_and_size, together
from limpet.errors import CurvatureError, positive_whole
from limpet.layers import MatrixLayer
from limpet.likelihoods import Count, Likelihood
from limpet.model.batch import FirstBatches, check_batches, needed_total, total_examples
from limpet.model.blocks import Block
from limpet.model.context import eager, perturbed, plain_recurrence, preserve_state, trainable
from limpet.precision import Term

if TYPE_CHECKING:
    from typing_extensions import Unpack

NOTHING = -1
"""Number of a filler batch: the rank runs it only to take part in collectives, and it is not counted."""

TOLERANCE = 1.1
"""Factor by which the batches may contain more examples than stated, for padded shards and random masks."""

Displacement = Callable[[int], Mapping[str, Tensor]]
"""Maps a batch number to the displacement, by parameter, that is added to the weights for that batch."""


class PassCheckpoint(Protocol):
    """Interface of a checkpoint of a pass (`limpet.curvature.checkpoint`)."""

    def resume(self, one_pass: FisherPass) -> None:
        """Restore the state of the pass at its last save."""

    def verified(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, after comparing them with those that were read before the last save."""

    def due(self) -> bool:
        """Whether the next save is due."""

    def save(self, one_pass: FisherPass) -> None:
        """Save the pass."""


@dataclass(frozen=True)
class Fisher:
    """Result of a pass.

    Args:
        blocks: The blocks as they were measured, which may be more finely split than those requested.
        terms: The terms of the Fisher of each block, by block name.
        examples: Number of examples (or predicted positions) N of the task that the Fisher is scaled to, with its
            rows.
        seen: Number of examples (or predicted positions) that were read.
        kind: The kind of Fisher: "exact", "sampled" or "empirical".
        unused: Names of the parameters that had no gradient.
        rows: Number of rows that were read.
        first: The first batches that were read.
        roots: Number of backward passes per batch.
        loss_scale: Factor that converts the likelihood's negative log likelihood to nats.
        exposed: Names of the blocks whose inputs can be recovered from their Fisher, because it has too few of them.
        dropped: Names of the blocks whose terms were dropped.
    """

    blocks: list[Block]
    terms: dict[str, list[Term]]
    examples: Count
    seen: int
    kind: str
    unused: frozenset[str]
    rows: int
    first: FirstBatches
    roots: int = 1
    loss_scale: float = 1.0
    exposed: tuple[str, ...] = ()
    dropped: frozenset[str] = frozenset()

    def speaks_of(self, block: Block) -> bool:
        """Whether the task has curvature for the block: its parameters were used, and it has terms."""
        measured = bool(self.terms.get(block.name)) or block.name in self.dropped
        return measured and not self.unused.issuperset(block.parameters)

    def without_terms(self) -> Fisher:
        """Return the Fisher without its terms, which are as large as the memory, for when they are in it."""
        return replace(self, terms={}, dropped=frozenset(name for name, terms in self.terms.items() if terms))


class FisherPass(BatchStep):
    """One pass over the data. Call `run` to compute the Fisher.

    Args:
        model: The model.
        blocks: The blocks of parameters to measure.
        likelihood: The likelihood that defines the Fisher.
        structure: The structure of each block's Fisher.
        displacement: Displacement of the weights at which each batch is measured. None measures at the weights.
        **options: `fisher`, `draws`, `seed` and `forward` of `BatchStep`.
    """

    in_step = False  # whether the ranks run a sharded model together, each with the sums of its own blocks only

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        likelihood: Likelihood,
        structure: Structure,
        *,
        displacement: Displacement | None = None,
        **options: Unpack[StepOptions],
    ) -> None:
        self.displacement = displacement
        self.shared = False  # whether every rank is given all batches
        self.done: set[int] = set()  # batches included in the sums
        self.before: set[int] = set()  # batches included in any rank's sums on resume
        self.batch_hashes: list[int] = []  # of all batches that were read, if several ranks are given the same
        self.again: set[int] = set()  # those of `before` that this rank has to read again
        super().__init__(model, blocks, likelihood, structure, **options)

    def restart(self, direct: set[str]) -> None:
        """Reset all sums and start reading again."""
        super().restart(direct)
        self.first, self.batch_hashes = FirstBatches(), []
        self.again |= self.done & self.before
        self.done = set()

    def run(
        self,
        batches: Iterable[Any],
        *,
        examples: int | None = None,
        limit: int | None = None,
        progress: bool = True,
        checkpoint: PassCheckpoint | None = None,
    ) -> Fisher:
        """Read the batches once and compute the Fisher.

        Args:
            batches: The batches, or `ReplicatedBatches` of them to split the same batches among all ranks.
            examples: Number of examples N of the task. Default: the number read, scaled up to all batches if `limit` is
                given.
            limit: Stop after this many examples (or predicted positions; examples are never cut). None reads all.
            progress: Whether to show a progress bar.
            checkpoint: Resume from this checkpoint if it exists, and save to it regularly.

        Returns:
            The Fisher of every block.

        Raises:
            CurvatureError: If there is nothing to measure, the model cannot be measured, or `limit` is given without
                `examples` and the batches have no length.
            ValueError: If `examples` or `limit` is not a positive integer.
        """
        with together("the curvature pass", current(), runs_model=self.in_step):
            return self._run_pass(batches, examples, limit, progress, checkpoint)

    def _run_pass(
        self,
        batches: Iterable[Any],
        examples: int | None,
        limit: int | None,
        progress: bool,
        checkpoint: PassCheckpoint | None,
    ) -> Fisher:
        if not self.blocks:
            raise CurvatureError(
                "the model has no trainable parameter to protect: set requires_grad=True, or remove entries from "
                "exclude=[...]"
            )
        examples = None if examples is None else positive_whole("examples", examples)
        limit = None if limit is None else positive_whole("limit", limit)
        self.shared = isinstance(batches, ReplicatedBatches)
        batches = batches.batches if isinstance(batches, ReplicatedBatches) else batches
        check_batches(batches)
        total = needed_total(batches, examples, limit)
        self.joined = getattr(batches, "batch_size", None) or 1
        if checkpoint is not None:
            checkpoint.resume(self)
        ranks = current()
        if ranks is None:
            self._read_all(batches, limit, progress, checkpoint)
        else:
            share = None if limit is None else -(-limit // ranks.size)
            shown = progress and not ranks.rank

            def read() -> None:
                self._read_all(batches, share, shown, checkpoint)
                if self.shared:
                    compare_batches(ranks, self.batch_hashes)

            self._read_together(ranks, read)
            total = total if total is None or self.shared else round(ranks.numbers(total)[0])
        if not self.seen:
            raise CurvatureError("the batches contain no examples: pass a loader that yields (inputs, targets)")
        return self._result(examples, total)

    def _read_together(self, ranks: Ranks, read: Callable[[], None]) -> None:
        """Read on every rank and combine the sums."""
        read_on_all_ranks(self, ranks, read)

    def _read_all(
        self, batches: Iterable[Any], limit: int | None, progress: bool, checkpoint: PassCheckpoint | None
    ) -> None:
        """Read all batches, starting over if a later batch uses blocks in a way that the first did not."""
        try:
            self._read(batches, limit, Progress(limit or total_examples(batches), show=progress), checkpoint)
        except UnforeseenError as found:
            if isinstance(batches, Iterator):
                raise CurvatureError(
                    f"a later batch uses {', '.join(sorted(found.blocks))} differently from the first batches, so the "
                    "pass must start over, but these batches can be read only once: pass a loader or a list"
                ) from None
            self.restart(found.blocks)
            self._read_all(batches, limit, progress, checkpoint)

    def _read(
        self, batches: Iterable[Any], limit: int | None, bar: Progress, checkpoint: PassCheckpoint | None
    ) -> None:
        with ExitStack() as stack:
            stack.callback(bar.close)
            bar.update(self.seen)
            stack.enter_context(preserve_state(self.model, batches))
            stack.enter_context(trainable(self.parameters[name] for b in self.blocks for name in b.parameters))
            stack.enter_context(eager())
            stack.enter_context(plain_recurrence(self.model))
            stack.enter_context(self.live.watched())
            stack.enter_context(self.recorder.attached(self.blocks, self.spread))
            read = batches if checkpoint is None else checkpoint.verified(batches)
            for number, batch in self._wanted(read, limit):
                before = self.seen
                with perturbed(self.parameters, self._displaced(number)):
                    self.take(batch, None if limit is None else limit - self.seen)
                if number != NOTHING:
                    self.done.add(number)
                bar.update(self.seen - before)
                if checkpoint is not None and self.generator is not None and self._on_any_rank(checkpoint.due()):
                    checkpoint.save(self)

    def _wanted(self, batches: Iterable[Any], limit: int | None) -> Iterator[tuple[int, Any]]:
        """The batches that this rank still has to read, with their numbers."""
        rank, size = rank_and_size() if self.shared else (0, 1)
        turn = 0
        self.batch_hashes = []
        for number, batch in enumerate(batches):
            if size > 1:
                self.batch_hashes.append(batch_hash(batch))
            if number % size == rank:
                self.first.add(number // size, batch)
            mine = number in self.again
            if number not in self.before:
                mine, turn = turn % size == rank, turn + 1
            if mine and number not in self.done:
                yield number, batch
            if number + 1 >= len(self.before) and limit is not None and self.seen >= limit:
                return

    def _displaced(self, number: int) -> Mapping[str, Tensor]:
        """Displacement at which a batch is measured; batches of different ranks get different displacements."""
        if self.displacement is None:
            return {}
        rank, size = (0, 1) if self.shared else rank_and_size()
        return self.displacement(number * size + rank)

    def _total(self, examples: int | None, total: int | None) -> Count:
        """Return N, after checking a stated N against what was read.

        Args:
            examples: N as the caller states it, or None.
            total: Number of rows of all batches if only some were read, or None.

        Returns:
            N with its rows.

        Raises:
            CurvatureError: If the batches contain more than the stated N.
        """
        seen = Count(self.seen, self.rows)
        known = seen if total is None else seen.scaled(max(total, self.rows))
        if isinstance(examples, Count):  # counted on the data: only what was read can contradict it
            known = seen
        if examples is None:
            return known
        if examples * TOLERANCE < known:
            raise CurvatureError(
                f"examples={int(examples):,} contradicts the batches, which contain {known}: N is counted in the unit "
                "that the mean loss averages over, and in a single pass over the data; omit examples=, or pass "
                "examples=memory.count(batches)"
            )
        return Count(examples, round(examples * self.rows / self.seen))

    def _result(self, examples: int | None, total: int | None) -> Fisher:
        count = self._total(examples, total)
        scale = count / self.seen
        scale *= self.likelihood.fisher_scale(self.tally, empirical=self.fisher == "empirical")
        exposed = self._of_all_ranks({block.name for block in self.blocks if self._exposes(block)})
        terms = {}
        for name in list(self.sums):  # pop one at a time, to free a block's sums before the next terms are allocated
            terms[name] = found = self.sums.pop(name).terms(scale)
            if not all(term.is_finite() for term in found):
                raise CurvatureError(f"the curvature of {name} contains inf or nan: check the data and the weights")
        unused = {name for block in self.blocks for name in block.parameters} - self.used
        return Fisher(
            self.blocks,
            terms,
            count,
            self.seen,
            self.fisher,
            frozenset(unused),
            self.rows,
            self.first,
            self.roots,
            loss_scale=self.likelihood.fisher_scale(self.tally, empirical=False),
            exposed=tuple(sorted(exposed)),
        )

    def _exposes(self, block: Block) -> bool:
        """Whether the block has fewer inputs than its input factor has rows, so that they can be recovered from it."""
        if block.name not in self.sums or not any(isinstance(layer, MatrixLayer) for layer in block.layers):
            return False
        accumulator = self.sums[block.name]
        if isinstance(accumulator, KroneckerAccumulator):
            return accumulator.fewer_inputs_than_side()
        return self.rows < block.shape[-1]

"""One pass over data that gives every block's Fisher.

Normalisation, stated once: the Fisher is that of the whole task, a sum over its N examples. A Kronecker block is
Q (x) H with Q the mean of a a^T over examples and positions and H the sum of g g^T. Where only some examples were
seen, the sums are scaled up by N / seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from limpet.curvature.batch_step import BatchStep, UnforeseenError
from limpet.curvature.ddp import read_on_all_ranks
from limpet.curvature.progress import Progress
from limpet.curvature.structure import Structure
from limpet.distributed import Ranks, ReplicatedBatches, current
from limpet.errors import CurvatureError, positive_whole
from limpet.likelihoods import Likelihood
from limpet.model.batch import FirstBatches, Forward, check_batches, needed_total, total_examples
from limpet.model.blocks import Block
from limpet.model.context import eager, perturbed, plain_recurrence, preserve_state, trainable
from limpet.precision import Term

NOTHING = -1
"""The number of a batch that a rank only goes along with: it is not counted."""

Displacement = Callable[[int], Mapping[str, Tensor]]
"""Where batch number i is measured: what is added to the weights, by parameter."""


class PassCheckpoint(Protocol):
    """Where a pass writes how far it is (`limpet.curvature.checkpoint`)."""

    def resume(self, one_pass: FisherPass) -> None:
        """Bring the pass to where it was when it was last saved."""

    def due(self) -> bool:
        """Whether it is time to save."""

    def save(self, one_pass: FisherPass) -> None:
        """Save the pass."""


@dataclass(frozen=True)
class Fisher:
    """What a pass found: the blocks as they had to be measured and the terms of each."""

    blocks: list[Block]
    terms: dict[str, list[Term]]
    examples: int
    seen: int
    kind: str
    unused: frozenset[str]
    rows: int  # the examples seen, as the batches count them
    first: FirstBatches  # of those that were read
    roots: int = 1  # backward passes that every batch took
    loss_scale: float = 1.0  # what makes nats of the likelihood's negative logarithm

    def speaks_of(self, block: Block) -> bool:
        """Whether the task said anything about the block."""
        return bool(self.terms.get(block.name)) and not self.unused.issuperset(block.parameters)


class FisherPass(BatchStep):
    """The settings of one pass and how it goes through the batches; `run` makes it."""

    in_step = False  # the ranks go through the model together, each with the sums of its own blocks

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        likelihood: Likelihood,
        structure: Structure,
        *,
        fisher: str = "auto",
        draws: int = 1,
        seed: int = 0,
        forward: Forward | None = None,
        displacement: Displacement | None = None,
    ) -> None:
        self.displacement = displacement
        self.shared = False  # every rank is given all batches
        self.done: set[int] = set()  # the numbers of the batches that are in the sums
        self.before: set[int] = set()  # those that were in anybody's when a pass that was stopped went on
        self.again: set[int] = set()  # those of them that this rank has to read once more
        super().__init__(model, blocks, likelihood, structure, fisher=fisher, draws=draws, seed=seed, forward=forward)

    def restart(self, direct: set[str]) -> None:
        super().restart(direct)
        self.first = FirstBatches()
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
        """Read the batches once, or until `limit` examples (of several positions each: whole ones) have been seen."""
        if not self.blocks:
            raise CurvatureError("the model has no trainable parameter that is not excluded")
        examples = None if examples is None else positive_whole("examples", examples)
        limit = None if limit is None else positive_whole("limit", limit)
        self.shared = isinstance(batches, ReplicatedBatches)
        batches = batches.batches if isinstance(batches, ReplicatedBatches) else batches
        check_batches(batches)
        total = needed_total(batches, examples, limit)
        if checkpoint is not None:
            checkpoint.resume(self)
        ranks = current()
        if ranks is None:
            self._read_all(batches, limit, progress, checkpoint)
        else:
            share = None if limit is None else -(-limit // ranks.size)
            shown = progress and not ranks.rank
            self._read_together(ranks, lambda: self._read_all(batches, share, shown, checkpoint))
            total = total if total is None or self.shared else round(ranks.numbers(total)[0])
        if not self.seen:
            raise CurvatureError("the batches held no example: give a loader that yields (inputs, targets)")
        return self._result(examples, total)

    def _read_together(self, ranks: Ranks, read: Callable[[], None]) -> None:
        """Read on every rank, and add up."""
        read_on_all_ranks(self, ranks, read)

    def _read_all(
        self, batches: Iterable[Any], limit: int | None, progress: bool, checkpoint: PassCheckpoint | None
    ) -> None:
        """Read the batches to their end, from the beginning where a later one shows what the first did not."""
        try:
            self._read(batches, limit, Progress(limit or total_examples(batches), show=progress), checkpoint)
        except UnforeseenError as found:
            if isinstance(batches, Iterator):
                raise CurvatureError(
                    f"a later batch uses {', '.join(sorted(found.blocks))} in a way that the first ones did not "
                    "show, and these batches can be read only once: give a loader or a list"
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
            stack.enter_context(self.recorder.attached(self.blocks))
            for number, batch in self._wanted(batches, limit):
                before = self.seen
                with perturbed(self.parameters, self._displaced(number)):
                    self.take(batch, None if limit is None else limit - self.seen)
                if number != NOTHING:
                    self.done.add(number)
                bar.update(self.seen - before)
                if checkpoint is not None and self.generator is not None and self._on_any_rank(checkpoint.due()):
                    checkpoint.save(self)

    def _wanted(self, batches: Iterable[Any], limit: int | None) -> Iterator[tuple[int, Any]]:
        """The batches that are still to be read, with their numbers."""
        rank, size = _turn() if self.shared else (0, 1)
        turn = 0
        for number, batch in enumerate(batches):
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
        """Where a batch is measured: batches of different ranks at different places."""
        if self.displacement is None:
            return {}
        rank, size = (0, 1) if self.shared else _turn()
        return self.displacement(number * size + rank)

    def _result(self, examples: int | None, total: int | None) -> Fisher:
        if examples is None:
            examples = self.seen if total is None else round(self.seen * max(total / self.rows, 1))
        scale = examples / self.seen
        scale *= self.likelihood.fisher_scale(self.tally, empirical=self.fisher == "empirical")
        terms = {}
        for name in list(self.sums):  # one after another, so that a block's sums are gone when the next one is made
            terms[name] = found = self.sums.pop(name).terms(scale)
            if not all(term.is_finite() for term in found):
                raise CurvatureError(f"the curvature of {name} holds inf or nan: look at the data, or the weights")
        unused = {name for block in self.blocks for name in block.parameters} - self.used
        return Fisher(
            self.blocks,
            terms,
            examples,
            self.seen,
            self.fisher,
            frozenset(unused),
            self.rows,
            self.first,
            self.roots,
            loss_scale=self.likelihood.fisher_scale(self.tally, empirical=False),
        )


def _turn() -> tuple[int, int]:
    """This rank, and how many there are."""
    ranks = current()
    return (0, 1) if ranks is None else (ranks.rank, ranks.size)

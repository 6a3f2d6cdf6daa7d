"""A pass over the data whose result is differentially private (`limpet.curvature.privacy` has the mathematics).

A contribution must be a function of its example and the model alone. Examples therefore go through the model one at a
time, or several together where the layers keep them apart (linear and convolutional layers, checked by the audit).
Everything else that a pass releases (which parameters have gradients, how many positions are predicted per example)
must be the same for all examples, and is checked to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from limpet.curvature.accumulators import Accumulator
from limpet.curvature.batch_step import StepOptions, UnforeseenError, block_of
from limpet.curvature.contributions import Contribution, Contributions, Sums, contributions
from limpet.curvature.fisher_pass import Fisher, FisherPass, PassCheckpoint
from limpet.curvature.privacy import QUERIES, Privacy, noised, private_quantile
from limpet.curvature.progress import Progress
from limpet.curvature.structure import Structure
from limpet.distributed import ReplicatedBatches, current
from limpet.errors import (
    CurvatureError,
    LimpetError,
    NotProtectedWarning,
    PrivacyWarning,
    UnsupportedError,
    warn,
)
from limpet.likelihoods import Likelihood
from limpet.likelihoods.random import Random
from limpet.model.batch import batch_size, part, prepared
from limpet.model.blocks import Block
from limpet.precision import Term

if TYPE_CHECKING:
    from typing_extensions import Unpack

CLIP_ROWS = 4000
"""Number of examples, the first of the pass, on which the norms are measured at which contributions are clipped."""

STRIDE = 2**32
"""Distance between the seeds of two tasks, so that every example has random targets of its own."""

DIFFERENT = (
    "privacy= requires that all examples use the same parameters, predict the same number of positions and enter the "
    "likelihood in the same way, because the memory records it exactly: pack or truncate sequences to one length, use "
    "a Gaussian likelihood with a number as variance, or leave parameters that only some examples use out with "
    "exclude=[...]"
)

TOGETHER = 256
"""Largest number of examples that go through the model together."""

ENTRIES = 1 << 20
"""Largest number of entries of the gradients, example by example, that are formed for a block at once."""


class PrivatePass(FisherPass):
    """A Fisher pass with clipped contributions and noise. It reads the data twice.

    The first example of a pass goes through the model alone, and so do all if the model has parameters that are
    measured per sample, embeddings, or layers that flatten examples and positions into one dimension.

    Args:
        model: The model.
        blocks: The blocks of parameters to measure.
        likelihood: The likelihood that defines the Fisher.
        structure: The structure of each block's Fisher.
        privacy: The budget.
        **options: `fisher`, `draws`, `seed` and `forward` of `BatchStep`.
    """

    expands = False

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        likelihood: Likelihood,
        structure: Structure,
        *,
        privacy: Privacy,
        **options: Unpack[StepOptions],
    ) -> None:
        self.privacy = privacy
        self.clips: dict[str, float] = {}  # by statistic; empty while the norms are measured
        self.norms: dict[str, list[float]] = {}
        self.alone = False  # whether examples go through the model one at a time
        super().__init__(model, blocks, likelihood, structure, **options)

    def restart(self, direct: set[str]) -> None:
        """Reset all sums and start reading again."""
        super().restart(direct)
        self.totals: dict[str, Sums] = {}  # clipped sums by statistic
        self.symmetric: dict[str, bool] = {}
        self.forms: dict[str, Accumulator] = {}  # empty accumulators, which have the shapes of the sums
        self.same: Any = None  # what must be the same for every example
        self.each: list[tuple[int, list[float]]] = []  # count and tally of the examples of the last batch
        self.count = 1  # examples in the batch that is being added

    def run(
        self,
        batches: Iterable[Any],
        *,
        examples: int | None = None,
        limit: int | None = None,
        progress: bool = True,
        checkpoint: PassCheckpoint | None = None,
    ) -> Fisher:
        """Measure the norms, then the clipped sums, and add noise.

        Args:
            batches: The batches, which are read twice.
            examples: As for `FisherPass.run`. It is public.
            limit: As for `FisherPass.run`.
            progress: Whether to show a progress bar.
            checkpoint: Must be None, because a checkpoint would contain sums without noise.

        Returns:
            The private Fisher of every block.

        Raises:
            CurvatureError: If the batches cannot be split into examples, or nothing can be measured.
            LimpetError: If the batches can be read only once.
            UnsupportedError: In a distributed run, with a checkpoint, or if examples differ in more than their values.
        """
        if checkpoint is not None:
            raise UnsupportedError("checkpoint= would write sums without noise to a file: omit it, or privacy=")
        if current() is not None or isinstance(batches, ReplicatedBatches):
            raise UnsupportedError("privacy= is supported in a single process: consolidate in one process")
        if isinstance(batches, Iterator):
            raise LimpetError("privacy= reads the data twice: pass a loader or a list of batches, not an iterator")
        if self.blocks:
            self.clips, self.norms = {}, {}
            self._read(batches, limit, Progress(None, show=False), None)
            self.clips = self._measured_clips()
        self.restart(set())
        return super().run(batches, examples=examples, limit=limit, progress=progress)

    def take(self, batch: Any, left: int | None) -> None:
        """Add the clipped contributions of a batch.

        Args:
            batch: The batch.
            left: Add at most this many examples (or predicted positions), the first of the batch. None adds all.
        """
        batch = prepared(batch, next(iter(self.parameters.values())).device)
        size = batch_size(batch)
        if size is None:
            raise CurvatureError(
                "privacy= clips the contribution of every example, but the batch cannot be split into examples: the "
                "examples must be the first dimension of every tensor in the batch"
            )
        if not self.clips:
            size = min(size, CLIP_ROWS - self.rows)
        start, before = 0, self.seen
        while start < size and (left is None or self.seen - before < left):
            stop = min(start + self._together(), size)
            if left is not None and self.rows:
                stop = min(stop, start + max(1, math.ceil((left - self.seen + before) * self.rows / max(self.seen, 1))))
            if self._take_some(part(batch, slice(start, stop)), stop - start):
                start = stop

    def _together(self) -> int:
        """Number of examples that go through the model next."""
        separate = all(block.layers and not any(layer.data_one_hot for layer in block.layers) for block in self.blocks)
        if not self.begun or self.alone or not separate or self.fisher == "sampled":
            return 1
        wide = [block.shape.numel() for block in self.blocks if not self.structure.of(block).startswith("kronecker")]
        return max(1, min(TOGETHER, ENTRIES // max(wide, default=1)))

    def _take_some(self, examples: Any, count: int) -> bool:
        """Add some examples; return False if they have to be added one at a time."""
        self.count = count
        if self.begun:
            self.make_sums()
        try:
            super().take(examples, None)
        except UnforeseenError:
            if count == 1:
                raise UnsupportedError(DIFFERENT) from None
            self.alone = True
            return False
        found = {
            f"{name}|{key}": each
            for name, own in self.sums.items()
            if isinstance(own, Contributions)
            for key, each in own.statistics().items()
        }
        for each in self.each:
            same = (set(found), self.used, each)
            self.same = self.same or same
            if same != self.same:
                raise UnsupportedError(DIFFERENT)
        for key, contribution in found.items():
            norms = contribution.norms()
            if not bool(torch.isfinite(norms).all()):
                raise CurvatureError(f"the curvature of {key} contains inf or nan: check the data and the weights")
            if self.clips:
                self._add_clipped(key, contribution, norms)
            else:
                self.norms.setdefault(key, []).extend(norms.tolist())
        return True

    def _add_clipped(self, key: str, contribution: Contribution, norms: Tensor) -> None:
        clip = self.clips[key]
        weights = torch.where(norms <= clip, 1.0, clip / norms)
        self.symmetric[key] = contribution.symmetric
        summed = contribution.summed(weights)
        if key in self.totals:
            for total, more in zip(self.totals[key], summed, strict=True):
                total += more
        else:
            self.totals[key] = summed

    def make_sums(self) -> None:
        """Prepare for the contributions of the next examples."""
        self.begun = True
        for block in self.blocks:
            like = self.parameters[block.parameters[0]]
            if block.name not in self.forms:
                self.forms[block.name] = self.structure.accumulator(block, like)
            self.sums[block.name] = contributions(block, like, self.count, self.forms[block.name])

    def _accumulate(self, batch: Any, outputs: Any, targets: Any, tensors: tuple[Tensor, ...]) -> None:
        self.used = set()  # of these examples alone, to be compared with the others
        super()._accumulate(batch, outputs, targets, tensors)

    def _count(self, rows: int, outputs: Any, targets: Any) -> None:
        """Count every example by itself."""
        if self.count > 1 and batch_size((outputs, targets)) != self.count:
            raise UnforeseenError(set())
        self.each = []
        for n in range(self.count):
            one = (outputs, targets) if self.count == 1 else part((outputs, targets), slice(n, n + 1))
            before = self.seen, self.tally.clone()
            super()._count(1, *one)
            self.each.append((self.seen - before[0], (self.tally - before[1]).tolist()))

    def _random(self, batch: Any, count: int) -> Random:
        """Random targets by the number of the example, so that they do not depend on other examples."""
        assert self.generator is not None
        return self.generator.manual_seed(self.seed * STRIDE + self.rows)

    def _measured_clips(self) -> dict[str, float]:
        """Quantiles of the norms of every statistic, at the cost of a part of the budget."""
        if not self.norms:
            raise CurvatureError("the batches contain no examples: pass a loader that yields (inputs, targets)")
        deviation = math.sqrt(QUERIES * len(self.norms)) / self.privacy.mu_clip
        return {key: private_quantile(norms, self.privacy.clip, deviation) for key, norms in self.norms.items()}

    def deviations(self) -> dict[str, float]:
        """Return the standard deviation of the noise on the sum of every statistic, c_k sqrt(2 S) / mu."""
        factor = math.sqrt(2 * len(self.clips)) / self.privacy.mu_sums
        return {key: factor * clip for key, clip in self.clips.items()}

    def _result(self, examples: int | None, total: int | None) -> Fisher:
        count = self._total(examples, total)
        if self.privacy.delta * count.rows >= 1:
            warn(
                f"delta={self.privacy.delta:g} is not below 1 / N for N = {count.rows:,} examples: a mechanism that "
                "publishes one of the examples as it is would satisfy it; pass a delta far below 1 / N",
                PrivacyWarning,
            )
        scale = count / self.seen
        scale *= self.likelihood.fisher_scale(self.tally, empirical=self.fisher == "empirical")
        deviations, rows = self.deviations(), self.rows
        private: dict[str, Sums] = {
            key: [noised(total, deviations[key], symmetric=self.symmetric[key]) for total in totals]
            for key, totals in self.totals.items()
        }
        terms: dict[str, list[Term]] = {}
        for name, form in self.sums.items():
            assert isinstance(form, Contributions)
            own = {key.rpartition("|")[2]: sums for key, sums in private.items() if block_of(key) == name}
            terms[name] = form.private_terms(own, rows, scale)
        self.totals, self.sums = {}, {}
        lost = [name for name, some in terms.items() if not any(term.is_positive() for term in some)]
        if lost:
            warn(
                f"the noise of privacy= hides the curvature of {len(lost)} blocks (such as {lost[0]}), which this task "
                "does not protect: consolidate more examples, or allow a larger epsilon",
                NotProtectedWarning,
            )
        unused = {name for block in self.blocks for name in block.parameters} - self.used
        kind, loss_scale = self.fisher, self.likelihood.fisher_scale(self.tally, empirical=False)
        return Fisher(
            self.blocks, terms, count, self.seen, kind, frozenset(unused), rows, self.first, self.roots, loss_scale
        )

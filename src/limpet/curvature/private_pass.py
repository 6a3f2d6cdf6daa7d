"""A pass over the data whose result is differentially private (`limpet.curvature.privacy` has the mathematics).

Examples go through the model one at a time, so that each contribution is a function of its example and the model alone.
The contribution of an example to a block is its own Fisher: the mean of a a^T and the sum of g g^T over its positions,
or the square or outer product of its gradient. Everything else that a pass releases (which parameters have gradients,
how many positions are predicted per example) must be the same for all examples, and is checked to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from limpet.curvature.batch_step import StepOptions, UnforeseenError
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
from limpet.precision import DenseTerm, DiagonalTerm, KroneckerTerm, Matrix, Term
from limpet.precision.block_diagonal import joined, pieces
from limpet.precision.linalg import widened

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

Statistics = dict[str, tuple[Tensor, ...]]
"""The matrices (in their diagonal blocks) and diagonals of all terms, by block, number of the term and factor."""


class PrivatePass(FisherPass):
    """A Fisher pass with clipped contributions and noise. It reads the data twice.

    Args:
        model: The model.
        blocks: The blocks of parameters to measure.
        likelihood: The likelihood that defines the Fisher.
        structure: The structure of each block's Fisher.
        privacy: The budget.
        **options: `fisher`, `draws`, `seed` and `forward` of `BatchStep`.
    """

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
        super().__init__(model, blocks, likelihood, structure, **options)

    def restart(self, direct: set[str]) -> None:
        """Reset all sums and start reading again."""
        super().restart(direct)
        self.totals: Statistics = {}
        self.terms: dict[str, list[Term]] = {}  # of the last example
        self.same: Any = None  # what must be the same for every example

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
        """Add the clipped contributions of a batch, one example at a time.

        Args:
            batch: The batch.
            left: Add at most this many examples, the first of the batch. None adds all.
        """
        batch = prepared(batch, next(iter(self.parameters.values())).device)
        size = batch_size(batch)
        if size is None:
            raise CurvatureError(
                "privacy= clips the contribution of every example, but the batch cannot be split into examples: the "
                "examples must be the first dimension of every tensor in the batch"
            )
        before = self.seen
        for n in range(size):
            if left is not None and self.seen - before >= left:
                return
            if not self.clips and self.rows >= CLIP_ROWS:
                return
            self._take_example(part(batch, slice(n, n + 1)))

    def _take_example(self, example: Any) -> None:
        if self.begun:
            self.make_sums()
        seen, tally = self.seen, self.tally.clone()
        try:
            super().take(example, None)
        except UnforeseenError:
            raise UnsupportedError(DIFFERENT) from None
        self.terms = {name: accumulator.terms(1.0) for name, accumulator in self.sums.items()}
        found = statistics(self.terms)
        norms = {key: norm(tensors) for key, tensors in found.items()}
        if not all(math.isfinite(size) for size in norms.values()):
            raise CurvatureError("the curvature of an example contains inf or nan: check the data and the weights")
        same = (set(found), self.used, self.seen - seen, (self.tally - tally).tolist())
        if self.same is not None and same != self.same:
            raise UnsupportedError(DIFFERENT)
        self.same = same
        if not self.clips:
            for key, size in norms.items():
                self.norms.setdefault(key, []).append(size)
            return
        for key, tensors in found.items():
            factor = 1.0 if norms[key] <= self.clips[key] else self.clips[key] / norms[key]
            total = self.totals.setdefault(key, tuple(torch.zeros_like(widened(t)) for t in tensors))
            for one, tensor in zip(total, tensors, strict=True):
                one.add_(widened(tensor), alpha=factor)

    def _accumulate(self, batch: Any, outputs: Any, targets: Any, tensors: tuple[Tensor, ...]) -> None:
        self.used = set()  # of this example alone, to be compared with the others
        super()._accumulate(batch, outputs, targets, tensors)

    def _count(self, rows: int, outputs: Any, targets: Any) -> None:
        super()._count(1, outputs, targets)

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
        terms: dict[str, list[Term]] = {}
        for name, some in self.terms.items():
            terms[name] = [
                released(term, f"{name}|{number}", self.totals, deviations, rows, scale)
                for number, term in enumerate(some)
            ]
        self.totals, self.terms, self.sums = {}, {}, {}
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


def factors(term: Term) -> dict[str, tuple[tuple[Tensor, ...], bool]]:
    """Return the tensors of a term by factor, each with whether they are symmetric matrices rather than diagonals."""
    if isinstance(term, KroneckerTerm):
        return {
            "inputs": (pieces(term.inputs), not term.inputs_diagonal),
            "outputs": (pieces(term.outputs), not term.outputs_diagonal),
        }
    if isinstance(term, DenseTerm):
        return {"matrix": ((term.matrix,), True)}
    return {"diagonal": ((term.diagonal,), False)}


def statistics(terms: Mapping[str, Sequence[Term]]) -> Statistics:
    """Return the statistics of all terms by name."""
    return {
        f"{name}|{number}|{factor}": tensors
        for name, some in terms.items()
        for number, term in enumerate(some)
        for factor, (tensors, _) in factors(term).items()
    }


def norm(tensors: Sequence[Tensor]) -> float:
    """Return the Frobenius norm of a statistic."""
    return math.sqrt(sum(float(widened(tensor).square().sum()) for tensor in tensors))


def released(
    term: Term, name: str, totals: Statistics, deviations: Mapping[str, float], rows: int, scale: float
) -> Term:
    """Build the private term of a block.

    Args:
        term: A term of the same form.
        name: Name of the block, and number of the term.
        totals: Clipped sums by statistic.
        deviations: Standard deviation of the noise by statistic.
        rows: Number of examples in the sums. It is public.
        scale: Factor of the Fisher.

    Returns:
        The term, with noise in every factor.
    """

    def made(factor: str, times: float) -> Matrix:
        tensors, symmetric = factors(term)[factor]
        key = f"{name}|{factor}"
        noisy = [noised(total, deviations[key], symmetric=symmetric) for total in totals[key]]
        return joined([(times * total).to(like) for total, like in zip(noisy, tensors, strict=True)])

    if isinstance(term, KroneckerTerm):
        return replace(term, inputs=made("inputs", 1 / rows), outputs=made("outputs", scale))
    (factor,) = factors(term)
    total = pieces(made(factor, scale))[0]
    return DenseTerm(total) if isinstance(term, DenseTerm) else DiagonalTerm(total)

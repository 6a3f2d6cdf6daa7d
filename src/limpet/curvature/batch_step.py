"""Add one batch to the Fisher sums of every block: the part of a pass that is independent of other batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from limpet.curvature.accumulators import Accumulator
from limpet.curvature.audit import gradients_at, not_by_example, unseen
from limpet.curvature.broadcast import broadcast_parameters, is_candidate, is_per_example
from limpet.curvature.hooks import Recorder
from limpet.curvature.padding import Padding, find_decoding
from limpet.curvature.shared_inputs import find_same_inputs
from limpet.curvature.structure import Structure
from limpet.distributed import rank_and_size
from limpet.errors import CurvatureError, LimpetWarning, UnsupportedError, warn
from limpet.likelihoods import Likelihood, as_tensors
from limpet.likelihoods.base import TALLY
from limpet.likelihoods.random import Occurrences, PerExampleRNG, Random
from limpet.model.batch import Forward, batch_size, call, part, prepared
from limpet.model.blocks import Block
from limpet.model.names import named_parameters
from limpet.model.own_loss import check_own_loss, has_own_loss
from limpet.model.unsharded import UnshardedParameters
from limpet.precision.linalg import all_finite

FISHERS = ("auto", "exact", "sampled", "empirical")
EXACT_UP_TO = 16
"""Largest number of classes (or outputs) for which fisher="auto" is exact."""


class UnforeseenError(Exception):
    """Raised when a batch uses blocks in a way that no earlier batch did, so that they must be measured per sample.

    Args:
        blocks: The names of these blocks.
    """

    def __init__(self, blocks: set[str]) -> None:
        self.blocks = blocks


class StepOptions(TypedDict, total=False):
    """The keyword arguments of `BatchStep`, which passes hand on to it."""

    fisher: str
    draws: int
    seed: int
    forward: Forward | None


class BatchStep:
    """Fisher sums of all blocks, and the update of these sums with one batch.

    Args:
        model: The model.
        blocks: The blocks of parameters to measure.
        likelihood: The likelihood that defines the Fisher.
        structure: The structure of each block's Fisher.
        fisher: One of `FISHERS`. "auto" is exact up to `EXACT_UP_TO` outputs, and sampled otherwise.
        draws: Number of label samples per example for fisher="sampled".
        seed: Seed of these samples.
        forward: A function (model, batch) -> (outputs, targets). None calls the model on the inputs of the batch.
    """

    expands = True  # whether parameters that all examples use at once may be recorded per example

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
    ) -> None:
        self.model = model
        self.blocks = list(blocks)
        self.likelihood = likelihood
        self.structure = structure
        self.fisher = self.asked = fisher
        self.draws = draws
        self.seed = seed
        self.forward = forward
        self.joined = 1  # rows of the data set in a batch of one row: more if the collator joins them (packing)
        self.parameters = named_parameters(model)
        self.live = UnshardedParameters(model)
        self.recorder = Recorder()
        self.spread = broadcast_parameters(model, self.blocks) if self.expands else {}
        self.refused: set[str] = set()  # blocks that cannot be recorded per example
        self.restart(set())

    def restart(self, direct: set[str]) -> None:
        """Reset all sums. The blocks named in `direct` are measured per sample from now on."""
        self._make_direct(direct)
        self.refused |= direct
        self.recorder.broadcast -= direct
        self.sums: dict[str, Accumulator] = {}
        self.begun = False  # the sums are allocated
        self.generator: torch.Generator | None = None
        self.tally = torch.zeros(TALLY, dtype=torch.float64)
        self.used: set[str] = set()  # parameters that had a gradient
        self.audited: set[Any] = set()  # call patterns that passed the audit
        self.roots = 0  # backward passes per batch
        self.seen = 0  # examples, or predicted positions, counted by the likelihood
        self.padding = Padding(None)  # of the current batch
        self.decoding: dict[str, list[bool]] = {}  # which calls see the sequence of a decoder, where that is unclear
        self.rows = 0  # rows of the batches
        self.occurrences = Occurrences(rank_and_size()[0])

    def _make_direct(self, names: set[str]) -> None:
        self.blocks = [
            part for block in self.blocks for part in (block.as_per_sample() if block.name in names else [block])
        ]

    def take(self, batch: Any, left: int | None) -> None:
        """Add one batch to the sums.

        Args:
            batch: The batch.
            left: Add at most this many examples, the first of the batch. None adds all.

        Raises:
            CurvatureError: If the model cannot be measured on this batch.
            UnforeseenError: If some blocks turn out to need per-sample measurement after the sums were begun.
        """
        first = next(iter(self.parameters.values()))
        batch = prepared(batch, first.device)
        size = batch_size(batch)
        if size == 0:
            return
        if self.generator is None and self.forward is None:
            self._check_loss(batch)
        if left is not None and size is not None:
            rows = max(1, int(left / self._positions(batch, size)))
            batch = part(batch, slice(0, rows)) if rows < size else batch
        self.padding = Padding.of(self.model, batch)
        with torch.inference_mode(False), torch.enable_grad():
            outputs, targets = self._run(batch)
            tensors = as_tensors(outputs)
            self._reject_nonfinite(tensors)
            if self.generator is None:
                self._begin(outputs, tensors)
            pattern = self._pattern(tensors)
            if self._on_any_rank(pattern not in self.audited):
                if self._examine(batch, tensors):
                    outputs, targets = self._run(batch)
                    tensors = as_tensors(outputs)
                self.audited.add(self._pattern(tensors))
            self._mark_padding(batch)
            self._accumulate(batch, outputs, targets, tensors)
        self.recorder.clear()
        # `forward` may make another number of output rows of a batch, such as one for each position
        rows = batch_size(batch) or tensors[0].shape[0]
        self._count(self.joined if (size or rows) == 1 else rows, outputs, targets)

    def _check_loss(self, batch: Any) -> None:
        """Compare the loss of the first batch with the one that the model computes itself, if it does."""
        if has_own_loss(self.model, batch, self.likelihood):
            check_own_loss(self.model, batch, self.likelihood)

    def _reject_nonfinite(self, outputs: tuple[Tensor, ...]) -> None:
        if not all(map(all_finite, outputs)):
            raise CurvatureError("the model's outputs contain inf or nan: check the data and the weights")

    def _count(self, rows: int, outputs: Any, targets: Any) -> None:
        """Update the counters after a batch of so many rows of the data set has been added."""
        with torch.no_grad():
            self.tally += self.likelihood.tally(outputs, targets)
        self.seen += self.likelihood.count(outputs, targets)
        self.rows += rows

    def _positions(self, batch: Any, size: int) -> float:
        """Number of counted units per example of the batch: 1, or its predicted positions."""
        if self.rows:
            return max(self.seen / self.rows, 1.0)
        with torch.no_grad():
            outputs, targets = call(self.model, part(batch, slice(0, min(size, 1))), self.forward)
        return max(float(self.likelihood.count(outputs, targets)), 1.0)

    def _begin(self, outputs: Any, tensors: tuple[Tensor, ...]) -> None:
        """Initialize what depends on the outputs: the kind of Fisher and the random generator."""
        if (advice := self.likelihood.advice(outputs)) is not None:
            warn(advice, LimpetWarning)
        self.fisher = _resolve(self.fisher, self.likelihood, outputs)
        self.generator = torch.Generator(tensors[0].device).manual_seed(self.seed)
        if not any(tensor.requires_grad for tensor in tensors):
            raise CurvatureError(
                "the outputs do not depend on any trainable parameter: check whether the model runs under no_grad or "
                "`forward` detaches its outputs"
            )

    def _run(self, batch: Any) -> tuple[Any, Any]:
        """Run the model on a batch and record it."""
        with self.recorder.recording(batch_size(batch)):
            return call(self.model, batch, self.forward)

    def _examine(self, batch: Any, tensors: tuple[Tensor, ...]) -> bool:
        """Audit a batch, the first one or one in which the layers are called differently.

        Returns:
            Whether the batch has to be run again, because other blocks are recorded now.
        """
        wrong, used = unseen(self.blocks, self.recorder, self.live, tensors)
        self.used |= used
        needs_examples = {b.name for b in self.blocks if not self.structure.of(b).startswith("kronecker")}
        wrong |= not_by_example(
            self.blocks, needs_examples, self.recorder, self.model, batch, self.forward, tensors, self._on_any_rank
        )
        wrong = self._of_all_ranks(wrong & {block.name for block in self.blocks if block.layers})
        again = self._record_by_example(batch, tensors, wrong)
        wrong -= self.recorder.broadcast
        if wrong and self.begun:
            raise UnforeseenError(wrong)
        self._make_direct(wrong)
        if not self.begun:
            self.make_sums()
        return again

    def _pattern(self, tensors: tuple[Tensor, ...]) -> Any:
        """How the recorded forward pass has called the layers."""
        count = tensors[0].shape[0]
        firsts = [
            tuple(each.layer.example_count(each) == count for each in self.recorder.calls.get(block.name, []))
            for block in self.blocks
        ]
        return count > 1, tuple(firsts)

    def _record_by_example(self, batch: Any, tensors: tuple[Tensor, ...], wrong: set[str]) -> bool:
        """Try to record per example what all examples use at once; return whether the model was run for that."""
        count = tensors[0].shape[0]
        tried = [b for b in self.blocks if b.name in self.spread or (b.name in wrong and is_candidate(b))]
        tried = [b for b in tried if b.name not in self.refused | self.recorder.broadcast]
        if not self.expands or count < 2 or batch_size(batch) != count:
            return False
        for block in tried:
            self.recorder.broadcast.add(block.name)
            try:
                found = as_tensors(self._run(batch)[0])
                run = (found, tensors), self.model, batch, self.forward
                works = is_per_example(block, self.recorder, self.live, *run)
            except (CurvatureError, RuntimeError, ValueError, IndexError, TypeError):
                works = False
            if not works:
                self.recorder.broadcast.discard(block.name)
                self.refused.add(block.name)
        return bool(tried)

    def _mark_padding(self, batch: Any) -> None:
        """Give every recorded call the mask of its positions."""
        calls = {b.name: self.recorder.calls[b.name] for b in self.blocks if b.name in self.recorder.calls}
        known = all(len(self.decoding.get(name, ())) == len(some) for name, some in calls.items())
        if self._on_any_rank(self.padding.unclear and not known):
            self.decoding = find_decoding(self.model, self.blocks, batch, self.forward)
        self.padding.mark(calls, self.decoding)

    def _on_any_rank(self, flag: bool) -> bool:
        """The flag; if the ranks share a sharded model, whether it is set on any of them."""
        return flag

    def _of_all_ranks(self, names: set[str]) -> set[str]:
        """The names; if the ranks share a sharded model, the union over all of them."""
        return names

    def named_sums(self) -> dict[str, Tensor]:
        """Return the sums so far, by block and name: what a checkpoint stores and what ranks reduce."""
        return {f"{name}|{key}": t for name, one in self.sums.items() for key, t in one.sums().items()}

    def load_sums(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore sums returned by `named_sums`. Blocks without an entry keep their sums."""
        for name, accumulator in self.sums.items():
            own = {key.rpartition("|")[2]: t for key, t in tensors.items() if block_of(key) == name}
            if own:
                accumulator.load(own)

    def make_sums(self) -> None:
        """Allocate zero sums for the current blocks."""
        self.begun = True
        for block in self.blocks:
            self.sums[block.name] = self.structure.accumulator(block, self.parameters[block.parameters[0]])

    def _accumulate(self, batch: Any, outputs: Any, targets: Any, tensors: tuple[Tensor, ...]) -> None:
        hooked = [block for block in self.blocks if block.layers or block.name in self.recorder.broadcast]
        direct = [block for block in self.blocks if not block.layers and block.name not in self.recorder.broadcast]
        silent = [block for block in hooked if not self.recorder.calls.get(block.name)]
        find_same_inputs(call for block in hooked for call in self.recorder.calls.get(block.name, []))
        watched = {name: self.live[name] for block in silent for name in block.parameters}
        roots = self._roots(batch, outputs, targets)
        self.roots = 0
        kept: list[tuple[Tensor, ...]] = []
        following, first = next(roots, None), True
        while following is not None:
            root, following = following, next(roots, None)
            self.roots += 1
            if direct:
                kept.append(root)
            wanted = [*self.recorder.edges, *(watched.values() if first else ())]
            if not wanted:
                continue
            gradients = gradients_at(tensors, wanted, root, keep=following is not None or bool(direct))
            edges = len(self.recorder.edges)
            if first and self._on_any_rank(any(gradient is not None for gradient in gradients[edges:])):
                raise UnforeseenError(self._of_all_ranks({block.name for block in silent}))
            with torch.no_grad():
                self.recorder.take(gradients[:edges])
                for block in hooked:
                    self._add(block, data=first)
            first = False
        if direct:
            self._accumulate_direct(direct, batch, tensors, kept)

    def _add(self, block: Block, *, data: bool) -> None:
        """Add the block's calls to its sums, except calls that the outputs do not depend on."""
        calls = [each for each in self.recorder.calls.get(block.name, []) if each.gradient is not None]
        if not calls:
            return
        if data:
            self.sums[block.name].add_data(calls)
            self.used.update(block.parameters)
        self.sums[block.name].add_gradients(calls)

    def _roots(self, batch: Any, outputs: Any, targets: Any) -> Iterator[tuple[Tensor, ...]]:
        """The columns of a square root of the output Hessian: the cotangents of the backward passes."""
        with torch.no_grad():
            detached = outputs.detach() if isinstance(outputs, Tensor) else tuple(o.detach() for o in outputs)
            if self.fisher == "exact":
                for root in self.likelihood.roots(detached, targets):
                    yield as_tensors(root)
            elif self.fisher == "empirical":
                yield as_tensors(self.likelihood.gradient(detached, targets))
            else:
                random = self._random(batch, as_tensors(outputs)[0].shape[0])
                for _ in range(self.draws):
                    root = self.likelihood.sampled_root(detached, targets, random)
                    yield tuple(tensor * self.draws**-0.5 for tensor in as_tensors(root))

    def _random(self, batch: Any, count: int) -> Random:
        """Random numbers that depend only on the example and its occurrence, if the batch consists of examples."""
        if not self.likelihood.by_example or batch_size(batch) != count:
            return self.generator
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
        return PerExampleRNG.of(leaves, self.seed, self.occurrences)

    def _accumulate_direct(
        self,
        direct: Sequence[Block],
        batch: Any,
        tensors: tuple[Tensor, ...],
        roots: Sequence[tuple[Tensor, ...]],
    ) -> None:
        """Add per-sample gradients, one example at a time: slow, but correct for any model."""
        count = tensors[0].shape[0]
        parameters = [self.live[block.parameters[0]] for block in direct]
        if count > 1 and batch_size(batch) != count:
            raise CurvatureError(
                f"{', '.join(block.name for block in direct)}: no layer class supports these parameters, so they are "
                "measured per sample, but the batch cannot be split into examples: pass batches of one example, or "
                "leave these parameters out with exclude=[...]"
            )
        for n in range(count):
            single = tensors
            if count > 1:
                outputs, _ = call(self.model, part(batch, slice(n, n + 1)), self.forward)
                single = as_tensors(outputs)
            for k, root in enumerate(roots):
                cotangents = [tensor[n : n + 1] for tensor in root]
                gradients = gradients_at(single, parameters, cotangents, keep=k + 1 < len(roots))
                for block, gradient in zip(direct, gradients, strict=True):
                    if gradient is not None:
                        self.used.update(block.parameters)
                        self.sums[block.name].add_example(block.matrix([gradient.to_dense()]))


def _resolve(fisher: str, likelihood: Likelihood, outputs: Any) -> str:
    """Resolve fisher="auto", and check that fisher="exact" is available."""
    roots = likelihood.root_count(outputs)
    if fisher == "auto":
        width = sum(tensor[0].numel() for tensor in as_tensors(outputs))
        return "exact" if roots is not None and width <= EXACT_UP_TO else "sampled"
    if fisher == "exact" and roots is None:
        raise UnsupportedError(
            "fisher='exact' requires one output vector per example and a likelihood with an exact Fisher: use "
            "fisher='sampled' for outputs per position or for other likelihoods"
        )
    return fisher


def block_of(key: str) -> str:
    """Name of the block that a key of `named_sums` belongs to."""
    return key.rpartition("|")[0]

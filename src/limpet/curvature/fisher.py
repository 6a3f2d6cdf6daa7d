"""One pass over data that gives every block's Fisher.

Normalisation, stated once: the Fisher is that of the whole task, a sum over its N examples. A Kronecker block is
Q (x) H with Q the mean of a a^T over examples and positions and H the sum of g g^T. Where only some examples were
seen, the sums are scaled up by N / seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from limpet.curvature.accumulators import (
    Accumulator,
    DenseAccumulator,
    DiagonalAccumulator,
    KroneckerAccumulator,
)
from limpet.curvature.audit import audit
from limpet.curvature.batches import Forward, batch_size, call, part, to_device, total_examples
from limpet.curvature.blocks import Block, named_parameters
from limpet.curvature.guard import untouched
from limpet.curvature.progress import Progress
from limpet.curvature.record import Recorder
from limpet.errors import CurvatureError, UnsupportedError, positive_whole
from limpet.likelihoods import Likelihood, as_tensors
from limpet.precision import Term

FISHERS = ("auto", "exact", "sampled", "empirical")
EXACT_UP_TO = 16
"""Classes (or outputs) up to which fisher="auto" is exact."""


@dataclass(frozen=True)
class Structure:
    """Which structure a block gets: what the user asked for, as far as the block has it."""

    name: str
    max_side: int

    def of(self, block: Block) -> str:
        """The structure of this block: a diagonal where there are no Kronecker factors."""
        return "diagonal" if self.name.startswith("kronecker") and not block.factored else self.name

    def sides(self, block: Block) -> dict[str, bool]:
        """Which sides keep a diagonal factor: one-hot data, or longer than `max_side`."""
        one_hot = bool(block.layers) and all(layer.data_one_hot for layer in block.layers)
        *_, out, in_ = block.shape
        return {"inputs_diagonal": in_ > self.max_side, "outputs_diagonal": one_hot or out > self.max_side}

    def accumulator(self, block: Block, like: Tensor) -> Accumulator:
        """Zero sums for this block."""
        name = self.of(block)
        if name == "diagonal":
            return DiagonalAccumulator(block, like)
        if name == "dense":
            return DenseAccumulator(block, like)
        return KroneckerAccumulator(block, like, **self.sides(block))


@dataclass(frozen=True)
class Fisher:
    """What a pass found: the blocks as they had to be measured and the terms of each."""

    blocks: list[Block]
    terms: dict[str, list[Term]]
    examples: int
    seen: int
    kind: str
    unused: frozenset[str]


class FisherPass:
    """The settings and sums of one pass; `run` makes it."""

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
        self.fisher = fisher
        self.draws = draws
        self.seed = seed
        self.forward = forward
        self.parameters = named_parameters(model)
        self.sums: dict[str, Accumulator] = {}
        self.recorder = Recorder()
        self.generator: torch.Generator | None = None
        self.tally = torch.zeros(2, dtype=torch.float64)
        self.unused: frozenset[str] = frozenset()
        self.seen = 0  # examples, or predicted positions
        self.rows = 0  # examples as the batches count them

    def run(
        self,
        batches: Iterable[Any],
        *,
        examples: int | None = None,
        limit: int | None = None,
        progress: bool = True,
    ) -> Fisher:
        """Read the batches once, or until `limit` examples (of several positions each: whole ones) have been seen."""
        if not self.blocks:
            raise CurvatureError("the model has no trainable parameter that is not excluded")
        examples = None if examples is None else positive_whole("examples", examples)
        limit = None if limit is None else positive_whole("limit", limit)
        total = _total(batches, examples, limit)
        goal = limit if limit is not None else total
        bar = Progress(goal, show=progress)
        with ExitStack() as stack:
            stack.callback(bar.close)
            stack.enter_context(untouched(self.model))
            stack.enter_context(_eager())
            stack.enter_context(_plain_recurrence(self.model))
            stack.enter_context(self.recorder.attached(self.blocks))
            for batch in batches:
                left = None if limit is None else limit - self.seen
                if left is not None and left <= 0:
                    break
                before = self.seen
                self._take(batch, left)
                bar.update(self.seen - before)
        if not self.seen:
            raise CurvatureError("the batches held no example: give a loader that yields (inputs, targets)")
        return self._result(examples, total)

    def _result(self, examples: int | None, total: int | None) -> Fisher:
        if examples is None:
            examples = self.seen if total is None else round(self.seen * max(total / self.rows, 1))
        scale = examples / self.seen
        scale *= self.likelihood.fisher_scale(self.tally, empirical=self.fisher == "empirical")
        terms = {name: accumulator.terms(scale) for name, accumulator in self.sums.items()}
        return Fisher(self.blocks, terms, examples, self.seen, self.fisher, self.unused)

    def _take(self, batch: Any, left: int | None) -> None:
        """Add one batch, or its first `left` examples, to the sums."""
        first = next(iter(self.parameters.values()))
        batch = to_device(batch, first.device)
        size = batch_size(batch)
        if left is not None and size is not None:
            rows = max(1, int(left / self._positions(batch, size)))
            batch = part(batch, slice(0, rows)) if rows < size else batch
        with torch.inference_mode(False), torch.enable_grad():
            with self.recorder.recording():
                outputs, targets = call(self.model, batch, self.forward)
            tensors = as_tensors(outputs)
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
                raise CurvatureError("the model's outputs hold inf or nan, so nothing can be measured there")
            if not self.sums:
                self._begin(batch, outputs, tensors)
            self._accumulate(batch, outputs, targets, tensors)
        self.recorder.clear()
        self.seen += self.likelihood.count(outputs, targets)
        self.rows += tensors[0].shape[0]

    def _positions(self, batch: Any, size: int) -> float:
        """How many of what is counted an example of the batch holds: 1, or its predicted positions."""
        if self.rows:
            return max(self.seen / self.rows, 1.0)
        with torch.no_grad():
            outputs, targets = call(self.model, part(batch, slice(0, min(size, 1))), self.forward)
        return max(float(self.likelihood.count(outputs, targets)), 1.0)

    def _begin(self, batch: Any, outputs: Any, tensors: tuple[Tensor, ...]) -> None:
        """What can only be known once a first batch went through: the kind of Fisher and how blocks are used."""
        self.fisher = _resolve(self.fisher, self.likelihood, outputs)
        self.generator = torch.Generator(tensors[0].device).manual_seed(self.seed)
        if not any(tensor.requires_grad for tensor in tensors):
            raise CurvatureError(
                "the outputs do not depend on any trainable parameter: does the model run under no_grad, or does "
                "`forward` detach?"
            )
        found = audit(self.blocks, self.recorder, self.parameters, tensors)
        self.unused = found.unused
        self.blocks = []
        for block in found.blocks:
            fits = self._examples_first(block, batch, tensors[0].shape[0])
            self.blocks.extend([block] if fits else block.made_direct())
        for block in self.blocks:
            like = self.parameters[block.parameters[0]]
            self.sums[block.name] = self.structure.accumulator(block, like)

    def _examples_first(self, block: Block, batch: Any, count: int) -> bool:
        """Whether the examples are the first dimension of all that the block's layers see.

        Only sums of squared gradients need to know. Where there happen to be as many positions as examples, one
        example alone is sent through to tell them apart.
        """
        if not block.layers or self.structure.of(block).startswith("kronecker"):
            return True
        calls = self.recorder.calls.get(block.name, [])
        if any(each.layer.example_count(each) != count for each in calls):
            return False
        doubtful = any(each.data.dim() > 2 and each.data.shape[-2] == count for each in calls)
        if not doubtful or count == 1 or batch_size(batch) != count:
            return True
        alone = Recorder()
        with alone.attached([block]):
            with alone.recording():
                call(self.model, part(batch, slice(0, 1)), self.forward)
            return all(each.layer.example_count(each) == 1 for each in alone.calls.get(block.name, []))

    def _accumulate(self, batch: Any, outputs: Any, targets: Any, tensors: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            self.tally += self.likelihood.tally(outputs, targets)
            for block in self.blocks:
                self.sums[block.name].add_data(self.recorder.calls.get(block.name, []))
        direct = [block for block in self.blocks if not block.layers]
        roots = self._roots(outputs, targets)
        kept: list[tuple[Tensor, ...]] = []
        following = next(roots, None)
        while following is not None:
            root, following = following, next(roots, None)
            if self.recorder.edges:
                gradients = torch.autograd.grad(
                    tensors,
                    self.recorder.edges,
                    root,
                    retain_graph=following is not None or bool(direct),
                    allow_unused=True,
                )
                with torch.no_grad():
                    self.recorder.take(gradients)
                    for block in self.blocks:
                        if block.layers:
                            self.sums[block.name].add_gradients(self.recorder.calls.get(block.name, []))
            if direct:
                kept.append(root)
        if direct:
            self._accumulate_direct(direct, batch, tensors, kept)

    def _roots(self, outputs: Any, targets: Any) -> Iterator[tuple[Tensor, ...]]:
        with torch.no_grad():
            detached = outputs.detach() if isinstance(outputs, Tensor) else tuple(o.detach() for o in outputs)
            if self.fisher == "exact":
                for root in self.likelihood.roots(detached, targets):
                    yield as_tensors(root)
            elif self.fisher == "empirical":
                yield as_tensors(self.likelihood.gradient(detached, targets))
            else:
                for _ in range(self.draws):
                    root = self.likelihood.sampled_root(detached, targets, self.generator)
                    yield tuple(tensor * self.draws**-0.5 for tensor in as_tensors(root))

    def _accumulate_direct(
        self,
        direct: Sequence[Block],
        batch: Any,
        tensors: tuple[Tensor, ...],
        roots: Sequence[tuple[Tensor, ...]],
    ) -> None:
        """The gradients of one example after another: slow, and right for whatever the model does."""
        count = tensors[0].shape[0]
        parameters = [self.parameters[block.parameters[0]] for block in direct]
        if count > 1 and batch_size(batch) != count:
            raise CurvatureError(
                f"{', '.join(block.name for block in direct)}: no layer class covers these parameters, so every "
                "example is measured by itself, but the batch cannot be cut into examples: give batches of one "
                "example, or leave these parameters out with exclude=[...]"
            )
        for n in range(count):
            single = tensors
            if count > 1:
                outputs, _ = call(self.model, part(batch, slice(n, n + 1)), self.forward)
                single = as_tensors(outputs)
            for k, root in enumerate(roots):
                gradients = torch.autograd.grad(
                    single,
                    parameters,
                    [tensor[n : n + 1] for tensor in root],
                    retain_graph=k + 1 < len(roots),
                    allow_unused=True,
                )
                for block, gradient in zip(direct, gradients, strict=True):
                    if gradient is not None:
                        self.sums[block.name].add_example(block.matrix([gradient.to_dense()]))


def _resolve(fisher: str, likelihood: Likelihood, outputs: Any) -> str:
    roots = likelihood.root_count(outputs)
    if fisher == "auto":
        width = sum(tensor[0].numel() for tensor in as_tensors(outputs))
        return "exact" if roots is not None and width <= EXACT_UP_TO else "sampled"
    if fisher == "exact" and roots is None:
        raise UnsupportedError(
            "fisher='exact' is for one output vector per example; outputs per position (or a likelihood without "
            "exact roots) take fisher='sampled'"
        )
    return fisher


def _total(batches: Iterable[Any], examples: int | None, limit: int | None) -> int | None:
    """The examples that all batches hold together, where `limit` makes it needed."""
    total = total_examples(batches)
    if total is None and isinstance(batches, Sequence):
        sizes = [batch_size(batch) for batch in batches]
        total = None if None in sizes else sum(size for size in sizes if size is not None)
    if limit is not None and examples is None and total is None:
        raise CurvatureError(
            "with limit=, the pass has to know how many examples the task has altogether, and these batches do "
            "not say: pass examples="
        )
    return total if limit is not None else None


def _eager() -> Any:
    """Run compiled parts of the model as they are written: inside compiled code hooks do not fire."""
    if "torch._dynamo" not in sys.modules:
        return ExitStack()
    return torch.compiler.set_stance("force_eager")


def _plain_recurrence(model: nn.Module) -> Any:
    """cuDNN's recurrent layers have no backward pass in eval mode; PyTorch's own have."""
    if torch.cuda.is_available() and any(isinstance(m, nn.RNNBase) for m in model.modules()):
        return torch.backends.cudnn.flags(enabled=False)
    return ExitStack()

"""Audit of the forward hooks: check that they account for the whole gradient of every parameter, per sample.

Hooks can miss a use of a weight: MultiheadAttention passes the weight of its `out_proj` to a function, a tied head
calls F.linear on the embedding's weight, or user code calls `layer.forward` directly. Nor does a layer necessarily see
one row per example: a position embedding receives the gradient of the whole batch at once. A Fisher computed from the
hooks alone would then be silently wrong. The gradient of every parameter is therefore computed twice, by autograd and
from the recorded calls, and one example is also passed through the model alone. A block that fails either check is
measured per sample instead.

Every block is checked when the backward pass reaches it, and its gradient is then freed: under `fully_shard`, no rank
has room for the gradients of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from limpet.curvature.hooks import Recorder
from limpet.errors import CurvatureError
from limpet.layers import Call, MatrixLayer
from limpet.likelihoods import as_tensors
from limpet.model.batch import Forward, batch_size, call, part
from limpet.model.blocks import Block
from limpet.precision.linalg import widened

ROUNDING = {torch.float64: (1e-8, 1e-13), torch.float32: (1e-3, 1e-6)}
HALF_ROUNDING = (5e-2, 5e-3)
"""Rounding tolerances: relative to the gradient, and relative to the magnitude of its summands."""

REENTRANT = (
    "the model uses reentrant gradient checkpointing, which exposes no intermediate gradients: call checkpoint(..., "
    "use_reentrant=False)"
)
MIXED = (
    "passing a single example through the model fails or changes its outputs, so per-sample gradients are undefined: "
    "examples must be the first dimension of every tensor in the batch and of the outputs, and no layer may mix them "
    "(batch norm without running statistics does: use GroupNorm)"
)
LAST = slice(-1, None)
"""The example that is passed through the model alone.

It is not the first one: if a sequence is mistaken for a batch, its first element gives the same outputs alone.
"""


def unseen(
    blocks: Sequence[Block], recorder: Recorder, parameters: Mapping[str, nn.Parameter], outputs: Sequence[Tensor]
) -> tuple[set[str], set[str]]:
    """Find the blocks whose recorded gradient differs from autograd's.

    Args:
        blocks: The blocks to check.
        recorder: The recorder of the forward pass that produced `outputs`.
        parameters: The model's parameters, by name.
        outputs: The model's outputs, with their graph.

    Returns:
        The names of the blocks whose gradient the recorded calls do not account for, and the names of the parameters
        that have a gradient at all.

    Raises:
        CurvatureError: If the model uses reentrant gradient checkpointing, or a gradient contains inf or nan.
    """
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(o.shape, generator=generator, device="cpu").to(o) for o in outputs]
    recorder.take(gradients_at(outputs, recorder.edges, cotangents, keep=True))
    comparison = _Comparison(blocks, recorder, parameters)
    used = comparison.run(outputs, cotangents)
    hidden = recorder.without_graph & {b.name for b in blocks if used.isdisjoint(b.parameters)}
    if hidden and _is_checkpointed(outputs):
        raise CurvatureError(REENTRANT)
    if comparison.error is not None:
        raise comparison.error
    return comparison.wrong, used


class _Comparison:
    """Compares the gradients of all blocks with the recorded ones, each as soon as autograd has computed it.

    Args:
        blocks: The blocks to check.
        recorder: The recorder, with the output gradients of its calls.
        parameters: The model's parameters, by name.
    """

    def __init__(self, blocks: Sequence[Block], recorder: Recorder, parameters: Mapping[str, nn.Parameter]) -> None:
        self.recorder, self.parameters = recorder, parameters
        self.wrong: set[str] = set()  # blocks whose gradients differ
        self.error: CurvatureError | None = None
        self._waiting = {name: block for block in blocks for name in block.parameters}
        self._found: dict[str, Tensor] = {}  # of blocks that still lack a parameter

    def run(self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> set[str]:
        """Run the backward pass; return the names of the parameters that have a gradient."""
        names = list(self._waiting)
        parameters: list[Any] = [self.parameters[name] for name in names]
        handles = [
            parameter.register_hook(partial(self._arrived, name))
            for name, parameter in zip(names, parameters, strict=True)
        ]
        try:
            gradients = gradients_at(outputs, parameters, cotangents, keep=True)
        finally:
            for handle in handles:
                handle.remove()
        for block in dict.fromkeys(self._waiting.values()):
            self._check(block)
        return {name for name, gradient in zip(names, gradients, strict=True) if gradient is not None}

    def _arrived(self, name: str, gradient: Tensor) -> Tensor | None:
        """Hook on a parameter. What it returns is kept until the end of the pass: zeros that take no space."""
        block = self._waiting[name]
        self._found[name] = gradient
        if all(one in self._found for one in block.parameters):
            self._check(block)
        return gradient.new_zeros(()).expand(gradient.shape) if gradient.layout == torch.strided else None

    def _check(self, block: Block) -> None:
        """Compare a block, and forget its gradients."""
        true = {name: self._found.pop(name, None) for name in block.parameters}
        for name in block.parameters:
            self._waiting.pop(name)
        try:
            if block.layers and not _accounted_for(block, self.recorder, self.parameters, true):
                self.wrong.add(block.name)
        except CurvatureError as error:  # raised after the backward pass
            self.error = self.error or error


def gradients_at(
    outputs: Sequence[Tensor], wanted: Any, cotangents: Sequence[Tensor] | None, *, keep: bool
) -> tuple[Tensor | None, ...]:
    """Call torch.autograd.grad, with a helpful error if reentrant checkpointing prevents it.

    Args:
        outputs: The tensors to differentiate.
        wanted: The tensors or gradient edges to differentiate with respect to.
        cotangents: The vectors of the vector-Jacobian product, one per output. None for scalar outputs.
        keep: Whether to retain the graph for another call.

    Returns:
        One gradient per element of `wanted`, None where the outputs do not depend on it.

    Raises:
        CurvatureError: If the model uses reentrant gradient checkpointing.
    """
    if not wanted:
        return ()
    try:
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            outputs, wanted, cotangents, retain_graph=keep, allow_unused=True
        )
        return found
    except RuntimeError as error:
        if "heckpoint" not in str(error):
            raise
        raise CurvatureError(REENTRANT) from error


def _is_checkpointed(outputs: Sequence[Tensor]) -> bool:
    """Whether the graph contains reentrant checkpointing, whose inner graph does not exist before the backward pass."""
    nodes, seen = [output.grad_fn for output in outputs], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith("CheckpointFunction"):
            return True
        seen.add(node)
        nodes.extend(following for following, _ in node.next_functions)
    return False


def _accounted_for(
    block: Block, recorder: Recorder, parameters: Mapping[str, nn.Parameter], true: Mapping[str, Tensor | None]
) -> bool:
    if block.name in recorder.unreadable:
        return False
    given = [true[name] for name in block.parameters]
    dense = [
        torch.zeros_like(parameters[name]) if gradient is None else gradient.to_dense()
        for name, gradient in zip(block.parameters, given, strict=True)
    ]
    expected = block.matrix(dense)
    size = float(torch.linalg.vector_norm(expected, dtype=torch.float64))
    if not math.isfinite(size):
        raise CurvatureError(f"the gradient of {block.name} contains inf or nan: check the data and the weights")
    calls = [each for each in recorder.calls.get(block.name, []) if each.gradient is not None]
    # one matrix in float64: there is no room for more beside the gradient of the largest block
    difference, summands = widened(expected.neg()), 0.0
    del dense, expected
    relative, absolute = ROUNDING.get(parameters[block.parameters[0]].dtype, HALF_ROUNDING)
    try:
        for each in calls:
            difference += each.layer.total_gradient(each).to(difference.device)
            summands += _size(each)
            rounding = ROUNDING.get(each.dtype, HALF_ROUNDING)
            relative, absolute = max(relative, rounding[0]), max(absolute, rounding[1])
    except (RuntimeError, IndexError):  # mismatched shapes: the layer uses its input in another way
        return False
    return bool(difference.norm() <= relative * size + absolute * summands)


def _size(each: Call) -> float:
    if each.gradient is None:
        return 0.0
    if not isinstance(each.layer, MatrixLayer):
        data = each.data.float().norm() if each.data.is_floating_point() else torch.ones(())
    else:
        data = torch.stack([part.float().norm() for _, part in each.layer.parts(each)]).norm()
    return float(data) * float(each.gradient.norm())


def not_by_example(
    blocks: Sequence[Block],
    needs_examples: set[str],
    recorder: Recorder,
    model: nn.Module,
    batch: Any,
    forward: Forward | None,
    outputs: Sequence[Tensor],
    on_any_rank: Callable[[bool], bool] = bool,
) -> set[str]:
    """Find the blocks whose layers do not process the examples independently.

    Every call must see as many rows per example in the batch as for a single example alone. Blocks for which squared
    per-sample gradients are summed (`needs_examples`) must also have the examples as their first dimension.

    Args:
        blocks: The blocks to check.
        needs_examples: Names of the blocks that need per-sample gradients.
        recorder: The recorder of the forward pass that produced `outputs`.
        model: The model.
        batch: The batch of that forward pass.
        forward: The user's forward function, if any.
        outputs: The outputs of that forward pass.
        on_any_rank: Logical OR over the ranks. Ranks that share a sharded model must agree on every forward pass.

    Returns:
        The names of the blocks that have to be measured per sample.

    Raises:
        CurvatureError: If the model mixes the examples of a batch.
    """
    count = outputs[0].shape[0]
    hooked = [block for block in blocks if block.layers]
    if not on_any_rank(count > 1):  # all rows are those of the one example, also where they are not seen as such
        return {
            b.name
            for b in hooked
            if b.name in needs_examples
            and any(each.layer.example_count(each) != 1 for each in recorder.calls.get(b.name, []))
        }
    if batch_size(batch) != count:
        return {
            b.name for b in hooked if not _plausible(recorder.calls.get(b.name, []), count, b.name in needs_examples)
        }
    alone = Recorder()
    with alone.attached(hooked):
        try:
            with alone.recording():
                single, _ = call(model, part(batch, LAST), forward)
        except (RuntimeError, ValueError, IndexError) as error:
            raise CurvatureError(f"{MIXED} ({error})") from error
        _same_outputs(as_tensors(single), outputs, model, batch, forward, on_any_rank)
        return {
            b.name
            for b in hooked
            if not _scales(recorder.calls.get(b.name, []), alone.calls.get(b.name, []), count, b.name in needs_examples)
        }


def _scales(calls: Sequence[Call], alone: Sequence[Call], count: int, needs_examples: bool) -> bool:
    if len(calls) != len(alone) or any(
        a.layer.row_count(a) != count * b.layer.row_count(b) for a, b in zip(calls, alone, strict=True)
    ):
        return False
    firsts = zip(calls, alone, strict=True)
    return not needs_examples or all(
        a.layer.example_count(a) == count and b.layer.example_count(b) == 1 for a, b in firsts
    )


def _plausible(calls: Sequence[Call], count: int, needs_examples: bool) -> bool:
    """Check the row counts of a batch that cannot be split into examples, as far as that is possible."""
    if any(each.layer.row_count(each) % count for each in calls):
        return False
    firsts = [each.layer.example_count(each) == count and each.layer.row_count(each) != count * count for each in calls]
    return not needs_examples or all(firsts)


def _same_outputs(
    single: Sequence[Tensor],
    outputs: Sequence[Tensor],
    model: nn.Module,
    batch: Any,
    forward: Forward | None,
    on_any_rank: Callable[[bool], bool],
) -> None:
    if not on_any_rank(not all(_alike(a, b[LAST]) for a, b in zip(single, outputs, strict=True))):
        return
    with torch.no_grad():
        again = as_tensors(call(model, part(batch, LAST), forward)[0])
    if on_any_rank(not all(_alike(a, b) for a, b in zip(single, again, strict=True))):
        return  # a stochastic model: its outputs differ from call to call anyway
    raise CurvatureError(MIXED)


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    relative, _ = ROUNDING.get(a.dtype, HALF_ROUNDING)
    return bool((a - b).abs().max() <= relative * b.abs().max().clamp_min(1e-6)) if a.numel() else True

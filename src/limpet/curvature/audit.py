"""Does what the hooks see account for the whole gradient of every parameter, example by example?

Hooks can miss a use of a weight: MultiheadAttention hands the weight of its `out_proj` to a function, a tied head
calls F.linear on the embedding's weight, somebody calls `layer.forward`. And what a layer sees need not be a row for
every example: a position embedding gets the gradient of the whole batch at once. A Fisher made from the hooks alone
would then be wrong in silence. So the gradient of every parameter is made twice, by autograd and from what was
recorded, and one example is sent through by itself; a block that fails is measured directly instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from limpet.curvature.hooks import Recorder
from limpet.errors import CurvatureError
from limpet.layers import Call
from limpet.likelihoods import as_tensors
from limpet.model.batch import Forward, batch_size, call, part
from limpet.model.blocks import Block
from limpet.precision.linalg import widened

ROUNDING = {torch.float64: (1e-8, 1e-13), torch.float32: (1e-3, 1e-6)}
HALF_ROUNDING = (5e-2, 5e-3)
"""What rounding may change: relative to the gradient, and to the size of what it is summed from."""


REENTRANT = (
    "the model uses reentrant gradient checkpointing, which gives no gradients in between: call checkpoint(..., "
    "use_reentrant=False)"
)
MIXED = (
    "an example by itself gives other outputs than in its batch, or none, so no example has a gradient of its own: the "
    "examples must be the first dimension of every tensor in the batch and of the outputs, and no layer may mix them "
    "(a batch norm without running statistics does: use GroupNorm)"
)
LAST = slice(-1, None)
"""The example that is sent through by itself. Not the first: a sequence taken for a batch begins by itself, too."""


def unseen(
    blocks: Sequence[Block], recorder: Recorder, parameters: Mapping[str, nn.Parameter], outputs: Sequence[Tensor]
) -> tuple[set[str], set[str]]:
    """The blocks whose recorded gradient is not autograd's own, and the parameters that have a gradient at all."""
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(o.shape, generator=generator, device="cpu").to(o) for o in outputs]
    names = [name for block in blocks for name in block.parameters]
    wanted: Any = [*recorder.edges, *(parameters[name] for name in names)]
    found = gradients_at(outputs, wanted, cotangents, keep=True)
    recorder.take(found[: len(recorder.edges)])
    true = dict(zip(names, found[len(recorder.edges) :], strict=True))
    hidden = recorder.without_graph & {b.name for b in blocks if all(true[name] is None for name in b.parameters)}
    if hidden and _is_checkpointed(outputs):
        raise CurvatureError(REENTRANT)
    wrong = {b.name for b in blocks if b.layers and not _accounted_for(b, recorder, parameters, true)}
    return wrong, {name for name, gradient in true.items() if gradient is not None}


def gradients_at(
    outputs: Sequence[Tensor], wanted: Any, cotangents: Sequence[Tensor] | None, *, keep: bool
) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad, with a word on the one thing that stops it."""
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
    """Whether the graph goes through reentrant checkpointing, inside which there is no graph yet."""
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
    expected = widened(block.matrix(dense))
    if not bool(torch.isfinite(expected).all()):
        raise CurvatureError(f"the gradient of {block.name} holds inf or nan: look at the data, or the weights")
    calls = [each for each in recorder.calls.get(block.name, []) if each.gradient is not None]
    recorded, summands = torch.zeros_like(expected), 0.0
    relative, absolute = ROUNDING.get(parameters[block.parameters[0]].dtype, HALF_ROUNDING)
    try:
        for each in calls:
            recorded += widened(each.layer.total_gradient(each))
            summands += _size(each)
            rounding = ROUNDING.get(each.dtype, HALF_ROUNDING)
            relative, absolute = max(relative, rounding[0]), max(absolute, rounding[1])
    except (RuntimeError, IndexError):  # shapes that do not fit: the layer does something else with its input
        return False
    return bool((recorded - expected).norm() <= relative * expected.norm() + absolute * summands)


def _size(each: Call) -> float:
    data = each.data.float().norm() if each.data.is_floating_point() else torch.ones(())
    return float(data) * float(each.gradient.norm()) if each.gradient is not None else 0.0


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
    """The blocks whose layers do not see the examples one by one.

    Every call must see as many rows per example in the batch as for one example by itself; blocks of which squared
    gradients are summed (`needs_examples`) must have the examples as first dimension, too. Ranks that go through a
    model together do so here, too, which is what `on_any_rank` is for.
    """
    count = outputs[0].shape[0]
    hooked = [block for block in blocks if block.layers]
    if not on_any_rank(count > 1):
        return set()
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
    """As far as it can be told from a batch that cannot be cut."""
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
        return  # a model that draws random numbers gives other outputs every time
    raise CurvatureError(MIXED)


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    relative, _ = ROUNDING.get(a.dtype, HALF_ROUNDING)
    return bool((a - b).abs().max() <= relative * b.abs().max().clamp_min(1e-6)) if a.numel() else True

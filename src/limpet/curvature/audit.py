"""Does what the hooks see account for the whole gradient of every parameter?

Hooks can miss a use of a weight: MultiheadAttention hands the weight of its `out_proj` to a function, a tied head
calls F.linear on the embedding's weight, somebody calls `layer.forward`. A Fisher made from the hooks alone would
then be wrong in silence. So for the first batch the gradient of every parameter is made twice, by autograd and from
what was recorded, and a block that differs is measured directly instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from limpet.curvature.blocks import Block
from limpet.curvature.record import Recorder
from limpet.precision.linalg import widened

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Relative difference that rounding may make; 5e-2 for the half precisions."""


@dataclass(frozen=True)
class Audit:
    """The blocks as they must be measured, and the parameters that the outputs do not depend on."""

    blocks: list[Block]
    unused: frozenset[str]


def audit(
    blocks: Sequence[Block],
    recorder: Recorder,
    parameters: Mapping[str, nn.Parameter],
    outputs: Sequence[Tensor],
) -> Audit:
    """Hold the recorded gradients of one batch against autograd's own."""
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
    names = [name for block in blocks for name in block.parameters]
    wanted: Any = [*recorder.edges, *(parameters[name] for name in names)]
    found = torch.autograd.grad(
        outputs,
        wanted,
        cotangents,
        retain_graph=True,
        allow_unused=True,
    )
    recorder.take(found[: len(recorder.edges)])
    true = dict(zip(names, found[len(recorder.edges) :], strict=True))
    kept: list[Block] = []
    for block in blocks:
        if not block.layers or _accounted_for(block, recorder, parameters, true):
            kept.append(block)
        else:
            kept.extend(block.made_direct())
    return Audit(kept, frozenset(name for name, gradient in true.items() if gradient is None))


def _accounted_for(
    block: Block, recorder: Recorder, parameters: Mapping[str, nn.Parameter], true: Mapping[str, Tensor | None]
) -> bool:
    gradients = []
    for name in block.parameters:
        gradient = true[name]
        gradients.append(torch.zeros_like(parameters[name]) if gradient is None else gradient.to_dense())
    expected = widened(block.matrix(gradients))
    calls = [call for call in recorder.calls.get(block.name, []) if call.gradient is not None]
    recorded = torch.zeros_like(expected)
    for call in calls:
        recorded += widened(call.layer.total_gradient(call))
    tolerance = TOLERANCE.get(parameters[block.parameters[0]].dtype, 5e-2)
    return bool((recorded - expected).norm() <= tolerance * expected.norm())

"""Parameters that all examples of a batch use at once, recorded per example.

A position embedding is looked up once for the whole batch, and the class token of a vision transformer is a parameter
of shape (1, ...): both are broadcast over the examples later, and what arrives at them is the gradient of all examples
together. If the broadcast is made explicit before, with a view that repeats the output or the parameter for every
example, the gradient of that view is the per-sample gradient. Whether a model permits it is found out by trying: the
outputs must stay the same, and the gradient of one example must be the one that it has alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from limpet.curvature.audit import HALF_ROUNDING, LAST, ROUNDING, gradients_at
from limpet.curvature.hooks import Recorder
from limpet.layers import Broadcast, Embedding, example_gradients
from limpet.likelihoods import as_tensors
from limpet.model.batch import Forward, call, part
from limpet.model.blocks import Block
from limpet.model.names import places
from limpet.precision.linalg import widened


def broadcast_parameters(model: nn.Module, blocks: Sequence[Block]) -> dict[str, Broadcast]:
    """Return the parameters of shape (1, ...) without a layer that only one module has, by block name."""
    wanted = {block.parameters[0]: block for block in blocks if not block.layers and block.shapes[0][:1] == (1,)}
    uses = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    found = {}
    for _, prefix, module in places(model):
        for local, parameter in module._parameters.items():
            name = f"{prefix}.{local}" if prefix else local
            if name in wanted and parameter is not None and parameter.dim() > 1 and uses[parameter] == 1:
                found[wanted[name].name] = Broadcast(module, (local,))
    return found


def is_candidate(block: Block) -> bool:
    """Return whether a block that fails the audit may pass if it is recorded per example."""
    return bool(block.layers) and all(isinstance(layer, Embedding) for layer in block.layers)


def is_per_example(
    block: Block,
    recorder: Recorder,
    parameters: Mapping[str, nn.Parameter],
    outputs: tuple[Sequence[Tensor], Sequence[Tensor]],
    model: nn.Module,
    batch: Any,
    forward: Forward | None,
) -> bool:
    """Return whether the recorded gradients of a block are its per-sample gradients.

    Args:
        block: The block, which has one parameter.
        recorder: The recorder of the last forward pass, in which the block was recorded per example.
        parameters: The model's parameters, by name.
        outputs: The outputs of that forward pass, and those of one in which the block was not.
        model: The model.
        batch: The batch of the forward passes.
        forward: The user's forward function, if any.

    Returns:
        Whether the outputs are the same, the gradients add up to that of the parameter, and the one of the last example
        is that of this example alone.
    """
    found, before = outputs
    calls, parameter = recorder.calls.get(block.name, []), parameters[block.parameters[0]]
    relative, absolute = ROUNDING.get(parameter.dtype, HALF_ROUNDING)
    if not calls or not all(_near(a, b, relative) for a, b in zip(found, before, strict=True)):
        return False
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(o.shape, generator=generator, device="cpu").to(o) for o in found]
    *recorded, total = gradients_at(found, [*recorder.edges, parameter], cotangents, keep=True)
    single = as_tensors(call(model, part(batch, LAST), forward)[0])
    (alone,) = gradients_at(single, [parameter], [c[LAST] for c in cotangents], keep=False)
    if total is None or alone is None:
        return False
    recorder.take(recorded)
    calls = [each for each in calls if each.gradient is not None]
    if any(each.layer.example_count(each) != len(found[0]) for each in calls):
        return False
    slack = absolute * sum(float(each.gradient.norm()) for each in calls if each.gradient is not None)
    pairs = [
        (torch.stack([each.layer.total_gradient(each) for each in calls]).sum(0), total),
        (example_gradients(calls, LAST)[0], alone),
    ]
    return all(_near(a, block.matrix([b.to_dense()]), relative, slack) for a, b in pairs)


def _near(a: Tensor, b: Tensor, relative: float, slack: float = 1e-6) -> bool:
    """Whether two tensors are equal up to rounding."""
    a, b = widened(a), widened(b)
    return a.shape == b.shape and bool((a - b).norm() <= relative * b.norm() + slack)

"""`limpet.repair`: undo forgetting after fine-tuning, without the old data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn

from limpet.distributed import current, is_sharded, together
from limpet.errors import LimpetError, LimpetWarning, UnsupportedError, warn
from limpet.forgetting.repair import Repair
from limpet.likelihoods import Likelihood
from limpet.methods.laplace import Laplace
from limpet.methods.memory import Memory
from limpet.methods.repair_pass import RepairOptions, repaired
from limpet.methods.restore import restored
from limpet.model import Forward, unwrapped


def repair(
    model: nn.Module,
    memory: Memory,
    batches: Iterable[Any],
    *,
    strength: float | None = None,
    scale: float = 1.0,
    tolerance: float | Literal["auto"] | None = None,
    budget: float | Literal["auto"] | None = None,
    rank: int | None = None,
    refit: bool = True,
    examples: int | None = None,
    limit: int | None = None,
    forward: Forward | None = None,
    probe_forward: Forward | None = None,
    likelihood: str | Likelihood | None = None,
    progress: bool = True,
) -> Repair:
    """Repair a fine-tuned model in place: undo its forgetting, and keep what the new data need.

    The memory has the weights before fine-tuning and the curvature of the old loss there. One pass over the new data
    measures their curvature at the tuned weights. Every block then moves to the minimizer of the sum of the two
    quadratics (`limpet.forgetting.repair` has the formula and references). Train as usual, with any optimizer, and
    call this once at the end.

    In layers with LoRA adapters the adapters are repaired, at their own rank. A new linear output layer, which the
    old tasks do not use, is fitted again to the repaired features (`limpet.forgetting.output_layer`); that the old
    tasks have another one is known from the memory's probe. All other parameters that the memory does not protect and
    buffers (running statistics of batch norm) keep their tuned values.
    If an error is raised, the model keeps its tuned weights.

    Args:
        model: The tuned model.
        memory: A memory of the model before fine-tuning, made by one of the Laplace methods. It is not modified.
        batches: The new data, in any form that `memory.consolidate` accepts.
        strength: Factor of the old curvature. Defaults to 1, the Laplace approximation of training on both datasets.
        scale: Factor of the repaired update.
        tolerance: Instead of `strength`: use the largest strength at which the loss on a held-out part of the batches
            increases by at most this many nats per example. "auto": 0.05, but at most a tenth of what the update has
            reduced that loss by.
        budget: Instead of `strength`: use the smallest strength at which the measured drift and 1.64 standard errors
            (`Drift.upper`) are at most this many nats per example. Requires a memory with a probe. "auto": 0.04, but
            at most a tenth of the drift of a model that gives the same answer to every input of the probe. With a
            `tolerance` as well, the drift is reduced to the budget or as far as the tolerance allows; a tolerance of
            "auto" is then 0.3, but at most half of what was learned.
        rank: Truncate adapters to this rank if it is lower than their own.
        refit: Fit a new output layer again. Models that are sharded keep it as it was trained.
        examples: Number of examples in the new data, if `batches` contains only some of them.
        limit: Use at most this many examples to measure the curvature.
        forward: `forward(model, batch)` returns `(outputs, targets)`. Needed for batches that are neither pairs nor
            dictionaries.
        probe_forward: The `forward` of the memory's probe, as for `memory.drift`.
        likelihood: Likelihood of the new data. Defaults to that of the memory.
        progress: Show progress bars.

    Returns:
        The repair, which can move the model along the path of strengths, or undo it.

    Raises:
        LimpetError: If memory, model, batches and options do not fit together.
        UnsupportedError: If the memory has no curvature (Synaptic Intelligence), or if the model is sharded and the
            memory was made for another one.

    Examples:
        >>> import limpet
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(4, 3)
        >>> old, new = ([(torch.randn(60, 4), torch.randint(0, 3, (60,)))] for _ in range(2))
        >>> memory = limpet.OnlineLaplace(model)
        >>> memory.consolidate(old, probe=60)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        >>> for x, y in new * 20:
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.cross_entropy(model(x), y).backward()
        ...     optimizer.step()
        >>> before = memory.drift()
        >>> repaired = limpet.repair(model, memory, new, strength=1.0)
        >>> repaired
        <Repair strength=1 scale=1 blocks=1>
        >>> memory.drift() < before / 2
        True
        >>> _ = repaired.undo()
    """
    options = RepairOptions(
        strength=strength,
        scale=scale,
        tolerance=tolerance,
        budget=budget,
        rank=rank,
        refit=refit,
        examples=examples,
        limit=limit,
        forward=forward,
        probe_forward=probe_forward,
        likelihood=likelihood,
        progress=progress,
    )
    with together("repair", current(), runs_model=memory.sharded):
        return repaired(_usable(memory, model), batches, options)


def _usable(memory: Memory, model: nn.Module) -> Laplace:
    """Check that the memory can be used for a repair, and bind it to `model` if it was made for another copy."""
    if not isinstance(memory, Laplace):
        raise UnsupportedError(
            f"{type(memory).__name__} measures no curvature, which repair requires: use limpet.OnlineLaplace"
        )
    if not memory.tasks:
        raise LimpetError(
            "this memory has no consolidated task: call memory.consolidate(old_batches) before fine-tuning"
        )
    memory._reject_inside_protect()
    _warn_of_merged(model)
    if memory.model is unwrapped(model):
        memory.posterior.follow_devices()
        return memory
    if memory.sharded or any(map(is_sharded, model.parameters())):
        raise UnsupportedError(
            "the memory was made for another model, and one of the two is sharded (fully_shard): load the memory for "
            "the tuned model, limpet.load(path, model), and repair that"
        )
    own = restored(memory._state(), model, memory.likelihood)
    assert isinstance(own, Laplace)
    return own


def _warn_of_merged(model: nn.Module) -> None:
    if any(getattr(module, "merged_adapters", None) for module in model.modules()):
        warn(
            "adapters are merged, so the repair changes the merged base weights: keep the merged model "
            "(merge_and_unload), or call unmerge_adapter() before the repair",
            LimpetWarning,
        )

"""Rehearsal on inputs drawn from the memory itself, so without any data.

The input factor of the first layer is the mean of [x 1] [x 1]^T over the old inputs x: their mean m and covariance S.
A small network can be compared with the one before on inputs from that Gaussian. Every step adds the gradient of

    KL(before || now),    x ~ N(m, S),

to that of the loss, beside the memory's penalty. After several tasks, m and S are those of all old inputs together,
weighted by the traces of the output factors. Distillation on random inputs is as old as pseudo-rehearsal (Robins 1995,
"Catastrophic forgetting, rehearsal and pseudorehearsal"); here their distribution comes from a curvature factor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import limpet
from limpet.errors import LimpetError
from limpet.experiments.methods import OnlineLaplace
from limpet.experiments.networks import Network
from limpet.experiments.recipe import Recipe
from limpet.experiments.registry import METHODS
from limpet.precision import Kronecker
from limpet.precision.linalg import symmetric_eigen, widened


def input_gaussian(memory: limpet.Memory) -> tuple[Tensor, Tensor]:
    """Compute mean and covariance of the old inputs from the input factor of the first layer.

    Args:
        memory: A memory with complete Kronecker factors, whose first block is a linear layer with bias that reads the
            inputs.

    Returns:
        The mean m (n,), and a matrix R (n, n) with R R^T = S.

    Raises:
        LimpetError: If the first block has no such factor.
    """
    name, held = next(iter(memory.posterior.held.items()))
    factor = held.precision.inputs if isinstance(held.precision, Kronecker) else None
    vectors = None if factor is None else factor.columns
    if factor is None or not isinstance(vectors, Tensor) or not held.block.bias:
        raise LimpetError(
            f"gaussian-rehearsal draws inputs from the complete input factor of the first layer, and {name} has none: "
            "use structure 'kronecker' without a rank, and a first layer with bias"
        )
    basis = widened(vectors)
    moments = (basis * widened(factor.trace)) @ basis.mT
    moments = moments / moments[-1, -1]  # the entry of the bias, whose input is 1
    mean = moments[:-1, -1]
    values, columns = symmetric_eigen(moments[:-1, :-1] - torch.outer(mean, mean))
    return mean.to(held.mean), (columns * values.clamp_min(0).sqrt()).to(held.mean)


def network_before(model: nn.Module, memory: limpet.Memory) -> nn.Module:
    """Return a copy of the network with the weights after the last task, which are the mean of the memory.

    Args:
        model: The network.
        memory: Its memory.

    Returns:
        The copy, in eval mode and frozen.
    """
    before = copy.deepcopy(model).eval().requires_grad_(False)
    weights = dict(before.named_parameters())
    for held in memory.posterior.held.values():
        for name, mean in held.block.scatter(held.mean).items():
            weights[name].copy_(mean)
    return before


@METHODS.register("gaussian-rehearsal")
class GaussianRehearsal(OnlineLaplace):
    """Online Laplace, compared with the network before on inputs drawn from the memory (`memory.rehearsal`)."""

    structures: tuple[str, ...] = ("kronecker",)

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__(model, recipe)
        layers = list(model.body.children()) if isinstance(model, Network) and len(model.heads) == 1 else []
        first = next((layer for layer in layers if not isinstance(layer, nn.Flatten)), None)
        if not isinstance(first, nn.Linear) or recipe.memory.rank is not None or recipe.memory.energy is not None:
            raise LimpetError(
                "gaussian-rehearsal needs a network of one head whose first layer is linear, such as mlp, and a memory "
                "with complete factors (no memory.rank or memory.energy)"
            )

    @contextmanager
    def hold(self, optimizer: torch.optim.Optimizer, examples: int) -> Iterator[None]:
        """Protect the training, and add the gradient of the divergence in every step.

        Inputs are drawn from the global generator, which is seeded in every epoch, so a run can be resumed.
        """
        with super().hold(optimizer, examples):
            if not self.memory.tasks:
                yield
                return
            before = network_before(self.model, self.memory)
            mean, root = input_gaussian(self.memory)
            size, weight = self.recipe.training.batch_size, self.recipe.memory.rehearsal

            def rehearse(*_: object) -> None:
                drawn = torch.randn(size, len(mean), dtype=mean.dtype, device=mean.device)
                inputs = torch.addmm(mean, drawn, root.mT)
                with torch.no_grad():
                    expected = before(inputs).log_softmax(-1)
                found = self.model(inputs).log_softmax(-1)
                torch.autograd.backward(weight * F.kl_div(found, expected, log_target=True, reduction="batchmean"))

            handle = optimizer.register_step_pre_hook(rehearse)
            try:
                yield
            finally:
                handle.remove()

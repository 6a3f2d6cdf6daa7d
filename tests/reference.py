"""The dense Fisher, made the slow and obvious way, to hold everything else against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from limpet.curvature import Fisher, FisherPass, Structure
from limpet.likelihoods import Likelihood, as_tensors
from limpet.model import Block, discover


def measure(
    model: nn.Module,
    batches: list[Any],
    likelihood: Likelihood,
    structure: str = "diagonal",
    *,
    fisher: str = "auto",
    max_factor_size: int = 4096,
    draws: int = 1,
    seed: int = 0,
    exclude: tuple[str, ...] = (),
    forward: Callable[..., Any] | None = None,
    **run: Any,
) -> Fisher:
    settings = Structure(structure, max_factor_size)
    one_pass = FisherPass(
        model,
        discover(model, exclude),
        likelihood,
        settings,
        fisher=fisher,
        draws=draws,
        seed=seed,
        forward=forward,
    )
    return one_pass.run(batches, progress=False, **run)


def output_hessian(likelihood: Likelihood, outputs: Tensor, targets: Any) -> Tensor:
    """The Hessian of the negative log likelihood of one example in its outputs, by autograd."""

    def nll(flat: Tensor) -> Tensor:
        return likelihood.negative_log_likelihood(flat.reshape(outputs.shape), targets)

    found: Tensor = torch.autograd.functional.hessian(nll, outputs.detach().flatten())
    return found


def jacobian(model: nn.Module, x: Any, parameters: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The outputs of one example and their Jacobian (outputs, weights)."""
    output = as_tensors(model(x))[0]
    rows = []
    for value in output.flatten():
        gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g.to_dense()).flatten()
                    for p, g in zip(parameters, gradients, strict=True)
                ]
            )
        )
    return output, torch.stack(rows)


def dense_fisher(
    model: nn.Module, block: Block, x: Any, y: Any, likelihood: Likelihood, root: Tensor | None = None
) -> Tensor:
    """The Fisher of one block over W flattened row by row: exact, or the one of a given root per example."""
    model = model.eval()
    named = dict(model.named_parameters())
    parameters = [named[name] for name in block.parameters]
    size = block.shape.numel()
    # where each weight of the block stands among the flattened parameters
    places = torch.arange(sum(p.numel() for p in parameters), dtype=torch.float64).split(
        [p.numel() for p in parameters]
    )
    order = block.matrix([place.reshape(p.shape) for place, p in zip(places, parameters, strict=True)])
    index = order.flatten().long()
    total = torch.zeros(size, size, dtype=torch.float64)
    for n in range(len(x)):
        outputs, J = jacobian(model, x[n : n + 1], parameters)
        J = J[:, index]
        if root is None:
            target = None if y is None else y[n : n + 1]
            total += J.T @ output_hessian(likelihood, outputs, target) @ J
        else:
            g = J.T @ root[n : n + 1].flatten()
            total += torch.outer(g, g)
    return total


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    """Equal to a relative `tolerance` in the norm."""
    assert a.shape == b.shape, (a.shape, b.shape)
    error = float((a - b).norm() / b.norm().clamp_min(1e-300))
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e}"

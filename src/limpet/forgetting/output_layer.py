"""Fit a new output layer again, after a repair has moved the features that it was trained on.

Training fits a new head to the features of the tuned weights, and a repair changes these features. For a linear output
layer the best one for the repaired features has a closed form: ridge regression to the outputs z of the tuned model,

    min over W, b of  sum over rows |W h + b - z|^2 + ridge |W - W0|^2,

where h are the features and W0 is the trained layer. It needs no labels, and does not change what the old tasks see,
which have heads of their own. The ridge minimizes the leave-one-out error, which also has a closed form (PRESS, Allen
1974; Hastie, Tibshirani & Friedman 2009, section 7.10).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from limpet.distributed import current
from limpet.errors import LimpetWarning, warn
from limpet.forgetting.probe import REPLACED, Probe, cosine
from limpet.model import Forward, call, full_precision, named_parameters, prepared, preserve_state
from limpet.model.context import eager

RIDGES = tuple(10.0**exponent for exponent in range(-7, 4))
"""Candidates for the ridge, in units of the mean, over features, of the sum of squares of a centered feature."""

UNMOVED = 0.9
"""Cosine of all other weights with what they were before, above which a fine-tune has not trained them anew."""


class OutputLayer:
    """The linear output layer of a model, with the outputs that it had at the tuned weights.

    Args:
        model: The model, at its tuned weights.
        name: Name of the layer.
        batches: The new data to fit it to.
        forward: As for `memory.consolidate`.

    Attributes:
        name: Name of the layer.
    """

    def __init__(self, model: nn.Module, name: str, batches: Sequence[Any], forward: Forward | None) -> None:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        self.name, self._model, self._layer = name, model, layer
        self._batches, self._forward = batches, forward
        self._trained = [p.detach().clone() for p in layer.parameters()]
        _, self._outputs = self._run()

    @torch.no_grad()
    def fit(self) -> None:
        """Fit the layer to the current features. A layer that has replaced it in the model is not touched."""
        if self._layer not in self._model.modules():
            return
        features, _ = self._run()
        weight, bias = self._layer.weight, self._layer.bias
        trained = [p.double().cpu() for p in self._trained]
        missing = self._outputs - features @ trained[0].T - (0.0 if bias is None else trained[1])
        change, constant = ridge_regression(features, missing, intercept=bias is not None)
        if not bool(torch.isfinite(change).all() and torch.isfinite(constant).all()):
            return
        weight.copy_(trained[0] + change)
        if bias is not None:
            bias.copy_(trained[1] + constant)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the trained layer, bit for bit."""
        for parameter, value in zip(self._layer.parameters(), self._trained, strict=True):
            parameter.copy_(value)

    def _run(self) -> tuple[Tensor, Tensor]:
        """Return the features and the outputs of the rows of all ranks, in float64 on the CPU."""
        _, calls = _recorded(self._model, {self.name: self._layer}, self._batches, self._forward)
        features, outputs = (
            _of_all_ranks(torch.cat([tensor.double().cpu() for tensor in tensors]))
            for tensors in zip(*calls[self.name], strict=True)
        )
        return features, outputs


def new_output_layer(
    model: nn.Module,
    probes: Sequence[Probe],
    covered: Collection[str],
    batches: Sequence[Any],
    forward: Forward | None,
) -> OutputLayer | None:
    """Find the linear layer that computes the outputs of a model, if the old tasks do not use it.

    Args:
        model: The model, at its tuned weights.
        probes: The probes of the memory, which store the heads of the old tasks.
        covered: Names of the parameters that the memory covers.
        batches: The new data.
        forward: As for `memory.consolidate`.

    Returns:
        The layer, which was added since the old tasks or has replaced theirs. None if old tasks share it, if it is not
        trained, if it has one output per position, or if the outputs are not those of one linear layer, which is found
        out by running the first batch.
    """
    if not batches or not probes:
        return None
    parameters = named_parameters(model)
    frozen = not any(p.requires_grad for p in parameters.values())  # as a whole, after training
    new = {p for name, p in parameters.items() if (p.requires_grad or frozen) and name not in covered}
    same: set[nn.Parameter] = set()
    for probe in probes:
        replaced = probe.head if probe.head_was_replaced(model) else {}
        new -= {parameters[name] for name in probe.outside if name in parameters and name not in replaced}
        same |= {parameters[name] for name in probe.outside.keys() - probe.changed_outside(model)}
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and new.issuperset(module.parameters()) and module.weight not in same
    }
    (outputs,), calls = _recorded(model, layers, batches[:1], forward)
    for name, found in calls.items():
        if len(found) == 1 and isinstance(outputs, Tensor) and outputs.dim() == 2 and _same(outputs, found[0][1]):
            return OutputLayer(model, name, batches, forward)
    return None


def warn_of_covered_head(
    model: nn.Module, means: Mapping[str, Tensor], batches: Sequence[Any], forward: Forward | None
) -> None:
    """Warn if the layer that computes the outputs is another one than the memory's, which a repair would pull it to.

    It is taken for another one if it is unlike the memory's, and all other weights are much as they were.

    Args:
        model: The model, at its tuned weights.
        means: The weights in the memory, by name.
        batches: The new data.
        forward: As for `memory.consolidate`.
    """
    parameters = named_parameters(model)
    pairs = {name: (parameters[name], mean) for name, mean in means.items() if parameters[name].shape == mean.shape}
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (pair := pairs.get(f"{name}.weight")) and cosine([pair]) < REPLACED
    }
    if not layers or not batches:
        return
    (outputs,), calls = _recorded(model, layers, batches[:1], forward)
    for name, found in calls.items():
        others = [pair for other, pair in pairs.items() if not other.startswith(f"{name}.")]
        is_last = len(found) == 1 and isinstance(outputs, Tensor) and _same(outputs, found[0][1])
        if is_last and others and cosine(others) > UNMOVED:
            warn(
                f"the memory covers the output layer {name}, whose weights are now unlike those in the memory: if it "
                "is a new head, the repair pulls it towards the old one; make the memory with "
                f"exclude=[{name!r}], so that the new one is fitted again instead",
                LimpetWarning,
            )


def ridge_regression(
    features: Tensor, targets: Tensor, *, intercept: bool = True, ridges: Sequence[float] = RIDGES
) -> tuple[Tensor, Tensor]:
    """Ridge regression with the ridge that has the least leave-one-out error.

    With centered features U S V^T and residuals r_i, the error of a row when the fit leaves it out is
    r_i / (1 - 1/n - sum over k of u_ik^2 s_k^2 / (s_k^2 + ridge)), without the 1/n if there is no intercept.

    Args:
        features: Features of every row, of shape (rows, features).
        targets: Targets of every row, of shape (rows, outputs).
        intercept: Whether to fit a constant, which is not shrunk.
        ridges: Candidates, in the unit of `RIDGES`.

    Returns:
        The weights, of shape (outputs, features), and the constant, of shape (outputs,).
    """
    rows = len(features)
    center, mean = features.mean(0) * intercept, targets.mean(0) * intercept
    left, singular, right = torch.linalg.svd(features - center, full_matrices=False)
    squares, projected = singular.square(), left.T @ (targets - mean)
    unit = float(squares.sum()) / features.shape[1]
    best, chosen = float("inf"), torch.zeros_like(squares)
    for ridge in ridges:
        kept = squares / (squares + ridge * unit).clamp_min(torch.finfo(squares.dtype).tiny)
        left_out = 1 - intercept / rows - left.square() @ kept
        residuals = targets - mean - left @ (kept[:, None] * projected)
        error = float((residuals / left_out.clamp_min(1e-12)[:, None]).square().sum())
        if error < best:
            best, chosen = error, kept
    solved = torch.where(squares > 0, chosen / singular.clamp_min(torch.finfo(squares.dtype).tiny), 0.0)
    weights = (right.T @ (solved[:, None] * projected)).T
    return weights, mean - weights @ center


def _recorded(
    model: nn.Module, layers: Mapping[str, nn.Linear], batches: Sequence[Any], forward: Forward | None
) -> tuple[list[Any], dict[str, list[tuple[Tensor, Tensor]]]]:
    """Run a model on batches.

    Args:
        model: The model.
        layers: Some of its layers, by name.
        batches: The batches.
        forward: As for `memory.consolidate`.

    Returns:
        The outputs of the model for every batch, and the inputs and outputs of every call of these layers.
    """
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layers}

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _, inputs, outputs: calls[name].append((inputs[0], outputs))

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    device = next(model.parameters()).device
    try:
        with preserve_state(model), torch.no_grad(), full_precision(), eager():
            return [call(model, prepared(batch, device), forward)[0] for batch in batches], calls
    finally:
        for handle in handles:
            handle.remove()


def _same(outputs: Tensor, others: Tensor) -> bool:
    return outputs.shape == others.shape and torch.equal(outputs.float(), others.float())


def _of_all_ranks(rows: Tensor) -> Tensor:
    """Concatenate the rows of all ranks of replicas."""
    ranks = current()
    if ranks is None:
        return rows
    counts = ranks.gather(len(rows))
    start = sum(counts[: ranks.rank])
    placed = rows.new_zeros(sum(counts), *rows.shape[1:])
    placed[start : start + len(rows)] = rows
    return ranks.sum({"rows": placed})["rows"]

"""Linearized Laplace: the network linearized at the posterior mean has Gaussian outputs in closed form.

    f(x) ~ N(f(x, mean), J L^-1 J^T),    J the Jacobian of the outputs with respect to the weights

(MacKay 1992; Immer, Korzepa and Bauer 2021, "Improving predictions of Bayesian neural nets via local linearization".)
In the eigenbasis of L (for kronecker-sum, of its constant-size approximation) every block contributes the products of
its rotated gradients divided by the eigenvalues. If a layer is used once per example, the gradient of output c is
g_c a^T, and the contribution takes only two small matrix products,

    sum_ij (U_H^T g_c)_i (U_H^T g_c')_i (U_Q^T a)_j^2 / (D_ij + prior)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from limpet.curvature import gradients_at
from limpet.curvature.audit import not_by_example, unseen
from limpet.curvature.hooks import Recorder
from limpet.errors import UnsupportedError, finite_number
from limpet.layers import Call, MatrixLayer, example_gradients
from limpet.layers.base import CHUNK
from limpet.likelihoods import as_tensors
from limpet.model import Forward, call, named_parameters, part, perturbed, prepared, preserve_state, trainable
from limpet.model.batch import batch_size
from limpet.posterior import BlockPosterior, Posterior
from limpet.precision import Kronecker, Spectrum
from limpet.precision.base import inverse_root

MOST_OUTPUTS = 64
"""Largest number of outputs for which the Jacobian, one backward pass per output, is computed."""


@dataclass(frozen=True)
class OutputDistribution:
    """Gaussian distribution of the outputs, independent between examples.

    Args:
        mean: Mean, of shape (examples, outputs).
        covariance: Covariance, of shape (examples, outputs, outputs).
    """

    mean: Tensor
    covariance: Tensor

    @property
    def variance(self) -> Tensor:
        """Marginal variance of each output, of shape (examples, outputs)."""
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    def sample(self, draws: int, generator: torch.Generator | None = None) -> Tensor:
        """Sample outputs.

        Args:
            draws: Number of samples.
            generator: Random generator. Default: that of the device.

        Returns:
            The samples, of shape (draws, examples, outputs).
        """
        values, vectors = torch.linalg.eigh(self.covariance)
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        device = self.mean.device if generator is None else generator.device
        drawn = torch.randn((draws, *self.mean.shape), dtype=self.mean.dtype, device=device, generator=generator)
        outputs: Tensor = self.mean + (root @ drawn.to(self.mean.device).unsqueeze(-1)).squeeze(-1)
        return outputs


def output_distribution(
    posterior: Posterior, inputs: Any, *, forward: Forward | None = None, prior_precision: float | None = None
) -> OutputDistribution:
    """Compute the output distribution of the linearized model for a batch of inputs. The model is left unchanged.

    Args:
        posterior: The posterior.
        inputs: The batch of inputs.
        forward: A function (model, batch) -> outputs. None calls the model on the inputs.
        prior_precision: Prior precision to use instead of that of the posterior.

    Returns:
        The Gaussian distribution of the outputs.

    Raises:
        UnsupportedError: If the model does not give one output vector per example of at most `MOST_OUTPUTS` numbers,
            or per-sample blocks need a batch that can be split into examples.
    """
    parameters = named_parameters(posterior.model)
    batch = prepared(inputs, next(iter(parameters.values())).device)
    blocks = [held.block for held in posterior.held.values()]
    recorder = Recorder()
    with (
        preserve_state(posterior.model),
        trainable(parameters[name] for block in blocks for name in block.parameters),
        perturbed(parameters, posterior.way_to_the_mean()),
        torch.inference_mode(False),
        torch.enable_grad(),
        recorder.attached(blocks),
    ):
        with recorder.recording():
            outputs = _flat(call(posterior.model, batch, forward)[0])
        per_sample = {block.name for block in blocks if not block.layers} | unseen(
            blocks, recorder, parameters, (outputs,)
        )[0]
        names = {block.name for block in blocks}
        per_sample |= not_by_example(blocks, names, recorder, posterior.model, batch, forward, (outputs,))
        covariance = outputs.new_zeros(*outputs.shape, outputs.shape[1], dtype=_wide(outputs))
        calls = _calls_by_output(recorder, outputs)
        for name, held in posterior.held.items():
            by_output = [found.get(name, []) for found in calls]
            if name not in per_sample and any(by_output):
                with torch.no_grad():
                    covariance += _share(held, _spectrum(held, prior_precision), by_output, covariance)
        if per_sample:
            direct = [held for name, held in posterior.held.items() if name in per_sample]
            covariance += _direct(posterior, direct, batch, forward, prior_precision, covariance)
    return OutputDistribution(outputs.detach().to(covariance.dtype), (covariance + covariance.mT) / 2)


def _flat(outputs: Any) -> Tensor:
    tensors = as_tensors(outputs)
    if len(tensors) != 1 or tensors[0].dim() != 2 or tensors[0].shape[1] > MOST_OUTPUTS:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise UnsupportedError(
            f"linearized predictions require one output vector per example of at most {MOST_OUTPUTS} elements, but "
            f"the model returned {shapes}: use link_approximation='sampled', or select the outputs with forward="
        )
    return tensors[0]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _spectrum(held: BlockPosterior, prior_precision: float | None) -> Spectrum:
    spectrum = held.precision.spectrum()
    if prior_precision is None:
        return spectrum
    return replace(spectrum, prior=finite_number("prior_precision", prior_precision))


def _calls_by_output(recorder: Recorder, outputs: Tensor) -> list[dict[str, list[Call]]]:
    """The recorded calls of every layer, with the gradients of each output in turn."""
    found = []
    for c in range(outputs.shape[1]):
        root = torch.zeros_like(outputs)
        root[:, c] = 1
        last = c + 1 == outputs.shape[1]
        with torch.no_grad():
            recorder.take(gradients_at((outputs,), recorder.edges, (root,), keep=not last))
        found.append(
            {
                name: [replace(each) for each in calls if each.gradient is not None]
                for name, calls in recorder.calls.items()
            }
        )
    return found


def _share(held: BlockPosterior, spectrum: Spectrum, by_output: Sequence[Sequence[Call]], like: Tensor) -> Tensor:
    """Contribution of a block to the covariance of the outputs."""
    if isinstance(held.precision, Kronecker) and len(held.precision.shape) == 2 and _once(by_output):
        return _low_rank_share(held.precision, spectrum, by_output, like)
    share = torch.zeros_like(like)
    step = max(1, CHUNK // (held.precision.shape.numel() * len(by_output)))
    for start in range(0, like.shape[0], step):
        rows = slice(start, start + step)
        gradients = [_gradients(calls, rows, held, like[rows]) for calls in by_output]
        share[rows] = _products(spectrum, torch.stack(gradients, 1))
    return share


def _once(by_output: Sequence[Sequence[Call]]) -> bool:
    """Whether the weights are used by a single matrix layer, at a single position of every example."""
    return all(
        len(calls) == 1 and isinstance(calls[0].layer, MatrixLayer) and calls[0].data.shape[-2] == 1
        for calls in by_output
    )


def _gradients(calls: Sequence[Call], rows: slice, held: BlockPosterior, like: Tensor) -> Tensor:
    if not calls:
        return like.new_zeros(like.shape[0], *held.precision.shape)
    return example_gradients(calls, rows).to(like.dtype)


def _products(spectrum: Spectrum, jacobian: Tensor) -> Tensor:
    """Compute J L^-1 J^T for a Jacobian of shape (examples, outputs, *block)."""
    full = spectrum.total + spectrum.prior
    coordinates = (spectrum.into(jacobian.to(full.dtype)) * inverse_root(full)).flatten(2)
    return (coordinates @ coordinates.mT).to(jacobian.dtype)


def _low_rank_share(
    precision: Kronecker, spectrum: Spectrum, by_output: Sequence[Sequence[Call]], like: Tensor
) -> Tensor:
    """Contribution of a block whose gradients have rank one: a layer that is used once per example."""
    first = by_output[0][0]
    data = first.data.squeeze(-2).to(like.dtype)
    if isinstance(first.layer, MatrixLayer) and first.layer.has_bias:
        data = torch.cat([data, data.new_ones(len(data), 1)], -1)
    found = [calls[0].gradient for calls in by_output]
    gradients = torch.stack([g.squeeze(-2) for g in found if g is not None], 1).to(like.dtype)
    sides = precision.sides()
    if sides.columns is not None:
        data = data @ sides.columns.to(like.device, like.dtype)
    if sides.rows is not None:
        gradients = gradients @ sides.rows.to(like.device, like.dtype)
    inverse = inverse_root(spectrum.total + spectrum.prior).square().to(like.dtype)
    weight = data.square() @ inverse.mT  # (examples, out)
    share: Tensor = (gradients * weight.unsqueeze(1)) @ gradients.mT
    return share


def _direct(
    posterior: Posterior,
    blocks: Sequence[BlockPosterior],
    batch: Any,
    forward: Forward | None,
    prior_precision: float | None,
    like: Tensor,
) -> Tensor:
    """Contribution of the per-sample blocks, which no layer class supports: one example at a time."""
    weights = posterior.parameters()
    names = [name for held in blocks for name in held.block.parameters]
    share = torch.zeros_like(like)
    if len(like) > 1 and batch_size(batch) != len(like):
        raise UnsupportedError(
            f"{', '.join(held.block.name for held in blocks)}: these blocks are linearized per sample, but the batch "
            "cannot be split into examples: pass one example at a time, or use link_approximation='sampled'"
        )
    for n in range(like.shape[0]):
        outputs = _flat(call(posterior.model, part(batch, slice(n, n + 1)), forward)[0])
        last = outputs.shape[1] - 1
        rows = []
        for c in range(last + 1):
            gradients = gradients_at((outputs[0, c],), [weights[name] for name in names], None, keep=c < last)
            found = zip(names, gradients, strict=True)
            rows.append({name: torch.zeros_like(weights[name]) if g is None else g.to_dense() for name, g in found})
        for held in blocks:
            jacobian = torch.stack([held.block.gather(row) for row in rows]).unsqueeze(0).to(like.dtype)
            share[n] += _products(_spectrum(held, prior_precision), jacobian)[0]
    return share

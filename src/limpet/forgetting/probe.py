"""Probes: inputs and the model's outputs on them at consolidation, stored so that drift can be measured later.

A probe contains input data, so it is opt-in: `memory.consolidate(batches, probe=100)`. For a generative model the
inputs can be samples from the model itself (`limpet.integrations.causal_lm.self_samples`), which contain no user data.
Targets are not stored, and for a large vocabulary only some of the labels are (`Categorical.summary`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from limpet.distributed import reshard, whole
from limpet.errors import UnsupportedError, finite_number, signed_number
from limpet.likelihoods import Likelihood
from limpet.likelihoods.base import TALLY
from limpet.model import Forward, call, named_parameters, prepared, preserve_state, replaced
from limpet.model.adapters import adapter_parameters
from limpet.model.batch import is_causal, is_encoder_decoder, target_key
from limpet.model.quantized import QuantizedWeight, is_quantized

Plain = Any
"""A JSON value: a number, a string, None, or a list or dictionary of these."""


HEAD = "head/"
"""Prefix of the names of the stored parameters."""

HEAD_SHARE = 10
"""Parameters that the memory does not cover are stored if they are at most one in this many of the model's weights; of
more, those that are trained."""

REPLACED = 0.5
"""Cosine with what they were before, below which weights are taken for replaced rather than trained further."""


@dataclass(frozen=True)
class Probe:
    """Batches of inputs with a summary of the model's outputs for each.

    Attributes:
        batches: Inputs, in the form that the model is called with.
        summaries: The likelihood's summary of the outputs, one per batch.
        scale: Factor that converts the likelihood's divergence to nats, for likelihoods that estimate their noise.
        outside: Checksums of the parameters that the memory does not cover, used to detect changes in them.
        head: The values of those parameters, or of those of them that are trained, if they are few compared to the
            model, so that the outputs of an encoder can be compared through the head that they were recorded with.
        quantized: Whether the model had quantized weights when the outputs were recorded.
        new_head: Whether the head had been replaced when the first training with protection began; None before that. It
            is not saved.
    """

    batches: Sequence[Any]
    summaries: Sequence[Mapping[str, Tensor]]
    scale: float = 1.0
    outside: Mapping[str, Sequence[float]] = field(default_factory=dict)
    head: Mapping[str, Tensor] = field(default_factory=dict)
    quantized: bool = False
    new_head: bool | None = None

    @classmethod
    def record(
        cls,
        model: nn.Module,
        batches: Sequence[Any],
        likelihood: Likelihood,
        forward: Forward | None,
        *,
        held: Collection[str],
        seed: int,
    ) -> Probe:
        """Record the current outputs of a model.

        Args:
            model: The model. Its state is preserved.
            batches: The data whose inputs are stored.
            likelihood: The likelihood of the outputs.
            forward: As for `memory.consolidate`. If given, batches are stored whole, including their targets.
            held: Names of the parameters that the memory covers.
            seed: Seed for sampling labels from a large vocabulary.

        Returns:
            The probe, on the CPU.

        Raises:
            UnsupportedError: If the batches contain objects that cannot be stored, or if the likelihood does not define
                a divergence.
        """
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(seed)
        kept, summaries, tally = [], [], torch.zeros(TALLY, dtype=torch.float64)
        with preserve_state(model), torch.no_grad():
            for batch in batches:
                given = prepared(batch, device)
                outputs, targets = call(model, given, forward)
                found = likelihood.summary(outputs, targets, generator)
                tally += likelihood.tally(outputs, targets)
                summaries.append({name: tensor.cpu() for name, tensor in found.items()})
                kept.append(_on_cpu(given if forward is not None else without_targets(model, given)))
        outside = _sums(model, held)
        scale = likelihood.fisher_scale(tally, empirical=False)
        quantized = any(map(is_quantized, model.modules()))
        probe = cls(kept, summaries, scale, outside, _head(model, outside), quantized)
        probe.metadata()  # raises now, rather than on save, if a batch cannot be stored
        return probe

    def with_outputs_of(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        forward: Forward | None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Probe]:
        """Yield one probe for every batch, with the outputs of another model at the positions that count in this one.

        Args:
            model: The other model.
            likelihood: The likelihood of the outputs.
            forward: The forward function that the probe was recorded with.
            generator: Samples labels of a large vocabulary. None keeps all of them.

        Yields:
            The probes.
        """
        device = next(model.parameters()).device
        for batch, stored in zip(self.batches, self.summaries, strict=True):
            outputs, _ = call(model, prepared(batch, device), forward)
            counted = {name: tensor for name, tensor in stored.items() if name.endswith("counted")}
            found = likelihood.summary(outputs, None, generator)
            yield replace(self, batches=[batch], summaries=[found | counted])

    def changed_outside(self, model: nn.Module) -> list[str]:
        """List the parameters that the memory does not cover and that have changed, such as a new head.

        Args:
            model: The model as it is now.

        Returns:
            The names of the parameters, including those that no longer exist.
        """
        parameters = named_parameters(model)
        now = _sums(model, [name for name in parameters if name not in self.outside])

        def same(name: str, sums: Sequence[float]) -> bool:
            # the tolerance allows for another dtype or order of summation
            return name in now and all(abs(a - b) <= 1e-3 * sums[1] for a, b in zip(now[name], sums, strict=True))

        quantized = {name for name, p in parameters.items() if isinstance(p, QuantizedWeight)}  # and so not trained
        return [name for name, sums in self.outside.items() if name not in quantized and not same(name, sums)]

    def before_training(self, model: nn.Module) -> Probe:
        """Note whether the head has been replaced, when a training with protection begins.

        Later that is hard to tell: a new head that was initialized with the seed of the old one stays close to it.

        Args:
            model: The model as it is now.

        Returns:
            The probe, the same one if a training has begun before.
        """
        if self.new_head is not None or not self.head:
            return self
        changed = self.changed_outside(model)
        return replace(self, new_head=bool(changed) and set(changed) <= self.head.keys())

    @torch.no_grad()
    def head_was_replaced(self, model: nn.Module) -> bool:
        """Tell whether the head was replaced, rather than trained further.

        Args:
            model: The model as it is now.

        Returns:
            Whether the stored parameters had changed before training began, or have other shapes or, together, a cosine
            with their stored values below `REPLACED`.
        """
        if not self.head:
            return False
        parameters, changed = named_parameters(model), self.changed_outside(model)
        if not changed or not set(changed) <= parameters.keys() & self.head.keys():
            return False
        if self.new_head:
            return True
        pairs = [(whole(parameters[name]).cpu().double(), self.head[name].double()) for name in changed]
        if any(now.shape != before.shape for now, before in pairs):
            return True
        return cosine(pairs) < REPLACED

    @contextmanager
    def through_head(self, model: nn.Module) -> Iterator[None]:
        """Run the body with the stored head in place of the one that has replaced it.

        Args:
            model: The model. If its head was not replaced, it runs as it is.
        """
        reshard(model)
        try:
            with replaced(named_parameters(model), self.head if self.head_was_replaced(model) else {}):
                yield
        finally:
            reshard(model)  # what a sharded model gathered has the stored head

    @property
    def rows(self) -> int:
        """Number of examples."""
        return sum(len(next(iter(summary.values()))) for summary in self.summaries)

    @property
    def nbytes(self) -> int:
        """Size of all tensors, in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""
        found: dict[str, Tensor] = {}
        for i, (batch, summary) in enumerate(zip(self.batches, self.summaries, strict=True)):
            _flatten(batch, f"{i}/inputs", found)
            found.update({f"{i}/outputs/{name}": tensor for name, tensor in summary.items()})
        return found | {f"{HEAD}{name}": tensor for name, tensor in self.head.items()}

    def metadata(self) -> Plain:
        """Return everything that is not a tensor as JSON values, with a note that the file contains inputs."""
        forms = [_flatten(batch, f"{i}/inputs", {}) for i, batch in enumerate(self.batches)]
        return {
            "holds": "inputs, with the outputs of the model before",
            "scale": self.scale,
            "batches": forms,
            "outside": dict(self.outside),
            **({"quantized": True} if self.quantized else {}),
        }

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], metadata: Plain) -> Probe:
        """Invert `tensors` and `metadata`.

        Args:
            tensors: The tensors, by name.
            metadata: The JSON values.

        Returns:
            The probe.

        Raises:
            ValueError: If outputs are missing or of different lengths, a tensor contains inf or nan, or a batch is
                malformed.
            KeyError: If a tensor or a field of the metadata is missing.
        """
        batches = [_unflatten(form, tensors) for form in metadata["batches"]]
        summaries = []
        for i in range(len(batches)):
            prefix = f"{i}/outputs/"
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            if not own or len({len(t) for t in own.values()}) != 1:
                raise ValueError(f"batch {i} of the probe has no outputs, or outputs of different lengths")
            summaries.append(own)
        # -inf is the logarithm of a probability of zero, and an entry of some attention masks
        if any(t.is_floating_point() and t.numel() and not float(t.max()) < math.inf for t in tensors.values()):
            raise ValueError("the probe contains inf or nan")
        outside = {str(name): [signed_number(name, one) for one in sums] for name, sums in metadata["outside"].items()}
        head = {name.removeprefix(HEAD): t for name, t in tensors.items() if name.startswith(HEAD)}
        if not head.keys() <= outside.keys() or not all(bool(t.isfinite().all()) for t in head.values()):
            raise ValueError("the probe contains parameters that it does not name, or that are not finite")
        scale = finite_number("scale", metadata["scale"])
        return cls(batches, summaries, scale, outside, head, metadata.get("quantized", False) is True)


@torch.no_grad()
def cosine(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Compute the cosine of tensors with others of their shapes, all together.

    Args:
        pairs: The tensors, each with the other.

    Returns:
        The cosine; 1 if one side is zero.
    """
    both = first = second = 0.0
    for one, other in pairs:
        a = one.flatten().to(torch.promote_types(one.dtype, torch.float32))
        b = other.flatten().to(a)
        both, first, second = both + float(a @ b), first + float(a @ a), second + float(b @ b)
    return both / math.sqrt(first * second) if first * second else 1.0


@torch.no_grad()
def _sums(model: nn.Module, without: Collection[str]) -> dict[str, list[float]]:
    """Sum the values and the absolute values of every parameter that is neither in `without` nor in an adapter."""
    left_out = adapter_parameters(model)
    return {
        name: [float(values.sum()), float(values.abs().sum())]
        for name, p in named_parameters(model).items()
        if name not in without and p not in left_out and not isinstance(p, QuantizedWeight)
        for values in [whole(p).double()]
    }


def _head(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Copy these parameters, if together they are at most one in `HEAD_SHARE` weights of the model.

    If they are more, such as with frozen embeddings, those of them that are trained are copied, if they are that few.
    """
    parameters = named_parameters(model)
    most = sum(p.numel() for p in parameters.values()) / HEAD_SHARE
    uncovered = {name: parameters[name] for name in names if _is_stored(parameters[name])}
    for found in (uncovered, {name: p for name, p in uncovered.items() if p.requires_grad}):
        if sum(p.numel() for p in found.values()) <= most:
            return {name: _on_cpu(whole(p)) for name, p in found.items()}
    return {}


def _is_stored(parameter: Tensor) -> bool:
    """Whether a head may contain this parameter."""
    return parameter.is_floating_point() and not isinstance(parameter, QuantizedWeight)


def without_targets(model: nn.Module, batch: Any) -> Any:
    """Drop the targets of a batch, leaving a form that the model can be called with in the same way.

    Args:
        model: The model.
        batch: The batch.

    Returns:
        The batch without targets, except for an encoder-decoder, whose decoder inputs are made from them.
    """
    if isinstance(batch, Mapping):
        if is_encoder_decoder(model):
            return batch  # the decoder inputs are made from the labels
        target = "labels" if "input_ids" in batch and is_causal(model) else target_key(batch)
        return {key: value for key, value in batch.items() if key != target}
    return (batch[0], None) if isinstance(batch, tuple | list) and len(batch) == 2 else batch


def _on_cpu(batch: Any) -> Any:
    """Copy a batch to the CPU."""
    if isinstance(batch, Tensor):
        return batch.detach().cpu().clone(memory_format=torch.contiguous_format)
    if isinstance(batch, Mapping):
        return {key: _on_cpu(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        items = [_on_cpu(value) for value in batch]
        return items if isinstance(batch, list) else tuple(items)
    return batch


def _flatten(batch: Any, name: str, found: dict[str, Tensor]) -> Plain:
    """Describe the structure of a batch as JSON, and add its tensors to `found`."""
    if isinstance(batch, Tensor):
        found[name] = batch
        return {"tensor": name}
    if isinstance(batch, Mapping):
        return {"mapping": {str(key): _flatten(value, f"{name}/{key}", found) for key, value in batch.items()}}
    if isinstance(batch, tuple | list):
        kind = "tuple" if isinstance(batch, tuple) else "list"
        return {kind: [_flatten(value, f"{name}/{i}", found) for i, value in enumerate(batch)]}
    if batch is None or isinstance(batch, bool | int | float | str):
        return {"plain": batch}
    raise UnsupportedError(
        f"a probe can store only tensors, numbers and strings, but the batches contain a {type(batch).__name__}: "
        "remove it from the batches, or consolidate without probe="
    )


def _unflatten(form: Plain, tensors: Mapping[str, Tensor]) -> Any:
    """Invert `_flatten`."""
    ((kind, value),) = form.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "mapping":
        return {key: _unflatten(inner, tensors) for key, inner in value.items()}
    if kind in ("tuple", "list"):
        items = [_unflatten(inner, tensors) for inner in value]
        return tuple(items) if kind == "tuple" else items
    if kind != "plain" or not (value is None or isinstance(value, bool | int | float | str)):
        raise ValueError(f"the probe contains an entry of unknown kind {kind!r}")
    return value

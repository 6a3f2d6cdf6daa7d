"""A probe: inputs, and the model's outputs for them when it was consolidated, so that drift can be measured later.

It holds inputs, so it is opt-in: `memory.consolidate(batches, probe=100)`. For a generative model the inputs can be
its own samples (`limpet.integrations.causal_lm.self_samples`), which are nobody's data. Targets are not kept;
of a large vocabulary only some labels are (`Categorical.summary`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from limpet.errors import UnsupportedError
from limpet.likelihoods import Likelihood
from limpet.model import Forward, call, named_parameters, prepared, preserve_state
from limpet.model.adapters import adapter_parameters
from limpet.model.batch import is_causal, target_key

Plain = Any
"""Numbers, words, None, and lists and dictionaries of them: JSON."""


@dataclass(frozen=True)
class Probe:
    """Batches with a summary of the outputs for each.

    Attributes:
        batches: Inputs, as the model takes them.
        summaries: What the likelihood kept of the outputs, one for every batch.
        scale: What makes nats of the likelihood's divergence, where it has estimated its own noise.
        outside: Sums over the parameters that the memory does not hold, by which a change in them is noticed.
    """

    batches: Sequence[Any]
    summaries: Sequence[Mapping[str, Tensor]]
    scale: float = 1.0
    outside: Mapping[str, Sequence[float]] = field(default_factory=dict)

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
        """What a model says now.

        Args:
            model: The model, which is left as it was.
            batches: The data to keep the inputs of.
            likelihood: What the outputs mean.
            forward: As for `memory.consolidate`; whatever it is given has to be kept whole, targets too.
            held: The names of the parameters that the memory holds.
            seed: Of the labels that are drawn from a large vocabulary.

        Returns:
            The probe, on the CPU.
        """
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(seed)
        kept, summaries, tally = [], [], torch.zeros(2, dtype=torch.float64)
        with preserve_state(model), torch.no_grad():
            for batch in batches:
                given = prepared(batch, device)
                outputs, targets = call(model, given, forward)
                found = likelihood.summary(outputs, targets, generator)
                tally += likelihood.tally(outputs, targets)
                summaries.append({name: tensor.cpu() for name, tensor in found.items()})
                kept.append(_on_cpu(given if forward is not None else _without_targets(model, given)))
        probe = cls(kept, summaries, likelihood.fisher_scale(tally, empirical=False), _sums(model, held))
        probe.metadata()  # what cannot be kept in a file is rejected now
        return probe

    def changed_outside(self, model: nn.Module) -> list[str]:
        """The parameters that the memory does not hold and that are others now, such as a new head."""
        now = _sums(model, [name for name in named_parameters(model) if name not in self.outside])

        def same(name: str, sums: Sequence[float]) -> bool:
            # to what another dtype or another order of summation may change
            return name in now and all(abs(a - b) <= 1e-3 * sums[1] for a, b in zip(now[name], sums, strict=True))

        return [name for name, sums in self.outside.items() if not same(name, sums)]

    @property
    def rows(self) -> int:
        """Examples."""
        return sum(len(next(iter(summary.values()))) for summary in self.summaries)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to keep, by name."""
        found: dict[str, Tensor] = {}
        for i, (batch, summary) in enumerate(zip(self.batches, self.summaries, strict=True)):
            _flatten(batch, f"{i}/inputs", found)
            found.update({f"{i}/outputs/{name}": tensor for name, tensor in summary.items()})
        return found

    def metadata(self) -> Plain:
        """What is no tensor, as JSON. It says in words that there are inputs in the file."""
        forms = [_flatten(batch, f"{i}/inputs", {}) for i, batch in enumerate(self.batches)]
        return {
            "holds": "inputs, with the outputs of the model before",
            "scale": self.scale,
            "batches": forms,
            "outside": dict(self.outside),
        }

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], metadata: Plain) -> Probe:
        """The inverse of `tensors` and `facts`; a ValueError or KeyError says what does not fit."""
        batches = [_unflatten(form, tensors) for form in metadata["batches"]]
        summaries = []
        for i in range(len(batches)):
            prefix = f"{i}/outputs/"
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            if not own or len({len(t) for t in own.values()}) != 1:
                raise ValueError(f"the probe's batch {i} has no outputs, or outputs of several lengths")
            summaries.append(own)
        if any(t.is_floating_point() and bool(t.isnan().any()) for t in tensors.values()):
            raise ValueError("the probe holds nan")
        outside = {str(name): [float(one) for one in sums] for name, sums in metadata["outside"].items()}
        return cls(batches, summaries, float(metadata["scale"]), outside)


@torch.no_grad()
def _sums(model: nn.Module, without: Collection[str]) -> dict[str, list[float]]:
    """The sum of every other parameter, and of its absolute values; adapters are what the memory holds."""
    left_out = adapter_parameters(model)
    return {
        name: [float(p.double().sum()), float(p.double().abs().sum())]
        for name, p in named_parameters(model).items()
        if name not in without and p not in left_out
    }


def _without_targets(model: nn.Module, batch: Any) -> Any:
    """The inputs of a batch, in a form that the model is called on as before."""
    if isinstance(batch, Mapping):
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            return batch  # it makes the decoder's inputs from the labels
        target = "labels" if "input_ids" in batch and is_causal(model) else target_key(batch)
        return {key: value for key, value in batch.items() if key != target}
    return (batch[0], None) if isinstance(batch, tuple | list) and len(batch) == 2 else batch


def _on_cpu(batch: Any) -> Any:
    """A copy that nobody else changes."""
    if isinstance(batch, Tensor):
        return batch.detach().cpu().clone(memory_format=torch.contiguous_format)
    if isinstance(batch, Mapping):
        return {key: _on_cpu(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        items = [_on_cpu(value) for value in batch]
        return items if isinstance(batch, list) else tuple(items)
    return batch


def _flatten(batch: Any, name: str, found: dict[str, Tensor]) -> Plain:
    """The form of a batch as JSON; its tensors go to `found`."""
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
        f"a probe keeps tensors, numbers and words, and the batches hold a {type(batch).__name__}: leave out probe="
    )


def _unflatten(form: Plain, tensors: Mapping[str, Tensor]) -> Any:
    ((kind, value),) = form.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "mapping":
        return {key: _unflatten(inner, tensors) for key, inner in value.items()}
    if kind in ("tuple", "list"):
        items = [_unflatten(inner, tensors) for inner in value]
        return tuple(items) if kind == "tuple" else items
    if kind != "plain" or not (value is None or isinstance(value, bool | int | float | str)):
        raise ValueError(f"the probe has a part of a kind that is not known: {kind!r}")
    return value

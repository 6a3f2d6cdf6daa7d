"""Protection in the outputs: the interface of the methods that compare what a model predicts with what it predicted.

Weights are a poor witness of what a large pretrained network knows: many changes of them leave its predictions alone,
and a curvature approximates only the first of the others. The methods here need none. They add

    weight * mean KL(before || now)

to the loss, on inputs of which the model before is asked what it would have said.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from limpet.errors import LimpetError, MemoryFileError, UnsupportedError, finite_number, logger, positive_whole
from limpet.io.state import State, sealed
from limpet.likelihoods import Likelihood, resolve
from limpet.methods.checks import check_model
from limpet.model import Forward, unwrapped
from limpet.version import __version__

if TYPE_CHECKING:  # imported lazily at run time, to keep `import limpet` fast
    from limpet.forgetting.drift import Drift
    from limpet.forgetting.probe import Probe
    from limpet.forgetting.reference import Reference
    from limpet.methods.state_header import Settings
    from limpet.protection.output_protection import Compared, OutputProtection

COPY = "reference/"
"""Prefix of the names of the tensors of a frozen copy."""

NOT_CONSOLIDATED = "this memory knows no model from before: call memory.consolidate(...) before training"

NO_HELD_OUT = (
    "this memory has no held-out inputs to measure drift on: call memory.consolidate(batches, probe=100), which stores "
    "100 of them"
)


class OutputMemory(ABC):
    """A model's outputs from before, which training is held to.

    Abstract base class: use `limpet.SelfRehearsal` or `limpet.Distillation`. It has the names of `limpet.Memory`, but
    no posterior over the weights, and therefore no forecast, no repair and no predictive distribution.

    Args:
        model: The model to protect. Wrappers (torch.compile, DistributedDataParallel, PEFT) are unwrapped.
        likelihood: The meaning of the model's outputs: a name or a `limpet.Likelihood`.
        weight: Weight of the divergence relative to the mean loss.
        reference: Where the outputs before come from: "stored", "adapters", "copy" or "auto".
        forward: `forward(model, batch)` returns `(outputs, None)`, if the outputs to protect are not those that the
            model returns. It is not part of the file: set `memory.forward` after `limpet.load`.

    Attributes:
        model: The protected model, unwrapped.
        likelihood: The likelihood.
        weight: Weight of the divergence relative to the mean loss. It can be changed between tasks.
        reference: The `reference` that was asked for.
        forward: The `forward` that computes the outputs.
        tasks: Number of calls of `consolidate`.
        probes: Held-out inputs with the outputs before; `drift` is measured on them.
    """

    method: ClassVar[str]
    _stores_outputs: ClassVar[bool]  # whether the inputs to compare on are known before training

    def __init__(
        self,
        model: nn.Module,
        *,
        likelihood: str | Likelihood,
        weight: float,
        reference: str,
        forward: Forward | None,
    ) -> None:
        from limpet.forgetting.reference import check_reference

        check_model(model)
        self.model = unwrapped(model)
        self.likelihood = resolve(likelihood)
        self.weight = finite_number("weight", weight)
        check_reference(reference, stored=self._stores_outputs)
        self.reference = reference
        self.forward = forward
        self.tasks = 0
        self.probes: tuple[Probe, ...] = ()
        self._kind: str | None = None  # the kind of reference, once consolidated
        self._before: Reference | None = None
        self._protection: OutputProtection | None = None
        self._resume = 0  # steps of a loaded run, for the next `protect`

    # --- interface -----------------------------------------------------------------------------------------------

    @abstractmethod
    def consolidate(self, batches: Iterable[Any] | None = None) -> None:
        """Take the model as it is now for the model before."""

    def protect(
        self,
        optimizer: Any,
        *,
        examples: int | None = None,
        every: int = 1,
        mode: str = "auto",
        reduction: str = "mean",
        batch_size: int | None = None,
        budget: float | None = None,
    ) -> OutputProtection:
        """Protect the outputs while the model trains: `with memory.protect(optimizer): ...`.

        Inside the `with` block every `optimizer.step()` also follows the gradient of weight * KL(before || now), which
        one forward and one backward pass compute before the step. The training loop needs no other change. Other
        memories may protect the same optimizer.

        Clipping acts on the gradient of the loss alone.

        Args:
            optimizer: The optimizer that trains the model.
            examples: Accepted because other memories need it. The divergence is a mean, so it is not used.
            every: Compare outputs only in every this many steps, with this many times the weight.
            mode: "auto" or "gradient", which are the same here.
            reduction: "mean" if the training loss is a mean over examples, "sum" if it is a sum over the batch.
            batch_size: Number of examples that the loss of one step sums over. Required with `reduction="sum"`.
            budget: Not supported: monitor `drift` and choose the weight.

        Returns:
            A context manager that adds hooks to the optimizer on entry and removes them on exit.

        Raises:
            LimpetError: If nothing was consolidated, or inside another `with memory.protect(...)`.
            UnsupportedError: If the optimizer, the model, the mode or a budget is not supported.
            ValueError: If an argument has an invalid value.
        """
        from limpet.forgetting.reference import AdaptersOff
        from limpet.protection.optimizers import penalty_weight
        from limpet.protection.output_protection import OutputProtection

        self._reject_inside_protect()
        if self._kind is None:
            raise LimpetError(NOT_CONSOLIDATED)
        if isinstance(self._before, AdaptersOff):
            self._before.check()
        if mode not in ("auto", "gradient"):
            raise UnsupportedError(
                f"{type(self).__name__} adds a gradient, so mode={mode!r} does not apply: leave it out"
            )
        if budget is not None:
            raise UnsupportedError(f"{type(self).__name__} has no budget: monitor memory.drift(), and choose weight=")
        if examples is not None:
            positive_whole("examples", examples)
        factor = 1.0 if reduction == "mean" else penalty_weight(1, reduction, batch_size)
        return OutputProtection(
            self,
            optimizer,
            method=self.method,
            weight=self.weight * factor,
            every=every,
            count=self._resume,
            drift=lambda: float(self.drift()) if self.probes else None,
            on_enter=self._entered,
            on_exit=self._left,
        )

    def drift(self, *, forward: Forward | None = None) -> Drift:
        """Measure how much the model's predictions have changed: KL(before || now) on held-out inputs.

        Args:
            forward: Computes the outputs to compare. Defaults to the `forward` of the memory.

        Returns:
            The drift in nats per example (or predicted token), with its standard error.

        Raises:
            LimpetError: If the memory has no held-out inputs.
        """
        from limpet.forgetting.drift import measured_drift

        if not self.probes:
            raise LimpetError(NO_HELD_OUT)
        return measured_drift(self.model, self.probes, self.likelihood, forward or self.forward)

    @property
    def nbytes(self) -> int:
        """Total bytes of what `save` writes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._state()["tensors"].values())

    @property
    def sharded(self) -> bool:
        """Whether each rank holds only a part: never, since sharded models are not supported."""
        return False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} weight={self.weight:g} reference={self._kind!r} tasks={self.tasks}>"

    # --- what a protection asks for ------------------------------------------------------------------------------

    @property
    def on_new_inputs(self) -> bool:
        """Whether outputs are compared on the inputs that the model is trained on."""
        return not self._stores_outputs

    @abstractmethod
    def compared(self, step: int, inputs: Sequence[Any]) -> Iterator[Compared]:
        """Yield what is compared in a step."""

    def _entered(self, protection: OutputProtection) -> None:
        self._reject_inside_protect()
        self._protection, self._resume = protection, 0

    def _left(self, finished: bool) -> None:
        self._protection = None

    def _reject_inside_protect(self) -> None:
        if self._protection is not None:
            raise LimpetError(
                "this memory is already protecting: call this after the `with memory.protect(...)` block, not inside it"
            )

    def _set_reference(self) -> None:
        """Take the model as it is now for the model before."""
        from limpet.forgetting.reference import AdaptersOff, FrozenCopy, kind_of_reference

        kind = kind_of_reference(self.model, self.reference, stored=self._stores_outputs)
        before: Reference | None = None
        if kind != "stored":
            before = AdaptersOff(self.model) if kind == "adapters" else FrozenCopy(self.model)
        self._kind, self._before = kind, before

    def _summary_before(self, batch: Any, forward: Forward | None) -> dict[str, Tensor]:
        """Compute the summary of the outputs before, on a batch that is on the device of the model."""
        from limpet.forgetting.reference import FrozenCopy, summary_before

        assert self._before is not None
        if isinstance(self._before, FrozenCopy):
            self._before.follow(self.model)
        return summary_before(self._before, batch, self.likelihood, forward)

    def _recorded(self, batches: Sequence[Any], seed: int) -> Probe:
        """Record the current outputs on batches."""
        from limpet.forgetting.probe import Probe
        from limpet.model import named_parameters

        return Probe.record(
            self.model, batches, self.likelihood, self.forward, held=set(named_parameters(self.model)), seed=seed
        )

    # --- files ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return the state of the memory: `{"metadata": JSON, "tensors": tensors by name}`.

        Returns:
            The state, with a SHA-256 checksum of every tensor and of the metadata.
        """
        return sealed(self._state(), None)

    def _state(self) -> State:
        """The state without checksums. Its tensors are shared, and never modified in place."""
        from limpet.forgetting.reference import FrozenCopy
        from limpet.methods.state_dict import PROBE

        tensors: dict[str, Tensor] = {}
        for i, probe in enumerate(self._all_probes()):
            tensors |= {f"extra/{PROBE}{i}/{name}": tensor for name, tensor in probe.tensors().items()}
        if isinstance(self._before, FrozenCopy):
            for name, tensor in self._before.model.state_dict().items():
                if not isinstance(tensor, Tensor):
                    raise UnsupportedError(f"{name} is no tensor, so a copy of this model cannot be saved")
                tensors[f"extra/{COPY}{name}"] = tensor
        count = self._resume if self._protection is None else self._protection.count
        metadata = {
            "library": __version__,
            "settings": {**self._settings(), "count": count},
            "blocks": [],
            "constant": 0.0,
            "proximal": None,
        }
        return {"metadata": json.dumps(metadata, allow_nan=False), "tensors": tensors}

    def _settings(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "likelihood": self.likelihood.describe(),
            "weight": self.weight,
            "reference": self.reference,
            "kind": self._kind,
            "examples": 0,
            "tasks": self.tasks,
            "probes": [probe.metadata() for probe in self._all_probes()],
        }

    def _all_probes(self) -> tuple[Probe, ...]:
        """Return all inputs with their outputs, the held-out ones first."""
        return self.probes

    def _read(self, settings: Settings, probes: tuple[Probe, ...]) -> dict[str, Any]:
        """Return the attributes that the settings and inputs of a state determine."""
        return {"probes": probes}

    def load_state_dict(self, state: State) -> None:
        """Load a state returned by `state_dict`. If it raises, the memory is unchanged.

        Args:
            state: The state of a memory with the same method, likelihood and model.

        Raises:
            LimpetError: If called inside `with memory.protect(...)`.
            MemoryFileError: If the state is corrupted, or was made by another kind of memory or for another model.
        """
        from limpet.forgetting.reference import REFERENCES
        from limpet.methods import state_dict, state_header

        self._reject_inside_protect()
        content = state_header.Content.of(state)
        expected = {"method": self.method, "likelihood": self.likelihood.describe()}
        state_header.check_settings(content, expected)
        with state_header.rejecting_damage():
            settings = state_header.Settings(content)
            extra = {name.removeprefix("extra/"): content.tensors[name] for name in content.tensors}
            probes = state_dict.read_probes(settings, extra)
            kind = None if content.metadata["settings"]["kind"] is None else settings.choice("kind", REFERENCES[1:])
            attributes: dict[str, Any] = {
                "weight": settings.number("weight"),
                "reference": settings.choice("reference", REFERENCES),
                "tasks": settings.whole("tasks"),
                "_resume": settings.whole("count"),
                "_kind": kind,
                "_before": self._restored_reference(kind, extra),
                **self._read(settings, probes),
            }
        for name, value in attributes.items():
            setattr(self, name, value)

    def _restored_reference(self, kind: str | None, tensors: Mapping[str, Tensor]) -> Reference | None:
        from limpet.forgetting.reference import AdaptersOff, FrozenCopy

        own = {name.removeprefix(COPY): tensor for name, tensor in tensors.items() if name.startswith(COPY)}
        if (kind == "copy") != bool(own):
            raise MemoryFileError("the state has a copy of the model that it does not need, or needs one and has none")
        if kind == "adapters":
            return AdaptersOff(self.model)
        if kind != "copy":
            return None
        earlier = self._before  # made before the model got adapters or another head, if it did
        before = FrozenCopy(earlier.model if isinstance(earlier, FrozenCopy) else self.model)
        try:
            before.model.load_state_dict(own)
        except RuntimeError as error:
            raise MemoryFileError(
                f"the copy of the model before does not fit the model ({error}): load the memory before adding "
                "adapters or replacing the head"
            ) from error
        return before

    def save(self, path: str | Path) -> None:
        """Save the memory to a file: safetensors with a versioned header, no pickle.

        The file contains the inputs on which outputs are compared or drift is measured and, with a copy as the
        reference, the weights of the model before.

        Args:
            path: Path of the file. `limpet.load` reads it.
        """
        from limpet.methods import memory_file

        memory_file.write(path, self._state())
        logger.info("saved the memory of %d tasks to %s", self.tasks, path)

"""A memory as a state: what it is saved as, and what it is brought back from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from limpet.calibration import History
from limpet.curvature import Block, Structure
from limpet.errors import MemoryFileError, positive_whole
from limpet.likelihoods import Likelihood
from limpet.posterior import PRIOR_MEANS, Posterior
from limpet.precision.rest import Rest

if TYPE_CHECKING:
    from limpet import store
    from limpet.forgetting.probe import Probe
    from limpet.pull import ProximalState


PROBE = "probe/"
"""What the names of a probe's tensors begin with."""


class Kept(ABC):
    """What every memory has that is kept with it."""

    method: ClassVar[str]
    likelihood: Likelihood
    exclude: tuple[str, ...]
    posterior: Posterior
    examples: int
    tasks: int
    unused: frozenset[str]
    history: History
    probes: tuple[Probe, ...]  # inputs, with the outputs before
    _strength: float
    _automatic: bool
    _direct: set[str]  # parameters that no layer class has seen being used
    _proximal_state: ProximalState | None  # of the training that goes on,
    _resume: ProximalState | None  # and of one that was loaded

    @abstractmethod
    def _planned(self, also: Collection[str] = ()) -> list[Block]:
        """The blocks of the model as it is now."""

    @abstractmethod
    def _refuse_inside_protect(self) -> None:
        """Say no while a training is being protected."""

    def state_dict(self) -> store.State:
        """All that the memory holds: {"metadata": JSON, "tensors": tensors by name}.

        With `load_state_dict` it makes a memory a Stateful of torch.distributed.checkpoint: save it beside the model,
        `dcp.save({"model": ..., "memory": memory}, checkpoint_id=folder)`, and `limpet.load(folder, model)` brings it
        back on any number of ranks. For a model in pieces it is a collective.
        """
        from limpet import store

        extra = self._extra_tensors()
        for i, probe in enumerate(self.probes):
            extra |= {f"{PROBE}{i}/{name}": tensor for name, tensor in probe.tensors().items()}
        return store.collect(self.posterior, self._settings(), self._proximal_state, extra)

    def load_state_dict(self, state: store.State) -> None:
        """Take over a state that `state_dict` made, for the same method, structure and model; all of it or nothing."""
        from limpet import store

        self._refuse_inside_protect()
        content = store.Content.of(state)
        structure = self.posterior.structure.name
        expected = {"method": self.method, "structure": structure, "likelihood": self.likelihood.describe()}
        store.check_settings(content, expected)
        previous = self._direct, self.exclude, self.posterior.structure
        try:
            with store.refusing():
                settings = store.Settings(content)
                max_side = positive_whole("max_side", settings.whole("max_side"))
                self._direct, self.exclude = store.direct_parameters(content), tuple(settings.names("exclude"))
                rest = Rest.of(content.metadata["settings"])
                self.posterior.structure = Structure(structure, max_side, rest)
                attributes = self._read_settings(settings)
                prior_precision = settings.number("prior_precision")
                prior_mean = settings.choice("prior_mean", PRIOR_MEANS)
                blocks = self._planned(also=store.parameter_names(content))
                held, constant, proximal, extra = store.restore(content, blocks, self.posterior)
                attributes["probes"] = _read_probes(settings, extra)
                own = {name: tensor for name, tensor in extra.items() if not name.startswith(PROBE)}
                attributes.update(self._read_extra(settings, own))
        except MemoryFileError:
            self._direct, self.exclude, self.posterior.structure = previous
            raise
        for name, value in attributes.items():
            setattr(self, name, value)
        self.posterior.held, self.posterior.constant = held, constant
        self.posterior.prior_precision, self.posterior.prior_mean = prior_precision, prior_mean
        self._proximal_state = self._resume = proximal

    def save(self, path: str | Path) -> None:
        """Keep the memory in a file: safetensors with a versioned header, no pickle.

        Of a model in pieces all ranks write their parts of one file, which must be in a folder that all of them see.
        """
        from limpet import store

        state, spread = self.state_dict(), self.posterior.spread
        if spread is None:
            store.write(path, state)
        else:
            store.write_together(path, state, spread.ranks)

    def _settings(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "structure": self.posterior.structure.name,
            "strength": self._strength,
            "automatic": self._automatic,
            "prior_precision": self.posterior.prior_precision,
            "prior_mean": self.posterior.prior_mean,
            "likelihood": self.likelihood.describe(),
            "max_side": self.posterior.structure.max_side,
            **self.posterior.structure.rest.facts(),
            "exclude": list(self.exclude),
            "examples": self.examples,
            "tasks": self.tasks,
            "unused": sorted(self.unused),
            "history": self.history.plain(),
            **({"probes": [probe.facts() for probe in self.probes]} if self.probes else {}),
        }

    def _read_settings(self, settings: store.Settings) -> dict[str, Any]:
        """The attributes that settings stand for."""
        return {
            "_strength": settings.number("strength"),
            "_automatic": settings.flag("automatic"),
            "examples": settings.whole("examples"),
            "tasks": settings.whole("tasks"),
            "unused": frozenset(settings.names("unused")),
            "history": History.restore(settings.part("history")),
        }

    def _extra_tensors(self) -> dict[str, Tensor]:
        """Tensors of a method's own."""
        return {}

    def _read_extra(self, settings: store.Settings, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The attributes that a method's own tensors stand for."""
        if tensors:
            raise MemoryFileError(f"tensors that {type(self).__name__} does not know: {', '.join(sorted(tensors))}")
        return {}


def _read_probes(settings: store.Settings, tensors: dict[str, Tensor]) -> tuple[Probe, ...]:
    """The probes of a state."""
    facts = settings.list("probes")
    if not facts:
        return ()
    from limpet.forgetting.probe import Probe

    found = []
    for i, one in enumerate(facts):
        prefix = f"{PROBE}{i}/"
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        found.append(Probe.restore(own, one))
    return tuple(found)

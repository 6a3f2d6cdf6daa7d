"""What is stored of a memory: its state for checkpoints, its file, and its upload to the Hub."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from limpet.curvature import Structure
from limpet.errors import LimpetError, MemoryFileError, limited_number, logger, positive_whole
from limpet.forgetting.loss_curve import TaskHistory
from limpet.io.state import State, sealed
from limpet.likelihoods import Likelihood
from limpet.methods.agreement import sharing
from limpet.methods.checks import reject_sharded_memory
from limpet.model import Block
from limpet.posterior import PRIOR_MEANS, Posterior
from limpet.precision.storage import Storage
from limpet.precision.truncated_basis import part_of_trace

if TYPE_CHECKING:  # imported lazily at run time, to keep `import limpet` fast
    from limpet.forgetting.probe import Probe
    from limpet.methods.state_header import Settings
    from limpet.protection.bound_block import ProximalState


class StoredMemory(ABC):
    """The part of `Memory` that is about files. A method adds its own settings and tensors."""

    method: ClassVar[str]
    likelihood: Likelihood
    exclude: tuple[str, ...]
    posterior: Posterior
    examples: int
    tasks: int
    unused: frozenset[str]
    history: TaskHistory
    probes: tuple[Probe, ...]
    _strength: float
    _automatic: bool
    _direct: set[str]
    _proximal_state: ProximalState | None
    _resume: ProximalState | None

    def state_dict(self) -> State:
        """Return the state of the memory: `{"metadata": JSON, "tensors": tensors by name}`.

        Together with `load_state_dict` it makes a memory a `Stateful` of torch.distributed.checkpoint. Save it beside
        the model with `dcp.save({"model": ..., "memory": memory}, checkpoint_id=folder)`, and load it on any number of
        ranks with `limpet.load(folder, model)`. If the memory is sharded, this is a collective.

        Returns:
            The state, with a SHA-256 checksum of every tensor and of the metadata. A sharded memory returns the tensors
            of the rank's own blocks.
        """
        sharding = self.posterior.sharding
        with sharing(self.posterior, "state_dict"):
            return sealed(self._state(), sharding.ranks if sharding is not None else None)

    def _state(self) -> State:
        """The state without checksums."""
        from limpet.methods import state_dict

        extra = self._extra_tensors()
        for i, probe in enumerate(self.probes):
            extra |= {f"{state_dict.PROBE}{i}/{name}": tensor for name, tensor in probe.tensors().items()}
        return state_dict.collect(self.posterior, self._settings(), self._proximal_state, extra)

    def load_state_dict(self, state: State) -> None:
        """Load a state returned by `state_dict`. If it raises, the memory is unchanged.

        Args:
            state: The state of a memory with the same method, structure, likelihood and model.

        Raises:
            LimpetError: If called inside `with memory.protect(...)`.
            MemoryFileError: If the state is corrupted, or was made by another kind of memory or for another model.
        """
        with sharing(self.posterior, "load_state_dict"):
            self._load_state(state)

    def _load_state(self, state: State) -> None:
        from limpet.methods import state_dict, state_header

        self._reject_inside_protect()
        content = state_header.Content.of(state)
        structure = self.posterior.structure.name
        expected = {"method": self.method, "structure": structure, "likelihood": self.likelihood.describe()}
        state_header.check_settings(content, expected)
        previous = self._direct, self.exclude, self.posterior.structure
        try:
            with state_header.rejecting_damage():
                settings = state_header.Settings(content)
                max_factor_size = positive_whole("max_side", settings.whole("max_side"))
                self._direct, self.exclude = state_header.direct_parameters(content), tuple(settings.names("exclude"))
                rest = Storage.of(content.metadata["settings"])
                rank = None if settings.number("rank", 0) == 0 else positive_whole("rank", settings.whole("rank"))
                energy = part_of_trace(settings.number("energy")) if settings.has("energy") else None
                self.posterior.structure = Structure(structure, max_factor_size, rest, rank, energy)
                attributes = self._read_settings(settings)
                prior_precision = limited_number("prior_precision", settings.number("prior_precision"))
                prior_mean = settings.choice("prior_mean", PRIOR_MEANS)
                blocks = self._planned(also=state_header.parameter_names(content))
                held, constant, proximal, extra = state_dict.restore(content, blocks, self.posterior)
                attributes["probes"] = state_dict.read_probes(settings, extra)
                own = {name: tensor for name, tensor in extra.items() if not name.startswith(state_dict.PROBE)}
                attributes.update(self._read_extra(settings, own))
            if self.posterior.sharding is not None:
                self.posterior.sharding.ranks.gather(None, "states, which all ranks have read")
        except LimpetError:
            self._direct, self.exclude, self.posterior.structure = previous
            raise
        for name, value in attributes.items():
            setattr(self, name, value)
        self.posterior.hold(held)
        self.posterior.constant = constant
        self.posterior.prior_precision, self.posterior.prior_mean = prior_precision, prior_mean
        self._proximal_state = self._resume = proximal

    def save(self, path: str | Path, *, base: str | None = None) -> None:
        """Save the memory to a file: safetensors with a versioned header, no pickle.

        If the memory is sharded, all ranks write their blocks to the same file, which must be on a shared file system.

        Args:
            path: Path of the file. `limpet.load` reads it.
            base: Name of the published model that the mean of the memory is, such as "owner/model@revision". The file
                then has the SHA-256 of every weight instead of the mean, and can be loaded into that model only.

        Raises:
            LimpetError: If `base` is given, but the mean is not the current weights of the model.
            UnsupportedError: If `base` is given for a sharded memory.
        """
        from limpet.methods import base_weights, memory_file

        if base is not None:
            reject_sharded_memory(self.posterior, "save(base=)")
        with sharing(self.posterior, "save"):
            state, sharding = self._state(), self.posterior.sharding
            if base is not None:
                state = base_weights.without_means(state, self.posterior, base)
            if sharding is None:
                memory_file.write(path, state)
            else:
                memory_file.write_together(path, state, sharding.ranks)
        logger.info("saved the memory of %d tasks to %s", self.tasks, path)

    def _settings(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "structure": self.posterior.structure.name,
            "strength": self._strength,
            "automatic": self._automatic,
            "prior_precision": self.posterior.prior_precision,
            "prior_mean": self.posterior.prior_mean,
            "likelihood": self.likelihood.describe(),
            "max_side": self.posterior.structure.max_factor_size,
            **self.posterior.structure.rest.metadata(),
            **({} if self.posterior.structure.rank is None else {"rank": self.posterior.structure.rank}),
            **({} if self.posterior.structure.energy is None else {"energy": self.posterior.structure.energy}),
            "exclude": list(self.exclude),
            "examples": self.examples,
            "tasks": self.tasks,
            "unused": sorted(self.unused),
            "history": self.history.plain(),
            **({"probes": [probe.metadata() for probe in self.probes]} if self.probes else {}),
        }

    def _read_settings(self, settings: Settings) -> dict[str, Any]:
        """Return the attributes that the settings of a state determine."""
        return {
            "_strength": limited_number("strength", settings.number("strength")),
            "_automatic": settings.flag("automatic"),
            "examples": settings.whole("examples"),
            "tasks": settings.whole("tasks"),
            "unused": frozenset(settings.names("unused")),
            "history": TaskHistory.restore(settings.part("history")),
        }

    def _extra_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the method that are not part of a block."""
        return {}

    def _read_extra(self, settings: Settings, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return the attributes that the method's extra tensors determine."""
        if tensors:
            raise MemoryFileError(f"tensors unknown to {type(self).__name__}: {', '.join(sorted(tensors))}")
        return {}

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the memory to a model repository on the Hub, for `limpet.load(f"hub://{repo_id}", model)`.

        Args:
            repo_id: The repository, as "user/model". It is created if it does not exist.
            private: Whether a new repository is private. Defaults to the organization's setting.
            token: Access token of the hub. Defaults to that of the logged-in user.

        Returns:
            The URL of the commit.
        """
        from limpet.io import hub

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / hub.FILE
            self.save(path)
            return hub.upload(path, repo_id, private=private, token=token)

    @abstractmethod
    def _planned(self, also: Collection[str] = ()) -> list[Block]:
        """Return the blocks of the model in its current state."""

    @abstractmethod
    def _reject_inside_protect(self) -> None:
        """Raise an error inside `with memory.protect(...)`."""

"""The face that all methods share."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from limpet.curvature import Structure
from limpet.deprecation import renamed_arguments
from limpet.errors import LimpetError, MemoryFileError, UnsupportedError, finite_number, positive_whole
from limpet.forgetting.loss_curve import TaskHistory
from limpet.likelihoods import Likelihood, resolve
from limpet.methods.checks import check_model, excluded_names, say_what_is_not_protected
from limpet.model import Block, Forward, discover, unwrapped
from limpet.posterior import PRIOR_MEANS, Posterior
from limpet.posterior.sharding import reject_sharded
from limpet.precision import STRUCTURES
from limpet.precision.storage import Storage

if TYPE_CHECKING:  # what a memory can do is imported when it is asked for: importing limpet takes hardly any time
    from limpet.forgetting.budget import Budget
    from limpet.forgetting.drift import Drift
    from limpet.forgetting.forecast import Forecast
    from limpet.forgetting.probe import Probe
    from limpet.io.state import State
    from limpet.methods.state_dict import Settings
    from limpet.posterior.summary import Report
    from limpet.predictive.linearized import OutputDistribution
    from limpet.protection.bound_block import ProximalState
    from limpet.protection.protection import Protection, StepObserver

NO_PROBE = (
    "this memory has no probe to measure drift on, which is kept only where it is asked for: consolidate with "
    "probe=100 (it keeps so many inputs), or for a language model with limpet consolidate --self-samples"
)

MAX_FACTOR_SIZE = 4096
"""The longest side of a block whose factor is kept whole."""


class Memory(ABC):
    """What a network knows, as a Gaussian over its weights. Use one of the methods: `limpet.OnlineLaplace`, ..."""

    method: ClassVar[str]
    _measures_curves: ClassVar[bool] = False  # whether forecasts are in nats, so that a multiplier can follow them

    def __init__(
        self,
        model: nn.Module,
        *,
        likelihood: str | Likelihood,
        structure: str,
        strength: float | str,
        prior_precision: float,
        prior_mean: str,
        exclude: Iterable[str | nn.Module | nn.Parameter],
        max_factor_size: int,
        storage_dtype: str | None = None,
        offload: bool = False,
    ) -> None:
        if structure not in STRUCTURES:
            raise ValueError(f"structure must be one of {', '.join(STRUCTURES)}, not {structure!r}")
        if prior_mean not in PRIOR_MEANS:
            raise ValueError(f"prior_mean must be one of {', '.join(PRIOR_MEANS)}, not {prior_mean!r}")
        prior_precision = finite_number("prior_precision", prior_precision)
        settings = Structure(
            structure, positive_whole("max_factor_size", max_factor_size), Storage(storage_dtype, offload)
        )
        check_model(model)
        self.model = unwrapped(model)
        self.likelihood = resolve(likelihood)
        self.exclude = excluded_names(self.model, exclude)
        self.posterior = Posterior(self.model, settings, prior_precision, prior_mean)
        self.strength = strength
        self.examples = 0
        self.tasks = 0
        self.unused: frozenset[str] = frozenset()
        self.history = TaskHistory()
        self.probes: tuple[Probe, ...] = ()  # inputs, with the outputs that the model gave before
        self._direct: set[str] = set()  # parameters that no layer class has seen in use
        self._protection: Protection | None = None
        self._proximal_state: ProximalState | None = None  # of the training that is under way,
        self._resume: ProximalState | None = None  # and of one that was loaded
        self.posterior.arrange(self._planned())
        say_what_is_not_protected(self.model, self._planned())

    @property
    def strength(self) -> float | str:
        """What the Fisher of the tasks to come is multiplied by, or "auto"; it may be changed between tasks.

        "auto" takes for every task what its own data say when it is taken in: how much faster than the quadratic its
        loss rises at the distance that weights travel while other tasks are learned (`limpet.forgetting.loss_curve`).
        """
        return "auto" if self._automatic else self._strength

    @strength.setter
    def strength(self, value: float | str) -> None:
        automatic = isinstance(value, str) and value == "auto"
        if automatic and not self._measures_curves:
            raise UnsupportedError(f"{type(self).__name__} measures no Fisher, so its strength cannot be 'auto'")
        if isinstance(value, str) and not automatic:
            raise ValueError(f"strength must be a number >= 0 or 'auto', not {value!r}")
        self._strength = 1.0 if automatic else finite_number("strength", value)
        self._automatic = automatic

    @property
    def structure(self) -> str:
        """The structure of the precision."""
        return self.posterior.structure.name

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the memory holds."""
        return self.posterior.nbytes + sum(probe.nbytes for probe in self.probes)

    @abstractmethod
    def consolidate(
        self,
        batches: Iterable[Any],
        *,
        examples: int | None = None,
        limit: int | None = None,
        forward: Forward | None = None,
        progress: bool = True,
        checkpoint: str | Path | None = None,
        probe: int | None = None,
    ) -> None:
        """Take the task in: after this, mean and precision know it."""

    def protect(
        self,
        optimizer: Any,
        *,
        examples: int,
        every: int = 1,
        mode: str = "auto",
        reduction: str = "mean",
        batch_size: int | None = None,
        budget: float | None = None,
    ) -> Protection:
        """Hold on to what is known while the body trains: `with memory.protect(optimizer, examples=N): ...`.

        `examples` is N, the examples of the new task, epochs not counted. `mode` is "proximal" (SGD; taken every step
        it cannot diverge; with `every=k` it is taken every k steps) or "gradient" (any optimizer; with `every=k` made
        anew every k steps, and in between taken as it was), chosen by the optimizer when "auto". The loss is a mean
        over examples; one that sums over a batch says reduction="sum" and batch_size.

        With `budget` the strength no longer matters: the memory holds just hard enough to keep the forecast within
        so many nats per example, and not at all before that.
        """
        from limpet.protection.protection import Protection

        self._refuse_inside_protect()
        self.posterior.arrange(self._planned())
        return Protection(
            self.posterior,
            optimizer,
            examples=examples,
            every=every,
            mode=mode,
            reduction=reduction,
            batch_size=batch_size,
            state=self._resume,
            budget=self._budget(budget),
            old_examples=self.examples,
            observer=self._observer(examples),
            on_enter=self._entered,
            on_exit=self._left,
        )

    def _budget(self, budget: float | None) -> Budget | None:
        if budget is None:
            return None
        from limpet.forgetting.budget import Budget

        if not finite_number("budget", budget):
            raise ValueError("a budget of 0 lets nothing change: give what may be forgotten, in nats per example")
        if not self._measures_curves or self.structure == "kronecker-sum":
            raise UnsupportedError(
                "budget= needs forecasts in nats and a closed proximal map: a Laplace method with "
                "structure='kronecker', 'diagonal' or 'dense'"
            )
        if self.posterior.structure.rest.dtype is not None:
            raise UnsupportedError("budget= needs orthonormal bases: leave out storage_dtype=, which rounds them")
        return Budget(self.history, float(budget))

    def _entered(self, protection: Protection) -> None:
        self._refuse_inside_protect()
        # A state that was loaded goes on where it stopped; one that an error left behind belongs to weights that may
        # have been put back since, and any weights are a right place to begin.
        self._protection, self._proximal_state, self._resume = protection, protection.state, None

    def _left(self, finished: bool) -> None:
        self._protection = None
        if finished:
            self._proximal_state = None

    def _refuse_inside_protect(self) -> None:
        if self._protection is not None:
            raise LimpetError(
                "this memory is protecting already: do this after the `with memory.protect(...)` block, not inside it"
            )

    def _observer(self, examples: int) -> StepObserver | None:
        """Who watches the steps."""
        return None

    def penalty(self) -> Tensor:
        """1/2 (w - mean)^T L (w - mean) as a differentiable scalar, not yet divided by the examples.

        For people who would rather add it to the loss:

        >>> import limpet
        >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(20, 3), torch.randint(0, 2, (20,))
        >>> memory = limpet.OnlineLaplace(model)
        >>> memory.consolidate([(x, y)])
        >>> loss = torch.nn.functional.cross_entropy(model(x), y) + memory.penalty() / len(x)
        >>> loss.backward()
        """
        return self.posterior.penalty()

    def forecast(self) -> Forecast:
        """The predicted rise of the mean old loss since the last consolidation, in nats per example.

        Cheap enough to log during training: one rotation of each block's displacement.

        >>> import limpet
        >>> model = torch.nn.Linear(3, 2)
        >>> memory = limpet.OnlineLaplace(model)
        >>> memory.consolidate([(torch.randn(200, 3), torch.randint(0, 2, (200,)))])
        >>> float(memory.forecast())
        0.0
        >>> with torch.no_grad():
        ...     model.weight += 0.1
        >>> 0 < memory.forecast() < 0.1
        True
        """
        from limpet.forgetting.forecast import forecast

        return forecast(self.posterior, self.examples, self.history)

    def drift(
        self, *, forward: Forward | None = None, reference: nn.Module | None = None, blocks: bool = False
    ) -> Drift:
        """How far the model's answers are from those before: KL(before || now), measured on the memory's probe.

        Unlike `forecast` it predicts nothing: it takes the forward passes over the probe, and no approximation of the
        curvature enters it.

        Args:
            forward: What was given to `consolidate`, where the model is not called on the batches as they are.
            reference: The model before, where you have it: its outputs are then computed rather than remembered,
                which for a large vocabulary leaves out the error of remembering some labels only.
            blocks: Also find out which blocks carry the drift, by one backward pass over the probe.

        Returns:
            The drift in nats per example (or predicted token), with its standard error.

        Raises:
            LimpetError: Where the memory has no probe.

        >>> import limpet
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 2)
        >>> memory = limpet.OnlineLaplace(model)
        >>> memory.consolidate([(torch.randn(200, 3), torch.randint(0, 2, (200,)))], probe=100)
        >>> print(memory.drift())
        0 +- 0 nats
        >>> with torch.no_grad():
        ...     model.weight += torch.tensor([[0.5], [-0.5]])
        >>> print(memory.drift(blocks=True))
        0.247... +- 0.0... nats (most in model 0.247...)
        """
        from limpet.forgetting.drift import drift

        self._reject_sharded("drift")
        if not self.probes:
            raise LimpetError(NO_PROBE)
        self.posterior.follow_devices()
        before = None if reference is None else unwrapped(reference)
        return drift(self.posterior, self.probes, self.likelihood, forward, reference=before, blocks=blocks)

    def sample_weights(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """The protected parameters, drawn from the Gaussian that the memory is."""
        from limpet.predictive import sample_weights

        self._reject_sharded("sample_weights")
        return sample_weights(self.posterior, generator)

    @renamed_arguments(how="link_approximation")
    def predictive(
        self,
        inputs: Any,
        *,
        link_approximation: str = "probit",
        draws: int = 20,
        forward: Forward | None = None,
        prior_precision: float | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Predictions averaged over what the weights might be: class probabilities for a categorical.

        Args:
            inputs: A batch of inputs.
            link_approximation: "probit" (closed form, for the network linearised at the mean, whose outputs are
                Gaussian), "linearised" (the mean over `draws` outputs of that Gaussian) or "sampled" (the mean over
                `draws` weights of the memory: for outputs per position, which the first two do not support).
            draws: How many samples to average over.
            forward: `forward(model, inputs)` returns the outputs, where the model is not called on the inputs alone.
            prior_precision: Replaces the prior precision of the memory; "evidence" is the one that maximises the
                marginal likelihood.
            generator: The source of randomness.

        Returns:
            Class probabilities for a categorical likelihood, means for others.

        >>> import limpet
        >>> model = torch.nn.Linear(3, 2)
        >>> memory = limpet.OnlineLaplace(model)
        >>> memory.consolidate([(torch.randn(20, 3), torch.randint(0, 2, (20,)))])
        >>> memory.predictive(torch.zeros(5, 3)).sum(1).round(decimals=4)
        tensor([1., 1., 1., 1., 1.])
        """
        from limpet.predictive import predictive

        self._reject_sharded("predictive")
        return predictive(
            self.posterior,
            self.likelihood,
            inputs,
            link_approximation=link_approximation,
            draws=draws,
            forward=forward,
            prior_precision=self._prior(prior_precision),
            generator=generator,
        )

    def output_distribution(
        self, inputs: Any, *, forward: Forward | None = None, prior_precision: float | str | None = None
    ) -> OutputDistribution:
        """N(mean, covariance) of the outputs of the network linearised at the mean, for each example.

        >>> import limpet
        >>> model = torch.nn.Linear(3, 1)
        >>> memory = limpet.OnlineLaplace(model, likelihood="gaussian")
        >>> memory.consolidate([(torch.randn(20, 3), torch.randn(20, 1))])
        >>> found = memory.output_distribution(torch.zeros(5, 3))
        >>> found.mean.shape, found.covariance.shape
        (torch.Size([5, 1]), torch.Size([5, 1, 1]))
        """
        from limpet.predictive.linearized import output_distribution

        self._reject_sharded("output_distribution")
        prior = self._prior(prior_precision)
        return output_distribution(self.posterior, inputs, forward=forward, prior_precision=prior)

    def _reject_sharded(self, what: str) -> None:
        reject_sharded(self.posterior.sharding, f"memory.{what}(...)", "save the memory, and load it in one process")

    def _prior(self, prior_precision: float | str | None) -> float | None:
        if isinstance(prior_precision, str):
            from limpet.posterior.marginal_likelihood import evidence_prior

            if prior_precision != "evidence":
                raise ValueError(f"prior_precision must be a number or 'evidence', not {prior_precision!r}")
            return evidence_prior(self.posterior)
        return prior_precision

    def report(self) -> Report:
        """Every parameter of the model: its block, structure, bytes, and whether it is protected or why not."""
        from limpet.posterior.summary import report

        chosen = f" ({self._strength:.2g} for the last task)" if self._automatic and self.tasks else ""
        title = (
            f"{type(self).__name__}: {self.structure}, strength {self._strength_text}{chosen}, {self.tasks} tasks, "
            f"{self.examples:,} examples{self._probe_text}"
        )
        return report(self.posterior, title, exclude=self.exclude, unused=self.unused)

    @property
    def _probe_text(self) -> str:
        rows = sum(probe.rows for probe in self.probes)
        return f", a probe that holds {rows:,} inputs" if rows else ""

    @property
    def _strength_text(self) -> str:
        return "auto" if self._automatic else f"{self._strength:g}"

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} structure={self.structure!r} strength={self._strength_text} tasks={self.tasks} "
            f"examples={self.examples} bytes={self.nbytes}>"
        )

    def state_dict(self) -> State:
        """All that the memory holds: {"metadata": JSON, "tensors": tensors by name}.

        With `load_state_dict` it makes a memory a Stateful of torch.distributed.checkpoint: save it beside the model,
        `dcp.save({"model": ..., "memory": memory}, checkpoint_id=folder)`, and `limpet.load(folder, model)` brings it
        back on any number of ranks. For a model in pieces it is a collective.
        """
        from limpet.methods import state_dict

        extra = self._extra_tensors()
        for i, probe in enumerate(self.probes):
            extra |= {f"{state_dict.PROBE}{i}/{name}": tensor for name, tensor in probe.tensors().items()}
        return state_dict.collect(self.posterior, self._settings(), self._proximal_state, extra)

    def load_state_dict(self, state: State) -> None:
        """Take over a state that `state_dict` made, for the same method, structure and model; all of it or nothing."""
        from limpet.methods import state_dict

        self._refuse_inside_protect()
        content = state_dict.Content.of(state)
        structure = self.posterior.structure.name
        expected = {"method": self.method, "structure": structure, "likelihood": self.likelihood.describe()}
        state_dict.check_settings(content, expected)
        previous = self._direct, self.exclude, self.posterior.structure
        try:
            with state_dict.rejecting_damage():
                settings = state_dict.Settings(content)
                max_factor_size = positive_whole("max_side", settings.whole("max_side"))
                self._direct, self.exclude = state_dict.direct_parameters(content), tuple(settings.names("exclude"))
                rest = Storage.of(content.metadata["settings"])
                self.posterior.structure = Structure(structure, max_factor_size, rest)
                attributes = self._read_settings(settings)
                prior_precision = settings.number("prior_precision")
                prior_mean = settings.choice("prior_mean", PRIOR_MEANS)
                blocks = self._planned(also=state_dict.parameter_names(content))
                held, constant, proximal, extra = state_dict.restore(content, blocks, self.posterior)
                attributes["probes"] = state_dict.read_probes(settings, extra)
                own = {name: tensor for name, tensor in extra.items() if not name.startswith(state_dict.PROBE)}
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
        from limpet.methods import state_dict

        state, sharding = self.state_dict(), self.posterior.sharding
        if sharding is None:
            state_dict.write(path, state)
        else:
            state_dict.write_together(path, state, sharding.ranks)

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
            "exclude": list(self.exclude),
            "examples": self.examples,
            "tasks": self.tasks,
            "unused": sorted(self.unused),
            "history": self.history.plain(),
            **({"probes": [probe.metadata() for probe in self.probes]} if self.probes else {}),
        }

    def _read_settings(self, settings: Settings) -> dict[str, Any]:
        """The attributes that settings stand for."""
        return {
            "_strength": settings.number("strength"),
            "_automatic": settings.flag("automatic"),
            "examples": settings.whole("examples"),
            "tasks": settings.whole("tasks"),
            "unused": frozenset(settings.names("unused")),
            "history": TaskHistory.restore(settings.part("history")),
        }

    def _extra_tensors(self) -> dict[str, Tensor]:
        """Tensors of a method's own."""
        return {}

    def _read_extra(self, settings: Settings, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The attributes that a method's own tensors stand for."""
        if tensors:
            raise MemoryFileError(f"tensors that {type(self).__name__} does not know: {', '.join(sorted(tensors))}")
        return {}

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the memory beside a model on the Hugging Face hub, where `limpet.load(repo_id, model)` finds it."""
        from limpet.io import hub

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / hub.FILE
            self.save(path)
            return hub.upload(path, repo_id, private=private, token=token)

    @property
    def sharded(self) -> bool:
        """Whether every rank keeps some of the blocks, because the model is under `fully_shard`."""
        return self.posterior.sharding is not None

    def _partly_frozen(self) -> set[str]:
        """The parameters of blocks that hold tasks and still train, if only in part."""
        parameters = self.posterior.parameters()
        known = (held.block.parameters for held in self.posterior.held.values() if held.tasks)
        return {
            name
            for names in known
            if any(p in parameters and parameters[p].requires_grad for p in names)
            for name in names
        }

    def _planned(self, also: Collection[str] = ()) -> list[Block]:
        """The blocks of the model as it is now; those found to be used directly once stay so.

        What is known of a block of which only some parameters still train stays whole.
        """
        found: list[Block] = []
        for block in discover(self.model, self.exclude, {*also, *self._partly_frozen()}):
            found.extend(block.as_per_sample() if self._direct & set(block.parameters) else [block])
        return found

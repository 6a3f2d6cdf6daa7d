"""The interface that all methods share: a memory of past tasks, which protects them during training."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from limpet.curvature import Structure
from limpet.distributed import current, together
from limpet.errors import (
    LimpetError,
    LimpetWarning,
    UnsupportedError,
    limited_number,
    positive_whole,
    warn,
)
from limpet.forgetting.loss_curve import TaskHistory
from limpet.likelihoods import Likelihood, resolve
from limpet.methods.agreement import sharing
from limpet.methods.checks import check_model, excluded_names, reject_sharded_memory, say_what_is_not_protected
from limpet.methods.predictions import Predictions
from limpet.methods.protecting_memory import ProtectingMemory
from limpet.model import Block, Forward, discover, plain, unwrapped
from limpet.posterior import PRIOR_MEANS, Posterior
from limpet.precision import STRUCTURES
from limpet.precision.storage import EIGHT_BITS, Storage
from limpet.precision.truncated_basis import part_of_trace

if TYPE_CHECKING:  # imported lazily at run time, to keep `import limpet` fast
    from limpet.forgetting.drift import Drift
    from limpet.forgetting.forecast import Forecast
    from limpet.forgetting.probe import Probe
    from limpet.forgetting.repair import RepairMark
    from limpet.likelihoods import Count
    from limpet.posterior.summary import Report
    from limpet.protection.bound_block import ProximalState
    from limpet.protection.protection import Protection

NO_PROBE = (
    "this memory has no probe to measure drift on; probes store inputs, so they are opt-in: call "
    "memory.consolidate(batches, probe=100) to store 100 inputs, or for a language model use limpet consolidate "
    "--self-samples"
)

MAX_FACTOR_SIZE = 4096
"""Default for the largest Kronecker factor that is stored as one matrix."""


class Memory(ProtectingMemory, Predictions):
    """A Gaussian over a network's weights that summarizes the tasks learned so far.

    Abstract base class: use one of the methods, such as `limpet.OnlineLaplace`. A subclass sets `method` and
    implements `consolidate`.

    Args:
        model: The model to protect. Wrappers (torch.compile, DistributedDataParallel, PEFT) are unwrapped.
        likelihood: The meaning of the model's outputs: a name or a `limpet.Likelihood`.
        structure: Structure of each block's precision: "kronecker", "kronecker-sum", "diagonal" or "dense".
        strength: Factor of the curvature of each task, or "auto".
        prior_precision: Precision of the isotropic Gaussian prior over the weights.
        prior_mean: Mean of the prior: "zero", or "initial" for the weights that the model has now.
        exclude: Parameters to leave unprotected: names of parameters or modules, patterns, modules or parameters.
        max_factor_size: Largest Kronecker factor that is stored as one matrix.
        storage_dtype: Data type in which eigenbases are stored. By default the one they are used in.
        offload: Store eigenbases in host memory.
        rank: Number of eigenvectors to keep of each Kronecker factor.
        energy: Part of the trace of each Kronecker factor that its eigenvectors should hold.

    Attributes:
        model: The protected model, unwrapped.
        likelihood: The likelihood.
        exclude: Names and patterns of the excluded parameters.
        posterior: Mean and precision of every block.
        examples: Number of examples of all consolidated tasks.
        tasks: Number of consolidated tasks.
        unused: Parameters that had no gradient in the last task.
        history: Size and loss curve of each consolidated task.
        probes: Inputs with the outputs that the model had when they were consolidated; `drift` is measured on them.
        repair_mark: Whether the model is at repaired weights; None if it was not repaired since the last consolidation.
    """

    method: ClassVar[str]

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
        rank: int | None = None,
        energy: float | None = None,
    ) -> None:
        if structure not in STRUCTURES:
            raise ValueError(f"structure must be one of {', '.join(STRUCTURES)}, not {structure!r}")
        truncated = rank is not None or energy is not None
        if truncated and structure != "kronecker":
            raise ValueError(
                f"rank= and energy= truncate Kronecker factors: use structure='kronecker', not {structure!r}"
            )
        if storage_dtype == EIGHT_BITS and not truncated:
            raise ValueError("storage_dtype='int8' is for truncated factors: pass rank= as well")
        if prior_mean not in PRIOR_MEANS:
            raise ValueError(f"prior_mean must be one of {', '.join(PRIOR_MEANS)}, not {prior_mean!r}")
        prior_precision = limited_number("prior_precision", prior_precision)
        settings = Structure(
            structure,
            positive_whole("max_factor_size", max_factor_size),
            Storage(storage_dtype, offload),
            None if rank is None else positive_whole("rank", rank),
            None if energy is None else part_of_trace(energy),
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
        self.probes: tuple[Probe, ...] = ()
        self._direct: set[str] = set()  # parameters that must be measured per sample
        self._protection: Protection | None = None
        self._trained_with: int | None = None  # N of the last protected training run
        self._proximal_state: ProximalState | None = None  # of the current training run
        self.repair_mark: RepairMark | None = None  # of the last repair since the last consolidation
        self._doubted = False  # whether an untrusted forecast has warned
        self._resume: ProximalState | None = None  # of a loaded run, for the next `protect`
        with sharing(self.posterior, type(self).__name__):
            self.posterior.arrange(self._planned())
        say_what_is_not_protected(self.model, self._planned())

    @property
    def strength(self) -> float | str:
        """Factor of the Fisher of future tasks, or "auto". It can be changed between tasks.

        "auto" determines it for each task from the task's own data during consolidation: how much faster than the
        quadratic approximation its loss increases at the distance that weights typically move while later tasks are
        learned (`limpet.forgetting.loss_curve`).
        """
        return "auto" if self._automatic else self._strength

    @strength.setter
    def strength(self, value: float | str) -> None:
        automatic = isinstance(value, str) and value == "auto"
        if automatic and not self._measures_curves:
            raise UnsupportedError(
                f"{type(self).__name__} measures no Fisher, so its strength cannot be 'auto': pass a number"
            )
        if isinstance(value, str) and not automatic:
            raise ValueError(f"strength must be a number >= 0 or 'auto', not {value!r}")
        self._strength = 1.0 if automatic else limited_number("strength", value)
        self._automatic = automatic

    @property
    def nbytes(self) -> int:
        """Total bytes of the memory's tensors."""
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
        """Consolidate the task that was just learned: update mean and precision with its curvature.

        Call it after training, at the trained weights. An error while the curvature is measured leaves the memory
        unchanged. In a distributed run it is a collective: every rank passes its own share of the data, or all ranks
        pass the same data wrapped in `limpet.distributed.ReplicatedBatches`.

        Args:
            batches: A loader, list or other iterable of batches. A batch is a pair `(inputs, targets)`, a dictionary
                or, where no targets are needed, a tensor.
            examples: N, the number of examples in the task (predicted tokens for a language model), if the batches
                are only some of them. By default the examples are counted.
            limit: Use at most this many examples, and scale the Fisher up to all of them.
            forward: `forward(model, batch)` returns `(outputs, targets)`. Needed for other kinds of batches.
            progress: Show a progress bar.
            checkpoint: Path of a file to which a long pass is saved once a minute. Called again after a crash, with
                the batches in the same order, the pass resumes from it; with `ReplicatedBatches` also on another
                number of ranks. The file is deleted once the task is consolidated.
            probe: Number of inputs to store with the model's current outputs, for `drift` to be measured on. The
                memory's file will contain these inputs.

        Raises:
            LimpetError: If called inside `with memory.protect(...)`.
            CurvatureError: If the curvature cannot be measured, or the batches contain more than `examples`.
        """

    def count(self, batches: Iterable[Any], *, forward: Forward | None = None) -> Count:
        """Count the examples N of a task, in the unit that its mean loss averages over.

        N is the number of rows or, if the model predicts at every position (language models, token classification), the
        number of predicted positions, without padding and ignored labels. Pass it as `examples=`.

        Args:
            batches: A DataLoader of a data set with a length, or a list of batches.
            forward: As for `consolidate`. The model is then run on some of the batches.

        Returns:
            N, an integer that also knows its rows. Beyond 20,000 rows it is extrapolated from evenly spaced ones.

        Raises:
            CurvatureError: If the batches can be read only once, or contain no examples.

        Examples:
            >>> import limpet
            >>> import torch
            >>> memory = limpet.OnlineLaplace(torch.nn.Linear(3, 2))
            >>> tokens, labels = torch.randn(5, 7, 3), torch.randint(0, 2, (5, 7))
            >>> print(memory.count([(tokens, labels)]))
            35 predicted positions in 5 rows
        """
        from limpet.curvature.counting import count_examples

        return count_examples(self.model, batches, self.likelihood, forward)

    def penalty(self) -> Tensor:
        """Compute 1/2 (w - mean)^T L (w - mean) as a differentiable scalar.

        An alternative to `protect`: divide it by the number of examples of the new task, and add it to a mean loss.

        Returns:
            The penalty, not divided by the number of examples.

        Raises:
            UnsupportedError: If the memory is sharded.

        Examples:
            >>> import limpet
            >>> import torch
            >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(20, 3), torch.randint(0, 2, (20,))
            >>> memory = limpet.OnlineLaplace(model)
            >>> memory.consolidate([(x, y)])
            >>> loss = torch.nn.functional.cross_entropy(model(x), y) + memory.penalty() / len(x)
            >>> loss.backward()
        """
        return self.posterior.penalty()

    def forecast(self) -> Forecast:
        """Forecast the increase of the mean old loss since the last consolidation, in nats per example.

        Cheap enough to log during training: it rotates each block's displacement into the eigenbasis once.

        Its `trusted` is False where the measurements of `consolidate` do not support it: in networks that the curvature
        does not describe (diagonals, pretrained transformers), further away than was measured, and after a repair. The
        first such forecast warns. Measure with `drift` instead, or on old data with
        `forecast(batches, curvature="fresh")`.

        Returns:
            The increase as a float, with the shares of blocks and tasks, the predicted drift, and whether it can be
            trusted as attributes.

        Examples:
            >>> import limpet
            >>> import torch
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
        found = self._forecast()
        if found.doubt is not None and found.drift is not None and not self._doubted:
            self._doubted = True
            warn(
                f"forecasts of this memory cannot be trusted here: {found.doubt}. Measure with memory.drift(), which "
                "needs a probe (consolidate with probe=100), or with forecast(batches, curvature='fresh') on old data",
                LimpetWarning,
            )
        return found

    def _forecast(self) -> Forecast:
        """Forecast without a warning."""
        from limpet.forgetting.forecast import forecast

        with sharing(self.posterior, "forecast"):
            found = forecast(self.posterior, self.examples, self.history)
        if self.repair_mark is not None and self.repair_mark.repaired:
            found.doubt = "the model was repaired, which removes what the curvature sees and leaves what it does not"
        return found

    def drop(self, names: Iterable[str]) -> None:
        """Remove blocks from the memory, such as those of a head that the model no longer has.

        Their tasks are no longer protected, and a parameter of the same name starts again from the prior. While blocks
        with tasks are missing in the model, because a layer was removed, renamed or wrapped, the memory raises an
        error instead of ignoring them.

        Args:
            names: Names of blocks, parameters or modules, or patterns.

        Raises:
            ValueError: If a name matches no block.
            LimpetError: If called inside `with memory.protect(...)`.

        Examples:
            >>> import limpet
            >>> import torch
            >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
            >>> memory = limpet.OnlineLaplace(model)
            >>> memory.consolidate([(torch.randn(20, 3), torch.randint(0, 2, (20,)))])
            >>> del model[1]
            >>> memory.drop(["1"])
            >>> float(memory.forecast())
            0.0
        """
        self._reject_inside_protect()
        wanted = [names] if isinstance(names, str) else list(names)
        for name in wanted:
            if not self.posterior.drop([plain(name)]):
                raise ValueError(f"{name!r} matches no block of the memory: memory.report() lists them")

    def drift(
        self, *, forward: Forward | None = None, reference: nn.Module | None = None, blocks: bool = False
    ) -> Drift:
        """Measure how much the model's predictions have changed: KL(before || now) on the memory's probe.

        If the model is sharded, all ranks run the whole probe together.

        Unlike `forecast`, it is a measurement: it runs the model on the probe and uses no curvature approximation. If
        parameters outside of the memory, such as a head, were replaced, it is measured through the old ones: the probe
        stores them if they are at most a tenth of the model.

        On a quantized base, the drift is that from the base: a probe of the unquantized model is recorded again there,
        with the adapters switched off, when the drift is measured for the first time.

        Args:
            forward: The `forward` that was passed to `consolidate` or `add_probe`, if any.
            reference: The model from before, if available. Its outputs are then computed rather than read from the
                probe, which for a large vocabulary avoids the error of storing only some labels.
            blocks: Also attribute the drift to blocks, by one backward pass over the probe.

        Returns:
            The drift in nats per example (or predicted token), with its standard error.

        Raises:
            LimpetError: If the memory has no probe.
            UnsupportedError: If `blocks` is given and the memory is sharded.

        Examples:
            >>> import limpet
            >>> import torch
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
        from limpet.forgetting.quantized_probe import at_quantized_base

        if blocks:
            reject_sharded_memory(self.posterior, "drift(blocks=True)")
        if not self.probes:
            raise LimpetError(NO_PROBE)
        before = None if reference is None else unwrapped(reference)
        sharded = self.posterior.sharding is not None
        with together("drift", current() if sharded else None, runs_model=sharded):
            self.posterior.follow_devices()
            if before is None:
                self.probes = tuple(
                    at_quantized_base(probe, self.posterior, self.likelihood, forward) for probe in self.probes
                )
            return drift(self.posterior, self.probes, self.likelihood, forward, reference=before, blocks=blocks)

    def report(self, *, full: bool = False) -> Report:
        """List the blocks of the model: structure and bytes, and whether they are protected or why not.

        Args:
            full: Print a line per parameter. By default, a line per block, or per group of blocks that differ only in
                numbers in their names.

        Returns:
            A row for every parameter; `str(report)` formats them as a table.
        """
        from limpet.posterior.summary import report

        chosen = f" ({self._strength:.2g} for the last task)" if self._automatic and self.tasks else ""
        title = (
            f"{type(self).__name__}: {self.structure}, strength {self._strength_text}{chosen}, {self.tasks} tasks, "
            f"{self.examples:,} examples{self._content_text}"
        )
        return report(self.posterior, title, exclude=self.exclude, unused=self.unused, full=full)

    @property
    def _content_text(self) -> str:
        """What the memory contains besides curvature, for the report."""
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

    @property
    def sharded(self) -> bool:
        """Whether each rank holds only some of the blocks, because the model is sharded with `fully_shard`."""
        return self.posterior.sharding is not None

    def _partly_frozen(self) -> set[str]:
        """Return the parameters of consolidated blocks of which at least one parameter is trainable."""
        parameters = self.posterior.parameters()
        known = (held.block.parameters for held in self.posterior.held.values() if held.tasks)
        return {
            name
            for names in known
            if any(p in parameters and parameters[p].requires_grad for p in names)
            for name in names
        }

    def _planned(self, also: Collection[str] = ()) -> list[Block]:
        """Return the blocks of the model in its current state.

        Parameters that once had to be measured per sample stay so. A consolidated block of which some parameters have
        been frozen since stays one block.
        """
        self.posterior.parameters()  # raises if a consolidated block has lost its parameters
        found: list[Block] = []
        for block in discover(self.model, self.exclude, {*also, *self._partly_frozen()}):
            found.extend(block.as_per_sample() if self._direct & set(block.parameters) else [block])
        return found

"""Base class of the three Laplace methods: one Fisher pass over a task's data, then the update of the method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from limpet.curvature import FISHERS, Displacement, Fisher, FisherPass
from limpet.deprecation import renamed_arguments
from limpet.distributed import current, together
from limpet.errors import (
    LimpetError,
    finite_number,
    positive_whole,
    whole_number,
)
from limpet.likelihoods import Likelihood
from limpet.methods.agreement import sharing
from limpet.methods.memory import MAX_FACTOR_SIZE, NO_PROBE
from limpet.methods.private import (
    check_private,
    described,
    privacy_text,
    restored,
)
from limpet.methods.probed_memory import probe_rows
from limpet.methods.rank_target import rank_within
from limpet.methods.repair_pass import RepairOptions, check_drift, repaired
from limpet.methods.task_update import TaskUpdate
from limpet.model import Forward, counted_examples
from limpet.posterior.sharding import fisher_pass

if TYPE_CHECKING:
    from limpet.curvature.batch_step import StepOptions
    from limpet.curvature.checkpoint import Checkpoint
    from limpet.curvature.privacy import Privacy
    from limpet.forgetting.forecast import Forecast
    from limpet.forgetting.repair import Repair
    from limpet.methods import state_header
    from limpet.protection.repair_step import Repairer

REPAIRED_WITH = 10_000
"""Number of examples (or tokens) with which protection by repair measures the curvature of the new data."""

LOOK = 2000
"""Number of examples for the preliminary Fisher pass of `smoothing`."""


class Laplace(TaskUpdate):
    """Base class of memories whose precision is a sum of Fishers, each measured at the end of a task.

    Abstract: use `limpet.OnlineLaplace`, `limpet.PerTaskLaplace` or `limpet.ApproximateLaplace`, which take these
    arguments.

    Args:
        model: The model to protect. Wrappers (torch.compile, DistributedDataParallel, PEFT) are unwrapped.
        likelihood: The meaning of the model's outputs: "categorical", "gaussian", "bernoulli" or a
            `limpet.Likelihood`.
        structure: Structure of each block's precision: "kronecker" (a Kronecker-factored eigenbasis with a matrix of
            eigenvalues, as in EKFAC; its size does not grow with the number of tasks), "kronecker-sum" (the K-FAC
            factors of every task), "diagonal", or "dense" (the full matrix, for small blocks).
        strength: Factor of each task's Fisher. 1 is the Laplace approximation; larger values protect more. "auto"
            determines it for every task from the task's own data (see the `strength` property).
        prior_precision: Precision of the isotropic Gaussian prior over the weights.
        fisher: How the expectation over targets is computed: "exact" (in closed form; C - 1 backward passes for a
            categorical with C classes), "sampled" (targets drawn from the model's predictions), "empirical" (the
            targets of the data), or "auto" (exact for up to 16 classes or outputs, otherwise sampled).
        prior_mean: Mean of the prior: "zero", or "initial" for the weights that the model has now. Use "initial" for
            a pretrained model.
        exclude: Parameters to leave unprotected, such as task-specific heads: names of parameters or modules,
            patterns such as "*.bias", modules or parameters.
        smoothing: If positive, measure the Fisher not at the mode but at weights perturbed around it, with a new
            draw z for every batch, scaled such that the loss is predicted to increase by this many nats per example.
            Perturbations are never larger than the scale of the weights. The average is the curvature of the smoothed
            loss E[loss(w + z)], which accounts for the loss increasing faster than its quadratic approximation at the
            mode. It needs one more pass, over a subset of the data if the number of examples is known.
        draws: Number of targets sampled per example with the sampled Fisher.
        seed: Seed for sampled targets and perturbations.
        max_factor_size: Largest Kronecker factor that is stored as one matrix. A longer side of a block keeps its
            factor as a block-diagonal matrix of up to seven equal blocks, a still longer one (a vocabulary) as a
            diagonal. With a `rank` that is at most an eighth of the side, a factor of up to seven times this size is
            one matrix. Formerly `max_side`.
        storage_dtype: Data type in which the eigenbases of the Kronecker structure are stored: "float16" or
            "bfloat16", at half the memory, or with `rank` also "int8". They are converted when their block is used. By
            default they are stored in the data type they are used in. Formerly `at_rest`.
        offload: Store the eigenbases in host memory. They are moved to the device when their block is used.
        rank: Number of eigenvectors to keep of each Kronecker factor; the other eigenvalues are replaced by their mean.
            Besides its mean, a layer then takes rank (in + out) + 3 rank^2 numbers instead of in^2 + out^2 + in out. By
            default all are kept.
        energy: Instead of `rank`: keep as many eigenvectors of each factor as hold this part of its trace, such as
            0.99, also when tasks are added. The memory may grow with them.
        bytes_per_weight: Instead of `rank`: use the largest one at which the curvature of one task takes at most so
            many bytes per weight in a file, besides the mean. `compress` chooses ranks by layer.
        max_bytes: The same with a number of bytes in all, or a text such as "4GB".

    Raises:
        TypeError: If `model` is not a `torch.nn.Module`.
        ValueError: If an option has an invalid value.
        UnsupportedError: If the model is scripted or has uninitialized parameters.
    """

    _measures_curves = True

    @renamed_arguments(max_side="max_factor_size", at_rest="storage_dtype")
    def __init__(
        self,
        model: nn.Module,
        *,
        likelihood: str | Likelihood = "categorical",
        structure: str = "kronecker",
        strength: float | str = 1.0,
        prior_precision: float = 1.0,
        fisher: str = "auto",
        prior_mean: str = "zero",
        exclude: Iterable[str | nn.Module | nn.Parameter] = (),
        smoothing: float = 0.0,
        draws: int = 1,
        seed: int = 0,
        max_factor_size: int = MAX_FACTOR_SIZE,
        storage_dtype: str | None = None,
        offload: bool = False,
        rank: int | None = None,
        energy: float | None = None,
        bytes_per_weight: float | None = None,
        max_bytes: float | str | None = None,
    ) -> None:
        if sum(given is not None for given in (rank, energy, bytes_per_weight, max_bytes)) > 1:
            raise ValueError("pass one of rank=, energy=, bytes_per_weight= and max_bytes=, not several")
        if bytes_per_weight is not None or max_bytes is not None:
            exclude = list(exclude)
            rank = rank_within(
                model,
                bytes_per_weight=bytes_per_weight,
                max_bytes=max_bytes,
                max_factor_size=positive_whole("max_factor_size", max_factor_size),
                storage_dtype=storage_dtype,
                exclude=exclude,
            )
        if fisher not in FISHERS:
            raise ValueError(f"fisher must be one of {', '.join(FISHERS)}, not {fisher!r}")
        self.smoothing = finite_number("smoothing", smoothing)
        self.privacy: tuple[Privacy | None, ...] = ()
        self._off_center: frozenset[str] | None = None  # blocks that have the mean of before, until `_recenter`
        self.fisher, self.draws, self.seed = fisher, positive_whole("draws", draws), whole_number("seed", seed)
        super().__init__(
            model,
            likelihood=likelihood,
            structure=structure,
            strength=strength,
            prior_precision=prior_precision,
            prior_mean=prior_mean,
            exclude=exclude,
            max_factor_size=max_factor_size,
            storage_dtype=storage_dtype,
            offload=offload,
            rank=rank,
            energy=energy,
        )

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
        privacy: Privacy | None = None,
    ) -> None:
        """Consolidate the task in one pass over its data; see `Memory.consolidate`.

        `smoothing` and `privacy` need two passes.

        Args:
            batches: As for `Memory.consolidate`, and so are the other arguments except `privacy`.
            examples: N, if the batches are only some of the task's examples.
            limit: Use at most this many examples, and scale the Fisher up to all of them.
            forward: `forward(model, batch)` returns `(outputs, targets)`.
            progress: Show a progress bar.
            checkpoint: Path of a file to which a long pass is saved.
            probe: Number of inputs to store for `drift`.
            privacy: Budget of differential privacy. The curvature gets noise, such that it hardly depends on any single
                example; the loss curve is not measured, because it is not covered. Examples are processed one at a
                time. Without it, and with fewer examples than an input factor has rows, a `PrivacyWarning` says
                that examples can be recovered from the memory.

        Raises:
            UnsupportedError: If `privacy` is combined with an option that it does not cover.
        """
        if privacy is not None:
            check_private(self, privacy, smoothing=self.smoothing, checkpoint=checkpoint, probe=probe)
        arguments = {"examples": examples, "limit": limit, "checkpoint": checkpoint, "probe": probe}
        with self._on_all_ranks(batches, arguments):
            saved = self._checkpoint(checkpoint)
            rows = probe_rows(probe)
            fishers = [self._measure(batches, examples, limit, forward, progress, saved, privacy)]
            probes = () if rows is None else (self._record_probe(fishers[0].first.take(self._share(rows)), forward),)
            self._settle(fishers, forward, privacy)
            self.probes += probes
            if saved is not None:
                saved.remove()

    def forecast(
        self, batches: Iterable[Any] | None = None, *, curvature: str = "kept", forward: Forward | None = None
    ) -> Forecast:
        """Forecast the increase of the mean old loss since the last consolidation, in nats per example.

        `forecast()` uses the stored curvature and needs no data, as for every memory. If old data are available,
        `forecast(batches, curvature="fresh")` measures the increase of their loss instead, and each block's share by a
        Fisher measured on them. A few hundred examples are enough.

        Args:
            batches: Old data, only with `curvature="fresh"`.
            curvature: "kept" to use the stored curvature, "fresh" to measure on `batches`.
            forward: As for `consolidate`.

        Returns:
            The increase as a float, with the shares of blocks and tasks as attributes.

        Raises:
            LimpetError: If `batches` is missing with `curvature="fresh"`, or given without it.
        """
        from limpet.forgetting.forecast import fresh_forecast

        if curvature not in ("kept", "fresh"):
            raise ValueError(f"curvature must be 'kept' or 'fresh', not {curvature!r}")
        if (curvature == "fresh") != (batches is not None):
            raise LimpetError(
                "batches and curvature='fresh' must be passed together: call forecast(batches, curvature='fresh'), or "
                "forecast() to use the stored curvature"
            )
        if batches is None:
            return super().forecast()
        with together("forecast", current(), runs_model=self.sharded):
            return fresh_forecast(self.posterior, self._pass(forward, None), batches)

    def compress(
        self,
        *,
        rank: int | None = None,
        energy: float | None = None,
        bytes_per_weight: float | None = None,
        max_bytes: float | str | None = None,
        storage_dtype: str | None = "float16",
        progress: bool = True,
    ) -> dict[str, tuple[int, int]]:
        """Make the memory smaller: keep the largest eigenvalues of every Kronecker factor, and the mean of the others.

        Pass one of the first four arguments. What is removed cannot be restored. Layers with the same input share the
        eigenvectors of its factor, in the memory and in its file; in a sharded memory, if they are on the same rank.
        Factors that are block-diagonal (longer than `max_factor_size`) keep all their eigenvectors.

        Args:
            rank: Number of eigenvectors to keep of every factor.
            energy: Keep as many eigenvectors of each factor as hold this part of its trace, such as 0.99.
            bytes_per_weight: Keep as many eigenvectors as take at most this many bytes per weight in a file, besides
                the mean. The rank of a factor with n rows is proportional to 1 / sqrt(n).
            max_bytes: The same with a number of bytes in all, or a text such as "4GB".
            storage_dtype: How eigenvectors are stored: "float16", "bfloat16", "int8", or None for the dtype of use.
            progress: Show a progress bar.

        Returns:
            The ranks of the input and the output factor of every block.

        Raises:
            UnsupportedError: If the structure is not "kronecker".
            LimpetError: If the memory has no task yet, or the target is too small for one eigenvector per factor.

        Examples:
            >>> import limpet
            >>> import torch
            >>> _ = torch.manual_seed(0)
            >>> model = torch.nn.Linear(200, 50)
            >>> memory = limpet.OnlineLaplace(model)
            >>> memory.consolidate([(torch.randn(400, 200), torch.randint(0, 50, (400,)))])
            >>> before = memory.nbytes
            >>> memory.compress(rank=8)
            {'model': (8, 8)}
            >>> memory.nbytes < before / 4
            True
        """
        from limpet.methods.compress import Target, compress

        self._reject_inside_protect()
        target = Target(rank, energy, bytes_per_weight, max_bytes, storage_dtype)
        with sharing(self.posterior, "compress"):
            return compress(self.posterior, target, progress=progress)

    @staticmethod
    def _checkpoint(path: str | Path | None) -> Checkpoint | None:
        from limpet.curvature.checkpoint import Checkpoint

        return None if path is None else Checkpoint(path)

    def _measure(
        self,
        batches: Iterable[Any],
        examples: int | None,
        limit: int | None,
        forward: Forward | None,
        progress: bool,
        checkpoint: Checkpoint | None = None,
        privacy: Privacy | None = None,
    ) -> Fisher:
        self._reject_inside_protect()
        with torch.inference_mode(False):
            displacement = self._perturbation(batches, examples, limit, forward) if self.smoothing else None
            return self._pass(forward, displacement, privacy).run(
                batches, examples=examples, limit=limit, progress=progress, checkpoint=checkpoint
            )

    def _repairer(self, examples: int, budget: float | None, options: Mapping[str, Any] | None) -> Repairer | str:
        from limpet.protection.repair_step import Repairer

        if not self.tasks:
            return "no task has been consolidated yet"
        if budget is not None and not self.probes:
            return NO_PROBE
        chosen: dict[str, Any] = {"examples": examples, "limit": min(examples, REPAIRED_WITH), **(options or {})}
        if budget is not None:
            chosen["budget"] = budget
        elif not {"strength", "tolerance", "budget"} & chosen.keys():
            chosen |= {"tolerance": "auto", "budget": "auto" if self.probes else None}
        RepairOptions(**chosen)  # raises now, rather than after training

        def run(batches: Iterable[Any], forward: Forward | None) -> Repair:
            self.posterior.follow_devices()
            return repaired(self, batches, RepairOptions(**{"forward": forward, **chosen}))

        def check() -> None:
            if chosen.get("budget") is not None:
                check_drift(self, chosen.get("probe_forward"))

        needs_targets = self.fisher == "empirical" and chosen.get("forward") is None
        return Repairer(run, check, needs_targets)

    def _perturbation(
        self, batches: Iterable[Any], examples: int | None, limit: int | None, forward: Forward | None
    ) -> Displacement | None:
        """Measure a preliminary Fisher at the mode, and derive the perturbations of `smoothing` from it."""
        from limpet.posterior.perturbation import weight_perturbation

        if isinstance(batches, Iterator):
            raise LimpetError("smoothing reads the data twice: pass a loader or a list of batches, not an iterator")
        sized = examples is not None or counted_examples(batches) is not None
        short = min(limit or LOOK, LOOK) if sized or limit is not None else None
        look = self._pass(forward, None).run(batches, examples=examples, limit=short, progress=False)
        strength = 1.0 if self._automatic else self._strength
        return weight_perturbation(self.posterior, look, strength, self.smoothing, self.seed + self.tasks)

    def _pass(
        self, forward: Forward | None, displacement: Displacement | None, privacy: Privacy | None = None
    ) -> FisherPass:
        blocks, sharding = self._planned(), self.posterior.sharding
        measured = self.model, blocks, self.likelihood, self.posterior.structure
        options = self._step_options(forward)
        if privacy is not None:
            from limpet.curvature.private_pass import PrivatePass

            return PrivatePass(*measured, privacy=privacy, **options)
        if sharding is not None:
            sharding.settle(blocks, self.posterior.structure, self.posterior.parameters())
        return fisher_pass(*measured, sharding, displacement=displacement, **options)

    def _step_options(self, forward: Forward | None) -> StepOptions:
        """Return the options of the next pass: the settings of this memory, with a seed of its own for every task."""
        return {"fisher": self.fisher, "draws": self.draws, "seed": self.seed + self.tasks, "forward": forward}

    @property
    def _content_text(self) -> str:
        return super()._content_text + privacy_text(self.privacy)

    def _settings(self) -> dict[str, Any]:
        own = {"fisher": self.fisher, "smoothing": self.smoothing, "draws": self.draws, "seed": self.seed}
        return {**super()._settings(), **own, **described(self.privacy)}

    def _read_settings(self, settings: state_header.Settings) -> dict[str, Any]:
        return {
            **super()._read_settings(settings),
            "fisher": settings.choice("fisher", FISHERS),
            "smoothing": settings.number("smoothing", 0.0),
            "draws": max(settings.whole("draws"), 1),
            "seed": settings.whole("seed"),
            "privacy": restored(settings.list("privacy"), settings.whole("tasks")),
        }

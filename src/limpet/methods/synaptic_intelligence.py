"""Synaptic Intelligence (Zenke, Poole, Ganguli 2017): importance by contribution to the fall of the loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from limpet.errors import LimpetError, MemoryFileError, UnsupportedError, whole_number
from limpet.methods.limits import SLACK, check_strength, finite
from limpet.methods.memory import MAX_FACTOR_SIZE, Memory
from limpet.model import Block, is_excluded, named_parameters
from limpet.model.blocks import direct
from limpet.posterior import BlockPosterior
from limpet.posterior.sharding import reject_sharded
from limpet.precision import Diagonal, DiagonalTerm

if TYPE_CHECKING:
    from limpet.methods import state_header
    from limpet.protection.protection import StepObserver


class SynapticIntelligence(Memory):
    """Synaptic Intelligence: a diagonal penalty whose importances are path integrals of the loss gradient.

        loss + strength sum_k Omega_k (w_k - mean_k)^2
        omega_k = - sum over steps of g_k (change of w_k)
        Omega_k <- max(0, Omega_k + omega_k / ((change of w_k over the task)^2 + damping))

    g is the gradient of the loss alone, without the penalty. limpet divides the penalty by the number of examples N of
    the task being learned, so the importances of a task are multiplied by its own N; for tasks of equal size this is
    the original method. The importances are measured during training, so every task, the first one included, must be
    trained under `protect`; `consolidate` needs no data.

    Args:
        model: The model to protect. Wrappers (torch.compile, DistributedDataParallel, PEFT) are unwrapped.
        strength: Factor of the importances of each task.
        damping: Added to the squared change of each weight, which keeps importances finite. Must be positive.
        prior_precision: Precision of the isotropic Gaussian prior over the weights.
        prior_mean: Mean of the prior: "zero", or "initial" for the weights that the model has now.
        exclude: Parameters to leave unprotected: names of parameters or modules, patterns, modules or parameters.

    Raises:
        TypeError: If `model` is not a `torch.nn.Module`.
        ValueError: If an option has an invalid value.
        UnsupportedError: If the model is sharded, scripted or has uninitialized parameters.

    Examples:
        >>> import torch, limpet
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 2)
        >>> x, y = torch.randn(20, 3), torch.randint(0, 2, (20,))
        >>> memory = limpet.SynapticIntelligence(model, strength=0.1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with memory.protect(optimizer, examples=20):
        ...     for _ in range(5):
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.cross_entropy(model(x), y).backward()
        ...         optimizer.step()
        >>> memory.consolidate()
        >>> memory.tasks
        1
    """

    method = "synaptic-intelligence"

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: float = 1.0,
        damping: float = 0.1,
        prior_precision: float = 0.0,
        prior_mean: str = "zero",
        exclude: Iterable[str | nn.Module | nn.Parameter] = (),
    ) -> None:
        if not damping > 0:
            raise ValueError(f"damping must be > 0, not {damping!r}")
        self.damping = float(damping)
        self._watch: Watch | None = None
        super().__init__(
            model,
            likelihood="categorical",
            structure="diagonal",
            strength=strength,
            prior_precision=prior_precision,
            prior_mean=prior_mean,
            exclude=exclude,
            max_factor_size=MAX_FACTOR_SIZE,
        )
        reject_sharded(self.posterior.sharding, "Synaptic Intelligence", "use limpet.OnlineLaplace")

    def _planned(self, also: Any = ()) -> list[Block]:
        """Return one block per parameter: importances are per weight, whatever the layer."""
        return [
            direct(name, parameter.shape)
            for name, parameter in named_parameters(self.model).items()
            if name in also or (parameter.requires_grad and not is_excluded(name, self.exclude))
        ]

    def _observer(self, examples: int) -> StepObserver | None:
        if self._watch is None or self._watch.left_behind(self.posterior.parameters()):
            self._watch = Watch.begin(self.posterior.parameters(), list(self.posterior.held))
        self._watch.parameters = self.posterior.parameters()
        self._watch.examples = examples
        return self._watch

    def _left(self, finished: bool) -> None:
        super()._left(finished)
        if self._watch is not None:
            self._watch.leave()

    def consolidate(
        self,
        batches: Iterable[Any] | None = None,
        *,
        examples: int | None = None,
        limit: int | None = None,
        forward: Any = None,
        progress: bool = True,
        checkpoint: Any = None,
        probe: int | None = None,
    ) -> None:
        """Consolidate the task that was just learned under `protect`.

        No data are needed. The arguments of the other methods are accepted and ignored, so that the same training loop
        works for all methods.

        Args:
            batches: Ignored.
            examples: Ignored; `protect` has the number of examples.
            limit: Ignored.
            forward: Ignored.
            progress: Ignored.
            checkpoint: Ignored.
            probe: Must be None: probes are not supported.

        Raises:
            LimpetError: If no optimizer step was observed since the last task, or if called inside
                `with memory.protect(...)`.
            UnsupportedError: If `probe` is given.
        """
        self._reject_inside_protect()
        if probe is not None:
            raise UnsupportedError(
                "Synaptic Intelligence reads no data, so it does not support probe=: use limpet.OnlineLaplace"
            )
        watch = self._watch
        if watch is None or not watch.steps:
            raise LimpetError(
                "no optimizer step since the last task: Synaptic Intelligence measures importances during training, so "
                "train every task, including the first, inside `with memory.protect(optimizer, examples=N):`"
            )
        weights = self.posterior.parameters()
        held_now = dict(self.posterior.held)
        for name, held in held_now.items():
            if name not in watch.path:
                continue
            change = weights[name].detach().to(watch.start[name].dtype) - watch.start[name]
            importance = watch.path[name] / (change.square() + self.damping)
            # the penalty is 1/2 L d^2 / N, the paper's is strength * Omega d^2
            term = held.block.matrix([2 * watch.examples * importance])
            precision = held.precision.add(DiagonalTerm(_kept_positive(term, held, self._strength)), self._strength)
            mean = held.matrix(weights).detach().clone()
            held_now[name] = replace(held, mean=mean, precision=precision, tasks=held.tasks + 1)
            check_strength(held_now[name], self._strength)
        self.posterior.held = held_now
        self.examples += watch.examples
        self.tasks += 1
        self._proximal_state = None
        self._watch = None

    def _settings(self) -> dict[str, Any]:
        watch = self._watch
        running = None if watch is None else {"steps": watch.steps, "examples": watch.examples}
        return {**super()._settings(), "damping": self.damping, "watch": running}

    def _read_settings(self, settings: state_header.Settings) -> dict[str, Any]:
        return {**super()._read_settings(settings), "damping": settings.number("damping")}

    def _extra_tensors(self) -> dict[str, Tensor]:
        if self._watch is None:
            return {}
        pairs = (("path", self._watch.path), ("start", self._watch.start))
        return {f"watch.{kind}.{name}": tensor for kind, tensors in pairs for name, tensor in tensors.items()}

    def _read_extra(self, settings: state_header.Settings, tensors: dict[str, Tensor]) -> dict[str, Any]:
        running = settings.part("watch")
        if running is None:
            return {**super()._read_extra(settings, tensors), "_watch": None}
        weights = self.posterior.parameters()
        steps, examples = (whole_number(name, running[name]) for name in ("steps", "examples"))
        watch = Watch(weights, {}, {}, steps=steps, examples=examples)
        for key, tensor in tensors.items():
            kind, _, name = key.removeprefix("watch.").partition(".")
            shape = weights[name].shape if name in weights else None
            if kind not in ("path", "start") or shape != tensor.shape or not tensor.is_floating_point():
                raise MemoryFileError(f"{key} does not match any parameter of the model")
            (watch.path if kind == "path" else watch.start)[name] = finite(key, tensor.to(weights[name].device))
        if watch.path.keys() != watch.start.keys():
            raise MemoryFileError("the path integral of the current task is incomplete")
        # the importances of the task are 2 N strength path / (change^2 + damping)
        factor = 2 * max(examples, 1) * max(settings.number("strength"), 1.0) / settings.number("damping")
        for name, path in watch.path.items():
            if not factor * float(path.abs().max()) * SLACK <= torch.finfo(path.dtype).max:
                raise MemoryFileError(f"the path integral of {name} is so large that its importances overflow")
        return {"_watch": watch}


def _kept_positive(term: Tensor, held: BlockPosterior, strength: float) -> Tensor:
    """Clamp the term from below so that neither the sum of importances nor its weighted sum becomes negative."""
    precision = held.precision
    assert isinstance(precision, Diagonal)
    term = torch.maximum(term, -precision.values.plain)
    return torch.maximum(term, -precision.values.total / strength) if strength else term


class Watch:
    """Step observer that accumulates the path integral of one task.

    Args:
        parameters: The model's parameters by name.
        path: The path integral omega so far, by parameter.
        start: The weights at the start of the task, by parameter.
        steps: Number of steps so far.
        examples: Number of examples in the task.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        path: dict[str, Tensor],
        start: dict[str, Tensor],
        *,
        steps: int = 0,
        examples: int = 0,
    ) -> None:
        self.parameters = parameters
        self.path = path
        self.start = start
        self.steps = steps
        self.examples = examples
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._end: Tensor | None = None  # fingerprint of the weights when `protect` was last left

    @classmethod
    def begin(cls, parameters: dict[str, nn.Parameter], names: list[str]) -> Watch:
        """Start a path integral of zero at the current weights."""
        start = {}
        for name in names:
            weight = parameters[name].detach()
            start[name] = weight.to(torch.promote_types(weight.dtype, torch.float32)).clone()
        return cls(parameters, {name: torch.zeros_like(tensor) for name, tensor in start.items()}, start)

    def leave(self) -> None:
        """Record the weights at the end of a `protect` block; a later block may continue the path."""
        self._end = self._place(self.parameters)

    def left_behind(self, parameters: dict[str, nn.Parameter]) -> bool:
        """Whether the weights have changed since `leave` (were reset, for example), so that the path is invalid."""
        return self._end is not None and not torch.allclose(self._end, self._place(parameters), rtol=1e-9, atol=0.0)

    def _place(self, parameters: dict[str, nn.Parameter]) -> Tensor:
        known = [parameters[name].detach().double() for name in self.path if name in parameters]
        return torch.stack([number.cpu() for weight in known for number in (weight.sum(), weight.square().sum())])

    def before_step(self, gradients: dict[str, Tensor]) -> None:
        """Store the gradients and weights before the step."""
        self._before = {
            name: (gradient.detach().clone(), self.parameters[name].detach().clone())
            for name, gradient in gradients.items()
            if name in self.path
        }

    def after_step(self) -> None:
        """Update the path integral: omega -= g * (change of w in this step)."""
        for name, (gradient, before) in self._before.items():
            path = self.path[name]
            change = self.parameters[name].detach().to(path.dtype) - before.to(path.dtype)
            path -= gradient.to_dense().to(path.dtype) * change
        self._before = {}
        self.steps += 1

"""What a network's outputs mean: the negative log likelihood, and square roots of its Hessian in the outputs.

The Fisher of a task is sum_n J_n^T (sum_k r_nk r_nk^T) J_n with J_n the Jacobian of the outputs in the weights.
The curvature pass only needs the roots r, as tensors in the shape of the outputs; there are three kinds:

- exact: sum_k r_k r_k^T is the Hessian of the negative log likelihood in the outputs;
- sampled: r is the gradient at a label drawn from the model, so that E[r r^T] is that Hessian;
- empirical: r is the gradient at the true label.

A likelihood of your own is one small class with two methods, and has the sampled and the empirical kind:

>>> class Poisson(Likelihood):
...     name = "poisson"
...     def negative_log_likelihood(self, outputs, targets):
...         return torch.nn.functional.poisson_nll_loss(outputs, targets, reduction="sum")
...     def sample(self, outputs, generator):
...         return torch.poisson(outputs.exp(), generator=generator)
>>> Poisson().loss(torch.zeros(4, 1), torch.ones(4, 1))
tensor(1.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from limpet.errors import MemoryFileError, UnsupportedError

ROOTS_AT_ONCE = 1 << 22
"""Numbers that the exact roots made at a time may take."""

Outputs = Any
"""A tensor, examples first, or (for several outputs) a tuple of such tensors."""


class Likelihood(ABC):
    """The base of every likelihood. `name` stands in reports and files."""

    name: ClassVar[str]

    @abstractmethod
    def negative_log_likelihood(self, outputs: Outputs, targets: Any) -> Tensor:
        """-log p(targets | outputs), summed over the examples."""

    @abstractmethod
    def sample(self, outputs: Outputs, generator: torch.Generator | None) -> Any:
        """Targets drawn from p(. | outputs), independent for every example and position."""

    def loss(self, outputs: Outputs, targets: Any) -> Tensor:
        """The mean negative log likelihood per example: the loss that this likelihood's Fisher belongs to."""
        return self.negative_log_likelihood(outputs, targets) / self.count(outputs, targets)

    def count(self, outputs: Outputs, targets: Any) -> int:
        """How many examples (predicted positions, for outputs per position) there are."""
        return int(as_tensors(outputs)[0].shape[0])

    def root_count(self, outputs: Outputs) -> int | None:
        """How many roots the exact Fisher takes; None where there is no exact one."""
        return None

    def roots(self, outputs: Outputs, targets: Any) -> Iterator[Outputs]:
        """The exact roots. `targets` only say which positions are ignored, and may be None."""
        raise UnsupportedError(f"the {self.name} likelihood has no exact Fisher here: use fisher='sampled'")

    def sampled_root(self, outputs: Outputs, targets: Any, generator: torch.Generator | None) -> Outputs:
        """The gradient of the negative log likelihood in the outputs, at labels drawn from the model."""
        return self.gradient(outputs, self.sample(outputs, generator))

    def gradient(self, outputs: Outputs, targets: Any) -> Outputs:
        """The gradient of the negative log likelihood in the outputs, at `targets`."""
        leaves = [tensor.detach().requires_grad_() for tensor in as_tensors(outputs)]
        with torch.enable_grad():
            value = self.negative_log_likelihood(_like(outputs, leaves), targets)
            gradients = torch.autograd.grad(value, leaves)
        return _like(outputs, gradients)

    def tally(self, outputs: Outputs, targets: Any) -> Tensor:
        """Sums over a batch from which `fisher_scale` finds what the likelihood estimates itself."""
        return torch.zeros(2, dtype=torch.float64)

    def fisher_scale(self, tally: Tensor, *, empirical: bool) -> float:
        """What the Fisher is multiplied by in the end."""
        return 1.0

    def describe(self) -> dict[str, Any]:
        """Name and options as plain JSON values, for a memory's file."""
        return {"name": self.name}

    def mean(self, outputs: Outputs) -> Outputs:
        """E[targets | outputs]: class probabilities for a categorical."""
        raise UnsupportedError(f"the {self.name} likelihood does not say what its mean is: give it `mean`")


def as_tensors(outputs: Outputs) -> tuple[Tensor, ...]:
    """One or several outputs as a tuple of tensors."""
    if isinstance(outputs, Tensor):
        return (outputs,)
    if isinstance(outputs, tuple | list) and outputs and all(isinstance(o, Tensor) for o in outputs):
        return tuple(outputs)
    raise UnsupportedError(
        f"the model gave {type(outputs).__name__}, not a tensor or a tuple of tensors: pass "
        "forward=lambda model, batch: (outputs, targets) that picks the outputs the likelihood is about"
    )


def _like(outputs: Outputs, tensors: Sequence[Tensor]) -> Outputs:
    return tensors[0] if isinstance(outputs, Tensor) else tuple(tensors)


class Categorical(Likelihood):
    """Class scores (logits) -> softmax. Outputs (examples, classes), or (examples, positions..., classes).

    Targets are class numbers; positions whose target is `ignore_index` have no loss and no Fisher, and are not
    counted. Where the classes are not the last dimension (images: (n, classes, h, w)), say `class_dim=1`.

    >>> Categorical().loss(torch.zeros(3, 10), torch.tensor([1, 2, 3]))
    tensor(2.3026)
    """

    name = "categorical"

    def __init__(self, *, class_dim: int = -1, ignore_index: int = -100) -> None:
        self.class_dim = class_dim
        self.ignore_index = ignore_index

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "class_dim": self.class_dim, "ignore_index": self.ignore_index}

    def _logits(self, outputs: Outputs) -> Tensor:
        (logits,) = as_tensors(outputs)
        if logits.dim() < 2:
            raise UnsupportedError(
                f"categorical outputs are (examples, classes), not of shape {tuple(logits.shape)}; "
                "one logit per example is likelihood='bernoulli'"
            )
        logits = logits.movedim(self.class_dim, -1)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _check(self, logits: Tensor, targets: Any) -> Tensor | None:
        if targets is None:
            return None
        if not isinstance(targets, Tensor) or targets.shape != logits.shape[:-1]:
            shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
            raise UnsupportedError(
                f"targets of shape {shape} do not fit outputs with {logits.shape[-1]} classes for "
                f"{tuple(logits.shape[:-1])} positions: targets are class numbers; where classes are not the "
                "last dimension of the outputs use likelihood=limpet.Categorical(class_dim=1)"
            )
        return targets.to(logits.device)

    def _out(self, root: Tensor, outputs: Tensor, targets: Tensor | None) -> Tensor:
        if targets is not None:
            root = root.masked_fill((targets == self.ignore_index).unsqueeze(-1), 0)
        return root.movedim(-1, self.class_dim).to(outputs.dtype)

    def negative_log_likelihood(self, outputs: Outputs, targets: Any) -> Tensor:
        logits = self._logits(outputs)
        labels = self._check(logits, targets)
        if labels is None:
            raise UnsupportedError("the loss needs targets: give batches of (inputs, targets)")
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=self.ignore_index)

    def count(self, outputs: Outputs, targets: Any) -> int:
        logits = self._logits(outputs)
        labels = self._check(logits, targets)
        if labels is None:
            return logits[..., 0].numel()
        return int((labels != self.ignore_index).sum())

    def sample(self, outputs: Outputs, generator: torch.Generator | None) -> Tensor:
        probabilities = self._logits(outputs).softmax(-1)
        drawn = torch.multinomial(probabilities.flatten(0, -2), 1, generator=generator)
        return drawn.reshape(probabilities.shape[:-1])

    def gradient(self, outputs: Outputs, targets: Any) -> Tensor:
        logits = self._logits(outputs)
        labels = self._check(logits, targets)
        if labels is None:
            raise UnsupportedError("fisher='empirical' needs targets: give batches of (inputs, targets)")
        kept = labels.masked_fill(labels == self.ignore_index, 0).unsqueeze(-1)
        root = logits.softmax(-1)
        root.scatter_add_(-1, kept, torch.full_like(kept, -1, dtype=root.dtype))
        return self._out(root, outputs, labels)

    def sampled_root(self, outputs: Outputs, targets: Any, generator: torch.Generator | None) -> Tensor:
        root = self.gradient(outputs, self.sample(outputs, generator))
        return self._out(root.movedim(self.class_dim, -1), outputs, self._check(self._logits(outputs), targets))

    def root_count(self, outputs: Outputs) -> int | None:
        logits = self._logits(outputs)
        return max(logits.shape[-1] - 1, 1) if logits.dim() == 2 else None

    def roots(self, outputs: Outputs, targets: Any) -> Iterator[Tensor]:
        """The columns of the Cholesky factor of diag(p) - p p^T, which has rank classes - 1.

        With the tail sums t_j = p_j + ... + p_C: R_jj = sqrt(p_j t_{j+1} / t_j) and, below the diagonal,
        R_kj = -p_k sqrt(p_j / (t_j t_{j+1})) (Tanabe and Sagae 1992). One backward pass fewer than the
        symmetric root, and no square root of small differences.
        """
        logits = self._logits(outputs)
        labels = self._check(logits, targets)
        if logits.dim() != 2:
            raise UnsupportedError("fisher='exact' is for one output per example: use fisher='sampled'")
        p = logits.softmax(-1)
        if p.shape[-1] == 1:
            yield self._out(torch.zeros_like(p), outputs, labels)
            return
        tail = p.flip(-1).cumsum(-1).flip(-1)
        rest = tail[:, 1:].clamp_min(torch.finfo(p.dtype).tiny).sqrt()
        own = (p / tail.clamp_min(torch.finfo(p.dtype).tiny)).sqrt()
        chunk = max(1, ROOTS_AT_ONCE // p.numel())
        for start in range(0, p.shape[-1] - 1, chunk):
            stop = min(start + chunk, p.shape[-1] - 1)
            # p_k / rest_j is at most sqrt(p_k) below the diagonal, so no root overflows there
            roots = p.unsqueeze(1) * (-own[:, start:stop] / rest[:, start:stop]).unsqueeze(-1)
            roots = roots.triu(start + 1)
            roots.diagonal(start, 1, 2).copy_(own[:, start:stop] * rest[:, start:stop])
            whole = roots if labels is None else roots.masked_fill((labels == self.ignore_index)[:, None, None], 0)
            yield from whole.movedim(1, 0).contiguous().to(logits.dtype).movedim(-1, self.class_dim).to(outputs.dtype)

    def mean(self, outputs: Outputs) -> Tensor:
        return self._logits(outputs).softmax(-1).movedim(-1, self.class_dim)


class Bernoulli(Likelihood):
    """Independent logits -> sigmoid: outputs (examples, ...) and targets 0 or 1 of the same shape."""

    name = "bernoulli"

    def negative_log_likelihood(self, outputs: Outputs, targets: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(*_paired(outputs, targets), reduction="sum")

    def sample(self, outputs: Outputs, generator: torch.Generator | None) -> Tensor:
        return torch.bernoulli(self.mean(outputs), generator=generator)

    def gradient(self, outputs: Outputs, targets: Any) -> Tensor:
        logits, labels = _paired(outputs, targets)
        return logits.sigmoid() - labels

    def root_count(self, outputs: Outputs) -> int | None:
        return _per_example(outputs)

    def roots(self, outputs: Outputs, targets: Any) -> Iterator[Tensor]:
        p = self.mean(outputs)
        yield from _diagonal_roots((p * (1 - p)).sqrt())

    def mean(self, outputs: Outputs) -> Tensor:
        (logits,) = as_tensors(outputs)
        return logits.sigmoid()


class Gaussian(Likelihood):
    """Outputs (examples, ...) are means; the noise variance is given, or `"estimate"`d from the residuals.

    The negative log likelihood is sum (y - f)^2 / (2 variance) + const: a plain mean squared error is another
    multiple of it, `Gaussian(v).loss` is the loss itself.

    >>> Gaussian(0.5).loss(torch.zeros(4, 1), torch.ones(4, 1))
    tensor(1.5724)
    """

    name = "gaussian"

    def __init__(self, variance: float | str = 1.0) -> None:
        if variance != "estimate" and not (isinstance(variance, int | float) and variance > 0):
            raise ValueError(f"variance must be a number > 0 or 'estimate', not {variance!r}")
        self.variance = variance

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "variance": self.variance}

    @property
    def _known(self) -> float:
        """The variance while the pass runs: 1 where it is estimated, and mended by `fisher_scale`."""
        return 1.0 if isinstance(self.variance, str) else float(self.variance)

    def negative_log_likelihood(self, outputs: Outputs, targets: Any) -> Tensor:
        means, values = _paired(outputs, targets)
        constant = 0.5 * means.numel() * math.log(2 * math.pi * self._known)
        return (means - values).square().sum() / (2 * self._known) + constant

    def sample(self, outputs: Outputs, generator: torch.Generator | None) -> Tensor:
        (means,) = as_tensors(outputs)
        noise = torch.randn(means.shape, generator=generator, device=means.device, dtype=means.dtype)
        return means + math.sqrt(self._known) * noise

    def gradient(self, outputs: Outputs, targets: Any) -> Tensor:
        means, values = _paired(outputs, targets)
        return (means - values) / self._known

    def root_count(self, outputs: Outputs) -> int | None:
        return _per_example(outputs)

    def roots(self, outputs: Outputs, targets: Any) -> Iterator[Tensor]:
        yield from _diagonal_roots(torch.full_like(outputs, self._known**-0.5))

    def tally(self, outputs: Outputs, targets: Any) -> Tensor:
        if self.variance != "estimate":
            return super().tally(outputs, targets)
        means, values = _paired(outputs, targets)
        squares = (means - values).square().sum(dtype=torch.float32 if means.device.type == "mps" else torch.float64)
        return torch.tensor([float(squares), means.numel()], dtype=torch.float64)

    def fisher_scale(self, tally: Tensor, *, empirical: bool) -> float:
        if self.variance != "estimate":
            return 1.0
        variance = float(tally[0] / tally[1])
        if not variance > 0:
            raise UnsupportedError("the residuals are all zero, so no noise variance can be estimated: give one")
        return float(variance ** (-2 if empirical else -1))

    def mean(self, outputs: Outputs) -> Tensor:
        return as_tensors(outputs)[0]


class Several(Likelihood):
    """Several outputs, each with a likelihood of its own, independent given the outputs.

    >>> both = Several(Categorical(), Gaussian())
    >>> both.loss((torch.zeros(2, 4), torch.zeros(2, 1)), (torch.tensor([0, 1]), torch.zeros(2, 1)))
    tensor(2.3052)
    """

    name = "several"

    def __init__(self, *parts: Likelihood) -> None:
        if not parts:
            raise ValueError("Several needs one likelihood per output")
        if any(isinstance(part, Gaussian) and part.variance == "estimate" for part in parts):
            raise ValueError("one of several outputs cannot have its variance estimated: give Gaussian(variance)")
        self.parts = parts

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "parts": [part.describe() for part in self.parts]}

    def _each(self, outputs: Outputs, targets: Any) -> Iterator[tuple[Likelihood, Tensor, Any]]:
        tensors = as_tensors(outputs)
        if len(tensors) != len(self.parts):
            raise UnsupportedError(f"{len(tensors)} outputs for {len(self.parts)} likelihoods")
        return zip(self.parts, tensors, [None] * len(tensors) if targets is None else targets, strict=True)

    def negative_log_likelihood(self, outputs: Outputs, targets: Any) -> Tensor:
        values = [part.negative_log_likelihood(o, t) for part, o, t in self._each(outputs, targets)]
        return torch.stack(values).sum()

    def sample(self, outputs: Outputs, generator: torch.Generator | None) -> tuple[Any, ...]:
        return tuple(part.sample(o, generator) for part, o, _ in self._each(outputs, None))

    def gradient(self, outputs: Outputs, targets: Any) -> tuple[Tensor, ...]:
        return tuple(part.gradient(o, t) for part, o, t in self._each(outputs, targets))

    def sampled_root(self, outputs: Outputs, targets: Any, generator: torch.Generator | None) -> tuple[Tensor, ...]:
        return tuple(part.sampled_root(o, t, generator) for part, o, t in self._each(outputs, targets))

    def count(self, outputs: Outputs, targets: Any) -> int:
        return max(part.count(o, t) for part, o, t in self._each(outputs, targets))

    def root_count(self, outputs: Outputs) -> int | None:
        counts = [part.root_count(o) for part, o, _ in self._each(outputs, None)]
        return None if None in counts else sum(c for c in counts if c is not None)

    def roots(self, outputs: Outputs, targets: Any) -> Iterator[tuple[Tensor, ...]]:
        zeros = [torch.zeros_like(o) for o in as_tensors(outputs)]
        for i, (part, o, t) in enumerate(self._each(outputs, targets)):
            for root in part.roots(o, t):
                yield (*zeros[:i], root, *zeros[i + 1 :])

    def mean(self, outputs: Outputs) -> tuple[Tensor, ...]:
        return tuple(part.mean(o) for part, o, _ in self._each(outputs, None))


def _paired(outputs: Outputs, targets: Any) -> tuple[Tensor, Tensor]:
    """Outputs, and targets that fit them."""
    (tensor,) = as_tensors(outputs)
    if targets is None:
        raise UnsupportedError("this needs targets: give batches of (inputs, targets)")
    if tensor.shape != targets.shape:
        raise UnsupportedError(
            f"targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(tensor.shape)}: "
            "give them the same shape, for instance targets.unsqueeze(-1)"
        )
    return tensor, targets.to(tensor)


def _per_example(outputs: Tensor) -> int | None:
    return None if outputs.dim() > 2 else outputs[0].numel()


def _diagonal_roots(scale: Tensor) -> Iterator[Tensor]:
    """The columns of a diagonal root, for every example at once."""
    if scale.dim() > 2:
        raise UnsupportedError("fisher='exact' is for one output per example: use fisher='sampled'")
    flat = scale.reshape(scale.shape[0], -1)
    for k in range(flat.shape[1]):
        root = torch.zeros_like(flat)
        root[:, k] = flat[:, k]
        yield root.reshape(scale.shape)


NAMES: dict[str, type[Categorical] | type[Bernoulli] | type[Gaussian]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
}


def resolve(likelihood: str | Likelihood) -> Likelihood:
    """A likelihood by its name, or the likelihood itself."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    if likelihood not in NAMES:
        raise ValueError(f"likelihood must be one of {', '.join(NAMES)} or a Likelihood, not {likelihood!r}")
    return NAMES[likelihood]()


def from_description(description: Mapping[str, Any]) -> Likelihood:
    """The inverse of `describe`, for the likelihoods of this module."""
    try:
        options = dict(description)
        name = options.pop("name")
        if name == Several.name:
            return Several(*map(from_description, options["parts"]))
        return NAMES[name](**options)
    except (KeyError, TypeError, ValueError) as error:
        raise MemoryFileError(
            f"the file has the likelihood {description!r}, which is not one of limpet's own: pass it as "
            "limpet.load(path, model, likelihood=...)"
        ) from error

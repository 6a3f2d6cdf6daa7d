"""Categorical likelihood: softmax classification, also per position (tokens, pixels)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from limpet.errors import UnsupportedError
from limpet.likelihoods.base import Likelihood, Outputs, check_comparable, one_tensor, widened
from limpet.likelihoods.random import Random, uniform

TOP, TAIL = 64, 16
"""Labels in a summary: the number of most likely ones, and the number of draws from all others."""

ROOTS_AT_ONCE = 1 << 22
"""Maximum number of elements of the exact roots that are computed at once."""


class Categorical(Likelihood):
    """Categorical likelihood with a softmax over logits.

    Outputs have the shape (examples, classes) or (examples, positions..., classes), targets are class indices.

    Args:
        class_dim: Dimension of the classes in the outputs, for instance 1 for images of shape (n, classes, h, w).
        ignore_index: Target of positions to ignore: they contribute neither to the loss nor to the Fisher, and are not
            counted.

    Examples:
        >>> Categorical().loss(torch.zeros(3, 10), torch.tensor([1, 2, 3]))
        tensor(2.3026)
    """

    name = "categorical"
    by_example = True

    def __init__(self, *, class_dim: int = -1, ignore_index: int = -100) -> None:
        self.class_dim = class_dim
        self.ignore_index = ignore_index

    def describe(self) -> dict[str, Any]:
        """Return the name and the options as plain JSON values."""
        return {"name": self.name, "class_dim": self.class_dim, "ignore_index": self.ignore_index}

    def _logits(self, outputs: Outputs) -> Tensor:
        """Return the logits in at least float32, with the classes as the last dimension."""
        logits = widened(outputs)
        if logits.dim() < 2:
            raise UnsupportedError(
                f"categorical outputs must have the shape (examples, classes), not {tuple(logits.shape)}: for one "
                "logit per example use likelihood='bernoulli'"
            )
        return logits.movedim(self.class_dim, -1)

    def _labels(self, logits: Tensor, targets: Any) -> Tensor | None:
        """Return the targets as integers on the device of the logits; None if there are no targets."""
        if targets is None:
            return None
        if not isinstance(targets, Tensor) or targets.shape != logits.shape[:-1]:
            shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
            raise UnsupportedError(
                f"targets of shape {shape} do not match outputs with {logits.shape[-1]} classes for "
                f"{tuple(logits.shape[:-1])} positions: targets must be class indices; if the classes are not the "
                "last dimension of the outputs, use likelihood=limpet.Categorical(class_dim=1)"
            )
        labels = targets.to(logits.device)
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise UnsupportedError(f"targets of dtype {labels.dtype} are not class indices: pass targets.long()")
        return labels

    def _check(self, logits: Tensor, targets: Any) -> Tensor | None:
        """Return the targets as valid class indices on the device of the logits; None if there are no targets."""
        labels = self._labels(logits, targets)
        if labels is None:
            return None
        wrong = (labels != self.ignore_index) & ((labels < 0) | (labels >= logits.shape[-1]))
        if bool(wrong.any()):
            raise UnsupportedError(
                f"targets must be class indices from 0 to {logits.shape[-1] - 1}, or {self.ignore_index} for positions "
                f"to ignore (limpet.Categorical(ignore_index=...)), but they contain {int(labels[wrong][0])}"
            )
        return labels.long()

    def _out(self, root: Tensor, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Return a root in the layout and dtype of the outputs, zero at ignored positions."""
        if targets is not None:
            root = root.masked_fill((targets == self.ignore_index).unsqueeze(-1), 0)
        return root.movedim(-1, self.class_dim).to(outputs.dtype)

    def negative_log_likelihood(self, outputs: Outputs, targets: Any) -> Tensor:
        """Compute the summed cross-entropy of the positions that are not ignored."""
        logits = self._logits(outputs)
        labels = self._check(logits, targets)
        if labels is None:
            raise UnsupportedError("the loss needs targets: pass batches of (inputs, targets)")
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=self.ignore_index)

    def count(self, outputs: Outputs, targets: Any) -> int:
        """Count the positions that are not ignored."""
        logits = self._logits(outputs)
        labels = self._check(logits, targets)
        if labels is None:
            return logits[..., 0].numel()
        return int((labels != self.ignore_index).sum())

    def count_targets(self, targets: Any) -> int | None:
        """Count the class indices that are not ignored."""
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            return None
        return int((targets != self.ignore_index).sum())

    def label_counts(self, outputs: Outputs, targets: Any) -> Tensor:
        """Count how often each class occurs among the targets."""
        classes = self._logits(outputs).shape[-1]
        labels = targets[targets != self.ignore_index].flatten()
        return torch.bincount(labels.long().to(one_tensor(outputs).device), minlength=classes)

    def relabelled(self, targets: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """Replace the targets that are not ignored with labels drawn uniformly from `labels`."""
        drawn = labels[torch.randint(len(labels), targets.shape, generator=generator, device=labels.device)]
        return drawn.masked_fill((targets == self.ignore_index).to(drawn.device), self.ignore_index)

    def sample(self, outputs: Outputs, generator: Random) -> Tensor:
        """Draw classes from the softmax by inverting the cumulative distribution."""
        return self._drawn(self._logits(outputs).softmax(-1), generator)

    @staticmethod
    def _drawn(probabilities: Tensor, generator: Random) -> Tensor:
        cumulative = probabilities.cumsum(-1)
        wanted = uniform(cumulative.shape[:-1], cumulative, generator).unsqueeze(-1) * cumulative[..., -1:]
        return (
            torch.searchsorted(cumulative.contiguous(), wanted.contiguous())
            .squeeze(-1)
            .clamp_max(cumulative.shape[-1] - 1)
        )

    def gradient(self, outputs: Outputs, targets: Any) -> Tensor:
        """Compute softmax(logits) - onehot(targets), zero at ignored positions."""
        logits = self._logits(outputs)
        labels = self._check(logits, targets)
        if labels is None:
            raise UnsupportedError("fisher='empirical' needs targets: pass batches of (inputs, targets)")
        kept = labels.masked_fill(labels == self.ignore_index, 0).unsqueeze(-1)
        root = logits.softmax(-1)
        root.scatter_add_(-1, kept, torch.full_like(kept, -1, dtype=root.dtype))
        return self._out(root, outputs, labels)

    def sampled_root(self, outputs: Outputs, targets: Any, generator: Random) -> Tensor:
        """Compute the gradient at sampled classes, zero at ignored positions."""
        logits = self._logits(outputs)
        root = logits.softmax(-1)
        drawn = self._drawn(root, generator).unsqueeze(-1)
        root.scatter_add_(-1, drawn, torch.full_like(drawn, -1, dtype=root.dtype))
        return self._out(root, outputs, self._labels(logits, targets))  # where they are ignored; none is used as index

    def root_count(self, outputs: Outputs) -> int | None:
        """Return classes - 1 (at least 1), or None for one output per position."""
        logits = self._logits(outputs)
        return max(logits.shape[-1] - 1, 1) if logits.dim() == 2 else None

    def roots(self, outputs: Outputs, targets: Any) -> Iterator[Tensor]:
        """Yield the columns of the Cholesky factor of diag(p) - p p^T, which has rank classes - 1.

        With the tail sums t_j = p_j + ... + p_C: R_jj = sqrt(p_j t_{j+1} / t_j) and, below the diagonal,
        R_kj = -p_k sqrt(p_j / (t_j t_{j+1})) (Tanabe and Sagae 1992). This takes one backward pass fewer than the
        symmetric square root, and avoids square roots of small differences.
        """
        logits = self._logits(outputs)
        labels = self._check(logits, targets)
        if logits.dim() != 2:
            raise UnsupportedError("fisher='exact' supports only one output per example: use fisher='sampled'")
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
            # p_k / rest_j is at most sqrt(p_k) below the diagonal, so nothing overflows there
            roots = p.unsqueeze(1) * (-own[:, start:stop] / rest[:, start:stop]).unsqueeze(-1)
            roots = roots.triu(start + 1)
            roots.diagonal(start, 1, 2).copy_(own[:, start:stop] * rest[:, start:stop])
            whole = roots if labels is None else roots.masked_fill((labels == self.ignore_index)[:, None, None], 0)
            for root in whole.movedim(1, 0).contiguous().to(outputs.dtype):
                yield root.movedim(-1, self.class_dim)

    def summary(self, outputs: Outputs, targets: Any, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return all log probabilities or, with a generator and many classes, those of a weighted sample of labels.

        The `TOP` most likely labels are weighted by their probabilities, and `TAIL` draws from the others share the
        remaining probability equally. The divergence computed from such a summary is an unbiased estimate, whereas
        merging the other labels into one would underestimate it.
        """
        logits = self._logits(outputs)
        labels = self._check(logits, targets)
        found = {"log_probabilities": logits.log_softmax(-1)}
        if generator is not None and logits.shape[-1] > 2 * (TOP + TAIL):
            found = self._some_labels(found["log_probabilities"], generator)
        if labels is not None and bool((labels == self.ignore_index).any()):
            found["counted"] = labels != self.ignore_index
        return found

    @staticmethod
    def _some_labels(log_probabilities: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Summarize distributions by their `TOP` most likely labels and `TAIL` draws from the others."""
        top, best = log_probabilities.topk(TOP, -1)
        others = log_probabilities.scatter(-1, best, -math.inf).exp()
        rest = others.sum(-1, keepdim=True)
        flat = others.flatten(0, -2).to(generator.device)
        # multinomial needs a positive sum: if all probability is in the top labels, draw uniformly with zero weight
        flat = torch.where(flat.sum(-1, keepdim=True) > 0, flat, torch.ones_like(flat))
        drawn = torch.multinomial(flat, TAIL, replacement=True, generator=generator).reshape(*others.shape[:-1], TAIL)
        drawn = drawn.to(log_probabilities.device)
        labels = torch.cat([best, drawn], -1)
        return {
            "labels": labels.to(torch.int32),
            "log_probabilities": log_probabilities.gather(-1, labels),
            "weights": torch.cat([top.exp(), (rest / TAIL).expand(drawn.shape)], -1),
        }

    def divergence(self, summary: Mapping[str, Tensor], outputs: Outputs) -> Tensor:
        """Compute KL(before || now) of every position in nats; zero at ignored positions."""
        now = self._logits(outputs).log_softmax(-1)
        before = summary["log_probabilities"].to(now)
        if "labels" in summary:
            check_comparable(before.shape[:-1], now.shape[:-1])
            now = now.gather(-1, summary["labels"].to(now.device).long())
            weights = summary["weights"].to(now)
        else:
            check_comparable(before.shape, now.shape)
            weights = before.exp()
        # a label of probability zero contributes nothing, but its log probability may be -inf
        found = torch.where(weights > 0, weights * (before - now), torch.zeros_like(now)).sum(-1)
        counted = summary.get("counted")
        return found if counted is None else found.masked_fill(~counted.to(found.device), 0)

    def information(self, summaries: Sequence[Mapping[str, Tensor]]) -> float | None:
        """Compute H(mean of p) - mean of H(p), where all classes are stored."""
        if any("labels" in summary for summary in summaries):
            return None
        rows = [
            one["log_probabilities"].flatten(0, -2)[one["counted"].flatten() if "counted" in one else slice(None)]
            for one in summaries
        ]
        p = torch.cat(rows).double().exp()
        return float(torch.special.entr(p.mean(0)).sum() - torch.special.entr(p).sum(-1).mean())

    def mean(self, outputs: Outputs) -> Tensor:
        """Compute the class probabilities."""
        return self._logits(outputs).softmax(-1).movedim(-1, self.class_dim)

    def probit(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Compute softmax(mean / sqrt(1 + pi / 8 variance)): MacKay (1992), applied to every class."""
        return (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)

"""Self-rehearsal: a language model is held to what it said, on text that it wrote itself before training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from limpet.errors import LimpetError, MemoryFileError, UnsupportedError, positive_whole, whole_number
from limpet.likelihoods import Likelihood
from limpet.methods.output_memory import OutputMemory
from limpet.model import Forward

if TYPE_CHECKING:
    from limpet.forgetting.probe import Probe
    from limpet.methods.state_header import Settings
    from limpet.protection.output_protection import Compared

TOKENS, LENGTH, HELD_OUT = 16_384, 64, 32
"""Defaults: tokens to rehearse, tokens per row, and further rows to measure drift on."""

WEIGHT = 3.0
"""Default: of 0.3, 1 and 3 the one with the least drift at the same new loss (results/retention, development pair)."""


class SelfRehearsal(OutputMemory):
    r"""Rehearse samples of the model from before: protection of a generative language model without its data.

    While the model trains, the divergence from the model before is added to the loss,

        L(w) + weight * mean over rows x_1 ... x_T and positions t of KL(p_0(. | x_<t) || p_w(. | x_<t)),

    where the rows are sampled from p_0, the model before. Its expectation over rows is the divergence of the two
    distributions over whole texts, divided by their length. Pseudo-rehearsal (Robins 1995) with the soft targets of
    distillation (Hinton et al. 2015).

    Nothing but the model is needed, and nothing but its own samples is stored. With the default reference, the 64 most
    likely tokens of every position and 16 of the others are stored with their probabilities (15 MB for 16,384 tokens),
    and a step takes one forward and one backward pass over `batch_size` rows more than without protection.

    Args:
        model: The causal language model to protect. Wrappers (torch.compile, DistributedDataParallel, PEFT) are
            unwrapped.
        likelihood: The meaning of the model's outputs: a name or a `limpet.Likelihood`.
        weight: Weight of the divergence relative to the mean loss.
        batch_size: Number of rows to rehearse in a step. A quarter as many as your batch has are enough with AdamW
            (docs/decisions/0038-cheap-self-rehearsal.md).
        reference: Where the outputs before come from: "stored" (recorded by `consolidate`), "adapters" (computed with
            the adapters switched off; over the whole vocabulary; needs a model in which only adapters train), "copy"
            (computed by a frozen copy, over the whole vocabulary), or "auto": stored.
        forward: `forward(model, batch)` returns `(logits, targets)`, if the model is not one of transformers.
        seed: Seed of the samples and of their order.

    Attributes:
        batch_size: Number of rows to rehearse in a step.
        rehearsed: The rows to rehearse, with the outputs before; None before `consolidate`.

    Examples:
        >>> import limpet
        >>> model = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20))
        >>> memory = limpet.SelfRehearsal(model, forward=lambda model, batch: (model(batch), None))
        >>> memory.consolidate([torch.randint(0, 20, (80, 8))])  # of transformers: consolidate(), which samples
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> rows = torch.randint(0, 20, (4, 8))
        >>> with memory.protect(optimizer) as protection:
        ...     torch.nn.functional.cross_entropy(model(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).backward()
        ...     optimizer.step()
        >>> print(protection.summary())
        1 steps, 1 with outputs compared (self-rehearsal, every 1, weight 3); divergence ..., drift ...
    """

    method = "self-rehearsal"
    _stores_outputs = True

    def __init__(
        self,
        model: nn.Module,
        *,
        likelihood: str | Likelihood = "categorical",
        weight: float = WEIGHT,
        batch_size: int = 4,
        reference: str = "auto",
        forward: Forward | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, likelihood=likelihood, weight=weight, reference=reference, forward=forward)
        self.batch_size = positive_whole("batch_size", batch_size)
        self.seed = whole_number("seed", seed)
        self.rehearsed: Probe | None = None
        self._order: tuple[int, list[int]] = (-1, [])  # an epoch and the order of its batches

    def consolidate(
        self,
        batches: Iterable[Any] | None = None,
        *,
        tokens: int = TOKENS,
        length: int = LENGTH,
        held_out: int = HELD_OUT,
        prefixes: Sequence[Sequence[int]] | None = None,
        temperature: float = 1.0,
        progress: bool = True,
    ) -> None:
        """Sample text from the model as it is now, and record its outputs on it. Call it before training.

        Called again after training, it replaces the samples: those of the model then represent all that it knows.

        Args:
            batches: Text to rehearse instead of samples: tensors of token ids, or dictionaries as the model takes
                them. The file of the memory will contain it.
            tokens: Number of tokens to sample, rounded up to whole rows.
            length: Number of tokens per row.
            held_out: Number of further rows, to measure drift on. Of given batches, the first ones.
            prefixes: Token ids that the rows start with, used in turn. Defaults to the model's beginning-of-text
                token. For a chat model, use the beginnings of prompts.
            temperature: The sampling temperature.
            progress: Whether to show a progress bar.

        Raises:
            LimpetError: If called inside `with memory.protect(...)`, or there is no row to rehearse.
            UnsupportedError: If the reference or the form of the batches is not supported.
            ValueError: If an argument has an invalid value.
        """
        from limpet.forgetting.self_samples import self_samples
        from limpet.model.batch import check_batches
        from limpet.model.context import random_state

        self._reject_inside_protect()
        held_out, length = whole_number("held_out", held_out), positive_whole("length", length)
        if batches is None:
            rows = self_samples(
                self.model,
                positive_whole("tokens", tokens) + held_out * (length - 1),
                length=length,
                prefixes=prefixes,
                temperature=temperature,
                seed=self.seed,
                progress=progress,
            )
            batches = [{"input_ids": rows}]
        check_batches(batches)
        with random_state(batches):
            kept, probe = self._split(batches, held_out)
        if not kept:
            raise LimpetError("there is no row to rehearse: pass more batches, or a smaller held_out=")
        rehearsed = self._recorded(kept, self.seed)
        probes = (self._recorded(probe, self.seed + 1),) if probe else ()
        self._set_reference()
        self.rehearsed, self.probes = rehearsed, probes
        self.tasks, self._resume = self.tasks + 1, 0

    def _split(self, batches: Iterable[Any], held_out: int) -> tuple[list[Any], list[Any]]:
        """Cut batches into those of a step, and the held-out rows in front of them."""
        from limpet.model import part
        from limpet.model.batch import batch_size

        kept, probe = [], []
        for given in batches:
            batch = {"input_ids": given} if isinstance(given, torch.Tensor) and self.forward is None else given
            size = batch_size(batch)
            if size is None:
                raise UnsupportedError("the batches to rehearse must consist of tensors with one row per example")
            first = min(held_out, size)
            held_out -= first
            starts = range(first, size, self.batch_size)
            probe += [part(batch, slice(i, min(i + self.batch_size, first))) for i in range(0, first, self.batch_size)]
            kept += [part(batch, slice(i, i + self.batch_size)) for i in starts]
        return kept, probe

    def compared(self, step: int, inputs: Sequence[Any]) -> Iterator[Compared]:
        """Yield the rows to rehearse in a step, other ones on every rank."""
        from limpet.distributed import rank_and_size
        from limpet.model import prepared
        from limpet.protection.output_protection import Compared

        assert self.rehearsed is not None
        rank, size = rank_and_size()
        epoch, place = divmod(step * size + rank, len(self.rehearsed.batches))
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._order = epoch, torch.randperm(len(self.rehearsed.batches), generator=generator).tolist()
        number = self._order[1][place]
        batch = prepared(self.rehearsed.batches[number], next(self.model.parameters()).device)
        summary = self.rehearsed.summaries[number]
        if self._before is not None:
            kept = {name: tensor for name, tensor in summary.items() if name == "counted"}
            summary = self._summary_before(batch, self.forward) | kept
        yield Compared(batch, summary, self.forward)

    def _all_probes(self) -> tuple[Probe, ...]:
        return self.probes if self.rehearsed is None else (*self.probes, self.rehearsed)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "batch_size": self.batch_size, "seed": self.seed}

    def _read(self, settings: Settings, probes: tuple[Probe, ...]) -> dict[str, Any]:
        consolidated = settings.whole("tasks") > 0
        if consolidated and not probes:
            raise MemoryFileError("the state of a consolidated memory has no rows to rehearse")
        return {
            "batch_size": positive_whole("batch_size", settings.whole("batch_size")),
            "seed": settings.whole("seed"),
            "rehearsed": probes[-1] if consolidated else None,
            "probes": probes[:-1] if consolidated else (),
            "_order": (-1, []),
        }

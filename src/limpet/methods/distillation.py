"""Distillation: a model is held to what it said before, on the inputs that it is trained on now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from limpet.likelihoods import Likelihood
from limpet.methods.output_memory import OutputMemory
from limpet.model import Forward

if TYPE_CHECKING:
    from limpet.forgetting.probe import Probe
    from limpet.protection.output_protection import Compared


class Distillation(OutputMemory):
    """Hold the outputs on new inputs to those of the model before: learning without forgetting (Li and Hoiem 2016).

    While the model trains, the divergence from the model before is added to the loss,

        L(w) + weight * mean over the new inputs x of KL(p_0(. | x) || p_w(. | x)),

    with the outputs through the old head. No old data are needed; how well the new inputs represent them decides how
    much is kept. The inputs are those that the model is called on: the training loop needs no change.

    If the old outputs are not what the model returns now, because it has a new head, pass `forward`. It is called on
    the model now and on the model before, with a batch in the form of the call: `(inputs, None)` for one positional
    argument, a dictionary for keyword arguments, `{"args": ..., "kwargs": ...}` for anything else. An old head that is
    not part of the model must be frozen.

    Args:
        model: The model to protect. Wrappers (torch.compile, DistributedDataParallel, PEFT) are unwrapped.
        likelihood: The meaning of the old outputs: a name or a `limpet.Likelihood`.
        weight: Weight of the divergence relative to the mean loss.
        reference: The model before: "adapters" (the model with its adapters switched off), "copy" (a frozen copy), or
            "auto": adapters if only adapters train and they do not change the model yet, otherwise a copy.
        forward: `forward(model, batch)` returns `(old_outputs, None)`.

    Examples:
        >>> import torch, limpet
        >>> _ = torch.manual_seed(0)
        >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(20, 3), torch.randint(0, 2, (20,))
        >>> memory = limpet.Distillation(model)
        >>> memory.consolidate()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with memory.protect(optimizer) as protection:
        ...     for _ in range(2):
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.cross_entropy(model(x), y).backward()
        ...         optimizer.step()
        >>> print(protection.summary())
        2 steps, 2 with outputs compared (distillation, every 1, weight 1); divergence 0.000...
    """

    method = "distillation"
    _stores_outputs = False

    def __init__(
        self,
        model: nn.Module,
        *,
        likelihood: str | Likelihood = "categorical",
        weight: float = 1.0,
        reference: str = "auto",
        forward: Forward | None = None,
    ) -> None:
        super().__init__(model, likelihood=likelihood, weight=weight, reference=reference, forward=forward)
        self._are_inputs: dict[str, bool] = {}  # of arguments that are named like targets

    def consolidate(self, batches: Iterable[Any] | None = None, *, probe: int | None = None) -> None:
        """Take the model as it is now for the model before. Call it before training.

        Args:
            batches: Data of which inputs are stored, for `drift` to be measured on. Not needed for protection.
            probe: Number of inputs to store, all by default. The file of the memory will contain them.

        Raises:
            LimpetError: If called inside `with memory.protect(...)`.
            UnsupportedError: If the reference is not possible, or inputs cannot be stored.
            ValueError: If `probe` is given without batches.
        """
        self._reject_inside_protect()
        if batches is None and probe is not None:
            raise ValueError("probe= needs batches to take the inputs from: pass batches, or leave it out")
        probes: tuple[Probe, ...] = () if batches is None else (self._probe(batches, probe),)
        self._set_reference()
        self.probes = probes
        self.tasks, self._resume = self.tasks + 1, 0

    def _probe(self, batches: Iterable[Any], rows: int | None) -> Probe:
        from limpet.methods.probed_memory import probe_rows
        from limpet.model.batch import FirstBatches, check_batches
        from limpet.model.context import random_state

        check_batches(batches)
        wanted, first = probe_rows(rows), FirstBatches()
        with random_state(batches):
            if wanted is None:
                return self._recorded(list(batches), 0)
            for number, batch in enumerate(batches):
                first.add(number, batch)
                if first.rows >= wanted:
                    break
        return self._recorded(first.take(wanted), 0)

    def compared(self, step: int, inputs: Sequence[Any]) -> Iterator[Compared]:
        """Yield the inputs of the step with the outputs before."""
        from limpet.forgetting.probe import without_targets
        from limpet.model import prepared
        from limpet.protection.output_protection import Compared
        from limpet.protection.recorder import as_called, called_as_recorded, is_call

        device = next(self.model.parameters()).device
        for batch in inputs:
            given = batch if self.forward is not None else as_called(self.model, batch, self._are_inputs)
            forward = self.forward or (called_as_recorded if is_call(given) else None)
            batch = prepared(given if forward is not None else without_targets(self.model, given), device)
            yield Compared(batch, self._summary_before(batch, forward), forward)

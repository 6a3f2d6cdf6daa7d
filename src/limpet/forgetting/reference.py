"""The model before, which the outputs of the model now are compared with, and their divergence.

    divergence = KL(before || now), per example or predicted position

Three kinds of reference:

- stored: the outputs were recorded beforehand (`limpet.forgetting.probe`), so that no second model runs;
- adapters: the model with its adapters switched off, which has not changed as long as all else is frozen;
- copy: a frozen copy of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from limpet.errors import UnsupportedError
from limpet.forgetting.drift import by_example
from limpet.likelihoods import Likelihood
from limpet.model import Forward, call, preserve_state
from limpet.model.adapter_switch import adapters_change_nothing, adapters_off, only_adapters_train
from limpet.model.copied import independent_copy
from limpet.model.quantized import not_repacked

REFERENCES = ("auto", "stored", "adapters", "copy")

NOT_ONLY_ADAPTERS = (
    "reference='adapters' needs a model in which only adapters train and none is merged, but this one has other "
    "trainable parameters, or no adapters: freeze them, or pass reference='copy'"
)


class AdaptersOff:
    """The model with its adapters switched off.

    Args:
        model: The model.

    Raises:
        UnsupportedError: If the model has trainable parameters other than those of adapters, or no adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.check()

    def check(self) -> None:
        """Raise an `UnsupportedError` if switching the adapters off does not give the model before any more."""
        if not only_adapters_train(self._model):
            raise UnsupportedError(NOT_ONLY_ADAPTERS)

    def outputs(self, batch: Any, forward: Forward | None) -> tuple[Any, Any]:
        """Compute the outputs before, and the targets if the batch has any.

        Args:
            batch: The batch, on the device of the model.
            forward: As for `memory.consolidate`.

        Returns:
            Outputs and targets.
        """
        with adapters_off(self._model), not_repacked(self._model), torch.no_grad():
            return call(self._model, batch, forward)


class FrozenCopy:
    """A frozen copy of a model, in eval mode.

    Args:
        model: The model. It is not changed.

    Raises:
        UnsupportedError: If the model cannot be copied.

    Attributes:
        model: The copy.
    """

    def __init__(self, model: nn.Module) -> None:
        try:
            self.model = independent_copy(model)
        except (RuntimeError, TypeError) as error:
            raise UnsupportedError(
                f"the model cannot be copied ({error}): train adapters alone, and pass reference='adapters'"
            ) from error
        for module in self.model.modules():
            module.training = False  # not with eval(), which a class may override
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None

    def follow(self, model: nn.Module) -> None:
        """Move the copy to the device and the dtype of the model, which may have been moved since.

        Args:
            model: The model.
        """
        now, own = next(model.parameters()), next(self.model.parameters())
        if now.device != own.device:
            self.model.to(now.device)
        if now.dtype != own.dtype and now.is_floating_point():
            self.model.to(now.dtype)

    def outputs(self, batch: Any, forward: Forward | None) -> tuple[Any, Any]:
        """Compute the outputs before, and the targets if the batch has any.

        Args:
            batch: The batch, on the device of the model.
            forward: As for `memory.consolidate`.

        Returns:
            Outputs and targets.
        """
        with preserve_state(self.model), torch.no_grad():
            return call(self.model, batch, forward)


Reference = AdaptersOff | FrozenCopy
"""A reference that computes the outputs before; stored ones need none."""


def check_reference(wanted: str, *, stored: bool) -> None:
    """Check the name of a kind of reference, before the model is in the state that it is chosen for.

    Args:
        wanted: "stored", "adapters", "copy", or "auto".
        stored: Whether the inputs are known beforehand, so that outputs can be stored.

    Raises:
        ValueError: If `wanted` is unknown.
        UnsupportedError: If outputs are to be stored on inputs that are not known.
    """
    if wanted not in REFERENCES:
        raise ValueError(f"reference must be one of {', '.join(REFERENCES)}, not {wanted!r}")
    if wanted == "stored" and not stored:
        raise UnsupportedError(
            "outputs on new inputs cannot be stored beforehand: pass reference='adapters' or 'copy', or leave it out"
        )


def kind_of_reference(model: nn.Module, wanted: str, *, stored: bool) -> str:
    """Choose a kind of reference.

    Args:
        model: The model.
        wanted: "stored", "adapters", "copy", or "auto".
        stored: Whether the inputs are known beforehand, so that outputs can be stored.

    Returns:
        "stored", "adapters" or "copy".

    Raises:
        ValueError: If `wanted` is unknown.
        UnsupportedError: If `wanted` is not possible.
    """
    check_reference(wanted, stored=stored)
    if wanted == "adapters" and not only_adapters_train(model):
        raise UnsupportedError(NOT_ONLY_ADAPTERS)
    if wanted != "auto":
        return wanted
    if stored:
        return "stored"
    return "adapters" if only_adapters_train(model) and adapters_change_nothing(model) else "copy"


def summary_before(
    reference: Reference, batch: Any, likelihood: Likelihood, forward: Forward | None
) -> dict[str, Tensor]:
    """Compute the summary of the outputs before, over all classes.

    Args:
        reference: The model before.
        batch: A batch without targets, on the device of the model.
        likelihood: The likelihood of the outputs.
        forward: As for `memory.consolidate`. Its targets are not used.

    Returns:
        The likelihood's summary.
    """
    outputs, targets = reference.outputs(batch, forward)
    return likelihood.summary(outputs, targets if forward is None else None)


def divergence(
    model: nn.Module, batch: Any, summary: Mapping[str, Tensor], likelihood: Likelihood, forward: Forward | None
) -> tuple[Tensor, Tensor]:
    """Compute KL(before || now) on a batch, differentiable with respect to the model's parameters.

    Args:
        model: The model as it is now.
        batch: The batch, on the device of the model.
        summary: The likelihood's summary of the outputs before.
        likelihood: The likelihood of the outputs.
        forward: As for `memory.consolidate`.

    Returns:
        The sum over the positions of every example, and the number of positions that count, both of shape (examples,).

    Raises:
        UnsupportedError: If the model has outputs of another shape than before.
    """
    outputs, _ = call(model, batch, forward)
    try:
        found = likelihood.divergence(summary, outputs)
    except (RuntimeError, IndexError) as error:
        raise UnsupportedError(
            f"the outputs of the model cannot be compared with those before ({error}): if the model has a new head, "
            "compute the outputs of the old one with forward=lambda model, batch: (old_outputs, None)"
        ) from error
    values, counts = by_example(found, summary.get("counted"), batch)
    return values.sum(1), counts

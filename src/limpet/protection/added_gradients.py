"""Add to the gradients of the loss for one step, and restore the user's own afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class AddedGradients:
    """Gradients to which something was added for one step.

    Nothing is added in place: `.grad` is replaced by a sum, and `restore` puts the user's tensor back. Several objects
    may do so with the same parameters, and restore them in any order.
    """

    def __init__(self) -> None:
        self._original: list[tuple[nn.Parameter, Tensor | None, Tensor]] = []  # its gradient, our replacement

    def __len__(self) -> int:
        return len(self._original)

    def add(
        self, parameter: nn.Parameter, part: Tensor, *, weight: float, scale: Tensor | None = None, create: bool = False
    ) -> None:
        """Replace the gradient of a parameter by its sum with a weighted part.

        Args:
            parameter: The parameter.
            part: What is added.
            weight: Factor of the part.
            scale: The factor by which the optimizer divides the gradients inside its step; None for 1.
            create: Use the part alone if the parameter has no gradient. By default, such a parameter is left alone.
        """
        if parameter.grad is None and not create:
            return
        if scale is not None:
            part = part * scale.to(part.device)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        if part.dtype != gradient.dtype:  # the unweighted sum over examples may overflow half precision
            part, weight = (part * weight).to(gradient.dtype), 1.0
        # not added in place: the user's gradient is restored after the step
        ours: Any = torch.add(gradient, part.to(gradient.device), alpha=weight)
        # lets several protections of one optimizer restore their gradients in any order
        ours.in_place_of = parameter.grad
        self._original.append((parameter, parameter.grad, ours))
        parameter.grad = ours

    def restore(self) -> None:
        """Restore the user's gradients, unless something else has replaced them."""
        for parameter, gradient, ours in self._original:
            found = parameter.grad
            while found is not None and found is not ours:
                found = getattr(found, "in_place_of", None)
            if found is ours:
                parameter.grad = gradient
        self._original.clear()


def loss_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the user's own gradient of a parameter, also while protections have penalties added to it."""
    found: Any = parameter.grad
    while hasattr(found, "in_place_of"):
        found = found.in_place_of
    return found  # type: ignore[no-any-return]

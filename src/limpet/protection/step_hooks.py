"""Run functions before and after every step of an optimizer, however the step is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from limpet.protection.step_guard import StepGuard


class StepHooks:
    """Hooks around the steps of an optimizer, until `remove` is called.

    A step that calls the step of its base class runs its hooks twice, but counts as one step here. A closure computes
    the gradients inside the step, after the hooks before it, so it is wrapped to process the gradients there.

    Args:
        optimizer: The optimizer, without wrappers.
        start: Called when a step begins, before its closure.
        before: Called before the weights change, with the gradients of the loss in place.
        after: Called after a step that did not raise.
        restore: Called to undo what `before` did to the gradients: before a closure computes them again, and when a
            step raises.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        start: Callable[[], None],
        before: Callable[[], None],
        after: Callable[[], None],
        restore: Callable[[], None],
    ) -> None:
        self._start, self._before, self._after, self._restore = start, before, after, restore
        self._level = 0  # a step that calls the step of its base class runs the hooks of both
        self._handles = [
            optimizer.register_step_pre_hook(self._pre_hook),
            optimizer.register_step_post_hook(self._post_hook),
        ]
        self._guard = StepGuard(optimizer, self._raised)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._guard.remove()

    def _pre_hook(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nested = self._level > 0 and self._guard.depth > 0
        self._level = self._level + 1 if nested else 1
        if nested:
            return None
        self._start()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer itself
        if closure is None:
            self._before()
            return None

        def wrapped() -> Any:
            self._restore()
            with torch.enable_grad():
                loss = closure()
            self._before()
            return loss

        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _post_hook(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._level -= 1
        if self._level <= 0:
            self._after()

    def _raised(self) -> None:
        """Restore the gradients of the loss: hooks after a step are not run when it raises."""
        self._restore()
        self._level = 0


def skips_step(optimizer: Any) -> bool:
    """Return whether a fused optimizer under GradScaler skips the step because it found inf."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf > 0)

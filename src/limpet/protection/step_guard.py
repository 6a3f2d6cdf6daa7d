"""Notice a step of an optimizer that raises: hooks after a step are not run in that case."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch


class StepGuard:
    """Wraps `optimizer.step` on the instance, to act when a step raises.

    The wrapper is a bound method with the attributes and signature of what it wraps, so schedulers and GradScaler,
    which inspect or wrap `optimizer.step` themselves, find what they expect. It is removed by `remove`; if something
    else has wrapped it since, it stays inside as a plain call. Optimizers are pickled and copied without their
    instance attributes, so a copy has no wrapper.

    Args:
        optimizer: The optimizer.
        on_error: Called when a step raises, before the error is passed on.

    Attributes:
        depth: Number of calls of `optimizer.step` that are running.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, on_error: Callable[[], None]) -> None:
        self.depth = 0
        self._optimizer, self._on_error = optimizer, on_error
        self._before = optimizer.__dict__.get("step")  # set by a scheduler, for example
        self._step = self._wrapped(optimizer.step)
        optimizer.step = self._step  # type: ignore[method-assign]

    def _wrapped(self, step: Callable[..., Any]) -> MethodType:
        inner: Any = getattr(step, "__func__", None)
        bound = inner is not None and getattr(step, "__self__", None) is self._optimizer

        @functools.wraps(inner if bound else step)
        def guarded(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                return inner(optimizer, *args, **kwargs) if bound else step(*args, **kwargs)
            except BaseException:
                self._on_error()
                raise
            finally:
                self.depth -= 1

        return MethodType(guarded, self._optimizer)

    def remove(self) -> None:
        """Restore `optimizer.step`, unless something else has replaced or wrapped it since."""
        self._on_error = lambda: None
        if self._optimizer.__dict__.get("step") is self._step:
            if self._before is None:
                del self._optimizer.__dict__["step"]
            else:
                self._optimizer.step = self._before  # type: ignore[method-assign]

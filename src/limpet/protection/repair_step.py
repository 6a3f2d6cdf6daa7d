"""Repair mode: the optimizer's steps are left alone, and the model is repaired when training ends.

Adaptive optimizers normalize the sum of two gradients, so a penalty turns their steps without shortening them, and
training against an approximate curvature finds the directions that the approximation misses. A closed-form solution
that was not optimized against the memory does not (docs/decisions/0021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from limpet.errors import LimpetError, LimpetWarning, logger, warn
from limpet.forgetting.repair import Repair
from limpet.model import Forward
from limpet.model.batch import targets_of
from limpet.protection.penalty_step import PenaltyStep
from limpet.protection.recorder import InputRecorder


@dataclass(frozen=True)
class Repairer:
    """Repairs the model of a memory.

    Attributes:
        run: Repairs the model with new data, given as batches and the `forward` function that they need.
        check: Raises if the repair will not be possible, before the model is trained.
        needs_targets: Whether the curvature is that of the targets of the new data.
    """

    run: Callable[[Iterable[Any], Forward | None], Repair]
    check: Callable[[], None]
    needs_targets: bool = False


NOT_RECORDED = (
    "the model was trained, but its forward method was never called with gradients enabled, so no inputs were recorded "
    "and the model was not repaired: call the model itself rather than its parts (if it is compiled and was called "
    "before, call torch.compiler.reset() before protect), or pass memory.protect(..., batches=new_data)"
)

NO_TARGETS = (
    "the memory has fisher='empirical', which needs the targets of the new data to repair the model, but the model is "
    "called without them: pass memory.protect(..., batches=new_data), or make the memory with another fisher"
)


class RepairStep(PenaltyStep):
    """Records inputs while the optimizer steps, and repairs the model at the end.

    Args:
        *args: Arguments of `PenaltyStep`.
        repairer: Repairs the model with new data.
        batches: The new data; None to use a sample of the inputs that the model is trained on.
        **options: Options of `PenaltyStep`.

    Attributes:
        repair: The repair, once training has ended.
        failure: Why the model was not repaired, if so.
    """

    def __init__(self, *args: Any, repairer: Repairer, batches: Iterable[Any] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.repair: Repair | None = None
        self.failure: str | None = None
        self._repairer, self._batches = repairer, batches
        self._recorder = InputRecorder(self.posterior.model) if batches is None else None

    def check(self) -> None:
        """Raise if the repair will not be possible."""
        self._repairer.check()

    def start(self) -> None:
        """Start recording."""
        if self._recorder is not None:
            self._recorder.start()

    def before_step(self, scale: Tensor | None) -> None:
        """Leave the gradients as they are, and raise in the first step if the recorded inputs will not be enough.

        Args:
            scale: Not used.

        Raises:
            LimpetError: If targets are needed, and are not among the arguments of the model.
        """
        batches = None if self._recorder is None or self.penalised else self._recorder.batches
        if self._repairer.needs_targets and batches and targets_of(self.posterior.model, batches[0]) is None:
            raise LimpetError(NO_TARGETS)

    def restore(self) -> None:
        """Stop nothing and restore nothing: no gradient was changed."""

    def after_step(self) -> None:
        """Count the step."""
        self.penalised += 1

    def finish(self) -> None:
        """Do nothing: the repair runs after the protection has ended."""

    def stop(self) -> None:
        """Stop recording."""
        if self._recorder is not None:
            self._recorder.stop()

    def run(self) -> None:
        """Repair the model. If that is not possible, warn and leave the model as trained."""
        try:
            self.repair = self._repaired()
        except Exception as error:  # the training has ended, and what the user does with its result must still run
            what = str(error) if isinstance(error, LimpetError) else f"{type(error).__name__}: {error}"
            self.failure = f"the model was not repaired and keeps its trained weights: {what}"
            warn(self.failure, LimpetWarning)
        else:
            logger.info("repaired at strength %.3g", self.repair.strength)

    def _repaired(self) -> Repair:
        if self._recorder is None:
            assert self._batches is not None
            return self._repairer.run(self._batches, None)
        if not self._recorder.batches:
            raise LimpetError(NOT_RECORDED)
        self._recorder.prepare_replay()
        return self._repairer.run(self._recorder, self._recorder.forward)

"""What a protection did: counts of steps, forecasts before and after, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from limpet.protection.weight_watch import WeightWatch

HARDLY = 10
"""Writes to the weights per step of the optimizer from which on it hardly takes part in the training."""

_OTHER = (
    "another optimizer, or other code, changes these weights; pass the optimizer that trains the model to "
    "memory.protect, and only one optimizer for each weight"
)


@dataclass(frozen=True)
class ProtectionSummary:
    """What a protection did.

    Attributes:
        mode: "proximal", "gradient" or "repair".
        every: The period of the penalty, in steps.
        examples: N, the number of examples of the new task.
        steps: Number of steps of the optimizer.
        penalised: Number of those steps to which the penalty was applied.
        skipped: Number of further steps that the optimizer skipped because GradScaler had found inf.
        forecast_before: The forecast on entry.
        forecast_after: The forecast now or, once the protection has ended, on exit; None after an error.
        forecast_doubt: Why `forecast_after` cannot be trusted; None if it can.
        warnings: What is wrong, if anything.
        repair_strength: Strength of the repair at the end; None if there was none.
    """

    mode: str
    every: int
    examples: int
    steps: int
    penalised: int
    skipped: int
    forecast_before: float
    forecast_after: float | None
    forecast_doubt: str | None = None
    warnings: tuple[str, ...] = ()
    repair_strength: float | None = None

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log, by name."""
        numbers = {
            "memory_steps": float(self.steps),
            "memory_penalised_steps": float(self.penalised),
            "memory_skipped_steps": float(self.skipped),
            "memory_forecast_before": self.forecast_before,
        }
        if self.forecast_after is not None:
            numbers["memory_forecast_after"] = self.forecast_after
        if self.repair_strength is not None:
            numbers["memory_repair_strength"] = self.repair_strength
        return numbers

    def __str__(self) -> str:
        if self.mode == "repair":
            done = (
                "not repaired" if self.repair_strength is None else f"repaired at strength {self.repair_strength:.3g}"
            )
            steps, how = f"{self.steps} steps, then {done}", "mode repair"
        else:
            steps = f"{self.steps} steps, {self.penalised} with the penalty"
            how = f"mode {self.mode}, every {self.every}"
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        after = "unknown" if self.forecast_after is None else f"{self.forecast_after:.4g}"
        first = f"{steps}{skipped} ({how}, N = {self.examples}); forecast {self.forecast_before:.4g} -> {after}"
        doubt = [f"the forecast is not to be trusted: {self.forecast_doubt}"] if self.forecast_doubt else []
        return "\n".join([first, *doubt, *(f"warning: {one}" for one in self.warnings)])


def not_protected(optimizer: torch.optim.Optimizer, watch: WeightWatch, steps: int, penalised: int) -> str | None:
    """Explain why weights moved without the penalty, if they did.

    Args:
        optimizer: The protected optimizer.
        watch: The watch over the protected weights, after its last `look`.
        steps: Number of steps of the optimizer.
        penalised: Number of steps to which the penalty was applied.

    Returns:
        What happened, the cause and how to fix it; None if the protection was effective.
    """
    kind = type(optimizer).__name__
    if not penalised:
        if not watch.moved():
            return None
        if steps:
            return (
                f"no protected weight had a gradient in any of the {steps} steps of {kind}, yet the weights have "
                f"moved, so nothing was protected: {_OTHER}"
            )
        inner = [name for name, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)]
        if inner:
            return (
                f"the weights have moved, but {kind}.step() was never called, so nothing was protected: methods such "
                f"as the first_step and second_step of SAM step its {inner[0]} instead; protect that one, "
                f"memory.protect(optimizer.{inner[0]}, ...), or call optimizer.step(closure)"
            )
        return f"the weights have moved, but {kind}.step() was never called, so nothing was protected: {_OTHER}"
    if watch.writes > HARDLY * steps:
        return (
            f"{kind} took {steps} steps, but the protected weights were written {watch.writes} times outside of them, "
            f"without the penalty: {_OTHER}"
        )
    if steps > 1 and watch.changed > steps / 2:
        return (
            f"something other than {kind} changed the protected weights before {watch.changed} of its {steps} steps, "
            f"without the penalty: {_OTHER}"
        )
    return None

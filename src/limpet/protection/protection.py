"""Protect a memory during training: add the penalty to an optimizer through its step hooks.

The objective is mean loss + (1 / N) penalty(w). There are two modes:

- gradient: before the step, grad += gradient of the penalty / N. Works with all supported optimizers, but SGD diverges
  if the penalty is stiff. With every=k the gradient of the penalty is recomputed every k steps and reused in between,
  which has the same fixed point at a k-th of the cost.
- proximal: after the step to v, w <- argmin 1/(2 s) ||w - v||^2 + penalty(w) / N, which is stable for any penalty. For
  SGD, whose effective step size is s = lr (1 - dampening) / (1 - momentum), with or without Nesterov momentum. With
  every=k the proximal step is taken every k steps with the control variate of ProxSkip (Mishchenko et al. 2022), which
  preserves the fixed point: with h the control variate, an estimate of -gradient of the penalty / N, after every step
  w += s h; every k steps, with S the sum of the s since the last proximal step, z = w - S h, w = prox_S(z),
  h = (w - z) / S.

With a budget instead of a strength, the penalty is multiplied by a Lagrange multiplier (`limpet.forgetting.budget`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from limpet.distributed import is_sharded, local
from limpet.errors import LimpetError, LimpetWarning, UnsupportedError, warn
from limpet.forgetting.budget import Budget
from limpet.model import Block, full_precision
from limpet.posterior import Posterior
from limpet.posterior.lora import scale_down
from limpet.posterior.sharding import reject_sharded
from limpet.protection.bound_block import BoundBlock, Group, Part, ProximalState, ProximalUpdate, SteppedBlock
from limpet.protection.exchange import BlockExchange, LocalExchange, exchange_for
from limpet.protection.optimizers import few, inner_optimizer, mode_for, penalty_weight, refuse_unsupported, sgd_step


class StepObserver(Protocol):
    """Interface for observing the gradients of the loss, before the penalty is added, and the steps."""

    def before_step(self, gradients: dict[str, Tensor]) -> None:
        """Handle the gradients of the loss, before the weights change.

        Args:
            gradients: The gradients, by parameter name.
        """

    def after_step(self) -> None:
        """Handle the weights after the step, penalty included."""


class Protection:
    """Context manager that adds the penalty of a memory to every step of an optimizer.

    Created by `memory.protect`: `with memory.protect(optimizer, examples=N): ...`.

    Args:
        posterior: The posterior of the memory.
        optimizer: The optimizer that trains the model, possibly wrapped by accelerate or Lightning.
        examples: Number of examples N of the new task.
        every: Recompute the gradient of the penalty, or take the proximal step, every so many steps.
        mode: "gradient", "proximal", or "auto": proximal for plain SGD without adapters, else gradient.
        reduction: How the loss of a batch is reduced, "mean" or "sum".
        batch_size: Number of examples that the loss of one step sums over; required for reduction="sum".
        state: State of an interrupted protection to resume from. Ignored if its `every` or mode differs.
        budget: Multiplier of the penalty that keeps the forecast within a budget; None to use the strengths.
        old_examples: Number of examples that the memory has consolidated.
        observer: Called before every step with the gradients of the loss, and again after the step.
        on_enter: Called with this object when the context is entered.
        on_exit: Called when the context is left, with whether it was left without an exception.

    Raises:
        ValueError: If an option is invalid.
        UnsupportedError: If the optimizer or the combination of options is not supported.

    Attributes:
        posterior: The posterior of the memory.
        optimizer: The optimizer, without wrappers.
        mode: "gradient" or "proximal".
        every: The period of the penalty, in steps.
        weight: Weight of the penalty relative to the loss, 1 / N for a mean.
        state: State carried from step to step, to be saved with the memory.
        factor: The last multiplier of the penalty; 1 without a budget.
    """

    def __init__(
        self,
        posterior: Posterior,
        optimizer: Any,
        *,
        examples: int,
        every: int = 1,
        mode: str = "auto",
        reduction: str = "mean",
        batch_size: int | None = None,
        state: ProximalState | None = None,
        budget: Budget | None = None,
        old_examples: int = 0,
        observer: StepObserver | None = None,
        on_enter: Callable[[Protection], None] = lambda _: None,
        on_exit: Callable[[bool], None] = lambda _: None,
    ) -> None:
        if budget is not None:
            reject_sharded(posterior.sharding, "budget=", "use a strength instead, and monitor memory.forecast()")
        self.posterior = posterior
        self.optimizer = inner_optimizer(optimizer)
        self.mode = mode_for(self.optimizer, mode, every, list(posterior.lora_penalties()))
        self.every = every
        self.weight = penalty_weight(examples, reduction, batch_size)
        fits = state is not None and (state.every, state.mode) == (every, self.mode)
        self.state = state if state is not None and fits else ProximalState(every, mode=self.mode)
        self.factor = 1.0
        self._budget = budget if old_examples else None
        self._old_examples = old_examples
        if self._budget is not None and self.state.multiplier is not None:
            self._budget.state = self.state.multiplier
        self._observer = observer
        self._on_enter = on_enter
        self._on_exit = on_exit
        self._handles: list[Any] = []
        self._entered = False
        self._groups: list[tuple[int, int]] = []  # to notice when the optimizer's groups change
        self._bound: list[BoundBlock] = []  # the blocks that this rank owns
        self._reached: Sequence[SteppedBlock] = []  # the blocks that the optimizer steps, on all ranks
        self._exchange: BlockExchange = LocalExchange()
        self._parameters: dict[str, nn.Parameter] = {}
        self._group_of: dict[nn.Parameter, Group] = {}
        self._sizes: list[float] = []  # step size of every block in this step
        self._original: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # parameter, its gradient, our replacement

    def __enter__(self) -> Protection:
        if self._handles:
            raise LimpetError("this protection is already active: create another one with memory.protect(...)")
        self._entered = True
        self._on_enter(self)
        try:
            self._bind()
        except BaseException:
            self._on_exit(False)
            raise
        self._handles = [
            self.optimizer.register_step_pre_hook(self._pre_hook),
            self.optimizer.register_step_post_hook(self._post_hook),
        ]
        return self

    def __del__(self) -> None:
        if not getattr(self, "_entered", True):
            warn(
                "memory.protect(...) was called but never entered, so nothing was protected: use it in a `with` "
                "statement",
                LimpetWarning,
            )

    def _bind(self) -> None:
        """Match blocks to parameter groups. Called again whenever the optimizer's groups change during training."""
        refuse_unsupported(self.optimizer)
        self._groups = self._groups_now()
        self._group_of = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        self._parameters = self.posterior.parameters()
        self._exchange = exchange_for(self.posterior)
        self._bound = list(self._blocks())
        self._reached = self._exchange.stepped(self._bound, self._group_of)
        if not self._reached:
            raise LimpetError(
                "the optimizer has none of the parameters that the memory protects: create it from the parameters of "
                "the same model, after moving the model to its device"
            )
        if self.mode == "proximal":
            for bound in self._reached:
                self._common_step(bound)

    def _groups_now(self) -> list[tuple[int, int]]:
        """Identify the optimizer's current parameter groups."""
        return [(id(group), len(group["params"])) for group in self.optimizer.param_groups]

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._restore_gradients()
        finished = exception[0] is None
        with full_precision():
            if finished and self.mode == "proximal":
                self._take_proximal_step()
            elif finished and self._budget is not None:
                self._enforce_budget()
        self._on_exit(finished)

    def _blocks(self) -> Iterator[BoundBlock]:
        """Yield the blocks of this rank that the optimizer steps."""
        group_of = self._group_of
        weights, loras = self._parameters, self.posterior.lora_penalties()
        decayed = []
        for name, held in self.posterior.held.items():
            parameters = [weights[parameter] for parameter in held.block.parameters]
            groups = [group_of.get(parameter) for parameter in parameters]
            factors = [p for adapter in loras[name].adapters for p in (adapter.a, adapter.b)] if name in loras else []
            stepped = {factor: group_of[factor] for factor in factors if factor in group_of}
            if stepped or any(group is not None for group in groups):
                bound = BoundBlock(
                    held.block,
                    parameters,
                    groups,
                    held,
                    lora=loras.get(name),
                    adapter_groups=stepped,
                )
                if self._budget is not None:
                    bound.spectrum = held.precision.spectrum()
                elif self.mode == "gradient" and bound.lora is None:
                    bound.apply = held.precision.applier()
                yield bound
                if any(group is not None and group.get("weight_decay") for group in groups):
                    decayed.append(held.block.name)
        if decayed:
            warn(
                f"weight decay pulls protected weights towards zero, against the memory ({few(decayed)}): set "
                "weight_decay=0 for them; the memory's prior takes its place",
                LimpetWarning,
                every_rank=self.posterior.sharding is not None,  # a rank binds only the blocks that it owns
            )

    @torch.no_grad()
    def penalty(self) -> float:
        """Compute the penalty at the current weights, as added to the loss.

        Returns:
            The weighted penalty; with a budget, that of the Fisher alone, without the prior.
        """
        if self._budget is None:
            return float(self.posterior.penalty()) * self.weight
        return self.factor * sum(self.posterior.rises().values()) * self.weight

    def _pre_hook(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._groups_now() != self._groups:
            self._bind()
        # A closure computes the gradients inside the step, after this hook, so it is wrapped to process them there.
        # args[0] is the optimizer itself.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._before_step()
            return None

        def wrapped() -> Any:
            self._restore_gradients()
            with torch.enable_grad():
                loss = closure()
            self._before_step()
            return loss

        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _skipped(self) -> bool:
        """Whether a fused optimizer under GradScaler skips the step because it found inf."""
        found_inf = getattr(self.optimizer, "found_inf", None)
        return found_inf is not None and bool(found_inf > 0)

    @torch.no_grad()
    @full_precision()
    def _before_step(self) -> None:
        """Process the gradients of the loss before the step: call the observer and add the penalty."""
        self._restore_gradients()
        if self._skipped():
            return
        scale = getattr(self.optimizer, "grad_scale", None)  # a fused optimizer divides by it inside the step
        if self._observer is not None:
            self._observer.before_step(
                {
                    name: parameter.grad if scale is None else parameter.grad / scale.to(parameter.device)
                    for bound in self._bound
                    for name, parameter in bound.weights().items()
                    if isinstance(parameter, nn.Parameter) and parameter.grad is not None
                }
            )
        if self.mode == "gradient":
            for parameter, group, part in self._penalty_parts():
                self._add_gradient(parameter, group, part, scale)
        else:
            # computed before the step, so that an error leaves the weights unchanged
            self._sizes = [self._step_size(bound) for bound in self._reached]

    def _penalty_parts(self) -> Iterator[Part]:
        """Yield the gradient of the penalty for every parameter, not yet divided by the number of examples."""
        if self.every == 1:
            yield from self._fresh_parts()
            return
        state, parameters = self.state, self._parameters
        names = {parameter: name for name, parameter in parameters.items()}
        if state.count % self.every == 0:
            state.control_variate = {}
        # blocks without a gradient at the last update have no stored penalty gradient yet
        for p, _, part in self._fresh_parts(without={parameters[name] for name in state.control_variate}):
            state.control_variate[names[p]] = part.to(p.device, torch.promote_types(p.dtype, torch.float32), copy=True)
        state.count += 1
        for name, part in state.control_variate.items():
            if parameters[name] in self._group_of:
                yield parameters[name], self._group_of[parameters[name]], part

    def _fresh_parts(self, without: Collection[nn.Parameter] = ()) -> Iterator[Part]:
        """Recompute the gradient of the penalty, except for blocks with a parameter in `without`."""
        if self._budget is None:
            reached = [one for one in self._reached if one.stepped and one.targets.isdisjoint(without)]
            yield from self._gradients(reached)
            return
        stepped = [bound for bound in self._bound if bound.stepped and bound.targets.isdisjoint(without)]
        measured = [bound.measured() for bound in stepped]
        if without:
            for _, parts in measured:
                yield from parts(self.factor)
            return
        rise = sum(found for found, _ in measured) + self._rise_of_others(stepped)
        self.factor = self._budget.follow(rise / self._old_examples)
        self.state.multiplier = self._budget.state
        self.state.count += self.every == 1
        for _, parts in measured:
            yield from parts(self.factor)

    def _gradients(self, reached: Sequence[SteppedBlock]) -> Iterator[Part]:
        """Yield the gradient of the penalty of these blocks, for every parameter that the optimizer steps."""
        plain = []
        for one in reached:
            if isinstance(one, BoundBlock) and one.lora is not None:
                yield from one.penalty_parts()
            else:
                plain.append(one.block)
        if not plain:
            return
        blocks, names = {block.name for block in plain}, [name for block in plain for name in block.parameters]
        whole = self._exchange.bring({name: self._parameters[name] for name in names})
        found = (
            (name, (part,))
            for bound in self._bound
            if bound.block.name in blocks
            for name, part in bound.block.scatter(bound.gradient(bound.held.displacement(whole))).items()
        )
        for name, (part,) in self._exchange.give(found, names, 1):
            parameter = self._parameters[name]
            if parameter in self._group_of:
                yield parameter, self._group_of[parameter], part

    def _rise_of_others(self, bounds: list[BoundBlock]) -> float:
        """Compute 1/2 d^T F d of all other blocks."""
        return sum(self.posterior.rises(without={bound.held.block.name for bound in bounds}).values())

    def _add_gradient(self, parameter: nn.Parameter, group: Group, part: Tensor, scale: Tensor | None) -> None:
        """Replace the gradient of a parameter by its sum with the weighted gradient of the penalty."""
        if parameter.grad is None:
            return
        weight = -self.weight if group.get("maximize") else self.weight
        if scale is not None:
            part = part * scale.to(part.device)
        gradient = parameter.grad.to_dense()
        if part.dtype != gradient.dtype:  # the unweighted sum over examples may overflow half precision
            part, weight = (part * weight).to(gradient.dtype), 1.0
        # not added in place: the user's gradient is restored after the step
        ours: Any = torch.add(gradient, part.to(gradient.device), alpha=weight)
        # lets several protections of one optimizer restore their gradients in any order
        ours.in_place_of = parameter.grad
        self._original.append((parameter, parameter.grad, ours))
        parameter.grad = ours

    def _restore_gradients(self) -> None:
        """Restore the user's gradients, unless something else has replaced them."""
        for parameter, gradient, ours in self._original:
            found = parameter.grad
            while found is not None and found is not ours:
                found = getattr(found, "in_place_of", None)
            if found is ours:
                parameter.grad = gradient
        self._original.clear()

    @torch.no_grad()
    @full_precision()
    def _post_hook(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._restore_gradients()
        if self._skipped():
            return
        if self.mode == "proximal":
            self._after_step()
        if self._observer is not None:
            self._observer.after_step()

    def _after_step(self) -> None:
        """Add the control variates after a step and, every so many steps, take the proximal step."""
        self.state.count += 1
        moves: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for bound, step in zip(self._reached, self._sizes, strict=True):
            if not step:
                continue
            name = bound.block.name
            self.state.pending[name] = self.state.pending.get(name, 0.0) + step
            if self.every > 1 and bound.block.parameters[0] in self.state.control_variate:
                parameters, control_variates = moves.setdefault(step, ([], []))
                parameters += map(local, bound.parameters)
                control_variates += (
                    local(self.state.control_variate[parameter]) for parameter in bound.block.parameters
                )
        for step, (parameters, control_variates) in moves.items():
            torch._foreach_add_(parameters, control_variates, alpha=step)
        if self.state.count % self.every == 0:
            self._take_proximal_step()

    @torch.no_grad()
    def _take_proximal_step(self) -> None:
        """Take the proximal step for all optimizer steps since the last one."""
        pending = self.state.pending
        totals = {one.block.name: s for one in self._reached if (s := pending.pop(one.block.name, 0.0))}
        steps = {
            name: totals[b.block.name] for b in self._reached if b.block.name in totals for name in b.block.parameters
        }
        control_variates = self.state.control_variate if self.every > 1 else {}
        whole = self._exchange.bring(_WithoutPenalty(self._parameters, control_variates, steps))
        moved = [bound for bound in self._bound if bound.block.name in totals]
        updates = [
            ProximalUpdate(b, totals[b.block.name], b.held.displacement(whole), totals[b.block.name] * self.weight)
            for b in moved
        ]
        self._apply_updates(updates, list(steps))

    @torch.no_grad()
    def _enforce_budget(self) -> None:
        """Take one proximal step at the end of training in gradient mode, to end within the budget.

        Its step size is small, so that the prior, which is part of it, has almost no effect. There is no closed form in
        the factors of adapters, so these are scaled down, all by the same factor.
        """
        whole = [bound for bound in self._bound if bound.lora is None]
        partial = any(group is None for bound in whole for group in bound.groups)
        for _ in range(20 if partial else 1):  # parameters that are not stepped stay, so one solution is not enough
            updates = [ProximalUpdate(b, 1.0, b.held.displacement(b.weights()), 1e-3 * self.weight) for b in whole]
            self._apply_updates(updates, [name for b in whole for name in b.block.parameters])
            if not self.factor:
                break
        lora = [bound.lora for bound in self._bound if bound.lora is not None]
        if lora and self._budget is not None:
            others = self._rise_of_others([bound for bound in self._bound if bound.lora is not None])
            left = max(self._budget.quadratic * self._old_examples - others, 0.0)
            scale_down(lora, left)

    def _apply_updates(self, updates: list[ProximalUpdate], names: list[str]) -> None:
        """Apply the proximal updates of this rank's blocks, and write the results of all ranks to the parameters."""
        factor = None
        if self._budget is not None and updates:
            others = self._rise_of_others([update.bound for update in updates])
            factor = self._budget.solve(lambda m: (sum(u.rise(m) for u in updates) + others) / self._old_examples)
            self.factor, self.state.multiplier = factor, self._budget.state
        found = (pair for update in updates for pair in self._updated(update, factor))
        for name, (weight, *control_variate) in self._exchange.give(found, names, 1 if self.every == 1 else 2):
            parameter = self._parameters[name]
            if parameter in self._group_of:
                local(parameter).copy_(local(weight))
            for h in control_variate:
                self.state.control_variate[name] = h if is_sharded(h) else h.to(parameter, copy=True).contiguous()

    def _updated(self, update: ProximalUpdate, factor: float | None) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Yield the parameters of a block after its proximal step and, if every > 1, their control variates."""
        held, pulled = update.bound.held, update.pulled(factor)
        columns = [held.block.split(held.mean + pulled)]
        if self.every > 1:
            columns.append(held.block.split(pulled.sub_(update.d).div_(update.total)))
        for name, *tensors in zip(held.block.parameters, *columns, strict=True):
            yield name, tuple(tensors)

    def _step_size(self, bound: SteppedBlock) -> float:
        """Compute the step size s of a block in this step; 0 if the block has no gradient."""
        known = [parameter.grad is not None for parameter in bound.parameters]
        if not any(known):
            return 0.0
        if not all(known):
            raise _unequal_steps(bound.block)
        return self._common_step(bound)

    def _common_step(self, bound: SteppedBlock) -> float:
        """Return the step size shared by all parameters of a block; raise an error if they differ."""
        sizes = {None if group is None else sgd_step(group) for group in bound.groups}
        size = sizes.pop()
        if sizes or size is None:
            raise _unequal_steps(bound.block)
        return size


class _WithoutPenalty(Mapping[str, Tensor]):
    """The parameters without the control variates added since the last proximal step: w - S h."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        control_variates: Mapping[str, Tensor],
        steps: Mapping[str, float],  # S, by parameter
    ) -> None:
        self._parameters, self._control_variates, self._steps = parameters, control_variates, steps

    def __getitem__(self, name: str) -> Tensor:
        weight, step = local(self._parameters[name]), self._steps[name]
        if name not in self._control_variates:
            return weight
        return torch.sub(weight, local(self._control_variates[name]), alpha=step)

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


def _unequal_steps(block: Block) -> UnsupportedError:
    """Create the error for a block whose parameters have different step sizes, or only some of them a gradient."""
    return UnsupportedError(
        f"proximal mode steps all parameters of {block.name} as one block ({', '.join(block.parameters)}), but their "
        "step sizes differ or some have no gradient: give all of them the same lr and momentum and a gradient, or use "
        "mode='gradient'"
    )

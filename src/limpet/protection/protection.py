"""Hold on during training: the penalty as hooks of the optimizer's own step.

The objective is mean loss + (1 / N) penalty(w). Two ways to add the penalty:

- gradient: before the step, grad += gradient of the penalty / N. Any optimizer; stiff penalties make SGD diverge. With
  every=k it is made anew every k steps, and in between taken as it was: the same fixed point, at a k-th of the cost.
- proximal: after the step, w <- argmin 1/(2 s) ||w - v||^2 + penalty(w) / N; no penalty makes it diverge. For SGD,
  whose step size at rest is s = lr (1 - dampening) / (1 - momentum), Nesterov or not. Taken every k steps with the
  control variate of ProxSkip (Mishchenko et al. 2022), which keeps the fixed point: with h the force of the penalty,
  after every step w += s h; every k steps, with S the sum of the s since the last time, z = w - S h, w = prox_S(z),
  h = (w - z) / S.

Where a budget is given instead of a strength, the penalty is multiplied by what it takes: `limpet.forgetting.budget`.
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
    """Somebody who watches the steps: the loss gradient before any penalty joins, and what the step changed."""

    def before_step(self, gradients: dict[str, Tensor]) -> None:
        """The gradients of the loss are known, the weights still old."""

    def after_step(self) -> None:
        """The weights are new."""


class Protection:
    """`with memory.protect(optimizer, examples=N):` every step of the optimizer now also holds fast."""

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
            reject_sharded(posterior.sharding, "budget=", "hold with a strength, and watch memory.forecast()")
        self.posterior = posterior
        self.optimizer = inner_optimizer(optimizer)
        self.mode = mode_for(self.optimizer, mode, every, list(posterior.lora_penalties()))
        self.every = every
        self.weight = penalty_weight(examples, reduction, batch_size)
        fits = state is not None and (state.every, state.mode) == (every, self.mode)
        self.state = state if state is not None and fits else ProximalState(every, mode=self.mode)
        self.factor = 1.0  # what the penalty was multiplied by last
        self._budget = budget if old_examples else None
        self._old_examples = old_examples
        if self._budget is not None and self.state.multiplier is not None:
            self._budget.state = self.state.multiplier
        self._observer = observer
        self._on_enter = on_enter
        self._on_exit = on_exit
        self._handles: list[Any] = []
        self._entered = False
        self._groups: list[tuple[int, int]] = []  # the optimizer's groups as they were bound
        self._bound: list[BoundBlock] = []  # the blocks that are kept here
        self._reached: Sequence[SteppedBlock] = []  # those that the optimizer steps, wherever they are kept
        self._exchange: BlockExchange = LocalExchange()
        self._parameters: dict[str, nn.Parameter] = {}
        self._group_of: dict[nn.Parameter, Group] = {}
        self._sizes: list[float] = []  # the step size of every block in this step
        self._original: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # parameter, its gradient, ours in its place

    def __enter__(self) -> Protection:
        if self._handles:
            raise LimpetError("this protection is in use already: make a new one with memory.protect(...)")
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
            warn("memory.protect(...) was called and never entered, so nothing was held: write `with`", LimpetWarning)

    def _bind(self) -> None:
        """Find the groups of the blocks' parameters. Done anew when the optimizer's groups change under way."""
        refuse_unsupported(self.optimizer)
        self._groups = self._groups_now()
        self._group_of = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        self._parameters = self.posterior.parameters()
        self._exchange = exchange_for(self.posterior)
        self._bound = list(self._blocks())
        self._reached = self._exchange.stepped(self._bound, self._group_of)
        if not self._reached:
            raise LimpetError(
                "the optimizer holds none of the parameters that the memory protects: make it from the parameters "
                "of the same model, after the model is on its device"
            )
        if self.mode == "proximal":
            for bound in self._reached:
                self._common_step(bound)

    def _groups_now(self) -> list[tuple[int, int]]:
        return [(id(group), len(group["params"])) for group in self.optimizer.param_groups]

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._give_back()
        finished = exception[0] is None
        with full_precision():
            if finished and self.mode == "proximal":
                self._pull()
            elif finished and self._budget is not None:
                self._pull_once()
        self._on_exit(finished)

    def _blocks(self) -> Iterator[BoundBlock]:
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
                f"weight decay pulls protected weights to zero, against the memory ({few(decayed)}): set "
                "weight_decay=0 for them; the prior of the memory takes its place",
                LimpetWarning,
            )

    @torch.no_grad()
    def penalty(self) -> float:
        """The penalty as it stands beside the loss now; with a budget, that of the Fishers alone."""
        if self._budget is None:
            return float(self.posterior.penalty()) * self.weight
        return self.factor * sum(self.posterior.rises().values()) * self.weight

    def _pre_hook(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._groups_now() != self._groups:
            self._bind()
        # A closure runs inside the step, after this hook: what is to be done with its gradients goes with it.
        # args[0] is the optimizer itself.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._gradients_known()
            return None

        def wrapped() -> Any:
            self._give_back()
            with torch.enable_grad():
                loss = closure()
            self._gradients_known()
            return loss

        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _skipped(self) -> bool:
        """Whether a fused optimizer under GradScaler found inf and leaves the weights alone."""
        found_inf = getattr(self.optimizer, "found_inf", None)
        return found_inf is not None and bool(found_inf > 0)

    @torch.no_grad()
    @full_precision()
    def _gradients_known(self) -> None:
        self._give_back()
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
            self._sizes = [self._step_size(bound) for bound in self._reached]  # before the step, which it may refuse

    def _penalty_parts(self) -> Iterator[Part]:
        """The gradient of the penalty in every parameter, before it is divided by the examples."""
        if self.every == 1:
            yield from self._fresh_parts()
            return
        state, parameters = self.state, self.posterior.parameters()
        names = {parameter: name for name, parameter in parameters.items()}
        if state.count % self.every == 0:
            state.control_variate = {}
        # a block that no step has reached since the last time has none yet
        for p, _, part in self._fresh_parts(without={parameters[name] for name in state.control_variate}):
            state.control_variate[names[p]] = part.to(p.device, torch.promote_types(p.dtype, torch.float32), copy=True)
        state.count += 1
        for name, part in state.control_variate.items():
            if parameters[name] in self._group_of:
                yield parameters[name], self._group_of[parameters[name]], part

    def _fresh_parts(self, without: Collection[nn.Parameter] = ()) -> Iterator[Part]:
        """The same made anew, but for blocks whose parameters are among these."""
        if self._budget is None:
            reached = [one for one in self._reached if one.stepped and one.targets.isdisjoint(without)]
            yield from self._gradients({one.block.name for one in reached})
            return
        stepped = [bound for bound in self._bound if bound.stepped and bound.targets.isdisjoint(without)]
        measured = [bound.measured() for bound in stepped]
        if without:
            for _, parts in measured:
                yield from parts(self.factor)
            return
        rise = sum(found for found, _ in measured) + self._others(stepped)
        self.factor = self._budget.follow(rise / self._old_examples)
        self.state.multiplier = self._budget.state
        self.state.count += self.every == 1
        for _, parts in measured:
            yield from parts(self.factor)

    def _gradients(self, blocks: Collection[str]) -> Iterator[Part]:
        """The gradient of the penalty in these blocks, in every parameter that the optimizer steps."""
        through_adapters = {bound.block.name: bound for bound in self._bound if bound.lora is not None}
        for name in through_adapters.keys() & set(blocks):
            yield from through_adapters[name].penalty_parts()
        names = [
            name
            for one in self._reached
            if one.block.name in blocks and one.block.name not in through_adapters
            for name in one.block.parameters
        ]
        if not names:
            return
        whole = self._exchange.bring({name: self._parameters[name] for name in names})
        found = (
            (name, (part,))
            for bound in self._bound
            if bound.block.name in blocks and bound.lora is None
            for name, part in bound.block.scatter(bound.gradient(bound.held.displacement(whole))).items()
        )
        for name, (part,) in self._exchange.give(found, names, 1):
            parameter = self._parameters[name]
            if parameter in self._group_of:
                yield parameter, self._group_of[parameter], part

    def _others(self, bounds: list[BoundBlock]) -> float:
        """1/2 d^T F d of the blocks that are not among these."""
        return sum(self.posterior.rises(without={bound.held.block.name for bound in bounds}).values())

    def _add_gradient(self, parameter: nn.Parameter, group: Group, part: Tensor, scale: Tensor | None) -> None:
        if parameter.grad is None:
            return
        weight = -self.weight if group.get("maximize") else self.weight
        if scale is not None:
            part = part * scale.to(part.device)
        gradient = parameter.grad.to_dense()
        if part.dtype != gradient.dtype:  # a sum over all examples may be too large for half precision, its mean is not
            part, weight = (part * weight).to(gradient.dtype), 1.0
        # A tensor in place of the gradient, not a change to it: after the step the user's is there again.
        ours: Any = torch.add(gradient, part.to(gradient.device), alpha=weight)
        ours.in_place_of = parameter.grad  # for whoever else protects, and comes after us
        self._original.append((parameter, parameter.grad, ours))
        parameter.grad = ours

    def _give_back(self) -> None:
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
        self._give_back()
        if self._skipped():
            return
        if self.mode == "proximal":
            self._proximal_step()
        if self._observer is not None:
            self._observer.after_step()

    def _proximal_step(self) -> None:
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
            self._pull()

    @torch.no_grad()
    def _pull(self) -> None:
        """The proximal map for the steps since the last one."""
        pending = self.state.pending
        totals = {one.block.name: s for one in self._reached if (s := pending.pop(one.block.name, 0.0))}
        steps = {
            name: totals[b.block.name] for b in self._reached if b.block.name in totals for name in b.block.parameters
        }
        held_back = self.state.control_variate if self.every > 1 else {}
        whole = self._exchange.bring(_WithoutPenalty(self._parameters, held_back, steps))
        moved = [bound for bound in self._bound if bound.block.name in totals]
        updates = [
            ProximalUpdate(b, totals[b.block.name], b.held.displacement(whole), totals[b.block.name] * self.weight)
            for b in moved
        ]
        self._pull_back(updates, list(steps))

    @torch.no_grad()
    def _pull_once(self) -> None:
        """One proximal map at the end, for those who took gradients and must not end beyond a budget.

        Of a small step, so that the prior, which is in it too, does next to nothing. No such map is closed in the
        factors of adapters: they are scaled down, all alike.
        """
        whole = [bound for bound in self._bound if bound.lora is None]
        parted = any(group is None for bound in whole for group in bound.groups)
        for _ in range(20 if parted else 1):  # what stays where it is of a block is not what the map was solved for
            updates = [ProximalUpdate(b, 1.0, b.held.displacement(b.weights()), 1e-3 * self.weight) for b in whole]
            self._pull_back(updates, [name for b in whole for name in b.block.parameters])
            if not self.factor:
                break
        lora = [bound.lora for bound in self._bound if bound.lora is not None]
        if lora and self._budget is not None:
            others = self._others([bound for bound in self._bound if bound.lora is not None])
            left = max(self._budget.quadratic * self._old_examples - others, 0.0)
            scale_down(lora, left)

    def _pull_back(self, updates: list[ProximalUpdate], names: list[str]) -> None:
        """Take the updates of the blocks that are kept here, and put all parameters where they belong."""
        factor = None
        if self._budget is not None and updates:
            others = self._others([update.bound for update in updates])
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
        """The parameters of a block after its proximal map and, where steps are skipped, their control variates."""
        held, pulled = update.bound.held, update.pulled(factor)
        columns = [held.block.split(held.mean + pulled)]
        if self.every > 1:
            columns.append(held.block.split(pulled.sub_(update.d).div_(update.total)))
        for name, *tensors in zip(held.block.parameters, *columns, strict=True):
            yield name, tuple(tensors)

    def _step_size(self, bound: SteppedBlock) -> float:
        """s of this step; 0 where the block had no gradient."""
        known = [parameter.grad is not None for parameter in bound.parameters]
        if not any(known):
            return 0.0
        if not all(known):
            raise _not_as_one(bound.block)
        return self._common_step(bound)

    def _common_step(self, bound: SteppedBlock) -> float:
        """The step size that all parameters of the block have."""
        sizes = {None if group is None else sgd_step(group) for group in bound.groups}
        size = sizes.pop()
        if sizes or size is None:
            raise _not_as_one(bound.block)
        return size


class _WithoutPenalty(Mapping[str, Tensor]):
    """Where the parameters would be had the penalty not acted since the last proximal map: w - S h."""

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


def _not_as_one(block: Block) -> UnsupportedError:
    return UnsupportedError(
        f"{block.name} is one block ({', '.join(block.parameters)}), and proximal mode moves it as one: give "
        "its parameters the same lr and momentum and all of them a gradient, or use mode='gradient'"
    )

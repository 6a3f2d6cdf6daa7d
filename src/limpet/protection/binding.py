"""Match the blocks of a memory to the parameter groups of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from limpet.errors import LimpetError, LimpetWarning, warn
from limpet.posterior import Posterior
from limpet.posterior.gathered_adapters import GatheredAdapters
from limpet.protection.bound_block import BoundBlock, Group, SteppedBlock
from limpet.protection.exchange import BlockExchange, LocalExchange, exchange_for
from limpet.protection.optimizers import few, refuse_unsupported


@dataclass(frozen=True)
class Binding:
    """The blocks that an optimizer steps, with their parameters and parameter groups.

    Attributes:
        parameters: The parameters of the model, by name.
        group_of: The parameter group of every parameter of the optimizer.
        bound: The blocks that this rank owns.
        reached: The blocks that the optimizer steps, on all ranks.
        exchange: The exchange of weights between ranks.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    group_of: dict[nn.Parameter, Group] = field(default_factory=dict)
    bound: Sequence[BoundBlock] = ()
    reached: Sequence[SteppedBlock] = ()
    exchange: BlockExchange = field(default_factory=LocalExchange)

    @property
    def targets(self) -> list[nn.Parameter]:
        """Protected parameters that the optimizer steps, including those of adapters."""
        stepped = set().union(*(one.targets for one in self.reached))
        return [parameter for parameter in self.group_of if parameter in stepped]


def parameter_groups(optimizer: Any) -> list[tuple[int, int]]:
    """Identify the optimizer's current parameter groups, to notice when they change."""
    return [(id(group), len(group["params"])) for group in optimizer.param_groups]


def bind(posterior: Posterior, optimizer: Any, *, mode: str, budget: bool) -> Binding:
    """Match blocks to parameter groups.

    Args:
        posterior: The posterior of the memory.
        optimizer: The optimizer.
        mode: "proximal", "gradient" or "repair".
        budget: Whether the penalty is determined by a budget.

    Returns:
        The blocks that the optimizer steps.

    Raises:
        UnsupportedError: If the optimizer is not supported.
        LimpetError: If the optimizer has none of the protected parameters.
    """
    refuse_unsupported(optimizer)
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    adapters = posterior.gathered_adapters()
    exchange = exchange_for(posterior, adapters)
    bound = list(_blocks(posterior, group_of, adapters, mode=mode, budget=budget))
    reached = exchange.stepped(bound, group_of)
    if not reached:
        raise LimpetError(
            "the optimizer has none of the parameters that the memory protects: create it from the parameters of "
            "the same model, after moving the model to its device"
        )
    return Binding(posterior.parameters(), group_of, bound, reached, exchange)


def _blocks(
    posterior: Posterior,
    group_of: dict[nn.Parameter, Group],
    adapters: GatheredAdapters | None,
    *,
    mode: str,
    budget: bool,
) -> Iterator[BoundBlock]:
    """Yield the blocks of this rank that the optimizer steps."""
    weights, sharding = posterior.parameters(), posterior.sharding
    if sharding is None or adapters is None:
        loras = posterior.lora_penalties() if sharding is None else {}
    else:
        loras = posterior.sharded_lora_penalties(sharding, adapters)
        copies = {copy: weights[name] for copy, name in adapters.names.items()}
        group_of = group_of | {copy: group_of[p] for copy, p in copies.items() if p in group_of}
    decayed = []
    for name, held in posterior.held.items():
        parameters = [weights[parameter] for parameter in held.block.parameters]
        groups = [group_of.get(parameter) for parameter in parameters]
        factors = [p for adapter in loras[name].adapters for p in (adapter.a, adapter.b)] if name in loras else []
        stepped = {factor: group_of[factor] for factor in factors if factor in group_of}
        if not stepped and all(group is None for group in groups):
            continue
        bound = BoundBlock(held.block, parameters, groups, held, lora=loras.get(name), adapter_groups=stepped)
        if budget:
            bound.spectrum = replace(held.precision.fisher().spectrum(), prior=held.precision.prior)
        elif mode == "gradient" and bound.lora is None:
            bound.apply = held.precision.applier()
        yield bound
        # a repair undoes the decay of what the memory needs
        if mode != "repair" and any(group is not None and group.get("weight_decay") for group in groups):
            decayed.append(held.block.name)
    if decayed:
        warn(
            f"weight decay pulls protected weights towards zero, against the memory ({few(decayed)}): set "
            "weight_decay=0 for them; the memory's prior takes its place",
            LimpetWarning,
            every_rank=posterior.sharding is not None,  # a rank binds only the blocks that it owns
        )

"""The Gaussian that a memory is: a mean and a precision for every block of weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from limpet.curvature import Structure
from limpet.errors import LimpetError, NotProtectedWarning, warn
from limpet.model import PER_SAMPLE, Block, full_precision, named_parameters
from limpet.model.adapters import LowRank, adapted_parameters
from limpet.posterior.block_posterior import BlockPosterior
from limpet.posterior.lora import LoRAPenalty
from limpet.posterior.sharding import BlockSharding, reject_sharded
from limpet.precision import STRUCTURES, Kronecker, KroneckerSum, Precision

PRIOR_MEANS = ("zero", "initial")
"""What the weights are thought to be before the first task: zero, or what they were when the memory was made."""


class _EffectiveWeights(Mapping[str, Tensor]):
    """Parameters by name; what adapters add to one is added when it is asked for."""

    def __init__(self, parameters: dict[str, nn.Parameter], adapted: Mapping[nn.Parameter, Sequence[LowRank]]) -> None:
        self._parameters, self._adapted = parameters, adapted

    def __getitem__(self, name: str) -> Tensor:
        weight: Tensor = self._parameters[name]
        for adapter in self._adapted.get(self._parameters[name], ()):
            added = adapter.added(weight.shape)
            # in float32 at least: a change that a half-precision weight would round away is one all the same
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + added.to(weight.device)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class Posterior:
    """All blocks of a model, by name, and the settings by which new ones are started."""

    def __init__(self, model: nn.Module, structure: Structure, prior_precision: float, prior_mean: str) -> None:
        self.model = model
        self.structure = structure
        self.prior_precision = prior_precision
        self.prior_mean = prior_mean
        self.held: dict[str, BlockPosterior] = {}
        self.constant = 0.0
        self._lora_penalties: dict[str, LoRAPenalty] = {}
        self.sharding = BlockSharding.of(
            model
        )  # where the model lies on many ranks in pieces, `held` is what this one keeps

    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name."""
        return named_parameters(self.model)

    def weights(self) -> Mapping[str, Tensor]:
        """The same as what they act as now: the weight of a layer with adapters is its base with what they add.

        Of a model in pieces, those of the blocks that this rank keeps, brought here: a collective.
        """
        parameters, adapted = self.parameters(), adapted_parameters(self.model)
        if self.sharding is not None:
            exchange = self.sharding.exchange(parameters)
            return exchange.bring({name: parameters[name] for name in exchange.layouts})
        return _EffectiveWeights(parameters, adapted) if adapted else parameters

    def lora_penalties(self) -> dict[str, LoRAPenalty]:
        """The blocks that train through adapters, by name."""
        parameters, adapted = self.parameters(), adapted_parameters(self.model)
        found = {}
        for name, held in self.held.items() if adapted else ():
            own = [parameters[parameter] for parameter in held.block.parameters]
            adapters = [one for parameter in own for one in adapted.get(parameter, ())]
            if adapters:
                known = self._lora_penalties.get(name)
                fits = known is not None and known.fits(held, own, adapters)
                found[name] = known if known is not None and fits else LoRAPenalty(held, own, adapters)
        self._lora_penalties = found
        return found

    def way_to_the_mean(self) -> dict[str, Tensor]:
        """mean - w, by parameter."""
        weights, way = self.weights(), {}
        for held in self.held.values():
            way.update(held.block.scatter(-held.displacement(weights)))
        return way

    @full_precision()
    def penalty(self) -> Tensor:
        """The whole penalty, differentiable, not divided by the number of examples."""
        reject_sharded(self.sharding, "memory.penalty()", "hold on with memory.protect(optimizer, examples=N)")
        weights, lora_penalties = self.weights(), self.lora_penalties()
        values = [
            lora_penalties[name].value() if name in lora_penalties else held.value(weights)
            for name, held in self.held.items()
        ]
        if not values:
            raise LimpetError("the memory holds no block: every parameter of the model is frozen or in exclude=[...]")
        return torch.stack([value.to(values[0].device) for value in values]).sum() + self.constant

    @full_precision()
    def rises(self, without: Collection[str] = ()) -> dict[str, float]:
        """1/2 (w - mean)^T F (w - mean) of the blocks that hold tasks, by name; of all ranks."""
        weights, lora_penalties = self.weights(), self.lora_penalties()
        rises = {
            name: lora_penalties[name].rise()
            if name in lora_penalties
            else float(held.precision.fisher().quadratic(held.displacement(weights))) / 2
            for name, held in self.held.items()
            if held.tasks and name not in without
        }
        if self.sharding is None:
            return rises
        return {name: rise for some in self.sharding.ranks.gather(rises) for name, rise in some.items()}

    def start(self, block: Block, weights: Mapping[str, Tensor]) -> BlockPosterior:
        """A block that knows only the prior."""
        matrix = block.gather(weights).detach()
        like = matrix.new_zeros((), dtype=torch.promote_types(matrix.dtype, torch.float32))
        mean = like.expand(block.shape) if self.prior_mean == "zero" else matrix.to(like.dtype).clone()
        return BlockPosterior(block, mean, self._prior(block, like))

    def _prior(self, block: Block, like: Tensor) -> Precision:
        kind = STRUCTURES[self.structure.of(block)]
        if issubclass(kind, Kronecker | KroneckerSum):
            sides = self.structure.sides(block)
            return kind.start(block.shape, self.prior_precision, like, **sides, rest=self.structure.rest)
        return kind.start(block.shape, self.prior_precision, like)

    def without_tasks(self, held: BlockPosterior) -> BlockPosterior:
        """The same block and mean with the prior alone as precision."""
        like = held.mean.new_zeros(())
        return replace(held, precision=self._prior(held.block, like), linear_term=None, tasks=0)

    def arrange(self, blocks: Sequence[Block]) -> None:
        """Make the blocks those of the model as it is now, or as a pass found it must be measured.

        New parameters start from the prior. A block that no task has gone into yet may be cut up otherwise; one that
        holds tasks stays, or becomes its diagonal where from now on it has to be measured example by example.
        """
        before = dict(self.held)
        if self.sharding is not None:
            blocks = self.sharding.settle(blocks, self.structure)
        try:
            self._arrange(blocks, self.weights())
        except LimpetError:
            self.held = before
            raise

    def _arrange(self, blocks: Sequence[Block], weights: Mapping[str, Tensor]) -> None:
        self._drop_deleted()
        self._turn_to_diagonals(
            {b.parameters[0] for b in blocks if b.kind == PER_SAMPLE and self.structure.of(b) == "diagonal"}
        )
        by_parameters = {held.block.parameters: held for held in self.held.values()}
        wanted = {block.parameters for block in blocks}
        covered = {name for block in blocks for name in block.parameters}
        arranged: dict[str, BlockPosterior] = {}
        for block in blocks:
            old = by_parameters.get(block.parameters)
            if old is not None and old.block.kind == block.kind and old.block.shape == block.shape:
                arranged[block.name] = replace(old, block=block)
            else:
                arranged[block.name] = self._cut_again(block, weights)
        for held in self.held.values():
            if held.tasks and held.block.parameters not in wanted:
                if covered & set(held.block.parameters):
                    raise LimpetError(
                        f"{held.block.name} was measured with {', '.join(held.block.parameters)} together, and the "
                        "model now trains or uses only part of them: set requires_grad as it was"
                    )
                arranged[held.block.name] = held  # frozen since: its weights stay, and so does what is known
        self.held = arranged
        self.follow_devices()

    def _turn_to_diagonals(self, direct: set[str]) -> None:
        """Take known blocks apart whose parameters are all used directly now."""
        for name, held in list(self.held.items()):
            if held.tasks and held.block.kind != PER_SAMPLE and direct.issuperset(held.block.parameters):
                del self.held[name]
                self.held.update({piece.block.name: piece for piece in held.as_diagonals()})

    def _drop_deleted(self) -> None:
        """Leave out blocks whose parameters the model no longer has; refuse those that have another shape."""
        weights = self.parameters()
        for name, held in list(self.held.items()):
            shapes = dict(zip(held.block.parameters, held.block.shapes, strict=True))
            gone = [parameter for parameter in shapes if parameter not in weights]
            other = [p for p, shape in shapes.items() if p in weights and weights[p].shape != shape]
            if other and held.tasks:
                raise LimpetError(
                    f"{other[0]} was {tuple(shapes[other[0]])} when it was measured and is "
                    f"{tuple(weights[other[0]].shape)} now: leave a head that grows out of the memory from the start, "
                    f"exclude=[{name!r}]"
                )
            if gone and held.tasks:
                warn(f"the model no longer has {gone[0]}, and what was known of it is dropped", NotProtectedWarning)
            if gone or other:
                del self.held[name]

    def follow_devices(self) -> None:
        """Move the blocks of a model that went to another device."""
        weights = self.parameters()
        for name, held in self.held.items():
            device = weights[held.block.parameters[0]].device
            if held.mean.device != device:
                self.held[name] = replace(
                    held,
                    mean=held.mean.to(device),
                    linear_term=None if held.linear_term is None else held.linear_term.to(device),
                    precision=held.precision.to(device, held.mean.dtype),
                )

    def _cut_again(self, block: Block, weights: Mapping[str, Tensor]) -> BlockPosterior:
        """A block of parameters of which some may stand in other blocks already, with no task in them."""
        fresh = self.start(block, weights)
        means: dict[str, Tensor] = dict(zip(block.parameters, block.split(fresh.mean), strict=True))
        for held in self.held.values():
            shared = set(held.block.parameters) & set(block.parameters)
            if not shared:
                continue
            if held.tasks:
                raise LimpetError(
                    f"{held.block.name} was measured as {held.block.kind} before and cannot be measured so any more; "
                    "the model uses its weights in another way now: begin a new memory"
                )
            parts = dict(zip(held.block.parameters, held.block.split(held.mean), strict=True))
            means.update({name: parts[name] for name in shared})
        return replace(fresh, mean=block.gather(means))

    def replace_all(self, change: Callable[[BlockPosterior], BlockPosterior]) -> None:
        """Put every block through `change`, all or none."""
        self.held = {name: change(held) for name, held in self.held.items()}

    @property
    def names(self) -> list[str]:
        """The names of all blocks, on whatever rank they are kept."""
        return list(self.held) if self.sharding is None else list(self.sharding.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors kept, by this rank."""
        return sum(held.nbytes for held in self.held.values())

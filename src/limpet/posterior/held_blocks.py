"""The blocks of a posterior: made from the prior, arranged for the model, moved with it and dropped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from limpet.curvature import Structure
from limpet.distributed import reshard
from limpet.errors import LimpetError, UnsupportedError
from limpet.model import PER_SAMPLE, Block, is_excluded, named_parameters
from limpet.model.adapters import adapted_parameters
from limpet.model.names import replaced_modules
from limpet.model.quantized import QuantizedWeight, own_parameters
from limpet.posterior.block_posterior import BlockPosterior
from limpet.posterior.sharding import BlockSharding, reject_quantized_and_sharded
from limpet.precision import STRUCTURES, Kronecker, KroneckerSum, Precision
from limpet.precision.reflections import Reflections

PRIOR_MEANS = ("zero", "initial")
"""Prior mean of the weights: zero, or their values when the memory was created."""


class HeldBlocks(ABC):
    """The part of `Posterior` that keeps blocks. Its arguments are those of `Posterior`."""

    def __init__(self, model: nn.Module, structure: Structure, prior_precision: float, prior_mean: str) -> None:
        self.model = model
        self.structure = structure
        self.prior_precision = prior_precision
        self.prior_mean = prior_mean
        reshard(model)
        self.held: dict[str, BlockPosterior] = {}
        self.quantized: frozenset[str] = frozenset()  # quantized parameters of the blocks in `held`
        self.constant = 0.0
        self.inconsistent = False  # some blocks have a new precision, and the mean of before
        self.sharding = BlockSharding.of(model)
        if self.sharding is not None:
            reject_quantized_and_sharded(model)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters by name.

        Raises:
            UnsupportedError: If the model has lost a parameter that was measured.
            LimpetError: If the memory is inconsistent.
        """
        if self.inconsistent:
            raise LimpetError(
                "a consolidation has failed while the means of this memory were replaced, so it cannot be used any "
                "more: load it from its file"
            )
        if self.sharding is not None:
            reshard(self.model)
        found = named_parameters(self.model)
        for held in self.held.values():
            if held.tasks and not all(name in found for name in held.block.parameters):
                raise _unreachable(self.model, held.block, found)
            for name in held.block.parameters if held.tasks else ():
                if isinstance(found[name], QuantizedWeight) != (name in self.quantized):
                    raise UnsupportedError(
                        f"{name} was quantized or dequantized after the memory was made or loaded: do that first (with "
                        "bitsandbytes, by moving the model to its device), then call limpet.load(path, model)"
                    )
        return found

    def hold(self, held: dict[str, BlockPosterior]) -> None:
        """Replace all blocks by others, whose means belong to the model as it is quantized now."""
        found = named_parameters(self.model)
        names = {name for one in held.values() for name in one.block.parameters}
        self.held = held
        self.quantized = frozenset(name for name in names if isinstance(found.get(name), QuantizedWeight))

    def unreachable(self) -> dict[str, torch.Size]:
        """Return the parameters with tasks that the model no longer has, with their shapes."""
        found = named_parameters(self.model)
        return {
            name: shape
            for held in self.held.values()
            for name, shape in zip(held.block.parameters, held.block.shapes, strict=True)
            if held.tasks and name not in found
        }

    def drop(self, patterns: Collection[str]) -> list[str]:
        """Remove the blocks of which the name or a parameter matches one of these patterns, and return their names."""
        blocks = [held.block for held in self.held.values()] if self.sharding is None else self.sharding.blocks.values()
        gone = [b.name for b in blocks if any(is_excluded(name, patterns) for name in (b.name, *b.parameters))]
        self.held = {name: held for name, held in self.held.items() if name not in gone}
        if self.sharding is not None:
            self.sharding.blocks = {name: one for name, one in self.sharding.blocks.items() if name not in gone}
        return gone

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """Return the effective weights by name."""

    def on_any_rank(self, flag: bool) -> bool:
        """Whether a flag is set: in this process, or, of a sharded model, on any rank, which is a collective."""
        return flag if self.sharding is None else any(self.sharding.ranks.gather(flag))

    def start(self, block: Block, weights: Mapping[str, Tensor]) -> BlockPosterior:
        """Create a block with the prior as its posterior.

        Args:
            block: The block.
            weights: The current weights, by parameter name.

        Returns:
            The posterior of the block, without tasks.
        """
        matrix = block.gather(weights).detach()
        like = matrix.new_zeros((), dtype=torch.promote_types(matrix.dtype, torch.float32))
        mean = like.expand(block.shape) if self.prior_mean == "zero" else matrix.to(like.dtype).clone()
        return BlockPosterior(block, mean, self._prior(block, like))

    def _prior(self, block: Block, like: Tensor) -> Precision:
        kind = STRUCTURES[self.structure.of(block)]
        if issubclass(kind, Kronecker | KroneckerSum):
            options = {**self.structure.sides(block), "rest": self.structure.rest}
            if issubclass(kind, Kronecker):
                options |= {"rank": self.structure.rank, "energy": self.structure.energy}
            return kind.start(block.shape, self.prior_precision, like, **options)
        return kind.start(block.shape, self.prior_precision, like)

    def without_tasks(self, held: BlockPosterior) -> BlockPosterior:
        """Return the block with the same mean and only the prior as its precision."""
        like = held.mean.new_zeros(())
        return replace(held, precision=self._prior(held.block, like), linear_term=None, tasks=0)

    def arrange(self, blocks: Sequence[Block]) -> None:
        """Update the set of blocks to that of the current model, or to what a pass found it must measure.

        New parameters start from the prior. A block without tasks may be split differently. A block with tasks is kept,
        or replaced by its diagonal if it must be measured per sample from now on. On error nothing changes.

        Args:
            blocks: The new blocks, of all ranks.

        Raises:
            LimpetError: If a block with tasks cannot be carried over.
        """
        before = dict(self.held)
        if self.sharding is not None:
            sharded = self.sharding.blocks, self.sharding.owners
            blocks = self.sharding.settle(blocks, self.structure, self.parameters())
        try:
            self._check_sharing()
            adapted_parameters(self.model)  # raises an error if there are adapters that are not supported
            new = self.on_any_rank(any(self._known(block) is None for block in blocks))
            self._arrange(blocks, self.weights() if new else {})
        except LimpetError:
            self.held = before
            if self.sharding is not None:
                self.sharding.blocks, self.sharding.owners = sharded
            raise

    def _arrange(self, blocks: Sequence[Block], weights: Mapping[str, Tensor]) -> None:
        self._drop_deleted()
        self._turn_to_diagonals(
            {b.parameters[0] for b in blocks if b.kind == PER_SAMPLE and self.structure.of(b) == "diagonal"}
        )
        wanted = {block.parameters for block in blocks}
        covered = {name for block in blocks for name in block.parameters}
        arranged: dict[str, BlockPosterior] = {}
        for block in blocks:
            old = self._known(block)
            arranged[block.name] = self._cut_again(block, weights) if old is None else replace(old, block=block)
        for held in self.held.values():
            if held.tasks and held.block.parameters not in wanted:
                if covered & set(held.block.parameters):
                    raise LimpetError(
                        f"{held.block.name} was measured with {', '.join(held.block.parameters)} together, but the "
                        "model now trains or uses only some of them: restore requires_grad to what it was"
                    )
                arranged[held.block.name] = held  # frozen since: its posterior stays valid
        self.hold(arranged)
        self.follow_devices()

    def _known(self, block: Block) -> BlockPosterior | None:
        """Return the posterior of the same block; None if it is new, or was divided differently."""
        found = self.held.get(block.name)
        if found is None or found.block.parameters != block.parameters:
            found = next((held for held in self.held.values() if held.block.parameters == block.parameters), None)
        same = found is not None and found.block.kind == block.kind and found.block.shape == block.shape
        return found if same else None

    def _turn_to_diagonals(self, direct: set[str]) -> None:
        """Split blocks with tasks into diagonals if all their parameters are per-sample blocks now."""
        for name, held in list(self.held.items()):
            if held.tasks and held.block.kind != PER_SAMPLE and direct.issuperset(held.block.parameters):
                del self.held[name]
                self.held.update({piece.block.name: piece for piece in held.as_diagonals()})

    def _drop_deleted(self) -> None:
        """Drop blocks without tasks whose parameters the model no longer has; raise if a measured one changed."""
        weights = self.parameters()
        for name, held in list(self.held.items()):
            shapes = dict(zip(held.block.parameters, held.block.shapes, strict=True))
            gone = [parameter for parameter in shapes if parameter not in weights]
            other = [p for p, shape in shapes.items() if p in weights and weights[p].shape != shape]
            if other and held.tasks:
                raise LimpetError(
                    f"{other[0]} had shape {tuple(shapes[other[0]])} when it was measured, but has shape "
                    f"{tuple(weights[other[0]].shape)} now: if it is a growing head, create the memory with "
                    f"exclude=[{name!r}]"
                )
            if gone or other:
                del self.held[name]

    def _cut_again(self, block: Block, weights: Mapping[str, Tensor]) -> BlockPosterior:
        """Create a block from parameters that may already be in other blocks without tasks, keeping their means."""
        fresh = self.start(block, weights)
        means: dict[str, Tensor] = dict(zip(block.parameters, block.split(fresh.mean), strict=True))
        for held in self.held.values():
            shared = set(held.block.parameters) & set(block.parameters)
            if not shared:
                continue
            if held.tasks:
                raise LimpetError(
                    f"{held.block.name} was measured as {held.block.kind}, but the model now uses its weights "
                    "differently, so its curvature cannot be updated: create a new memory"
                )
            parts = dict(zip(held.block.parameters, held.block.split(held.mean), strict=True))
            means.update({name: parts[name] for name in shared})
        return replace(fresh, mean=block.gather(means))

    def _check_sharing(self) -> None:
        """Raise if a measured weight that several layers shared is no longer shared by all of them."""
        shared = {
            name: held.block
            for held in self.held.values()
            if held.tasks
            for name in held.block.parameters[:1]
            if len(held.block.layers) > 1
        }
        if not shared:
            return
        parameters, replaced = named_parameters(self.model), replaced_modules(self.model)
        running = (module for module in self.model.modules() if module not in replaced)
        held_by = Counter(p for module in running for _, p in own_parameters(module))
        for name, block in shared.items():
            uses = held_by[parameters[name]]
            if uses < len(block.layers):
                raise UnsupportedError(
                    f"{name} was measured as the weight of {len(block.layers)} layers ({block.kind}), but only "
                    f"{uses} of them have it now, and the memory does not see what happens to the others: if an "
                    "adapter has made a copy for one of them, keep the copies tied (in peft: ensure_weight_tying=True) "
                    "or remove the layer from modules_to_save"
                )

    def follow_devices(self) -> None:
        """Move each block to the device of its parameters."""
        weights = self.parameters()
        for name, held in self.held.items():
            device = weights[held.block.parameters[0]].device
            if held.mean.device != device:
                self.held[name] = replace(
                    held,
                    mean=moved_mean(held.mean, device),
                    linear_term=None if held.linear_term is None else held.linear_term.to(device),
                    precision=held.precision.to(device, held.mean.dtype),
                )

    @property
    def names(self) -> list[str]:
        """Names of the blocks of all ranks."""
        return list(self.held) if self.sharding is None else list(self.sharding.blocks)

    @property
    def nbytes(self) -> int:
        """Size of all tensors stored by this rank, in bytes. What blocks share is counted once."""
        inputs = [held.precision.inputs.vectors for held in self.held.values() if isinstance(held.precision, Kronecker)]
        truncated = [vectors for vectors in inputs if isinstance(vectors, Reflections)]
        once = {id(vectors): vectors.nbytes for vectors in truncated}
        repeated = sum(vectors.nbytes for vectors in truncated) - sum(once.values())
        return sum(held.nbytes for held in self.held.values()) - repeated


def moved_mean(mean: Tensor, device: torch.device) -> Tensor:
    """Move a mean to a device; zeros that are a view of one number stay one."""
    if mean.dim() and not any(mean.stride()):
        return mean.flatten()[0].to(device).expand(mean.shape)
    return mean.to(device)


def _unreachable(model: nn.Module, block: Block, found: Collection[str]) -> UnsupportedError:
    """Create the error for a measured block of which the model no longer has a parameter under its name."""
    parameter = next(name for name in block.parameters if name not in found)
    module, path = model, list[str]()
    for part in parameter.split(".")[:-1]:
        inner = module._modules.get(part)
        if inner is None:
            break
        module, path = inner, [*path, part]
    return UnsupportedError(
        f"{parameter} was measured, but the model no longer has it, so its displacement is unknown "
        f"({'.'.join(path) or 'the model'} is a {type(module).__module__}.{type(module).__qualname__} now). If an "
        "adapter or another wrapper has replaced the layer, it is not one that limpet knows: use LoRA "
        "(peft.LoraConfig), or merge the adapter into the model first (model.merge_and_unload()). If the layer was "
        f"removed on purpose, call memory.drop([{block.name!r}])"
    )

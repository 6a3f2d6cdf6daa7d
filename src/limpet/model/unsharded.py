"""Parameters as the forward pass uses them: under `fully_shard`, unsharded ones that temporarily replace the shards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from limpet.distributed import is_fsdp_unit, is_sharded
from limpet.model.names import Names, named_parameters


class UnshardedParameters(Mapping[str, nn.Parameter]):
    """Parameters by name, as the last forward pass in the body of `watched` used them.

    Args:
        model: The model, with or without `fully_shard`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names, self._parameters = Names(model), named_parameters(model)
        self._used: dict[str, nn.Parameter] = {}

    @contextmanager
    def watched(self, trainable: Collection[str] = ()) -> Iterator[None]:
        """Record the unsharded parameters that `fully_shard` substitutes for the shards before a module runs.

        Args:
            trainable: Names of parameters that get gradients in the body, even if they are frozen.
        """
        if not any(map(is_sharded, self._parameters.values())):
            yield
            return
        units = [(name, unit) for name, unit in self._model.named_modules() if is_fsdp_unit(unit)]
        # fully_shard's own hooks run first, so the parameters are unsharded when these run
        frozen: list[nn.Parameter] = []
        handles = [unit.register_forward_pre_hook(self._hook(name, set(trainable), frozen)) for name, unit in units]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter in frozen:
                parameter.requires_grad_(False)
            self._used.clear()

    def _hook(self, prefix: str, trainable: Collection[str], frozen: list[nn.Parameter]) -> Any:
        """Return a forward pre-hook for the FSDP module with this name.

        Args:
            prefix: The name of the module.
            trainable: Names of parameters that get gradients.
            frozen: The hook adds the parameters that it has made trainable.
        """

        def hook(unit: nn.Module, _: Any) -> None:
            for name, parameter in unit.named_parameters(prefix, remove_duplicate=False):
                if not is_sharded(parameter) and self._names[name] in self._parameters:
                    self._used[self._names[name]] = parameter
                    if self._names[name] in trainable and not parameter.requires_grad:
                        parameter.requires_grad_(True)
                        frozen.append(parameter)

        return hook

    def __getitem__(self, name: str) -> nn.Parameter:
        used = self._used.get(name)
        return self._parameters[name] if used is None else used

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

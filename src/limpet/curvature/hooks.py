"""Forward hooks that record the inputs and output gradients of every layer without changing the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from limpet.errors import CurvatureError
from limpet.layers import Broadcast, Call, Embedding, Layer
from limpet.model.blocks import Block


class Recorder:
    """Records the calls of every block's layers in one forward pass, and the graph edges at which gradients arrive.

    Gradients are requested at edges of the autograd graph rather than at the output tensors: a later in-place operation
    (such as ReLU) replaces the tensor's node in the graph, but the edge stays valid. Backward hooks and `.grad` are not
    used at all.
    """

    def __init__(self) -> None:
        self.calls: dict[str, list[Call]] = {}
        self.edges: list[GradientEdge] = []
        self._at_edge: list[Call] = []
        self._inputs: list[tuple[str, Tensor, int]] = []
        self.unreadable: set[str] = set()  # blocks with a call that the layer class does not support
        self.without_graph: set[str] = set()  # blocks with a call outside the autograd graph
        self.broadcast: set[str] = set()  # blocks that all examples use at once, and that are recorded per example
        self._on = False
        self._examples: int | None = None

    @contextmanager
    def attached(
        self, blocks: Sequence[Block], parameters: Mapping[str, Broadcast] = MappingProxyType({})
    ) -> Iterator[Recorder]:
        """Context manager that registers hooks on the layers of these blocks, and removes them on exit.

        Args:
            blocks: The blocks.
            parameters: Parameters without a layer that may be recorded per example (`broadcast`), by block name.
        """
        watched: dict[nn.Module, list[tuple[str, Layer]]] = {}
        for block in blocks:
            for layer in block.layers:
                watched.setdefault(layer.module, []).append((block.name, layer))
        handles = []
        try:
            for module, users in watched.items():
                handles.append(module.register_forward_hook(self._hook(users), with_kwargs=True))
            for name, layer in parameters.items():
                handles.extend(self._replace(name, layer))
            yield self
        finally:
            for handle in handles:
                handle.remove()
            self.clear()

    def _hook(self, users: list[tuple[str, Layer]]) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not self._on or not isinstance(output, Tensor):
                return None
            if not output.requires_grad:
                self.without_graph.update(name for name, _ in users)
                return None
            x: Any = args[0] if args else next(iter(kwargs.values()), None)
            given = output
            if self._examples and any(name in self.broadcast for name, _ in users) and Embedding.without_examples(x):
                x, output = (t.expand(self._examples, *t.shape[-n:]) for t, n in ((x, 1), (output, 2)))
            edge = get_gradient_edge(output)
            with torch.no_grad():
                for name, layer in users:
                    try:
                        call = Call(layer, x.detach())
                    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                        self.unreadable.add(name)  # e.g. a subclass with other inputs
                        continue
                    self.calls.setdefault(name, []).append(call)
                    self.edges.append(edge)
                    self._at_edge.append(call)
                    if "weight" in layer.names:
                        self._inputs.append((name, x, x._version))
            return None if output is given else output

        return hook

    def _replace(self, name: str, layer: Broadcast) -> tuple[Any, Any]:
        """Register hooks that replace a parameter with one view per example while its module runs."""
        parameters, local = layer.module._parameters, layer.names[0]
        original: list[Tensor] = []

        def before(*_: Any) -> None:
            if self._on and self._examples and name in self.broadcast:
                original.append(parameters[local])
                parameters[local] = every = original[-1].expand(self._examples, *original[-1].shape[1:])
                self.calls.setdefault(name, []).append(call := Call(layer, every.detach()))
                self.edges.append(get_gradient_edge(every))
                self._at_edge.append(call)

        def after(*_: Any) -> None:
            if original:
                parameters[local] = original.pop()

        module = layer.module
        return module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)

    @contextmanager
    def recording(self, examples: int | None = None) -> Iterator[None]:
        """Context manager that records the forward pass in its body.

        Forward passes that gradient checkpointing repeats later are not recorded.

        Args:
            examples: Number of examples, if known; blocks in `broadcast` are recorded per example then.

        Raises:
            CurvatureError: If the input of a layer was modified in place after the layer had used it.
        """
        self.clear()
        self._on, self._examples = True, examples
        try:
            yield
        finally:
            self._on = False
        for name, x, version in self._inputs:
            if x._version != version:
                raise CurvatureError(
                    f"the input of {name} was modified in place after the layer had used it: "
                    "use the out-of-place version of that operation"
                )
        self._inputs.clear()

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        """Assign gradients, in the order of `edges`, to their calls."""
        for call, gradient in zip(self._at_edge, gradients, strict=True):
            call.gradient = None
            if gradient is not None:  # float32 or better, whatever the model's dtype
                call.dtype = gradient.dtype
                wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
                call.gradient = call.layer.read_gradient(wide)

    def clear(self) -> None:
        """Discard the recorded calls, and the graph with them."""
        self.calls.clear()
        self.edges.clear()
        self._at_edge.clear()
        self._inputs.clear()
        self.unreadable.clear()
        self.without_graph.clear()

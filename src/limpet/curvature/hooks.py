"""Forward hooks that record the inputs and output gradients of every layer without changing the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from limpet.errors import CurvatureError
from limpet.layers import Call, Layer
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
        self._on = False

    @contextmanager
    def attached(self, blocks: Sequence[Block]) -> Iterator[Recorder]:
        """Context manager that registers hooks on the layers of these blocks, and removes them on exit."""
        watched: dict[nn.Module, list[tuple[str, Layer]]] = {}
        for block in blocks:
            for layer in block.layers:
                watched.setdefault(layer.module, []).append((block.name, layer))
        handles = []
        try:
            for module, users in watched.items():
                handles.append(module.register_forward_hook(self._hook(users), with_kwargs=True))
            yield self
        finally:
            for handle in handles:
                handle.remove()
            self.clear()

    def _hook(self, users: list[tuple[str, Layer]]) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not self._on or not isinstance(output, Tensor):
                return
            if not output.requires_grad:
                self.without_graph.update(name for name, _ in users)
                return
            x: Any = args[0] if args else next(iter(kwargs.values()), None)
            edge = get_gradient_edge(output)
            with torch.no_grad():
                for name, layer in users:
                    try:
                        call = Call(layer, layer.read(x.detach()))
                    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                        self.unreadable.add(name)  # e.g. a subclass with other inputs
                        continue
                    self.calls.setdefault(name, []).append(call)
                    self.edges.append(edge)
                    self._at_edge.append(call)
                    if "weight" in layer.names:
                        self._inputs.append((name, x, x._version))

        return hook

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager that records the forward pass in its body.

        Forward passes that gradient checkpointing repeats later are not recorded.

        Raises:
            CurvatureError: If the input of a layer was modified in place after the layer had used it.
        """
        self.clear()
        self._on = True
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

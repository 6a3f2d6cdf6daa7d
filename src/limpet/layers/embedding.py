"""nn.Embedding: a linear layer on one-hot inputs, so the factor of its inputs is diagonal by nature."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from limpet.layers.base import Call, Layer, _known


class Embedding(Layer):
    """W is (tokens, features): left rows are one-hot (kept as token numbers), right rows the gradients."""

    kind = "embedding"
    modules = (nn.Embedding,)
    data_left = True
    data_one_hot = True

    @classmethod
    def refuse(cls, module: nn.Module) -> str | None:
        if getattr(module, "max_norm", None) is not None:
            return "max_norm changes the weights during the forward pass: exclude the embedding, or drop max_norm"
        if getattr(module, "scale_grad_by_freq", False):
            return "scale_grad_by_freq makes gradients that belong to no loss: exclude the embedding, or drop it"
        return None

    @property
    def rows(self) -> tuple[int, ...]:
        return (self.module.num_embeddings,)

    def read(self, x: Tensor) -> Tensor:
        return x.reshape(1, 1) if x.dim() == 0 else x.reshape(x.shape[0], -1)

    def read_gradient(self, g: Tensor) -> Tensor:
        return g.reshape(1, 1, -1) if g.dim() == 1 else g.reshape(g.shape[0], -1, g.shape[-1])

    def counts(self, call: Call, dtype: torch.dtype) -> Tensor:
        """How often every token stands in the data; the padding token, which has no gradient, never."""
        tokens = call.data.flatten() if call.real is None else call.data[call.real]
        counts = torch.bincount(tokens, minlength=self.module.num_embeddings).to(dtype)
        if self.module.padding_idx is not None:
            counts[self.module.padding_idx] = 0
        return counts

    def gradient_rows(self, call: Call) -> Tensor:
        """The gradient in the output, zero where the token is the padding token."""
        g = _known(call)
        if self.module.padding_idx is None:
            return g
        return g.masked_fill((call.data == self.module.padding_idx).unsqueeze(-1), 0)

    def row_count(self, call: Call) -> int:
        return call.data.numel()

    def example_count(self, call: Call) -> int:
        return call.data.shape[0]

    def example_gradients(self, call: Call, examples: slice) -> Tensor:
        g, tokens = self.gradient_rows(call)[examples], call.data[examples]
        result = g.new_zeros(len(g), self.module.num_embeddings, g.shape[-1])
        return result.scatter_add_(1, tokens.unsqueeze(-1).expand_as(g), g)

    def total_gradient(self, call: Call) -> Tensor:
        g = self.gradient_rows(call).flatten(0, 1)
        return g.new_zeros(self.module.num_embeddings, g.shape[-1]).index_add_(0, call.data.flatten(), g)

    def squares(self, call: Call) -> Tensor:
        g, tokens = self.gradient_rows(call), call.data
        size = self.module.num_embeddings
        example = torch.arange(len(tokens), device=tokens.device).unsqueeze(-1)
        pairs, place = torch.unique(example * size + tokens, return_inverse=True)
        summed = g.new_zeros(len(pairs), g.shape[-1]).index_add_(0, place.flatten(), g.flatten(0, 1))
        return g.new_zeros(size, g.shape[-1]).index_add_(0, pairs % size, summed.square())

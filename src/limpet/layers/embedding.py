"""nn.Embedding: a linear layer on one-hot inputs, whose input factor is therefore diagonal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from limpet.layers.base import Call, Layer, _output_gradient


class Embedding(Layer):
    """nn.Embedding; W has the shape (tokens, features).

    The left rows are one-hot (stored as token indices), the right rows are the output gradients.

    Args:
        module: The embedding.
        names: The parameters that the block covers: `"weight"`.
    """

    kind = "embedding"
    modules = (nn.Embedding,)
    data_left = True
    data_one_hot = True

    @classmethod
    def refuse(cls, module: nn.Module) -> str | None:
        """Reject the options `max_norm` and `scale_grad_by_freq`."""
        if getattr(module, "max_norm", None) is not None:
            return "max_norm changes the weights during the forward pass: exclude the embedding, or remove max_norm"
        if getattr(module, "scale_grad_by_freq", False):
            return (
                "scale_grad_by_freq yields gradients that are not those of a loss: exclude the embedding, or unset it"
            )
        return None

    @property
    def rows(self) -> tuple[int, ...]:
        """Leading dimensions (tokens,) of the block."""
        return (self.module.num_embeddings,)

    def read(self, x: Tensor) -> Tensor:
        """Return the token indices of shape (examples, positions)."""
        return x.reshape(1, 1) if x.dim() == 0 else x.reshape(x.shape[0], -1)

    def read_gradient(self, g: Tensor) -> Tensor:
        """Return the output gradient of shape (examples, positions, features)."""
        return g.reshape(1, 1, -1) if g.dim() == 1 else g.reshape(g.shape[0], -1, g.shape[-1])

    @staticmethod
    def without_examples(x: Tensor) -> bool:
        """Return whether an input can be one that is the same for all examples: (positions,) or (1, positions)."""
        return x.dim() == 1 or (x.dim() == 2 and x.shape[0] == 1)

    def counts(self, call: Call, dtype: torch.dtype) -> Tensor:
        """Count how often every token occurs in the data; the padding token, which has no gradient, counts zero.

        Args:
            call: A call of the embedding.
            dtype: Dtype of the counts.

        Returns:
            One count per token.
        """
        tokens = call.data.flatten() if call.real is None else call.data[call.real]
        counts = torch.bincount(tokens, minlength=self.module.num_embeddings).to(dtype)
        if self.module.padding_idx is not None:
            counts[self.module.padding_idx] = 0
        return counts

    def gradient_rows(self, call: Call) -> Tensor:
        """Return the output gradient, set to zero at padding tokens."""
        g = _output_gradient(call)
        if self.module.padding_idx is None:
            return g
        return g.masked_fill((call.data == self.module.padding_idx).unsqueeze(-1), 0)

    def row_count(self, call: Call) -> int:
        """Return the number of tokens of the call."""
        return call.data.numel()

    def example_count(self, call: Call) -> int:
        """Return the number of examples of the call."""
        return call.data.shape[0]

    def example_gradients(self, call: Call, examples: slice) -> Tensor:
        """Compute per-sample gradients of shape (examples, tokens, features)."""
        g, tokens = self.gradient_rows(call)[examples], call.data[examples]
        result = g.new_zeros(len(g), self.module.num_embeddings, g.shape[-1])
        return result.scatter_add_(1, tokens.unsqueeze(-1).expand_as(g), g)

    def total_gradient(self, call: Call) -> Tensor:
        """Compute the gradient summed over all examples."""
        g = self.gradient_rows(call).flatten(0, 1)
        return g.new_zeros(self.module.num_embeddings, g.shape[-1]).index_add_(0, call.data.flatten(), g)

    def squares(self, call: Call) -> Tensor:
        """Compute the sum of the squared per-sample gradients, from the tokens that occur in each example."""
        g, tokens = self.gradient_rows(call), call.data
        size = self.module.num_embeddings
        example = torch.arange(len(tokens), device=tokens.device).unsqueeze(-1)
        pairs, index = torch.unique(example * size + tokens, return_inverse=True)
        summed = g.new_zeros(len(pairs), g.shape[-1]).index_add_(0, index.flatten(), g.flatten(0, 1))
        return g.new_zeros(size, g.shape[-1]).index_add_(0, pairs % size, summed.square())

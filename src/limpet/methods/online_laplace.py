"""Online Laplace (Ritter, Botev, Barber 2018): one Gaussian, re-centered at each new mode, with its Fisher added."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from limpet.curvature import Fisher
from limpet.methods.laplace import Laplace
from limpet.posterior import BlockPosterior


class OnlineLaplace(Laplace):
    """Online Laplace approximation: the posterior after each task is the prior of the next.

        L_{t+1} = L_t + strength F_{t+1}(mean_{t+1}),    mean_{t+1} = the weights after training under the penalty

    The linear term of the old penalty at the new mean is dropped, because the new task's gradient cancels it there.
    The constructor arguments are those of `limpet.methods.laplace.Laplace`.

    Examples:
        >>> import torch, limpet
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 2)
        >>> data = [(torch.randn(20, 3), torch.randint(0, 2, (20,)))]
        >>> memory = limpet.OnlineLaplace(model, structure="kronecker", strength=3.0)
        >>> memory.consolidate(data)
        >>> memory
        <OnlineLaplace structure='kronecker' strength=3 tasks=1 examples=20 bytes=168>
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with memory.protect(optimizer, examples=20):
        ...     for x, y in data:
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.cross_entropy(model(-x), y).backward()
        ...         optimizer.step()
        >>> print(memory.forecast())
        0.0002... nats per example (most in model 0.0002...)
    """

    method = "online-laplace"

    def _updated(self, held: BlockPosterior, fishers: list[Fisher], mean: Tensor) -> BlockPosterior:
        return replace(held, mean=mean, precision=self._added(held, fishers), tasks=held.tasks + 1)

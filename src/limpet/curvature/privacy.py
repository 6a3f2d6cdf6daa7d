"""Differential privacy of a consolidation: the budget, the scale of the noise, and the noise itself.

Each example contributes one matrix or diagonal s_k to each of S statistics (the factors of all blocks). Contributions
are clipped to |s_k| <= c_k (Frobenius norm) and summed. Replacing one example by another changes a sum by at most
sqrt(2) c_k, because contributions are positive semi-definite or nonnegative, so that <s, s'> >= 0. All sums together,
each divided by its c_k, change by at most sqrt(2 S). The Gaussian mechanism with noise c_k sqrt(2 S) / mu on statistic
k is therefore mu-GDP (Dong, Roth, Su 2022), which is (epsilon, delta)-DP exactly if

    Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu) <= delta

(the analytic Gaussian mechanism, Balle and Wang 2018). Mechanisms compose as mu^2 = mu_1^2 + mu_2^2, also if the second
depends on the result of the first: one part of the budget measures the c_k, the rest is for the sums.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.errors import finite_number
from limpet.precision.linalg import widened

CLIP_SHARE = 0.1
"""Share of the budget mu^2 that is used to measure the norms at which contributions are clipped."""

QUERIES = 7
"""Noisy counts per statistic: a binary search over 2^7 powers of two, from 2^-64 to 2^63."""

random_bytes: Callable[[int], bytes] = os.urandom
"""Source of the noise: the cryptographic generator of the operating system. Tests replace it."""


@dataclass(frozen=True)
class Privacy:
    """Budget of a differentially private consolidation, `memory.consolidate(batches, privacy=...)`.

    The curvature in the memory is then (epsilon, delta)-differentially private with respect to replacing one example:
    for any two data sets of equal size that differ in one example and any set of memories E,

        P(memory of the one in E) <= exp(epsilon) P(memory of the other in E) + delta.

    The mean of the memory, which is the trained weights, is not covered unless the training was private, and the number
    of examples is public. An example is one row of a batch; for sequences it is a whole sequence. Tasks with disjoint
    data each keep their own guarantee; for an example that is in several tasks, epsilons and deltas add up.

    Args:
        epsilon: Bound on the log of the ratio of probabilities, in (0, 100]. Common values are 1 to 10.
        delta: Probability with which the bound may fail, in (0, 1). It should be far below 1 / N.
        clip: Quantile, in (0, 1), of the norms of the examples' contributions at which larger ones are clipped. The
            norms are measured with a tenth of the budget. A smaller quantile means less noise and more bias.

    Raises:
        ValueError: If a value is out of range.

    Examples:
        >>> import torch, limpet
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 2)
        >>> data = [(torch.randn(200, 3), torch.randint(0, 2, (200,)))]
        >>> memory = limpet.OnlineLaplace(model)
        >>> memory.consolidate(data, privacy=limpet.Privacy(epsilon=8, delta=1e-5))
        >>> memory.privacy
        (Privacy(epsilon=8.0, delta=1e-05, clip=0.9),)
        >>> round(1 / limpet.Privacy(epsilon=1, delta=1e-5).mu, 2)  # noise for a statistic of sensitivity 1
        3.73
    """

    epsilon: float
    delta: float
    clip: float = 0.9

    def __post_init__(self) -> None:
        """Check and convert the values."""
        for name, most in (("epsilon", 100.0), ("delta", 1.0), ("clip", 1.0)):
            value = finite_number(name, getattr(self, name))
            if not 0 < value <= most or (value == most and name != "epsilon"):
                end = "]" if name == "epsilon" else ")"
                raise ValueError(f"{name} must be in (0, {most:g}{end}, not {value:g}")
            object.__setattr__(self, name, value)

    @property
    def mu(self) -> float:
        """The largest mu for which a mu-GDP mechanism is (epsilon, delta)-DP: sensitivity over noise."""
        low, high = 0.0, 1.0
        while failure(high, self.epsilon) <= self.delta:
            low, high = high, 2 * high
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if failure(middle, self.epsilon) <= self.delta else (low, middle)
        return low

    @property
    def mu_clip(self) -> float:
        """Part of `mu` for the norms at which contributions are clipped."""
        return self.mu * math.sqrt(CLIP_SHARE)

    @property
    def mu_sums(self) -> float:
        """Part of `mu` for the sums."""
        return self.mu * math.sqrt(1 - CLIP_SHARE)


def failure(mu: float, epsilon: float) -> float:
    """Compute the smallest delta for which a mu-GDP mechanism is (epsilon, delta)-DP (Balle and Wang 2018, theorem 8).

    Args:
        mu: Sensitivity divided by the standard deviation of the noise.
        epsilon: The epsilon.

    Returns:
        Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu).
    """

    def below(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return below(mu / 2 - epsilon / mu) - math.exp(epsilon) * below(-mu / 2 - epsilon / mu)


def normal(*shape: int) -> Tensor:
    """Draw standard normal numbers from `random_bytes`, by the Box-Muller transform.

    The state of torch's generators is not used and not changed.

    Args:
        *shape: Shape of the result.

    Returns:
        A float64 tensor on the CPU.
    """
    count = math.prod(shape)
    half = (count + 1) // 2
    if not half:
        return torch.zeros(shape, dtype=torch.float64)
    integers = torch.frombuffer(bytearray(random_bytes(16 * half)), dtype=torch.int64)
    uniform = ((integers >> 11) & (2**53 - 1)).to(torch.float64).add(0.5).mul(2.0**-53)
    radius = (-2 * uniform[:half].log()).sqrt()
    angle = 2 * math.pi * uniform[half:]
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count].reshape(shape)


def private_quantile(norms: Sequence[float], quantile: float, deviation: float) -> float:
    """Find a power of two that is at least a quantile of some numbers, by noisy counts.

    Args:
        norms: The numbers.
        quantile: The quantile.
        deviation: Standard deviation of the noise on each of the `QUERIES` counts; a count changes by at most 1 if one
            number is replaced.

    Returns:
        A power of two. Too large rather than too small: contributions are clipped at it.
    """
    values = torch.tensor(norms, dtype=torch.float64)
    low, high = -(2 ** (QUERIES - 1)) - 1, 2 ** (QUERIES - 1) - 1  # the answer is in (low, high]
    for _ in range(QUERIES):
        middle = (low + high) // 2
        count = float((values <= 2.0**middle).sum()) + deviation * float(normal(1))
        low, high = (low, middle) if count >= quantile * len(norms) else (middle, high)
    return float(2.0**high)


def noised(total: Tensor, deviation: float, *, symmetric: bool) -> Tensor:
    """Add Gaussian noise to a sum, and average over what cannot be told from noise.

    The noise of a symmetric matrix is symmetric: in an orthonormal basis of the symmetric matrices each coordinate has
    the given deviation. Its largest eigenvalue is about sqrt(2 n) times the deviation (Wigner's semicircle). All
    eigenvalues below it are replaced by their mean, which is known far better than each of them, or by zero if the mean
    is below 3 / sqrt(n) deviations, too. Negative entries of a diagonal become zero. Neither reads the data again.

    Args:
        total: The sum, (..., n, n) if it is symmetric.
        deviation: Standard deviation of the noise.
        symmetric: Whether the sum is a symmetric matrix; otherwise it is a diagonal.

    Returns:
        The sum with noise, positive semi-definite, with the dtype and device of `total`.
    """
    noise = normal(*total.shape)
    if not symmetric:
        return (widened(total) + deviation * noise.to(widened(total))).clamp_min(0).to(total)
    matrix = widened(total) + deviation * ((noise + noise.mT) / 2).to(widened(total))
    values, vectors = torch.linalg.eigh(matrix)
    size = total.shape[-1]
    large = values > math.sqrt(2 * size) * deviation
    mean = values.masked_fill(large, 0).sum(-1, keepdim=True) / (~large).sum(-1, keepdim=True).clamp_min(1)
    values = torch.where(large, values, torch.where(mean > 3 / math.sqrt(size) * deviation, mean, 0))
    found: Tensor = (vectors * values.unsqueeze(-2)) @ vectors.mT
    return ((found + found.mT) / 2).to(total)

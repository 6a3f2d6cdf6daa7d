"""Continual-learning methods: how each one updates mean and precision when a task is consolidated."""

from limpet.methods.approximate_laplace import ApproximateLaplace
from limpet.methods.memory import Memory
from limpet.methods.online_laplace import OnlineLaplace
from limpet.methods.per_task_laplace import PerTaskLaplace
from limpet.methods.synaptic_intelligence import SynapticIntelligence

METHODS: dict[str, type[Memory]] = {
    kind.method: kind for kind in (OnlineLaplace, PerTaskLaplace, ApproximateLaplace, SynapticIntelligence)
}

__all__ = ["METHODS", "ApproximateLaplace", "Memory", "OnlineLaplace", "PerTaskLaplace", "SynapticIntelligence"]

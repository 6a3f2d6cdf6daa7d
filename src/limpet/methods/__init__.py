"""Continual-learning methods: how each one updates mean and precision when a task is consolidated."""

from limpet.methods.approximate_laplace import ApproximateLaplace
from limpet.methods.distillation import Distillation
from limpet.methods.memory import Memory
from limpet.methods.online_laplace import OnlineLaplace
from limpet.methods.output_memory import OutputMemory
from limpet.methods.per_task_laplace import PerTaskLaplace
from limpet.methods.self_rehearsal import SelfRehearsal
from limpet.methods.synaptic_intelligence import SynapticIntelligence

METHODS: dict[str, type[Memory]] = {
    kind.method: kind for kind in (OnlineLaplace, PerTaskLaplace, ApproximateLaplace, SynapticIntelligence)
}

OUTPUT_METHODS: dict[str, type[OutputMemory]] = {kind.method: kind for kind in (SelfRehearsal, Distillation)}
"""Methods that protect outputs rather than weights."""

__all__ = [
    "METHODS",
    "OUTPUT_METHODS",
    "ApproximateLaplace",
    "Distillation",
    "Memory",
    "OnlineLaplace",
    "OutputMemory",
    "PerTaskLaplace",
    "SelfRehearsal",
    "SynapticIntelligence",
]

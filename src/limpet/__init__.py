"""Continual learning for PyTorch: train networks on new tasks without forgetting the old ones.

memory = limpet.OnlineLaplace(model, strength=3.0)
for task in tasks:
    with memory.protect(optimizer, examples=len(task)):
        fit(model, optimizer, task)
    memory.consolidate(task.loader)
memory.save("memory.safetensors")
"""

import importlib
from typing import TYPE_CHECKING, Any

from limpet import deprecation
from limpet.curvature.privacy import Privacy
from limpet.errors import (
    CurvatureError,
    FallbackWarning,
    LimpetError,
    LimpetWarning,
    MemoryFileError,
    NotProtectedWarning,
    PrivacyWarning,
    RankError,
    SaveError,
    UnsupportedError,
)
from limpet.likelihoods import Bernoulli, Categorical, Count, Gaussian, Likelihood, MultiOutput
from limpet.methods import (
    ApproximateLaplace,
    Distillation,
    Memory,
    OnlineLaplace,
    OutputMemory,
    PerTaskLaplace,
    SelfRehearsal,
    SynapticIntelligence,
)
from limpet.methods.load import load
from limpet.version import __version__

__all__ = [
    "ApproximateLaplace",
    "Bernoulli",
    "Categorical",
    "Count",
    "CurvatureError",
    "Distillation",
    "FallbackWarning",
    "Gaussian",
    "Likelihood",
    "LimpetError",
    "LimpetWarning",
    "Memory",
    "MemoryFileError",
    "MultiOutput",
    "NotProtectedWarning",
    "OnlineLaplace",
    "OutputMemory",
    "PerTaskLaplace",
    "Privacy",
    "PrivacyWarning",
    "RankError",
    "SaveError",
    "SelfRehearsal",
    "SynapticIntelligence",
    "UnsupportedError",
    "__version__",
    "load",
    "repair",
]

deprecation.install()

if TYPE_CHECKING:
    from limpet.methods.repair import repair


def __getattr__(name: str) -> Any:
    """Import some attributes lazily, to keep `import limpet` fast, and resolve deprecated names."""
    if name == "repair":
        from limpet.methods.repair import repair

        return repair
    if name == "Several":
        return deprecation.renamed_attribute("limpet", "Several", "MultiOutput")
    if f"{__name__}.{name}" in deprecation.MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

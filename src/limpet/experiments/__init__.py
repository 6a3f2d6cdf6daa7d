"""The paper's experiments, and a benchmark for custom methods, networks and task sequences.

    limpet run permuted-mnist --method online-laplace --structure kronecker

corresponds to `run(load_preset("permuted-mnist").resolve({...}), folder)`. Requires pip install 'limpet[experiments]'.
"""

from limpet.experiments.data import Examples, images
from limpet.experiments.gaussian_rehearsal import GaussianRehearsal
from limpet.experiments.methods import Method
from limpet.experiments.networks import NETWORKS, Network
from limpet.experiments.recipe import Preset, Recipe, load_preset
from limpet.experiments.record import Record, RunFolder
from limpet.experiments.registry import METHODS
from limpet.experiments.runner import Watcher, run
from limpet.experiments.sequences import SEQUENCES, TaskSequence

__all__ = [
    "METHODS",
    "NETWORKS",
    "SEQUENCES",
    "Examples",
    "GaussianRehearsal",
    "Method",
    "Network",
    "Preset",
    "Recipe",
    "Record",
    "RunFolder",
    "TaskSequence",
    "Watcher",
    "images",
    "load_preset",
    "run",
]

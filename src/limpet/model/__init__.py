"""Access to the user's model: parameter names, blocks, batches, adapters, and contexts that preserve its state."""

from limpet.model.batch import Forward, call, counted_examples, part, prepared
from limpet.model.blocks import PER_SAMPLE, Block, discover, unwrapped
from limpet.model.context import full_precision, perturbed, preserve_state, replaced, trainable
from limpet.model.names import every_name, is_excluded, module_names, named_parameters, plain, running_statistics

__all__ = [
    "PER_SAMPLE",
    "Block",
    "Forward",
    "call",
    "counted_examples",
    "discover",
    "every_name",
    "full_precision",
    "is_excluded",
    "module_names",
    "named_parameters",
    "part",
    "perturbed",
    "plain",
    "prepared",
    "preserve_state",
    "replaced",
    "running_statistics",
    "trainable",
    "unwrapped",
]

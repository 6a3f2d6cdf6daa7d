"""One pass over data that gives every block's Fisher, and leaves the model as it was."""

from limpet.curvature.audit import gradients_at
from limpet.curvature.batches import Forward, call, counted_examples, part, prepared
from limpet.curvature.blocks import DIRECT, Block, discover, unwrapped
from limpet.curvature.fisher import Displacement, Fisher, FisherPass
from limpet.curvature.guard import full_precision, shifted, trainable, untouched
from limpet.curvature.names import every_name, is_excluded, module_names, named_parameters, plain, running_statistics
from limpet.curvature.structure import MOST_PIECES, Structure
from limpet.curvature.sums import FISHERS

__all__ = [
    "DIRECT",
    "FISHERS",
    "MOST_PIECES",
    "Block",
    "Displacement",
    "Fisher",
    "FisherPass",
    "Forward",
    "Structure",
    "call",
    "counted_examples",
    "discover",
    "every_name",
    "full_precision",
    "gradients_at",
    "is_excluded",
    "module_names",
    "named_parameters",
    "part",
    "plain",
    "prepared",
    "running_statistics",
    "shifted",
    "trainable",
    "untouched",
    "unwrapped",
]

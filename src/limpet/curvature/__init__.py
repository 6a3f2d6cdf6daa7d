"""Fisher estimation: one pass over the data computes the Fisher of every block and leaves the model unchanged."""

from limpet.curvature.audit import gradients_at
from limpet.curvature.batch_step import FISHERS
from limpet.curvature.fisher_pass import Displacement, Fisher, FisherPass
from limpet.curvature.structure import MOST_PIECES, Structure

__all__ = ["FISHERS", "MOST_PIECES", "Displacement", "Fisher", "FisherPass", "Structure", "gradients_at"]

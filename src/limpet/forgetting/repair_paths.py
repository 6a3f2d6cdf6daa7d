"""Solve for the repair path of every block that training has moved (`limpet.forgetting.repair` has the formula)."""

from __future__ import annotations

import torch

from limpet.curvature import Fisher
from limpet.curvature.progress import Progress
from limpet.errors import NotProtectedWarning, UnsupportedError, warn
from limpet.forgetting.displacement import Displacement, displacements, is_direct
from limpet.forgetting.output_layer import OutputLayer
from limpet.forgetting.repair import Measures, Repair
from limpet.model import Block
from limpet.posterior import BlockPosterior, Posterior
from limpet.posterior.whole_parameters import whole_parameters
from limpet.precision.pencil import Pencil
from limpet.precision.pencils import pencil


def solve(
    posterior: Posterior,
    fisher: Fisher,
    measures: Measures,
    *,
    weight: float = 1.0,
    rank: int | None = None,
    head: OutputLayer | None = None,
    progress: bool = True,
) -> Repair:
    """Compute the repair path of every block that training has moved, the memory covers and the new data use.

    Args:
        posterior: The posterior of the memory.
        fisher: The Fisher of the new data at the tuned weights.
        measures: Functions that measure the model along the path.
        weight: Factor applied to every strength: the fraction of the new data that the Fisher was estimated on.
        rank: Truncate adapters to this rank if it is smaller than their own; None keeps their rank.
        head: A new output layer, to be fitted again at every point of the path.
        progress: Whether to show a progress bar if this takes long.

    Returns:
        The repair, with the model at its tuned weights.

    Raises:
        UnsupportedError: If a block stores tasks that were consolidated with different strengths.
    """
    held, whole = _by_measurement(posterior, fisher), whole_parameters(posterior)
    moved = list(displacements(whole, held))
    # blocks without old curvature do not affect the old data, wherever they move
    moved = [one for one in moved if bool(one.held.precision.fisher().trace() > 0)]
    unseen = [one.block.name for one in moved if not _seen(fisher, one.block)]
    if unseen:
        warn(
            f"the new data do not use {len(unseen)} blocks that training has moved (such as {unseen[0]}), so these "
            "are not repaired and keep their tuned weights",
            NotProtectedWarning,
        )
    paths = []
    bar = Progress(len(moved), show=progress, label="limpet: repair", unit="blocks")
    try:
        for one in moved:
            if one.block.name not in unseen:
                paths.append((one, _path(one, fisher)))
            bar.update(1)
    finally:
        bar.close()
    return Repair(paths, whole, measures, weight=weight, rank=rank, head=head)


def _seen(fisher: Fisher, block: Block) -> bool:
    """Whether the new data have nonzero curvature in a block."""
    return fisher.speaks_of(block) and any(term.is_positive() for term in fisher.terms[block.name])


def _path(one: Displacement, fisher: Fisher) -> Pencil:
    """Compute the closed-form path of one block."""
    held = one.held
    linear_term = held.linear_term
    if linear_term is not None:
        linear_term = linear_term / _common_strength(held)
    terms = fisher.terms[one.block.name]
    return pencil(held.precision, terms, one.parts, columns=one.columns, linear_term=linear_term, offset=one.offset)


def _common_strength(held: BlockPosterior) -> float:
    """Return the strength shared by all tasks of a block; raise an error if they differ."""
    plain, total = held.precision.diagonals()
    common = float(total.double().sum() / plain.double().sum()) if plain.any() else 1.0
    if not torch.allclose(common * plain, total, rtol=1e-4):
        raise UnsupportedError(
            f"{held.block.name} stores tasks with different strengths, each around its own mean, but repair weights "
            "all tasks equally: use OnlineLaplace, or PerTaskLaplace with the same strength for all tasks"
        )
    return common


def _by_measurement(posterior: Posterior, fisher: Fisher) -> dict[str, BlockPosterior]:
    """Return the blocks that store tasks, split into diagonals where the pass measured them per sample."""
    structure = posterior.structure
    direct = {b.name for b in fisher.blocks if is_direct(b) and structure.of(b) == "diagonal"}
    found: dict[str, BlockPosterior] = {}
    for name, held in posterior.held.items():
        if not held.tasks:
            continue
        if not is_direct(held.block) and direct.intersection(held.block.parameters):
            found.update({piece.block.name: piece for piece in held.as_diagonals()})
        else:
            found[name] = held
    return found

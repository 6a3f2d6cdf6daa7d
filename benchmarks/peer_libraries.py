"""How the curvature of a network is computed with each library, with the settings that suit it best.

A `Peer` computes the curvature (`measure`), returns the tensors that it stores (`kept`), and expands its approximation
to a matrix over all parameters (`matrix`), in a common normalization: the Fisher summed over all examples.
`benchmarks/peers.py` compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import limpet
from limpet.curvature import FisherPass, Structure
from limpet.model import Block, discover
from limpet.precision import DiagonalTerm, KroneckerTerm, Term
from peer_cases import diagonal

Batches = list[tuple[Tensor, Tensor]]


class MisfitError(ValueError):
    """A library's matrix has another size than the parameters it is for."""


@dataclass(frozen=True)
class Peer:
    """One library with one structure."""

    name: str
    package: str
    setting: str
    form: str  # what its approximation is: see `benchmarks/peers.py`
    measure: Callable[[nn.Module, Batches, str], Any]
    matrix: Callable[[Any, nn.Module], Tensor]
    kept: Callable[[Any], Any]
    kinds: tuple[str, ...] = ("exact", "sampled")
    few: int | None = None  # time and memory are taken on so many examples
    rescaled: bool = False  # its scale is left to the user, so the best one is taken


def installed(package: str) -> str | None:
    """The version of a package, if it is there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def together(batches: Batches) -> DataLoader[Any]:
    """The batches as a loader that hands whole slices out, so that nobody's time is spent on collating."""

    class Sliced(TensorDataset):
        def __getitems__(self, rows: Sequence[int]) -> list[Tensor]:
            return [tensor[list(rows)] for tensor in self.tensors]

    examples = Sliced(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
    return DataLoader(examples, batch_size=len(batches[0][0]), collate_fn=lambda batch: batch)


def places(model: nn.Module) -> dict[str, Tensor]:
    """Where each parameter stands among all of them, in its shape; shared ones once."""
    found, start = {}, 0
    for name, parameter in model.named_parameters():
        found[name] = torch.arange(start, start + parameter.numel()).reshape(parameter.shape)
        start += parameter.numel()
    return found


def empty(model: nn.Module) -> Tensor:
    """A matrix over all parameters, nothing in it."""
    size = sum(parameter.numel() for parameter in model.parameters())
    return torch.zeros(size, size, dtype=torch.float64)


# --- limpet ------------------------------------------------------------------------------------------------------


def blockwise(model: nn.Module, blocks: Sequence[tuple[Block, Tensor]]) -> Tensor:
    """The dense matrices of blocks in the places of their parameters."""
    matrix, where = empty(model), places(model)
    for block, dense in blocks:
        rows = block.gather(where).flatten()
        matrix[rows[:, None], rows] += dense
    return matrix


def limpet_pass(structure: str) -> Callable[[nn.Module, Batches, str], Any]:
    """The Fisher alone: what the other libraries are asked for."""

    def measure(model: nn.Module, batches: Batches, kind: str) -> Any:
        one = FisherPass(model, discover(model), limpet.Categorical(), Structure(structure, 4096), fisher=kind)
        return one.run(batches, progress=False)

    return measure


def limpet_whole(structure: str) -> Callable[[nn.Module, Batches, str], Any]:
    """What a user calls."""

    def measure(model: nn.Module, batches: Batches, kind: str) -> Any:
        memory = limpet.OnlineLaplace(model, structure=structure, fisher=kind, prior_precision=0.0)
        memory.consolidate(batches, progress=False)
        return memory

    return measure


def written_out(term: Term) -> Tensor:
    """One task's Fisher of a block as a matrix, W flattened row by row."""
    if isinstance(term, DiagonalTerm):
        return term.diagonal.flatten().diag()
    if not isinstance(term, KroneckerTerm):
        return term.matrix
    q, h = term.factors()
    if q.dim() == 2:
        return torch.kron(h, q)
    return diagonal([torch.kron(h_group, q_group) for h_group, q_group in zip(h, q, strict=True)])


def pass_matrix(found: Any, model: nn.Module) -> Tensor:
    return blockwise(model, [(block, written_out(t)) for block in found.blocks for t in found.terms[block.name]])


def pass_kept(found: Any) -> Any:
    return [list(vars(term).values()) for terms in found.terms.values() for term in terms]


def memory_matrix(memory: Any, model: nn.Module) -> Tensor:
    return blockwise(model, [(held.block, held.precision.dense()) for held in memory.posterior.held.values()])


def memory_kept(memory: Any) -> Any:
    return [held.precision.tensors() for held in memory.posterior.held.values()]


# --- curvlinops --------------------------------------------------------------------------------------------------


def curvlinops(operator: str) -> Callable[[nn.Module, Batches, str], Any]:
    def measure(model: nn.Module, batches: Batches, kind: str) -> Any:
        import curvlinops

        found = getattr(curvlinops, operator)(
            model,
            nn.CrossEntropyLoss(reduction="sum"),
            list(model.parameters()),
            batches,
            fisher_type={"exact": "type-2", "sampled": "mc"}[kind],
            kfac_approx="expand",
            separate_weight_and_bias=False,
            check_deterministic=False,
            num_data=sum(len(y) for _, y in batches),
            num_per_example_loss_terms=1,
        )
        found.compute_kronecker_factors()
        if operator == "EKFACLinearOperator":
            found.compute_eigenvalue_correction()
        return found

    return measure


def curvlinops_matrix(found: Any, model: nn.Module) -> Tensor:
    return torch.as_tensor(found @ torch.eye(found.shape[0], dtype=next(model.parameters()).dtype))


def curvlinops_kept(found: Any) -> Any:
    names = "input_covariances", "gradient_covariances"
    kept = [*names, *(f"{name}_eigenvectors" for name in names), "corrected_eigenvalues"]
    return [getattr(found, f"_{name}", {}) for name in kept]


# --- nngeometry --------------------------------------------------------------------------------------------------


@contextmanager
def default_dtype(model: nn.Module) -> Iterator[None]:
    """It makes some of its tensors in the default dtype, whatever the model's."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(next(model.parameters()).dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def nngeometry(representation: str) -> Callable[[nn.Module, Batches, str], Any]:
    def measure(model: nn.Module, batches: Batches, kind: str) -> Any:
        from nngeometry import metrics
        from nngeometry import object as matrices

        loader, make = together(batches), {"exact": metrics.FIM, "sampled": metrics.FIM_MonteCarlo}[kind]
        with default_dtype(model):
            found = make(model, loader, getattr(matrices, representation), variant="classif_logits")
            if representation == "PMatEKFAC":
                found.update_diag(loader)
        found.seen = len(loader.dataset)  # type: ignore[arg-type]
        return found

    return measure


def nngeometry_matrix(found: Any, model: nn.Module) -> Tensor:
    """Its blocks, one for each module; those of a parameter that several modules share are added up."""
    with default_dtype(model):
        theirs = found.seen * found.to_torch()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    modules, where, matrix, start = dict(model.named_modules()), places(model), empty(model), 0
    for name, layer in found.generator.layer_collection.layers.items():
        used = [where[names[id(p)]].flatten() for p in modules[name].parameters(recurse=False)]
        rows, end = torch.cat(used), start + layer.numel()
        if len(rows) != layer.numel():
            raise MisfitError(f"a block of {layer.numel()} for the {len(rows)} weights of {modules[name]}")
        matrix[rows[:, None], rows] += theirs[start:end, start:end]
        start = end
    return matrix


# --- laplace-torch -----------------------------------------------------------------------------------------------


def laplace(structure: str, backend: str) -> Callable[[nn.Module, Batches, str], Any]:
    def measure(model: nn.Module, batches: Batches, kind: str) -> Any:
        from laplace import Laplace, curvature
        from laplace.baselaplace import ParametricLaplace

        found: Any = Laplace(
            model,
            "classification",
            subset_of_weights="all",
            hessian_structure=structure,
            backend=getattr(curvature, backend),
            backend_kwargs={"stochastic": kind == "sampled"},
        )
        ParametricLaplace.fit(found, together(batches))  # its `fit` without the eigendecompositions at the end
        return found

    return measure


def laplace_matrix(found: Any, model: nn.Module) -> Tensor:
    matrix = torch.diag(found.H) if isinstance(found.H, Tensor) else found.H.to_matrix()
    size = sum(parameter.numel() for parameter in model.parameters())
    if len(matrix) != size:
        raise MisfitError(f"a matrix of {len(matrix)} for {size} weights")
    return torch.as_tensor(matrix)


def laplace_kept(found: Any) -> Any:
    return found.H if isinstance(found.H, Tensor) else found.H.kfacs


# --- elastic weight consolidation --------------------------------------------------------------------------------


def batch_gradients(size: int | None) -> Callable[[nn.Module, Batches, str], Any]:
    """Squared gradients of the mean loss of every batch, averaged over the batches.

    As `EWCPlugin.compute_importances` of avalanche-lib 0.6.0 (avalanche/training/plugins/ewc.py) does it; its
    batches are those of the training.
    """

    def measure(model: nn.Module, batches: Batches, kind: str) -> Any:
        if size is not None:
            batches = [
                pair for x, y in batches for pair in zip(torch.split(x, size), torch.split(y, size), strict=True)
            ]
        importances = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for x, y in batches:
            model.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(x), y))
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    importances[name] += parameter.grad.square()
        return {name: total / len(batches) for name, total in importances.items()}

    return measure


def importances_matrix(found: Any, model: nn.Module) -> Tensor:
    return torch.cat([importance.flatten() for importance in found.values()]).diag()


PEERS = [
    Peer(
        "limpet, kronecker", "limpet", "`FisherPass`: the factors alone", "kronecker",
        limpet_pass("kronecker"), pass_matrix, pass_kept,
    ),
    Peer(
        "limpet, kronecker, `consolidate`", "limpet",
        "factors, eigenbases and the curve of the forecast: all that a user of the library waits for", "kronecker",
        limpet_whole("kronecker"), memory_matrix, memory_kept,
    ),
    Peer(
        "limpet, diagonal", "limpet", "`FisherPass`", "diagonal",
        limpet_pass("diagonal"), pass_matrix, pass_kept,
    ),
    Peer(
        "curvlinops, KFAC", "curvlinops-for-pytorch",
        "`KFACLinearOperator`, expand, weight and bias together, no check for determinism, sizes told beforehand",
        "kronecker", curvlinops("KFACLinearOperator"), curvlinops_matrix, curvlinops_kept,
    ),
    Peer(
        "curvlinops, EKFAC", "curvlinops-for-pytorch",
        "`EKFACLinearOperator`, the same; its eigendecompositions are part of it", "eigenbasis",
        curvlinops("EKFACLinearOperator"), curvlinops_matrix, curvlinops_kept,
    ),
    Peer(
        "nngeometry, KFAC", "nngeometry", "`FIM(..., PMatKFAC)`", "kronecker",
        nngeometry("PMatKFAC"), nngeometry_matrix, lambda found: found.data,
    ),
    Peer(
        "nngeometry, EKFAC", "nngeometry", "`FIM(..., PMatEKFAC)`, then `update_diag`", "eigenbasis",
        nngeometry("PMatEKFAC"), nngeometry_matrix, lambda found: found.data,
    ),
    Peer(
        "nngeometry, diagonal", "nngeometry", "`FIM(..., PMatDiag)`", "diagonal",
        nngeometry("PMatDiag"), nngeometry_matrix, lambda found: found.data,
    ),
    Peer(
        "laplace-torch, kron, curvlinops", "laplace-torch",
        "`CurvlinopsGGN`, its default; `fit` without the eigendecompositions at its end", "kronecker apart",
        laplace("kron", "CurvlinopsGGN"), laplace_matrix, laplace_kept,
    ),
    Peer(
        "laplace-torch, kron, ASDL", "laplace-torch", "`AsdlGGN`, the same", "kronecker apart",
        laplace("kron", "AsdlGGN"), laplace_matrix, laplace_kept,
    ),
    Peer(
        "laplace-torch, kron, BackPACK", "laplace-torch", "`BackPackGGN`, the same", "kronecker apart",
        laplace("kron", "BackPackGGN"), laplace_matrix, laplace_kept,
    ),
    Peer(
        "laplace-torch, diag, BackPACK", "laplace-torch", "`BackPackGGN`", "diagonal",
        laplace("diag", "BackPackGGN"), laplace_matrix, laplace_kept,
    ),
    Peer(
        "laplace-torch, diag, ASDL", "laplace-torch", "`AsdlGGN`", "diagonal",
        laplace("diag", "AsdlGGN"), laplace_matrix, laplace_kept,
    ),
    Peer(
        "laplace-torch, diag, torch.func", "laplace-torch",
        "`CurvlinopsGGN`, its default, which writes Jacobians out: time and memory on 10 examples", "diagonal",
        laplace("diag", "CurvlinopsGGN"), laplace_matrix, laplace_kept, few=10,
    ),
    Peer(
        "EWC as in Avalanche", "torch",
        "the empirical Fisher from gradients of whole batches, in the batches of the training", "diagonal",
        batch_gradients(None), importances_matrix, lambda found: found, kinds=("empirical",), rescaled=True,
    ),
    Peer(
        "EWC as in Avalanche, batches of one", "torch", "the same, one example after another", "diagonal",
        batch_gradients(1), importances_matrix, lambda found: found, kinds=("empirical",), rescaled=True,
    ),
]  # fmt: skip

"""Networks small enough to compute the dense Fisher, and its approximations as explicit matrices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXAMPLES, CLASSES = 48, 4


def used_twice() -> nn.Module:
    """One module, called twice."""
    again = nn.Linear(5, 5)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), again, nn.Tanh(), again, nn.Tanh(), nn.Linear(5, CLASSES))


def tied_linears() -> nn.Module:
    """Two linear layers with one weight and a bias each."""
    one, two = nn.Linear(5, 5), nn.Linear(5, 5)
    two.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), two, nn.Tanh(), nn.Linear(5, CLASSES))


def tied_embedding() -> nn.Module:
    """An embedding whose weight is the head's."""
    embedding, head = nn.Embedding(CLASSES, 5), nn.Linear(5, CLASSES, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Flatten(), nn.Linear(15, 5), nn.Tanh(), head)


def normalised() -> nn.Module:
    """Batch norm as it is after training."""
    norm = nn.BatchNorm2d(3)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    norm.load_state_dict({"running_mean": torch.randn(3), "running_var": torch.rand(3) + 0.5}, strict=False)
    return nn.Sequential(nn.Conv2d(2, 3, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(12, CLASSES))


@dataclass(frozen=True)
class Case:
    """A network, its inputs, and the layer whose block is looked at."""

    name: str
    network: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    modules: tuple[str, ...]  # that use the block's parameters
    parameters: tuple[str, ...]

    def build(self) -> tuple[nn.Module, Tensor, Tensor]:
        """In float64, and always the same."""
        torch.manual_seed(1)
        model, x = self.network().double().eval(), self.inputs()
        return model, x.double() if x.is_floating_point() else x, torch.randint(0, CLASSES, (EXAMPLES,))


def both(module: str) -> tuple[str, str]:
    """Weight and bias of a module."""
    return f"{module}.weight", f"{module}.bias"


CASES = [
    Case(
        "MLP", lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES)),
        lambda: torch.randn(EXAMPLES, 6), ("0",), both("0"),
    ),
    Case(
        "conv net",
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(),
            nn.Linear(16, CLASSES),
        ),
        lambda: torch.randn(EXAMPLES, 2, 6, 6), ("0",), both("0"),
    ),
    Case("module used twice", used_twice, lambda: torch.randn(EXAMPLES, 6), ("2",), both("2")),
    Case("tied linears", tied_linears, lambda: torch.randn(EXAMPLES, 5), ("0", "2"), ("0.weight",)),
    Case(
        "embedding tied to head", tied_embedding, lambda: torch.randint(0, CLASSES, (EXAMPLES, 3)), ("0", "4"),
        ("0.weight",),
    ),
    Case(
        "grouped convolution",
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, CLASSES)),
        lambda: torch.randn(EXAMPLES, 4, 4, 4), ("0",), both("0"),
    ),
    Case("BatchNorm, eval", normalised, lambda: torch.randn(EXAMPLES, 2, 4, 4), ("1",), both("1")),
]  # fmt: skip


# --- references, made the slow and obvious way -------------------------------------------------------------------


def dense_fisher(model: nn.Module, x: Tensor, y: Tensor, kind: str) -> Tensor:
    """J^T H J, a sum over the examples: H is that of the softmax, or of the labels that are there."""
    model = copy.deepcopy(model)  # functional_call does not put back what a module that is there twice had
    weights = dict(model.named_parameters())
    found = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, (x,)))(weights)
    J = torch.cat([rows.flatten(2) for rows in found.values()], -1).detach()
    p = model(x).softmax(-1).detach()
    r = p - F.one_hot(y, CLASSES)
    H = r[:, :, None] * r[:, None] if kind == "empirical" else torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return torch.einsum("ncp,nck,nkq->pq", J, H, J)


def uses(model: nn.Module, modules: tuple[str, ...], x: Tensor) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """Every call of the modules: input, and the gradients at its output for every class, (classes, examples, ...)."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    found = [model.get_submodule(name) for name in modules]
    hooks = [m.register_forward_hook(lambda m, args, out: calls.append((m, args[0].detach(), out))) for m in found]
    p = model(x).softmax(-1)
    for hook in hooks:
        hook.remove()
    log_p, weight = p.log(), p.detach().sqrt()
    outs = [out for _, _, out in calls]
    rows = [torch.autograd.grad((weight[:, c] * log_p[:, c]).sum(), outs, retain_graph=True) for c in range(CLASSES)]
    return [(m, a, torch.stack([g[i] for g in rows])) for i, (m, a, _) in enumerate(calls)]


def positions(module: nn.Module, a: Tensor, g: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    """What each position has as a row and as a column of W: (groups, classes or 1, examples, places, side)."""
    if isinstance(module, nn.Embedding):  # the rows of its W are tokens
        return F.one_hot(a, module.num_embeddings).to(g)[None, None], g[None]
    groups = 1
    if isinstance(module, nn.Conv2d):
        groups = module.groups
        a = F.unfold(a, module.kernel_size, module.dilation, module.padding, module.stride).mT  # type: ignore[arg-type]
        g = g.flatten(3).mT
    else:
        a, g = a[:, None], g[:, :, None]
    columns = torch.stack(a.chunk(groups, -1))[:, None]
    if bias:
        columns = torch.cat([columns, torch.ones_like(columns[..., :1])], -1)
    return torch.stack(g.chunk(groups, -1)), columns


def diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """The blocks along the diagonal."""
    return torch.as_tensor(torch.block_diag(*blocks))  # type: ignore[no-untyped-call]


def product(form: str, calls: list[tuple[Tensor, Tensor]], fisher: Tensor | None) -> Tensor:
    """K-FAC's expand form of some calls, in which every position of every call is one; W flattened row by row.

    In the form "eigenbasis" its eigenvectors with the diagonal that the Fisher has in them: the one given, or that of
    these calls alone.
    """
    blocks = []
    for group in range(len(calls[0][0])):
        rows, columns = ([call[side][group] for call in calls] for side in (0, 1))
        H, Q = (torch.stack([r.flatten(0, -2).mT @ r.flatten(0, -2) for r in side]).sum(0) for side in (rows, columns))
        count = sum(r.shape[1] * r.shape[2] for r in rows)
        if form != "eigenbasis":
            blocks.append(torch.kron(H / count, Q))
            continue
        U = torch.kron(torch.linalg.eigh(H).eigenvectors, torch.linalg.eigh(Q).eigenvectors)
        gradients = [torch.einsum("cnpo,cnpi->cnoi", r, c) for r, c in zip(rows, columns, strict=True)]
        G = torch.stack(gradients).sum(0).flatten(2).flatten(0, 1)
        F_group = G.mT @ G if fisher is None else fisher
        blocks.append(U @ (U.mT @ F_group @ U).diagonal().diag() @ U.mT)
    return diagonal(blocks)


def own_forms(form: str, case: Case, model: nn.Module, x: Tensor, fisher: Tensor) -> list[Tensor]:
    """The block as the approximation itself has it, parameters one after the other.

    Where a weight is used more than once there are several: all uses of a kind as positions of one product, or a
    product for each use, with the bias of that use or without.
    """
    if form == "diagonal" or case.name.startswith("BatchNorm"):
        return [fisher.diagonal().diag()]
    shapes = [model.get_parameter(name).shape for name in case.parameters]
    weight = torch.arange(shapes[0].numel()).reshape(shapes[0][0], -1)
    bias = [weight.numel() + torch.arange(shape[0])[:, None] for shape in shapes[1:]]
    order = torch.cat([weight, *bias], 1).flatten()  # where (row, column) of the matrix stands among the parameters
    found = uses(model, case.modules, x)
    calls = [positions(module, a, g, len(shapes) == 2) for module, a, g in found]
    kinds = sorted({type(module).__name__ for module, _, _ in found})
    pooled = [[call for call, use in zip(calls, found, strict=True) if type(use[0]).__name__ == kind] for kind in kinds]
    single = fisher[order][:, order] if len(pooled) == 1 and len(calls[0][0]) == 1 else None
    groupings = [[product(form, term, single) for term in pooled], [product(form, [call], None) for call in calls]]
    if len(shapes) == 1 and kinds == ["Linear"]:
        inside = torch.arange((weight.shape[1] + 1) * len(weight)).reshape(len(weight), -1)[:, :-1].flatten()
        wide = [product(form, [positions(module, a, g, True)], None) for module, a, g in found]
        groupings.append([one[inside][:, inside] for one in wide])
    forms = []
    for terms in groupings:
        block = torch.zeros_like(fisher)
        block[order[:, None], order] = torch.stack(terms).sum(0)
        if form == "kronecker apart":
            block = block * diagonal([torch.ones(shape.numel(), shape.numel()) for shape in shapes])
        forms.append(block)
    return forms

"""Every block of the curvature pass, compared with the dense Fisher and with its definition written out."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import networks
from limpet.curvature import Structure, shared_inputs
from limpet.curvature.gram import add_gram
from limpet.errors import CurvatureError, UnsupportedError
from limpet.likelihoods import Categorical, Gaussian
from limpet.likelihoods.random import PerExampleRNG
from limpet.model import PER_SAMPLE, discover
from limpet.precision import BlockDiagonal, DenseTerm, DiagonalTerm, KroneckerTerm, Matrix
from limpet.precision.block_diagonal import cut
from networks import NETWORKS, build
from reference import close, dense_fisher, measure

CATEGORICAL = Categorical()


def kronecker(term: object) -> Tensor:
    """Q (x) H over W flattened row by row."""
    assert isinstance(term, KroneckerTerm)
    q, h = term.factors()
    if q.dim() == 2:
        return torch.kron(h, q)
    return torch.block_diag(*(torch.kron(h_g, q_g) for h_g, q_g in zip(h, q, strict=True)))


@pytest.mark.parametrize("name", NETWORKS)
def test_diagonal_equals_that_of_the_dense_fisher(name: str) -> None:
    model, x, y = build(name)
    found = measure(model, [(x[:4], y[:4]), (x[4:], y[4:])], CATEGORICAL)
    assert found.kind == "exact" and found.seen == found.examples == len(x)
    covered = [p for block in found.blocks for p in block.parameters]
    assert sorted(covered) == sorted(n for n, _ in model.named_parameters())
    for block in found.blocks:
        (term,) = found.terms[block.name]
        assert isinstance(term, DiagonalTerm)
        dense = dense_fisher(model, block, x, y, CATEGORICAL)
        close(term.diagonal.flatten(), dense.diagonal())


@pytest.mark.parametrize("name", ["linear", "conv2d depthwise", "embedding", "layer norm", "attention", "tied weight"])
def test_dense_structure_equals_the_dense_fisher(name: str) -> None:
    model, x, y = build(name)
    found = measure(model, [(x, y)], CATEGORICAL, "dense")
    for block in found.blocks:
        (term,) = found.terms[block.name]
        assert isinstance(term, DenseTerm)
        close(term.matrix, dense_fisher(model, block, x, y, CATEGORICAL))


@pytest.mark.parametrize("name", ["linear", "in-place relu", "sequence", "conv2d"])
def test_one_example_makes_kronecker_exact_where_a_layer_is_used_once(name: str) -> None:
    model, x, y = build(name)
    found = measure(model, [(x[:1], y[:1])], CATEGORICAL, "kronecker")
    once = [b for b in found.blocks if b.kind == "linear" and not (name == "sequence" and b.name == "0")]
    assert once
    for block in once:
        (term,) = found.terms[block.name]
        close(kronecker(term), dense_fisher(model, block, x[:1], y[:1], CATEGORICAL))


def test_one_example_makes_kronecker_exact_for_one_position() -> None:
    """A convolution with one output position, and an embedding of one token."""
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Tanh(), nn.Linear(3, 3)).double()
    embedding = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Tanh(), nn.Linear(4, 3)).double()
    x, tokens, y = torch.randn(1, 2, 3, 3).double(), torch.tensor([[2]]), torch.tensor([1])
    for model, inputs in ((convolution, x), (embedding, tokens)):
        found = measure(model, [(inputs, y)], CATEGORICAL, "kronecker")
        for block in found.blocks:
            (term,) = found.terms[block.name]
            close(kronecker(term), dense_fisher(model, block, inputs, y, CATEGORICAL))


SHARED = [n for n in NETWORKS if n.startswith(("conv", "sequence", "four"))]


@pytest.mark.parametrize("name", SHARED)
def test_shared_weights_equal_the_expand_form_written_out(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, x, y = build(name)
    found = measure(model, [(x[:4], y[:4]), (x[4:], y[4:])], CATEGORICAL, "kronecker")
    block = found.blocks[0]
    module = dict(model.named_modules())[block.name]
    (term,) = found.terms[block.name]
    Q, H = expand_form(model, module, x)
    assert isinstance(term, KroneckerTerm)
    close(term.inputs, Q)
    close(term.outputs, H)
    dense = dense_fisher(model, block, x, y, CATEGORICAL)
    with capsys.disabled():
        ratio = kronecker(term).trace() / dense.trace()
        print(f"\ntrace of the expand form over the dense trace, {name}: {ratio:.3f}", end="")


def expand_form(model: nn.Module, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Q = mean of a a^T, H = sum of g g^T over examples and positions, one position after another.

    The patch of a convolution is found by the definition: the inputs that each single output is linear in.
    """
    groups = getattr(module, "groups", 1)
    inputs: list[Tensor] = []
    handle = module.register_forward_hook(lambda _, args, out: inputs.append(args[0].detach()))
    model(x)
    handle.remove()
    (a,) = inputs
    convolution = isinstance(module, nn.modules.conv._ConvNd)
    rows_a: list[list[Tensor]] = [[] for _ in range(groups)]
    rows_g: list[list[Tensor]] = [[] for _ in range(groups)]
    for n in range(a.shape[0]):
        example = a[n : n + 1]
        out = module(example)
        flat = out.flatten(2)[0] if convolution else out.reshape(-1, out.shape[-1]).T
        per_group = flat.shape[0] // groups
        for position in range(flat.shape[1]):
            for group in range(groups):
                (patch,) = torch.autograd.grad(flat[group * per_group, position], module.weight, retain_graph=True)
                row = patch[group * per_group].flatten()
                rows_a[group].append(torch.cat([row, torch.ones(1)]) if module.bias is not None else row)
    position_gradients = output_gradients(model, module, x)
    for g in position_gradients:  # (classes, rows, out)
        for group, part in enumerate(g.chunk(groups, -1)):
            rows_g[group].append(part.reshape(-1, part.shape[-1]))
    Q = torch.stack([torch.stack(r).T @ torch.stack(r) / len(r) for r in rows_a])
    H = torch.stack([torch.cat(r).T @ torch.cat(r) for r in rows_g])
    return (Q, H) if groups > 1 else (Q[0], H[0])


def output_gradients(model: nn.Module, module: nn.Module, x: Tensor) -> list[Tensor]:
    """For every example, sqrt(p_c) d log p_c / d(output of the module): (classes, positions, out)."""
    found = []
    batched_first = isinstance(model, networks.SequenceFirst)
    for n in range(len(x)):
        outs: list[Tensor] = []
        handle = module.register_forward_hook(lambda _, args, out, outs=outs: outs.append(out))
        log_p = F.log_softmax(model(x[n : n + 1]), -1)[0]
        handle.remove()
        (out,) = outs
        rows = []
        for c in range(len(log_p)):
            (g,) = torch.autograd.grad(log_p[c], out, retain_graph=True)
            g = g.flatten(2)[0].T if isinstance(module, nn.modules.conv._ConvNd) else g.reshape(-1, g.shape[-1])
            rows.append(log_p[c].detach().exp().sqrt() * g)
        found.append(torch.stack(rows))
    assert batched_first or len(found) == len(x)
    return found


def test_reused_module_counts_its_calls_as_positions() -> None:
    model, x, y = build("reused module")
    found = measure(model, [(x, y)], CATEGORICAL, "kronecker")
    (term,) = found.terms["again"]
    assert isinstance(term, KroneckerTerm)
    first = torch.tanh(model.first(x))
    between = torch.tanh(model.again(first))
    a = torch.cat([torch.cat([first, between]), torch.ones(12, 1)], 1).detach()
    close(term.inputs, a.T @ a / 12)
    g = two_call_gradients(model, model.again, model.again, x)
    close(term.outputs, g.T @ g)


def two_call_gradients(model: nn.Module, first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    outs: list[Tensor] = []
    handles = [m.register_forward_hook(lambda _, args, out: outs.append(out)) for m in {first, second}]
    log_p = F.log_softmax(model(x), -1)
    for handle in handles:
        handle.remove()
    rows = []
    for c in range(log_p.shape[1]):
        weight = log_p[:, c].detach().exp().sqrt()
        rows += [weight[:, None] * g for g in torch.autograd.grad(log_p[:, c].sum(), outs, retain_graph=True)]
    return torch.cat(rows)


def test_tied_weight_has_a_term_for_each_user_and_each_bias_is_its_own() -> None:
    model, x, y = build("tied weight")
    found = measure(model, [(x, y)], CATEGORICAL, "kronecker")
    assert [b.name for b in found.blocks] == ["a.weight", "a.bias", "b.bias", "last"]
    gradients = two_call_gradients(model, model.a, model.b, x).unflatten(0, (-1, 2, 6)).transpose(0, 1).flatten(1, 2)
    inputs = (x, torch.tanh(model.a(x)).detach())
    for term, a, g in zip(found.terms["a.weight"], inputs, gradients, strict=True):
        assert isinstance(term, KroneckerTerm)
        q, h = term.factors()
        close(q, a.T @ a / 6)
        close(h, g.T @ g)
    # a bias alone is a matrix of one column, whose Kronecker block is exact
    bias = next(b for b in found.blocks if b.name == "a.bias")
    close(kronecker(found.terms["a.bias"][0]), dense_fisher(model, bias, x, y, CATEGORICAL))


def per_token_case(kind: type[nn.Module]) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = kind().double()
    x = networks.tokens()
    y = torch.randint(0, 6, x.shape)
    y[0, :3] = -100
    return model, x, y


@pytest.mark.parametrize("kind", [networks.TiedHead, networks.FunctionalHead])
def test_outputs_per_position_diagonal(kind: type[nn.Module]) -> None:
    """Sampled labels, one per position: the diagonal is that of the drawn gradients, example by example."""
    model, x, y = per_token_case(kind)
    found = measure(model, [(x, y)], CATEGORICAL, seed=3)
    assert found.kind == "sampled" and found.examples == found.seen == 27
    root = CATEGORICAL.sampled_root(model(x).detach(), y, PerExampleRNG.of([x, y], 3))
    assert not root[0, :3].any()
    for block in found.blocks:
        (term,) = found.terms[block.name]
        assert isinstance(term, DiagonalTerm)
        close(term.diagonal.flatten(), dense_fisher(model, block, x, y, CATEGORICAL, root).diagonal())
    direct = [b.name for b in found.blocks if b.kind == PER_SAMPLE]
    assert direct == (["embed.weight"] if kind is networks.FunctionalHead else [])


def test_embedding_tied_to_the_head_gives_two_terms() -> None:
    model, x, y = per_token_case(networks.TiedHead)
    found = measure(model, [(x, y)], CATEGORICAL, "kronecker", seed=3)
    block = found.blocks[0]
    assert block.kind == "embedding+linear" and block.shape == (6, 4)
    as_embedding, as_head = found.terms[block.name]
    assert isinstance(as_embedding, KroneckerTerm) and isinstance(as_head, KroneckerTerm)
    root = CATEGORICAL.sampled_root(model(x).detach(), y, PerExampleRNG.of([x, y], 3))
    embedded = model.embed(x)
    hidden = torch.tanh(model.mix(embedded))
    (g,) = torch.autograd.grad(F.linear(hidden, model.embed.weight.detach()), embedded, root)
    one_hot = F.one_hot(x.flatten(), 6).double()
    close(torch.diag_embed(as_embedding.outputs), one_hot.T @ one_hot / 30)
    close(as_embedding.inputs, g.flatten(0, 1).T @ g.flatten(0, 1))
    a = hidden.detach().flatten(0, 1)
    close(as_head.inputs, a.T @ a / 30)
    close(as_head.outputs, root.flatten(0, 1).T @ root.flatten(0, 1))


def test_exact_fisher_of_a_softmax_is_its_gauss_newton() -> None:
    model, x, _ = build("linear")
    for row in x:
        logits = model(row[None]).detach()
        roots = torch.cat(list(CATEGORICAL.roots(logits, None)))
        p = logits.softmax(-1)[0]
        close(roots.T @ roots, torch.diag(p) - torch.outer(p, p))


@pytest.mark.slow
def test_sampled_fisher_tends_to_the_exact_one() -> None:
    model, x, y = build("linear")
    exact = measure(model, [(x, y)], CATEGORICAL)
    sampled = measure(model, [(x, y)], CATEGORICAL, fisher="sampled", draws=4000)
    for name, (term,) in exact.terms.items():
        (other,) = sampled.terms[name]
        close(other.diagonal, term.diagonal, 0.1)


def test_empirical_fisher_is_that_of_the_true_labels() -> None:
    model, x, y = build("conv2d")
    found = measure(model, [(x, y)], CATEGORICAL, fisher="empirical")
    root = F.softmax(model(x), -1).detach() - F.one_hot(y, 3)
    for block in found.blocks:
        (term,) = found.terms[block.name]
        close(term.diagonal.flatten(), dense_fisher(model, block, x, y, CATEGORICAL, root).diagonal())


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "dense"])
def test_batches_limit_and_examples(structure: str) -> None:
    model, x, y = build("linear")
    whole = measure(model, [(x, y)], CATEGORICAL, structure)
    parts = measure(model, [(x[:1], y[:1]), (x[1:], y[1:])], CATEGORICAL, structure)
    limited = measure(model, [(x, y)] * 2, CATEGORICAL, structure, limit=6)
    stated = measure(model, iter([(x, y)]), CATEGORICAL, structure, limit=6, examples=30)
    cut = measure(model, [(x, y)], CATEGORICAL, structure, limit=4)
    first = measure(model, [(x[:4], y[:4])], CATEGORICAL, structure)
    assert (limited.seen, limited.examples, cut.seen, cut.examples) == (6, 12, 4, 6)
    for name in whole.terms:
        expected = as_matrix(whole.terms[name][0])
        close(as_matrix(parts.terms[name][0]), expected)
        close(as_matrix(limited.terms[name][0]), 2 * expected)
        close(as_matrix(stated.terms[name][0]), 5 * expected)
        close(as_matrix(cut.terms[name][0]), 1.5 * as_matrix(first.terms[name][0]))


def test_limit_counts_predicted_positions() -> None:
    model, x, y = per_token_case(networks.TiedHead)
    y = y.clamp_min(0)  # 6 sequences of 5 positions
    found = measure(model, [(x, y)], CATEGORICAL, limit=10)
    assert (found.seen, found.examples) == (10, 30)
    first = measure(model, [(x[:2], y[:2])], CATEGORICAL)
    for name in found.terms:
        close(as_matrix(found.terms[name][0]), 3 * as_matrix(first.terms[name][0]))
    for wrong in ({"limit": 0}, {"limit": 2.5}, {"examples": 0}, {"examples": "all"}):
        with pytest.raises(ValueError, match="an integer"):
            measure(model, [(x, y)], CATEGORICAL, **wrong)


def as_matrix(term: object) -> Tensor:
    if isinstance(term, DiagonalTerm):
        return torch.diag(term.diagonal.flatten())
    return term.matrix if isinstance(term, DenseTerm) else kronecker(term)


def test_every_form_of_batch_gives_the_same() -> None:
    model, x, y = build("linear")

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, values: Tensor, factor: float = 1.0) -> dict[str, Tensor]:
            return {"logits": self.inner(values) * factor}

    expected = measure(model, [(x, y)], CATEGORICAL).terms["0"][0]
    dataset = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)
    wrapped = Wrapped()
    for found, name in (
        (measure(model, loader, CATEGORICAL), "0"),
        (measure(model, iter([[x, y]]), CATEGORICAL), "0"),
        (measure(model, [x], CATEGORICAL), "0"),
        (measure(wrapped, [{"values": x, "labels": y}], CATEGORICAL), "inner.0"),
        (measure(wrapped, [({"values": x}, y)], CATEGORICAL), "inner.0"),
        (measure(model, [(x, y, "extra")], CATEGORICAL, forward=lambda m, b: (m(b[0]), b[1])), "0"),
        (measure(model, [(x, y, "extra")], CATEGORICAL, forward=lambda m, b: m(b[0])), "0"),
    ):
        close(found.terms[name][0].diagonal, expected.diagonal, 1e-12)
    with pytest.raises(CurvatureError, match="forward=lambda"):
        measure(model, [(x, y, "extra")], CATEGORICAL)
    with pytest.raises(CurvatureError, match="examples="):
        measure(model, iter([(x, y)]), CATEGORICAL, limit=3)
    with pytest.raises(CurvatureError, match="no example"):
        measure(model, [], CATEGORICAL)


def test_compiled_models_are_measured_as_written() -> None:
    model, x, y = build("linear")
    expected = measure(model, [(x, y)], CATEGORICAL)
    whole = torch.compile(model, backend="eager")
    whole(x)
    inner = nn.Sequential(torch.compile(model[:3], backend="eager"), model[3:])
    inner(x)
    in_place, _, _ = build("linear")
    in_place.compile(backend="eager")
    in_place(x)
    for compiled, name in ((whole, "0"), (inner, "0.0"), (in_place, "0")):
        found = measure(compiled, [(x, y)], CATEGORICAL)
        assert all(block.kind == "linear" for block in found.blocks)
        close(found.terms[name][0].diagonal, expected.terms["0"][0].diagonal, 1e-12)


def test_gradient_checkpointing_gives_the_same() -> None:
    model, x, y = build("linear")

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    expected = measure(model, [(x, y)], CATEGORICAL, "kronecker")
    found = measure(Checkpointed(), [(x, y)], CATEGORICAL, "kronecker")
    close(kronecker(found.terms["inner.0"][0]), kronecker(expected.terms["0"][0]))


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(one, marks=pytest.mark.slow) for one in (torch.float16, torch.float32))],
    ids=str,
)
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "dense"])
def test_sums_are_float32_or_better(dtype: torch.dtype, structure: str) -> None:
    model, x, y = build("linear")
    model = model.to(dtype)
    batches = [(x.to(dtype), y)] * 500  # in bfloat16 a sum stops growing after 256 equal terms
    many = measure(model, batches, CATEGORICAL, structure)
    one = measure(model, batches[:1], CATEGORICAL, structure)
    for name in one.terms:
        a, b = as_matrix(many.terms[name][0]), as_matrix(one.terms[name][0])
        assert a.dtype == torch.float32
        close(a, 500 * b, 1e-4)


def test_long_sides_keep_a_diagonal_factor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 18), nn.Tanh(), nn.Linear(18, 2)).double()
    x, y = torch.randn(6, 9, dtype=torch.float64), torch.randint(0, 2, (6,))
    full = measure(model, [(x, y)], CATEGORICAL, "kronecker")
    short = measure(model, [(x, y)], CATEGORICAL, "kronecker", max_factor_size=1)
    whole, kept = full.terms["0"][0], short.terms["0"][0]
    assert isinstance(kept, KroneckerTerm) and isinstance(whole, KroneckerTerm)
    assert kept.inputs_diagonal and kept.outputs_diagonal
    (q, h), (whole_q, whole_h) = kept.factors(), whole.factors()
    close(q, whole_q.diagonal().diag())
    close(h, whole_h.diagonal().diag())
    last = short.terms["2"][0]
    assert isinstance(last, KroneckerTerm) and last.inputs_diagonal and not last.outputs_diagonal


@pytest.mark.parametrize("max_factor_size", [2, 3, 4])
@pytest.mark.parametrize("name", ["linear", "conv2d", "conv1d groups"])
def test_a_side_in_pieces_keeps_what_lies_in_them(name: str, max_factor_size: int) -> None:
    model, x, y = build(name)
    full = measure(model, [(x, y)], CATEGORICAL, "kronecker")
    short = measure(model, [(x, y)], CATEGORICAL, "kronecker", max_factor_size=max_factor_size)
    is_sharded, biases = 0, {block.name: block.bias for block in short.blocks}
    for block, (whole,) in full.terms.items():
        (kept,) = short.terms[block]
        assert isinstance(kept, KroneckerTerm) and isinstance(whole, KroneckerTerm)
        for side, matrix, true in zip((kept.inputs, kept.outputs), kept.factors(), whole.factors(), strict=True):
            if isinstance(side, BlockDiagonal):
                is_sharded += 1
                bias = biases[block] * (side is kept.inputs)  # it counts as no part of the side
                *most, last = cut(true.shape[-1] - bias, max_factor_size)
                assert side.sizes == [*most, last + bias]
                inside = BlockDiagonal(tuple(torch.ones(size, size) for size in side.sizes)).dense().to(true)
                close(matrix, true * inside)
            elif not (kept.inputs_diagonal if side is kept.inputs else kept.outputs_diagonal):
                close(matrix, true)
    assert is_sharded


def test_large_grams_in_strips_equal_the_plain_product() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(301, 2)).double()
    x = torch.randn(7, 301, dtype=torch.float64)
    (term,) = measure(model, [(x, torch.zeros(7, 2))], Gaussian(), "kronecker").terms["0"]
    a = torch.cat([x, torch.ones(7, 1)], 1)
    assert isinstance(term, KroneckerTerm)
    close(term.inputs, a.T @ a / 7)
    close(term.outputs, 7 * torch.eye(2, dtype=torch.float64))


def test_frozen_and_excluded_parameters() -> None:
    model, x, y = build("linear")
    model[0].weight.requires_grad_(False)
    found = measure(model, [(x, y)], CATEGORICAL, "kronecker", exclude=("4",))
    assert {b.name: b.parameters for b in found.blocks} == {"0": ("0.bias",), "2": ("2.weight",)}
    bias = found.blocks[0]
    close(found.terms[bias.name][0].outputs, dense_fisher(model, bias, x, y, CATEGORICAL))
    names = [p for b in discover(model, ("*.bias", "2")) for p in b.parameters]
    assert names == ["4.weight"]


def test_a_parameter_without_gradient_is_named() -> None:
    model, x, y = build("linear")
    model.extra = nn.Linear(2, 2).double()  # registered, never used

    def forward(m: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h = batch[0]
        for layer in list(m)[:5]:  # type: ignore[call-overload]
            h = layer(h)
        return h, batch[1]

    found = measure(model, [(x, y)], CATEGORICAL, forward=forward)
    assert found.unused == {"extra.weight", "extra.bias"}
    assert not found.terms["extra"][0].diagonal.any()


def test_what_cannot_be_measured_is_refused() -> None:
    model, x, y = build("linear")
    with pytest.raises(UnsupportedError, match="fisher='sampled'"):
        per_position, tokens, labels = per_token_case(networks.TiedHead)
        measure(per_position, [(tokens, labels)], CATEGORICAL, fisher="exact")
    with pytest.raises(CurvatureError, match="max_norm"):
        discover(nn.Embedding(3, 2, max_norm=1.0))
    with pytest.raises(CurvatureError, match="GroupNorm"):
        discover(nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(CurvatureError, match="inf or nan"):
        measure(model, [(x * math.nan, y)], CATEGORICAL)
    with pytest.raises(UnsupportedError, match="class_dim"):
        measure(model, [(x, y[:, None])], CATEGORICAL)
    changes = nn.Sequential(nn.Linear(4, 4), networks.Lambda(lambda h: h.mul_(2))).double()
    wrong = networks.Lambda(lambda h: torch.add(changes[0](h), h.add_(1)))
    wrong.inner = changes
    with pytest.raises(CurvatureError, match="in place"):
        measure(wrong, [(x.clone(), y)], CATEGORICAL)
    attention, sequences, labels = build("attention")
    pair = [((sequences[:3], sequences[3:]), labels)]
    with pytest.raises(CurvatureError, match="batches of one example"):
        measure(attention, pair, CATEGORICAL, forward=lambda m, b: (m(torch.cat(b[0])), b[1]))
    with pytest.raises(CurvatureError, match="no_grad"):
        measure(model, [(x, y)], CATEGORICAL, forward=lambda m, b: (m(b[0]).detach(), b[1]))
    with pytest.raises(CurvatureError, match="no trainable"):
        measure(model.requires_grad_(False), [(x, y)], CATEGORICAL)


class ReadTwice(nn.Module):
    """Two layers with a bias and one without read one tensor, and one more reads a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4, bias=False)
        self.part = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.tanh(self.query(x)) * self.key(x) + self.value(x) + self.part(x[..., :3])
        return mixed.mean(1)


@pytest.mark.parametrize("max_factor_size", [4096, 4, 2])
def test_layers_that_read_the_same_input_have_one_factor_made_for_them(
    max_factor_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = ReadTwice().double()
    x, y = torch.randn(8, 5, 6, dtype=torch.float64), torch.randint(0, 4, (8,))
    made: list[tuple[int, ...]] = []

    def counted(total: Matrix, parts: Iterable[Tensor], *, ones: bool, diagonal: bool) -> None:
        (rows,) = parts
        made.append(tuple(rows.shape))
        add_gram(total, rows, ones=ones, diagonal=diagonal)

    monkeypatch.setattr(shared_inputs, "add_grams", counted)
    shared = measure(
        model, [(x, y), (x[:7], y[:7])], CATEGORICAL, "kronecker", fisher="exact", max_factor_size=max_factor_size
    )
    # of every batch, once with the column of ones and once without
    assert made == [(40, 6), (40, 6), (35, 6), (35, 6)]
    monkeypatch.setattr(shared_inputs, "FEWEST_ROWS", 1000)
    alone = measure(
        model, [(x, y), (x[:7], y[:7])], CATEGORICAL, "kronecker", fisher="exact", max_factor_size=max_factor_size
    )
    assert len(made) == 4
    for name, (term,) in shared.terms.items():
        close(kronecker(term), kronecker(alone.terms[name][0]), 1e-12)


def test_a_bias_does_not_cut_a_side() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 9, bias=False), nn.Linear(9, 2))
    first, second, third = (Structure("kronecker", 4).sides(block) for block in discover(model))
    assert first["inputs_sizes"] == (5,) and first["outputs_sizes"] == (3,)
    assert second["inputs_sizes"] == (3,) and second["outputs_sizes"] == (3, 3, 3)
    assert third["inputs_sizes"] == (3, 3, 4) and not third["inputs_diagonal"]


def test_equal_examples_get_draws_of_their_own() -> None:
    """64 distinct inputs, 20,000 rows: with one draw for each distinct input, the error was 76 %."""
    torch.manual_seed(0)
    model = nn.Linear(6, 30)
    x = torch.randint(0, 2, (20_000, 6)).float()
    errors = {}
    for name, inputs in {"equal": x, "distinct": x + 1e-6 * torch.randn_like(x)}.items():
        exact, sampled = (measure(model, list(inputs.split(500)), CATEGORICAL, fisher=f) for f in ("exact", "sampled"))
        e, s = (as_matrix(found.terms["model"][0]) for found in (exact, sampled))
        errors[name] = float((s - e).norm() / e.norm())
    assert errors["equal"] < 1.3 * errors["distinct"], errors


def test_draws_of_equal_examples_do_not_depend_on_order_or_batches() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 5).double()
    x = torch.randn(4, 3).double().repeat(6, 1)
    whole = measure(model, [x], CATEGORICAL, "dense", fisher="sampled")
    split = measure(model, list(x[torch.randperm(24)].split(5)), CATEGORICAL, "dense", fisher="sampled")
    close(as_matrix(whole.terms["model"][0]), as_matrix(split.terms["model"][0]))

"""Uses of weights that the hooks or the first batch miss: they are measured correctly, or rejected."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import limpet
import networks
from allocated import allocations
from limpet.curvature.audit import unseen
from limpet.curvature.hooks import Recorder
from limpet.errors import CurvatureError, FallbackWarning, LimpetWarning, UnsupportedError
from limpet.likelihoods import Categorical
from limpet.model import PER_SAMPLE, discover
from limpet.precision import DiagonalTerm, KroneckerTerm
from reference import close, dense_fisher, measure

CATEGORICAL = Categorical()
STRUCTURES = ["diagonal", "kronecker"]


def check_diagonals(model: nn.Module, x: Tensor, y: Tensor, batches: Any, structure: str = "diagonal") -> set[str]:
    """Every diagonal term is the dense one; returns the names of the blocks measured directly."""
    found = measure(model, batches, CATEGORICAL, structure)
    for block in found.blocks:
        for term in found.terms[block.name]:
            if isinstance(term, DiagonalTerm):
                close(term.diagonal.flatten(), dense_fisher(model, block, x, y, CATEGORICAL).diagonal())
    return {block.name for block in found.blocks if block.kind == PER_SAMPLE}


class Positions(nn.Module):
    """A position embedding sees no batch: it gets the gradient of all examples at once."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position, self.last = nn.Embedding(6, 4), nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = self.position(torch.arange(x.shape[1])[None])
        return self.last((self.token(x) + places).sin().sum(1))


class Queries(nn.Module):
    """Learned queries through a linear layer: the same, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.mix, self.last = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = (x[:, None] * self.mix(self.query)).tanh()
        return self.last(weights.sum(1))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("sizes", [[6], [1, 5], [5, 1]], ids=str)
@pytest.mark.parametrize("kind", [Positions, Queries])
def test_layers_that_do_not_see_the_batch(kind: type[nn.Module], sizes: list[int], structure: str) -> None:
    torch.manual_seed(0)
    model = kind().double()
    x = networks.tokens(6, 5) if kind is Positions else torch.randn(6, 4).double()
    y = torch.randint(0, 3, (6,))
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    direct = check_diagonals(model, x, y, batches, structure)
    assert direct == (set() if kind is Positions else {"query", "mix.weight", "mix.bias"})


class Transposed(nn.Module):
    """Positions first inside: an embedding of transposed tokens, and heads as one more dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.norm, self.last = nn.Embedding(6, 4), nn.LayerNorm(2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.token(x.t())
        hidden = self.norm(hidden.unflatten(-1, (2, 2))).flatten(-2)
        return self.last(hidden.tanh().mean(0))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("length", [4, 6])  # the second: as many positions as examples
def test_positions_first(length: int, structure: str) -> None:
    torch.manual_seed(0)
    model, x, y = Transposed().double(), networks.tokens(6, length), torch.randint(0, 3, (6,))
    nn.init.normal_(model.norm.weight)
    check_diagonals(model, x, y, [(x, y)], structure)


class Changing(nn.Module):
    """A layer called as a module for some batches and by a function for others; a branch taken only later."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.branch = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, -1] > 0).all():
            hidden = F.linear(x, self.a.weight, self.a.bias)
            hidden = self.branch(hidden[:, None], hidden[:, None], hidden[:, None], need_weights=False)[0][:, 0]
        else:
            hidden = self.a(x)
        return self.last(hidden.tanh())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_later_batches_that_use_weights_otherwise(structure: str) -> None:
    torch.manual_seed(0)
    model, x, y = Changing().double(), torch.randn(6, 4).double(), torch.randint(0, 3, (6,))
    x[:3, -1], x[3:, -1] = -1, 1
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    direct = check_diagonals(model, x, y, batches, structure)
    assert {"a.weight", "a.bias", "branch.out_proj.weight"} <= direct
    assert not measure(model, batches, CATEGORICAL, structure).unused
    with pytest.raises(CurvatureError, match="read only once"):
        measure(model, iter(batches), CATEGORICAL, structure)


class CausalConv(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (2, 0)))


class ChannelsFirst(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Repeated(nn.Linear):
    def forward(self, times: int, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * times


class UsesRepeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Repeated(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(2, x)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["causal", "channels first", "other arguments"])
def test_subclasses_that_do_something_else_with_their_input(kind: str, structure: str) -> None:
    torch.manual_seed(0)
    pool = networks.Lambda(networks.pool)
    model, x = {
        "causal": (nn.Sequential(CausalConv(2, 4, 3), nn.Tanh(), pool, nn.Linear(4, 3)), torch.randn(6, 2, 7)),
        "channels first": (nn.Sequential(ChannelsFirst(4, 5), nn.Tanh(), pool, nn.Linear(5, 3)), torch.randn(6, 4, 7)),
        "other arguments": (UsesRepeated(), torch.randn(6, 4)),
    }[kind]
    model, x, y = model.double(), x.double(), torch.randint(0, 3, (6,))
    assert check_diagonals(model, x, y, [(x, y)], structure)


class Idle(nn.Module):
    """Calls a layer for nothing, on large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(100 * x)
        return self.layer(x)


def test_calls_that_do_not_reach_the_outputs_do_not_count() -> None:
    torch.manual_seed(0)
    model, x, y = Idle().double(), torch.randn(1, 4).double(), torch.tensor([0])
    (term,) = measure(model, [(x, y)], CATEGORICAL, "kronecker").terms["layer"]
    assert isinstance(term, KroneckerTerm)
    (block,) = discover(model)
    close(torch.kron(term.outputs, term.inputs), dense_fisher(model, block, x, y, CATEGORICAL))


def test_padding_does_not_dilute_an_embedding() -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(6, 4, padding_idx=0)
    model = nn.Sequential(embedding, networks.Lambda(lambda h: h.sum(1).tanh()), nn.Linear(4, 3)).double()
    x, y = torch.randint(1, 6, (6, 5)), torch.randint(0, 3, (6,))
    padded = F.pad(x, (0, 15))
    (short,), (long,) = (measure(model, [(t, y)], CATEGORICAL, "kronecker").terms["0"] for t in (x, padded))
    assert isinstance(short, KroneckerTerm) and isinstance(long, KroneckerTerm)
    close(long.outputs, short.outputs)
    close(long.inputs, short.inputs)


def test_examples_that_are_mixed_are_refused() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4).double(), torch.randint(0, 3, (6,))
    norm = nn.BatchNorm1d(5, affine=False, track_running_stats=False)
    model = nn.Sequential(nn.Linear(4, 5), norm, nn.Linear(5, 3)).double()
    with pytest.raises(CurvatureError, match="use GroupNorm"):
        measure(model, [(x, y)], CATEGORICAL)

    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.last = nn.GRU(3, 4), nn.Linear(4, 5)  # positions first, outputs too

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.gru(x)[0])

    with pytest.raises(CurvatureError, match="first dimension"):
        measure(Sequence(), [(torch.randn(7, 2, 3), torch.randint(0, 5, (7, 2)))], CATEGORICAL)


def test_a_model_that_draws_random_numbers_is_taken() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.1 * torch.randn(len(x), 3)

    found = measure(Noisy(4, 3), [(torch.randn(6, 4), torch.randint(0, 3, (6,)))], CATEGORICAL, "kronecker")
    assert [block.kind for block in found.blocks] == ["linear"]


def test_autocast_is_rounding_and_no_reason_to_fall_back() -> None:
    model, x, y = networks.build("linear")
    model, x = model.float(), x.float()

    def forward(m: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return m(batch[0]), batch[1]

    found = measure(model, [(x, y)], CATEGORICAL, "kronecker", forward=forward)
    exact = measure(model, [(x, y)], CATEGORICAL, "kronecker")
    for block in found.blocks:
        assert block.kind == "linear"
        (a,), (b,) = found.terms[block.name], exact.terms[block.name]
        close(a.outputs, b.outputs, 0.05)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "dense"])
def test_curvature_that_is_not_finite_is_refused(structure: str) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(4, 4, bias=False), nn.Linear(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.layer(x).square().sum(1, keepdim=True).sqrt())  # no gradient at zero

    with pytest.raises(CurvatureError, match="inf or nan"):
        measure(Root(), [(torch.zeros(3, 4), torch.zeros(3).long())], CATEGORICAL, structure)


def test_a_batch_sampler_of_ones_own_does_not_say_how_much_there_is() -> None:
    model, x, y = networks.build("linear")
    dataset = torch.utils.data.TensorDataset(x.repeat(10, 1), y.repeat(10))
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=[[0, 1, 2], [3, 4, 5]])
    assert measure(model, loader, CATEGORICAL).examples == 6
    with pytest.raises(CurvatureError, match="examples="):
        measure(model, loader, CATEGORICAL, limit=3)
    usual = torch.utils.data.DataLoader(dataset, batch_size=7, shuffle=True)
    assert measure(model, usual, CATEGORICAL, limit=20).examples == 60


def test_batches_are_read_no_further_than_the_limit() -> None:
    model, x, y = networks.build("linear")
    batches = iter([(x, y)] * 5)
    measure(model, batches, CATEGORICAL, limit=12, examples=30)
    assert len(list(batches)) == 3


def test_mappings_of_every_kind_can_be_cut() -> None:
    class Wrapped(networks.Recurrent):
        def forward(self, values: Tensor) -> Tensor:
            return super().forward(values)

    model, x, y = Wrapped().double(), torch.randn(6, 5, 4).double(), torch.randint(0, 3, (6,))
    plain = measure(model, [{"values": x, "labels": y}], CATEGORICAL, limit=2)
    other = measure(model, [UserDict({"values": x, "labels": y})], CATEGORICAL, limit=2)
    assert plain.seen == other.seen == 2
    for name, (term,) in plain.terms.items():
        close(other.terms[name][0].diagonal, term.diagonal)


def test_labels_of_language_models_are_warned_about() -> None:
    class Language(networks.TiedHead):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids)

    tokens = networks.tokens()
    with pytest.warns(LimpetWarning, match="shift them"):
        measure(Language(), [{"input_ids": tokens, "labels": tokens}], CATEGORICAL)


def test_reentrant_checkpointing_names_the_mend() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            return self.last(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True))

    with pytest.raises(CurvatureError, match="use_reentrant=False"):
        measure(Checkpointed(), [(torch.randn(3, 4), torch.zeros(3).long())], CATEGORICAL)


def test_a_fall_back_is_said() -> None:
    model, x, y = networks.build("attention")
    memory = limpet.OnlineLaplace(model)
    with pytest.warns(FallbackWarning, match="out_proj"):
        memory.consolidate([(x, y)])


def test_plausible_mistakes_name_the_mend() -> None:
    model, x, y = networks.build("linear")
    memory = limpet.OnlineLaplace(model)
    several: Any = nn.ModuleList([model])
    several.forward = lambda x: (model(x), x)
    with pytest.raises(UnsupportedError, match="MultiOutput"):
        limpet.OnlineLaplace(several).consolidate([(x, y)])
    for targets, message in (
        (y + 7, "from 0 to 2"),
        (-torch.ones_like(y), "ignore_index"),
        (y.double(), "long"),
        (F.one_hot(y, 3), "class indices"),
    ):
        for fisher in ("exact", "sampled", "empirical"):
            memory.fisher = fisher
            with pytest.raises(UnsupportedError, match=message):
                memory.consolidate([(x, targets)])
    memory.fisher = "exact"
    for batches in ((x, y), x, {"x": x}):
        with pytest.raises(CurvatureError, match=r"\[\(inputs, targets\)\]"):
            memory.consolidate(batches)
    memory.consolidate([(x[:0], y[:0]), (x, y), (x[:0], y[:0])])  # empty batches are passed over
    assert memory.examples == 6


def test_a_pass_that_begins_again_forgets_all_it_had() -> None:
    """The residuals of batches read twice would count twice in an estimated variance."""
    torch.manual_seed(0)
    model, x = Changing().double(), torch.randn(6, 4).double()
    x[:3, -1], x[3:, -1] = -1, 1
    y = torch.cat([torch.randn(3, 3), 9 * torch.randn(3, 3)]).double()
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    variance = float((torch.cat([model(x[:3]), model(x[3:])]).detach() - y).square().mean())
    found = measure(model, batches, limpet.Gaussian("estimate"))
    given = measure(model, batches, limpet.Gaussian(variance))
    for name, (term,) in given.terms.items():
        close(found.terms[name][0].diagonal, term.diagonal)


def test_a_batch_that_cannot_be_cut_and_could_be_read_two_ways_is_refused() -> None:
    model, x, y = networks.build("sequence first, as many positions as examples")
    batch = [(x[:2], x[2:], y)]
    with pytest.raises(CurvatureError, match="batches of one example"):
        measure(model, batch, CATEGORICAL, forward=lambda m, b: (m(torch.cat([b[0], b[1]])), b[2]))


def test_a_layer_that_was_registered_is_measured() -> None:
    from limpet import layers

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x

    @layers.register
    class GainLayer(layers.OverFeatures):
        kind = "gain"
        modules = (Gain,)

        def normalised(self, x: Tensor) -> Tensor:
            return x

        def spread(self, x: Tensor) -> Tensor:
            return x.reshape(len(x), -1, x.shape[-1])

    torch.manual_seed(0)
    model = nn.Sequential(Gain(), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 4).double(), torch.randint(0, 3, (6,))
    assert not check_diagonals(model, x, y, [(x, y)])
    del layers._REGISTRY[Gain]
    assert check_diagonals(model, x, y, [(x, y)]) == {"0.weight"}


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "kronecker-sum"])
@pytest.mark.parametrize("method", [limpet.OnlineLaplace, limpet.PerTaskLaplace])
def test_a_known_layer_that_is_used_otherwise_becomes_its_diagonal(structure: str, method: Any) -> None:
    torch.manual_seed(0)
    model, x, y = Changing().double(), torch.randn(6, 4).double(), torch.randint(0, 3, (6,))
    x[:3, -1], x[3:, -1] = -1, 1  # the first task calls the layer, the second hands its weights to a function
    memory = method(model, structure=structure, strength=2.0)
    memory.consolidate([(x[:3], y[:3])])
    known = memory.posterior.held["a"]
    expected, _ = known.block.split((known.precision.dense().diagonal() - 1).reshape(known.block.shape))
    with pytest.warns(FallbackWarning, match=r"a\.weight"):
        memory.consolidate([(x[3:], y[3:])])
    held = memory.posterior.held["a.weight"]
    fresh = dense_fisher(model, held.block, x[3:], y[3:], CATEGORICAL).diagonal()
    assert held.tasks == 2
    close(held.precision.dense().diagonal(), 1 + expected.flatten() + 2 * fresh)


def test_the_gradients_of_the_whole_model_are_never_there_at_once() -> None:
    """Under fully_shard no rank has room for them."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(160, 160) for _ in range(16)])
    blocks, recorder = discover(model), Recorder()
    with recorder.attached(blocks):
        with recorder.recording(4):
            outputs = model(torch.randn(4, 160))
        with allocations() as found:
            wrong, used = unseen(blocks, recorder, dict(model.named_parameters()), [outputs])
    assert not wrong and len(used) == 32
    assert found.peak < 8 * model[0].weight.nbytes  # most of it to compare one block
    assert all(parameter._backward_hooks is None or not parameter._backward_hooks for parameter in model.parameters())

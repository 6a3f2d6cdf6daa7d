"""Differential privacy: the calibration, the sensitivity of everything that is released, and the noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import limpet
from limpet.curvature import FisherPass, Structure, privacy, private_pass
from limpet.curvature.private_pass import PrivatePass
from limpet.likelihoods import resolve
from limpet.model import discover
from limpet.precision import DenseTerm, KroneckerTerm, Term
from limpet.precision.block_diagonal import pieces


class Tokens(nn.Module):
    """An embedding, a normalization and a head, with one prediction per sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Mean over positions."""
        return self.head(self.norm(self.embedding(x)).mean(1))


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(9, 6)


def convolution() -> tuple[nn.Module, Tensor]:
    layers = nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    return nn.Sequential(*layers), torch.randn(9, 2, 4, 4)


def sequences() -> tuple[nn.Module, Tensor]:
    return Tokens(), torch.randint(0, 7, (9, 5))


def raw() -> tuple[nn.Module, Tensor]:
    """A parameter that no layer class knows, measured per sample."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(6)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * self.scale)

    return Scaled(), torch.randn(9, 6)


CASES = [
    (mlp, "kronecker", 4096),
    (mlp, "kronecker", 4),  # factors in diagonal blocks
    (mlp, "diagonal", 4096),
    (mlp, "dense", 4096),
    (convolution, "kronecker", 4096),
    (convolution, "diagonal", 4096),
    (sequences, "kronecker", 4096),
    (sequences, "diagonal", 4096),
    (raw, "kronecker", 4096),
]
cases = pytest.mark.parametrize(("make", "structure", "size"), CASES)
Make = Callable[[], tuple[nn.Module, Tensor]]


@pytest.fixture
def fixed_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    monkeypatch.setattr(privacy, "random_bytes", generator.bytes)


def tensors_of(term: Term) -> list[tuple[Tensor, ...]]:
    if isinstance(term, KroneckerTerm):
        return [pieces(term.inputs), pieces(term.outputs)]
    return [(term.matrix,)] if isinstance(term, DenseTerm) else [(term.diagonal,)]


def flat(terms: dict[str, list[Term]]) -> dict[str, list[Tensor]]:
    """The tensors of all terms as float64, by block, term and factor."""
    return {
        f"{name} {i} {k}": [t.double() for t in factor]
        for name, some in terms.items()
        for i, term in enumerate(some)
        for k, factor in enumerate(tensors_of(term))
    }


def pass_over(model: nn.Module, structure: Structure, **options: object) -> PrivatePass:
    budget = limpet.Privacy(3.0, 1e-3, clip=0.5)
    likelihood = resolve("categorical")
    return PrivatePass(model, discover(model, (), set()), likelihood, structure, privacy=budget, **options)  # type: ignore[arg-type]


def single(model: nn.Module, structure: Structure, x: Tensor, y: Tensor) -> dict[str, list[Tensor]]:
    """The Fisher of one example, by an ordinary pass."""
    likelihood = resolve("categorical")
    found = FisherPass(model, discover(model, (), set()), likelihood, structure).run([(x[None], y[None])])
    return flat(found.terms)


def length(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


def clipped_sums(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, structure: Structure, x: Tensor, clips: dict[str, float] | None
) -> tuple[PrivatePass, dict[str, list[Tensor]], dict[str, float]]:
    """Run a private pass without noise, at the given or the measured clips: its sums, and the clips in their order."""

    def without_noise(total: Tensor, deviation: float, *, symmetric: bool) -> Tensor:
        return total

    monkeypatch.setattr(private_pass, "noised", without_noise)
    one_pass = pass_over(model, structure)
    if clips is not None:
        monkeypatch.setattr(one_pass, "_measured_clips", lambda: clips)
    y = torch.arange(len(x)) % 3
    found = one_pass.run([(x[:4], y[:4]), (x[4:], y[4:])], progress=False)
    return one_pass, flat(found.terms), one_pass.clips


@cases
@pytest.mark.usefixtures("fixed_noise")
def test_sums_are_those_of_clipped_examples(
    make: Make, structure: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs' factor is divided by the number of examples, as is the mean of a a^T."""
    torch.manual_seed(0)
    model, x = make()
    one_pass, found, clips = clipped_sums(monkeypatch, model.double(), Structure(structure, size), x_of(x), None)
    y = torch.arange(len(x)) % 3
    alone = [single(model, Structure(structure, size), a, b) for a, b in zip(x_of(x), y, strict=True)]
    assert set(found) == set(alone[0]) and len(clips) == len(found)
    some_clipped = False
    for key, sums in found.items():
        norms = [length(each[key]) for each in alone]
        # the clip of this factor is the one whose measured norms are these
        (name,) = {n for n, seen in one_pass.norms.items() if np.allclose(seen, norms, rtol=1e-6)} or {""}
        weights = [min(1.0, clips[name] / norm) if norm else 1.0 for norm in norms]
        some_clipped |= min(weights) < 1
        expected = [sum(w * each[key][i] for w, each in zip(weights, alone, strict=True)) for i in range(len(sums))]
        for total, wanted in zip(sums, expected, strict=True):
            ratio = 1 / len(x) if name.endswith("/data") else 1.0
            torch.testing.assert_close(total, wanted * ratio, rtol=1e-6, atol=1e-12)
    assert some_clipped


def x_of(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


@cases
@pytest.mark.usefixtures("fixed_noise")
def test_neighbouring_data_differ_by_at_most_the_sensitivity(
    make: Make, structure: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    model, x = make()
    model, x = model.double(), x_of(x)
    x = 3 * x if x.is_floating_point() else x  # so that contributions differ
    form = Structure(structure, size)
    one_pass, _, clips = clipped_sums(monkeypatch, model, form, x, None)

    def released(data: Tensor) -> Tensor:
        """All sums, in units of their clips, over a fixed number of examples."""
        own = pass_over(model, form)
        monkeypatch.setattr(own, "_measured_clips", lambda: clips)
        kept: dict[str, list[Tensor]] = {}

        def result(*_: object) -> None:
            kept.update(own.totals)

        monkeypatch.setattr(own, "_result", result)
        own.run([(data, torch.arange(len(data)) % 3)], progress=False)
        return torch.cat([t.flatten() / clips[key] for key, totals in sorted(kept.items()) for t in totals])

    full = released(x)
    count = len(clips)
    largest = 0.0
    for n in (0, 4, 8):
        other = x.clone()
        other[n] = -5 * x[n] if x.is_floating_point() else torch.full_like(x[n], n % 7)
        changed = float((released(other) - full).norm())
        assert changed <= math.sqrt(2 * count) * (1 + 1e-9)
        largest = max(largest, changed)
    removed = released(x[:-1])  # the last one, so that the targets of the others stay
    assert float((removed - full).norm()) <= math.sqrt(count) * (1 + 1e-9)
    assert largest > 0.05 * math.sqrt(count)
    deviations = one_pass.deviations()
    budget = one_pass.privacy
    for key, clip in clips.items():
        assert deviations[key] == pytest.approx(clip * math.sqrt(2 * count) / (budget.mu * math.sqrt(0.9)))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (1.0, 1e-5), (8.0, 1e-5), (30.0, 1e-9)])
def test_calibration_against_the_definition(epsilon: float, delta: float) -> None:
    """delta is the integral of max(0, p - e^epsilon q) for two normals at distance mu."""
    mu = limpet.Privacy(epsilon, delta).mu
    x = np.linspace(-15, mu + 15, 2_000_001)
    p, q = (np.exp(-0.5 * (x - at) ** 2) / math.sqrt(2 * math.pi) for at in (mu, 0.0))
    integral = np.trapezoid(np.maximum(0, p - math.exp(epsilon) * q), x)
    assert integral == pytest.approx(delta, rel=1e-4)
    budget = limpet.Privacy(epsilon, delta)
    assert budget.mu_clip**2 + budget.mu_sums**2 == pytest.approx(mu**2)


def test_known_value_of_balle_and_wang() -> None:
    """For epsilon = 1 and delta = 1e-5 the noise of the analytic mechanism is 3.730, of the classical one 4.84."""
    assert 1 / limpet.Privacy(1.0, 1e-5).mu == pytest.approx(3.7306, abs=1e-4)


@pytest.mark.usefixtures("fixed_noise")
def test_noise_is_normal_symmetric_and_of_the_given_size() -> None:
    drawn = privacy.normal(400_001)
    assert drawn.shape == (400_001,) and abs(float(drawn.mean())) < 0.01 and abs(float(drawn.std()) - 1) < 0.01
    for z, share in ((0.0, 0.5), (1.0, 0.8413), (-2.0, 0.0228), (3.0, 0.99865)):
        assert float((drawn <= z).double().mean()) == pytest.approx(share, abs=0.003)
    large = 1e6 * torch.eye(300, dtype=torch.float64)  # no eigenvalue is near the threshold
    found = privacy.noised(large, 2.0, symmetric=True) - large
    torch.testing.assert_close(found, found.mT)
    assert float(found.diagonal().std()) == pytest.approx(2.0, rel=0.15)
    assert float(found.triu(1).flatten().square().sum() * 2 / (300 * 299)) == pytest.approx(2.0, rel=0.05)
    nothing = privacy.noised(torch.zeros(300, 300, dtype=torch.float64), 2.0, symmetric=True)
    assert float(torch.linalg.matrix_norm(nothing, 2)) < 2.2 * math.sqrt(600)
    assert int((torch.linalg.eigvalsh(nothing) > 1e-9).sum()) <= 2


@pytest.mark.usefixtures("fixed_noise")
def test_small_eigenvalues_become_their_mean() -> None:
    """Two directions stand out of noise of size sqrt(600) = 24; of the others only the mean is known."""
    values = torch.linspace(0.5, 1.5, 300, dtype=torch.float64)
    values[:2] = 1000.0
    basis = torch.linalg.qr(torch.randn(300, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    found = torch.linalg.eigvalsh(privacy.noised(basis * values @ basis.mT, 1.0, symmetric=True))
    assert float(found[-2:].mean()) == pytest.approx(1000.0, rel=0.02)
    torch.testing.assert_close(found[:-8], found[:1].expand(292))  # a few are above the edge by chance
    assert float(found[0]) == pytest.approx(1.0, abs=0.3)
    assert int((privacy.noised(torch.diag(values[:1]), 1e6, symmetric=True) > 0).sum()) <= 1


def test_noise_comes_from_the_system_and_leaves_the_generators_alone() -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), [(torch.randn(50, 3), torch.randint(0, 2, (50,)))]
    before = torch.get_rng_state(), np.random.get_state()[1].copy()

    def trace() -> float:
        memory = limpet.OnlineLaplace(model)
        memory.consolidate(data, privacy=limpet.Privacy(50.0, 1e-3))
        return float(memory.posterior.held["model"].precision.trace())

    assert trace() != trace()
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1] == before[1]).all()


@pytest.mark.usefixtures("fixed_noise")
def test_a_quantile_is_found_within_a_factor_of_two() -> None:
    norms = (torch.arange(1, 1001) / 1000 * 5.0).tolist()
    assert privacy.private_quantile(norms, 0.9, 0.0) == 8.0  # the quantile is 4.5
    assert privacy.private_quantile(norms, 0.3, 0.0) == 2.0
    assert privacy.private_quantile(norms, 0.3, 20.0) in (1.0, 2.0, 4.0)
    assert privacy.private_quantile([0.0] * 100, 0.5, 0.0) == 2.0**-64


@pytest.mark.usefixtures("fixed_noise")
def test_little_noise_gives_the_ordinary_fisher() -> None:
    """With a very large budget and hardly any clipping, the private memory is the ordinary one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    data = [(torch.randn(1000, 6), torch.randint(0, 3, (1000,))) for _ in range(20)]
    private, plain = limpet.OnlineLaplace(model), limpet.OnlineLaplace(model)
    private.consolidate(data, privacy=limpet.Privacy(100.0, 1e-6, clip=0.999))
    plain.consolidate(data)
    for name, held in plain.posterior.held.items():
        a, b = held.precision.dense(), private.posterior.held[name].precision.dense()
        assert float((a - b).norm() / a.norm()) < 0.05
    assert private.privacy == (limpet.Privacy(100.0, 1e-6, clip=0.999),)


def test_sampled_targets_do_not_depend_on_other_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if two examples are equal, and one of them is replaced."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).double(), torch.randn(5, 4).double()
    x[3] = x[1]
    monkeypatch.setattr(private_pass, "noised", lambda total, deviation, *, symmetric: total)

    def gradients(data: Tensor) -> Tensor:
        own = pass_over(model, Structure("kronecker", 100), fisher="sampled")
        clips = {"model|linear/data": 1e6, "model|linear/gradients": 1e6}
        monkeypatch.setattr(own, "_measured_clips", lambda: clips)
        (term,) = own.run([(data, torch.zeros(5, dtype=torch.long))], progress=False).terms["model"]
        assert isinstance(term, KroneckerTerm) and isinstance(term.outputs, Tensor)
        return term.outputs

    full, replaced = gradients(x), gradients(torch.cat([x[:1], 0 * x[:1], x[2:]]))
    assert torch.linalg.matrix_rank(full - replaced, atol=1e-9) <= 2  # one contribution less, one more


def test_values_out_of_range_are_rejected() -> None:
    for bad in ({"epsilon": 0}, {"epsilon": 101}, {"delta": 0}, {"delta": 1}, {"clip": 0}, {"clip": 1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            limpet.Privacy(**{"epsilon": 1.0, "delta": 1e-5, **bad})


def test_examples_that_differ_in_more_than_values_are_rejected() -> None:
    model = nn.Linear(4, 3)
    y = torch.tensor([[0, 1, 2], [0, 1, -100]])
    with pytest.raises(limpet.UnsupportedError, match="same number of positions"):
        limpet.OnlineLaplace(model).consolidate([(torch.randn(2, 3, 4), y)], privacy=limpet.Privacy(1.0, 1e-5))
    memory = limpet.OnlineLaplace(model, likelihood=limpet.Gaussian("estimate"))
    with pytest.raises(limpet.UnsupportedError, match="a number as variance"):
        memory.consolidate([(torch.randn(5, 4), torch.randn(5, 3))], privacy=limpet.Privacy(1.0, 1e-5))
    batches: Iterator[tuple[Tensor, Tensor]] = iter([(torch.randn(5, 4), torch.zeros(5, dtype=torch.long))])
    with pytest.raises(limpet.LimpetError, match="twice"):
        limpet.OnlineLaplace(model).consolidate(batches, privacy=limpet.Privacy(1.0, 1e-5))

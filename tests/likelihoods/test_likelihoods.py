"""Likelihoods: exact roots against the Hessian computed by autograd, sampled roots in expectation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import limpet.likelihoods as L
from limpet.errors import UnsupportedError
from limpet.likelihoods.random import PerExampleRNG
from reference import close, measure, output_hessian

CASES: dict[str, tuple[L.Likelihood, Any, Any]] = {
    "categorical": (L.Categorical(), torch.randn(1, 5).double(), torch.tensor([2])),
    "two classes": (L.Categorical(), torch.randn(1, 2).double(), torch.tensor([1])),
    "sure": (L.Categorical(), torch.tensor([[0.0, 800.0, -800.0, 0.0]]).double(), torch.tensor([1])),
    "bernoulli": (L.Bernoulli(), torch.randn(1, 4).double(), torch.tensor([[0.0, 1.0, 1.0, 0.0]])),
    "gaussian": (L.Gaussian(0.3), torch.randn(1, 4).double(), torch.randn(1, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_roots_are_square_roots_of_the_hessian(name: str) -> None:
    likelihood, outputs, targets = CASES[name]
    roots = torch.stack([r.flatten() for r in likelihood.roots(outputs, targets)])
    assert len(roots) == likelihood.root_count(outputs)
    hessian = output_hessian(likelihood, outputs, targets)
    assert (roots.T @ roots - hessian).abs().max() < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_negative_log_likelihood(name: str) -> None:
    likelihood, outputs, targets = CASES[name]
    expected = L.Likelihood.gradient(likelihood, outputs, targets)
    assert (likelihood.gradient(outputs, targets) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_sampled_roots_have_the_hessian_as_second_moment(name: str) -> None:
    likelihood, outputs, targets = CASES[name]
    many = outputs.expand(20_000, -1)
    root = likelihood.sampled_root(many, None, torch.Generator().manual_seed(0))
    hessian = output_hessian(likelihood, outputs, targets)
    moment = root.T @ root / len(root)
    assert (moment - hessian).abs().max() < 0.05 * max(float(hessian.abs().max()), 1e-6)


def test_negative_log_likelihoods_are_those_of_torch_distributions() -> None:
    x, y = torch.randn(6, 4).double(), torch.randn(6, 4).double()
    normal = torch.distributions.Normal(x, 0.3**0.5).log_prob(y).sum()
    close(L.Gaussian(0.3).negative_log_likelihood(x, y), -normal)
    label = torch.randint(0, 4, (6,))
    categorical = torch.distributions.Categorical(logits=x).log_prob(label).sum()
    close(L.Categorical().negative_log_likelihood(x, label), -categorical)
    bits = (y > 0).double()
    bernoulli = torch.distributions.Bernoulli(logits=x).log_prob(bits).sum()
    close(L.Bernoulli().negative_log_likelihood(x, bits), -bernoulli)


def test_ignored_positions_and_class_dim() -> None:
    logits = torch.randn(2, 5, 3).double()  # (n, classes, positions)
    labels = torch.tensor([[0, -100, 4], [2, 2, -100]])
    likelihood = L.Categorical(class_dim=1)
    close(likelihood.negative_log_likelihood(logits, labels), F.cross_entropy(logits, labels, reduction="sum"))
    assert likelihood.count(logits, labels) == 4
    root = likelihood.sampled_root(logits, labels, None)
    assert root.shape == logits.shape
    assert not root[0, :, 1].any() and not root[1, :, 2].any() and root[0, :, 0].any()
    close(likelihood.mean(logits), logits.softmax(1))


def test_estimated_noise_scales_the_fisher() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(50, 3).double(), torch.randn(50, 2).double()
    variance = float((model(x).detach() - y).square().mean())
    for fisher in ("exact", "empirical"):
        given = measure(model, [(x, y)], L.Gaussian(variance), fisher=fisher)
        found = measure(model, [(x[:20], y[:20]), (x[20:], y[20:])], L.Gaussian("estimate"), fisher=fisher)
        close(found.terms["model"][0].diagonal, given.terms["model"][0].diagonal)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classes, self.value = nn.Linear(3, 4), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.classes(x), self.value(x)


def test_several_outputs_add_up() -> None:
    torch.manual_seed(0)
    model = TwoHeads().double()
    x = torch.randn(8, 3).double()
    y = (torch.randint(0, 4, (8,)), torch.randn(8, 2).double())
    both = L.MultiOutput(L.Categorical(), L.Gaussian(0.5))
    for fisher in ("exact", "empirical"):
        found = measure(model, [(x, y)], both, fisher=fisher)
        for i, (name, part) in enumerate([("classes", L.Categorical()), ("value", L.Gaussian(0.5))]):
            alone = measure(getattr(model, name), [(x, y[i])], part, fisher=fisher)
            close(found.terms[name][0].diagonal, alone.terms["model"][0].diagonal)


class Poisson(L.Likelihood):
    name = "poisson"

    def negative_log_likelihood(self, outputs: Any, targets: Any) -> Tensor:
        return F.poisson_nll_loss(outputs, targets, reduction="sum")

    def sample(self, outputs: Any, generator: torch.Generator | None) -> Tensor:
        return torch.poisson(outputs.exp(), generator=generator)


def test_a_likelihood_of_ones_own_is_two_methods() -> None:
    """The Fisher of a Poisson with log rate f is exp(f)."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False).double()
    x = torch.randn(10, 1).double()
    found = measure(model, [x], Poisson(), draws=8_000)
    assert found.kind == "sampled"
    expected = (x.square() * model(x).exp()).sum()
    close(found.terms["model"][0].diagonal.sum(), expected.detach(), 0.05)
    with pytest.raises(UnsupportedError, match="sampled"):
        measure(model, [x], Poisson(), fisher="exact")


def test_wrong_input_names_the_mend() -> None:
    with pytest.raises(ValueError, match="categorical, bernoulli, gaussian"):
        L.resolve("softmax")
    with pytest.raises(ValueError, match="estimate"):
        L.Gaussian(-1.0)
    with pytest.raises(UnsupportedError, match="unsqueeze"):
        L.Gaussian().loss(torch.zeros(3, 1), torch.zeros(3))
    with pytest.raises(UnsupportedError, match="bernoulli"):
        L.Categorical().sample(torch.zeros(3), None)
    with pytest.raises(UnsupportedError, match="forward="):
        L.as_tensors({"logits": 1})


def test_several_outputs_count_the_examples_of_all() -> None:
    both = L.MultiOutput(L.Categorical(), L.Gaussian())
    outputs = (torch.zeros(5, 4), torch.zeros(5, 1))
    assert both.count(outputs, (torch.tensor([0, -100, 1, -100, 2]), torch.zeros(5, 1))) == 5


def test_bernoulli_targets_are_checked() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(UnsupportedError, match="categorical"):
        measure(model, [(torch.randn(4, 3), torch.full((4, 2), 3.0))], L.Bernoulli())


def test_what_is_drawn_for_an_example_depends_on_it_and_the_seed_alone() -> None:
    x = torch.randn(400, 7, generator=torch.Generator().manual_seed(0))
    outputs = torch.randn(400, 5, generator=torch.Generator().manual_seed(1))
    given = outputs
    for likelihood in (L.Categorical(), L.Bernoulli(), L.Gaussian(0.3)):
        assert likelihood.by_example
        drawn = likelihood.sample(given, PerExampleRNG.of([x], 3))
        order = torch.randperm(400, generator=torch.Generator().manual_seed(2))
        assert torch.equal(likelihood.sample(given[order], PerExampleRNG.of([x[order]], 3)), drawn[order])
        assert torch.equal(likelihood.sample(given[17:29], PerExampleRNG.of([x[17:29]], 3)), drawn[17:29])
        assert not torch.equal(likelihood.sample(given, PerExampleRNG.of([x], 4)), drawn)
        stream = PerExampleRNG.of([x], 3)
        assert torch.equal(likelihood.sample(given, stream), drawn)
        assert not torch.equal(likelihood.sample(given, stream), drawn)  # the next draw


def test_draws_have_the_distribution_of_the_likelihood() -> None:
    n = 40_000
    x = torch.arange(n).unsqueeze(-1)
    logits = torch.tensor([0.3, -1.0, 2.0]).expand(n, 3)
    labels = L.Categorical().sample(logits, PerExampleRNG.of([x], 0))
    shares = torch.bincount(labels, minlength=3) / n
    assert torch.allclose(shares, logits[0].softmax(0), atol=0.01)
    ones = L.Bernoulli().sample(logits, PerExampleRNG.of([x], 0)).mean(0)
    assert torch.allclose(ones, logits[0].sigmoid(), atol=0.01)
    noise = L.Gaussian(0.3).sample(torch.zeros(n, 2), PerExampleRNG.of([x], 0))
    assert torch.allclose(noise.mean(0), torch.zeros(2), atol=0.01)
    assert torch.allclose(noise.T.cov(), 0.3 * torch.eye(2), atol=0.01)
    fourth = noise.pow(4).mean(0) / noise.square().mean(0).square()
    assert torch.allclose(fourth, torch.full((2,), 3.0), atol=0.1)


def test_classes_before_the_last_dimension_have_the_same_roots() -> None:
    logits = torch.randn(5, 5, dtype=torch.float64)
    for first, last in zip(
        L.Categorical(class_dim=1).roots(logits, None), L.Categorical().roots(logits, None), strict=True
    ):
        close(first, last)


def test_any_whole_numbers_are_labels() -> None:
    logits, labels = torch.randn(6, 4), torch.randint(0, 4, (6,))
    for kind in (torch.int32, torch.uint8):
        close(L.Categorical().loss(logits, labels.to(kind)), F.cross_entropy(logits, labels))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_confident_outputs_in_half_precision_have_a_fisher(dtype: torch.dtype) -> None:
    logits = torch.tensor([[7.0], [-9.0]])
    for exact, half in zip(L.Bernoulli().roots(logits, None), L.Bernoulli().roots(logits.to(dtype), None), strict=True):
        assert half.dtype == dtype
        close(half.float(), exact, 0.01)

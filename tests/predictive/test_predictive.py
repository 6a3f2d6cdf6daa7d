"""Posterior predictive, compared with the explicit Jacobian and dense precision, and with laplace-torch."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import limpet
import networks
from limpet.errors import LimpetError, UnsupportedError
from limpet.posterior.marginal_likelihood import evidence_prior, log_evidence
from limpet.predictive import sample_weights
from limpet.predictive.linearized import OutputDistribution

KINDS = [
    "linear",
    "in-place relu",
    "sequence",
    "conv1d groups",
    "conv2d stride dilation",
    "embedding",
    "layer norm sequence",
    "group norm",
    "reused module",
    "tied weight",
    "direct parameter",
    "attention",
    "lstm",
    "sequence first",
    "sequence first, as many positions as examples",
]


def learned(name: str, structure: str, **options: Any) -> tuple[limpet.OnlineLaplace, Tensor]:
    model, x, y = networks.build(name)
    memory = limpet.OnlineLaplace(model, structure=structure, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for strength, data in ((2.0, x), (1.0, x.flip(0))):
            memory.strength = strength
            memory.consolidate([(data, y)])
    return memory, x


def dense_covariance(memory: limpet.OnlineLaplace, x: Tensor) -> Tensor:
    """J L^-1 J^T, written out."""
    weights = {name: p.detach() for name, p in memory.model.named_parameters()}
    memory.model.eval()
    jacobians = jacrev(lambda w: functional_call(memory.model, w, (x,)))(weights)
    total = torch.zeros(1)
    for held in memory.posterior.held.values():
        parts = [jacobians[name] for name in held.block.parameters]
        J = torch.stack(
            [
                torch.stack(
                    [held.block.matrix([part[n, c] for part in parts]).flatten() for c in range(parts[0].shape[1])]
                )
                for n in range(len(x))
            ]
        )
        total = total + J @ torch.linalg.inv(held.precision.dense()) @ J.mT
    return total


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the reference, in attention
@pytest.mark.parametrize("structure", ["kronecker", "diagonal"])
@pytest.mark.parametrize("name", KINDS)
def test_the_covariance_of_the_outputs_is_that_of_the_linearised_network(name: str, structure: str) -> None:
    memory, x = learned(name, structure)
    found = memory.output_distribution(x)
    expected = dense_covariance(memory, x)
    assert (found.covariance - expected).norm() < 1e-6 * expected.norm()
    memory.model.eval()
    assert torch.equal(found.mean, memory.model(x).detach())


def test_a_dense_precision_and_many_examples_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limpet.predictive.linearized.CHUNK", 200)
    memory, x = learned("linear", "dense")
    expected = dense_covariance(memory, x)
    assert (memory.output_distribution(x).covariance - expected).norm() < 1e-6 * expected.norm()


def test_outputs_are_those_at_the_mean_wherever_the_weights_are() -> None:
    memory, x = learned("linear", "kronecker")
    before = memory.output_distribution(x)
    with torch.no_grad():
        for parameter in memory.model.parameters():
            parameter += 1.0
    weights = copy.deepcopy(memory.model.state_dict())
    after = memory.output_distribution(x)
    assert (after.mean - before.mean).norm() < 1e-9 * before.mean.norm()
    assert (after.covariance - before.covariance).norm() < 1e-9 * before.covariance.norm()
    for name, value in memory.model.state_dict().items():
        assert torch.equal(value, weights[name])
    assert all(parameter.grad is None for parameter in memory.model.parameters())


def test_drawn_outputs_have_the_covariance() -> None:
    mean = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    covariance = torch.tensor([[[2.0, 0.6], [0.6, 0.5]]], dtype=torch.float64)
    drawn = OutputDistribution(mean, covariance).sample(20000, torch.Generator().manual_seed(0))[:, 0]
    assert (drawn.mean(0) - mean[0]).abs().max() < 0.05
    assert (drawn.T.cov() - covariance[0]).abs().max() < 0.06


def test_linearised_and_sampled_agree_where_the_network_is_linear() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    x, y = torch.randn(50, 3).double(), torch.randint(0, 4, (50,))
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, y)])
    generator = torch.Generator().manual_seed(0)
    sampled = memory.predictive(x[:5], link_approximation="sampled", draws=4000, generator=generator)
    linearised = memory.predictive(x[:5], link_approximation="linearised", draws=4000, generator=generator)
    assert (sampled - linearised).abs().max() < 0.02
    assert (memory.predictive(x[:5], link_approximation="probit") - linearised).abs().max() < 0.05


def test_the_probit_of_a_bernoulli_is_nearly_its_integral() -> None:
    grid = torch.linspace(-12, 12, 20001, dtype=torch.float64)
    for mean, variance in ((0.5, 0.3), (-2.0, 4.0), (3.0, 9.0)):
        density = torch.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
        integral = torch.trapezoid((mean + math.sqrt(variance) * grid).sigmoid() * density, grid)
        found = limpet.Bernoulli().probit(torch.tensor(mean), torch.tensor(variance))
        assert abs(float(found - integral)) < 0.02
    assert limpet.Gaussian().probit(torch.tensor(2.0), torch.tensor(5.0)) == 2.0


def test_another_prior_takes_the_place_of_the_memorys() -> None:
    memory, x = learned("linear", "kronecker", prior_precision=3.0)
    other, _ = learned("linear", "kronecker", prior_precision=0.5)
    found = memory.output_distribution(x, prior_precision=0.5).covariance
    expected = other.output_distribution(x).covariance
    assert (found - expected).norm() < 1e-9 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["kronecker", "diagonal", "dense"])
def test_weights_drawn_with_another_prior_have_its_covariance(structure: str) -> None:
    memory, _ = learned("linear", structure, prior_precision=3.0)
    generator = torch.Generator().manual_seed(0)
    held = next(iter(memory.posterior.held.values()))
    drawn = [sample_weights(memory.posterior, generator, 0.5) for _ in range(4000)]
    flat = torch.stack([(held.block.gather(weights) - held.mean).flatten() for weights in drawn])
    n = flat.shape[1]
    expected = torch.linalg.inv(held.precision.dense() - 2.5 * torch.eye(n, dtype=torch.float64))
    assert (flat.T @ flat / len(flat) - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("structure", ["kronecker", "diagonal", "dense"])
def test_the_evidence_is_that_of_the_dense_precision_and_its_prior_the_best(structure: str) -> None:
    memory, _ = learned("linear", structure, prior_precision=0.7)
    expected = 0.0
    for held in memory.posterior.held.values():
        n = held.mean.numel()
        expected -= 0.5 * (float(torch.logdet(held.precision.dense())) - n * math.log(0.7))
        expected -= 0.35 * float(held.mean.square().sum())
    assert log_evidence(memory.posterior, 0.7) == pytest.approx(expected, rel=1e-6)
    best = evidence_prior(memory.posterior)
    assert all(log_evidence(memory.posterior, best) >= log_evidence(memory.posterior, best * f) for f in (0.97, 1.03))
    same = memory.predictive(torch.ones(2, 4).double(), link_approximation="probit", prior_precision="evidence")
    assert torch.equal(
        same, memory.predictive(torch.ones(2, 4).double(), link_approximation="probit", prior_precision=best)
    )


def test_inputs_of_any_form_and_a_forward_of_ones_own() -> None:
    memory, x = learned("linear", "kronecker")
    found = memory.predictive({"x": x}, link_approximation="probit", forward=lambda model, batch: model(batch["x"]))
    assert torch.equal(found, memory.predictive(x, link_approximation="probit"))
    generator = torch.Generator().manual_seed(0)
    drawn = memory.predictive({"input": x}, link_approximation="sampled", draws=3, generator=generator)
    assert torch.equal(
        drawn, memory.predictive(x, link_approximation="sampled", draws=3, generator=torch.Generator().manual_seed(0))
    )


def test_wrong_questions_name_the_mend() -> None:
    memory, x = learned("linear", "kronecker")
    with pytest.raises(ValueError, match="probit, linearised, sampled"):
        memory.predictive(x, link_approximation="exact")
    with pytest.raises(ValueError, match="evidence"):
        memory.predictive(x, link_approximation="probit", prior_precision="best")
    with pytest.raises(UnsupportedError, match="link_approximation='sampled'"):
        memory.predictive(x, link_approximation="probit", forward=lambda model, x: model(x).repeat(1, 30))
    with pytest.raises(LimpetError, match="consolidate"):
        limpet.OnlineLaplace(nn.Linear(2, 2)).predictive(
            torch.ones(1, 2), link_approximation="probit", prior_precision="evidence"
        )


def test_it_agrees_with_laplace_torch() -> None:
    """On a network without biases, which laplace-torch keeps as blocks of their own."""
    laplace = pytest.importorskip("laplace")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
    x, y = torch.randn(60, 4), torch.randint(0, 3, (60,))
    memory = limpet.OnlineLaplace(model, prior_precision=1.0)
    memory.consolidate([(x, y)])
    theirs = laplace.Laplace(
        copy.deepcopy(model), "classification", subset_of_weights="all", hessian_structure="kron", prior_precision=1.0
    )
    data = torch.utils.data.TensorDataset(x, y)
    theirs.fit(torch.utils.data.DataLoader(data, batch_size=60))
    mean, covariance = theirs._glm_predictive_distribution(x)
    found = memory.output_distribution(x)
    assert (found.mean - mean).norm() < 1e-5 * mean.norm()
    assert (found.covariance - covariance).norm() < 1e-3 * covariance.norm()
    assert (memory.predictive(x, link_approximation="probit") - theirs(x, link_approx="probit")).abs().max() < 1e-4


def test_blocks_without_a_layer_alone() -> None:
    """As those of Synaptic Intelligence: J L^-1 J^T with a diagonal L."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2).double(), torch.randn(20, 3).double(), torch.randint(0, 2, (20,))
    memory = limpet.SynapticIntelligence(model, prior_precision=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memory.protect(optimizer, examples=20):
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    memory.consolidate()
    found = memory.output_distribution(x[:4])
    inverse = {name: 1 / held.precision.dense().diagonal() for name, held in memory.posterior.held.items()}
    weight, bias = inverse["weight"].reshape(2, 3), inverse["bias"]
    expected = torch.diag_embed(x[:4].square() @ weight.mT + bias)
    assert torch.allclose(found.covariance, expected)

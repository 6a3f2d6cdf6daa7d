"""Drift, KL(before || now) on a probe, compared with an explicit computation of the divergence."""

from __future__ import annotations

import copy
import json
import math
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

import limpet
from limpet.errors import LimpetError, LimpetWarning, MemoryFileError, UnsupportedError
from limpet.forgetting.drift import Drift, exact_drift, information
from limpet.forgetting.probe import Probe
from limpet.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, MultiOutput
from limpet.methods.repair_pass import default_budget
from states import changed, metadata


def net(outputs: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def moved(model: nn.Module, size: float = 0.3, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += size * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)


def inputs(n: int = 50, seed: int = 1) -> Tensor:
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def kl(before: Tensor, now: Tensor) -> Tensor:
    """KL between two categorical distributions given by logits, over the last dimension."""
    p, q = before.log_softmax(-1), now.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def test_it_is_the_divergence_and_its_standard_error() -> None:
    model, x = net(), inputs()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x[:20], torch.zeros(20).long()), (x[20:], torch.zeros(30).long())], probe=45, progress=False)
    before = model(x[:45]).detach()
    assert float(memory.drift()) == 0
    moved(model)
    each = kl(before, model(x[:45]).detach())
    found = memory.drift()
    assert math.isclose(found, float(each.mean()), rel_tol=1e-12)
    assert math.isclose(found.standard_error, float(each.std() / math.sqrt(45)), rel_tol=1e-9)
    assert found.examples == 45


def test_with_the_model_before_nothing_has_to_be_remembered() -> None:
    model, x = net(), inputs()
    before = copy.deepcopy(model)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, torch.zeros(50).long())], probe=50, progress=False)
    moved(model)
    assert math.isclose(memory.drift(reference=before), memory.drift(), rel_tol=1e-12)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "divergence"),
    [
        (Gaussian(0.5), 3, lambda f, g: (f - g).square().sum(1)),
        (
            Bernoulli(),
            3,
            lambda f, g: (
                f.sigmoid() * (F.logsigmoid(f) - F.logsigmoid(g))
                + (-f).sigmoid() * (F.logsigmoid(-f) - F.logsigmoid(-g))
            ).sum(1),
        ),
        (Categorical(), 3, kl),
    ],
    ids=["gaussian", "bernoulli", "categorical"],
)
def test_every_likelihood_has_its_divergence(likelihood: Likelihood, outputs: int, divergence: Any) -> None:
    model, x = net(outputs), inputs()
    summary = likelihood.summary(model(x).detach(), None)
    before = model(x).detach()
    moved(model)
    now = model(x).detach()
    torch.testing.assert_close(likelihood.divergence(summary, now), divergence(before, now))
    both = MultiOutput(likelihood, Gaussian(1.0))
    summary = both.summary((before, before), None)
    wanted = divergence(before, now) + (before - now).square().sum(1) / 2
    torch.testing.assert_close(both.divergence(summary, (now, now)), wanted)


@pytest.mark.parametrize(
    ("likelihood", "constant"),
    [
        (Gaussian(0.5), lambda f: f.mean(0)),
        (Bernoulli(), lambda f: f.sigmoid().mean(0).logit()),
        (Categorical(), lambda f: f.softmax(1).mean(0).log()),
    ],
    ids=["gaussian", "bernoulli", "categorical"],
)
def test_information_is_the_drift_of_the_best_answer_that_is_the_same_for_all(likelihood: Any, constant: Any) -> None:
    outputs = net(3)(inputs()).detach()
    summaries = [likelihood.summary(part, None) for part in outputs.split(20)]
    same = constant(outputs)

    def drift_of(answer: Tensor) -> float:
        return float(likelihood.divergence(likelihood.summary(outputs, None), answer.expand_as(outputs)).mean())

    found = likelihood.information(summaries)
    assert math.isclose(found, drift_of(same), rel_tol=1e-9) and found > 0.01
    for seed in range(5):
        other = same + 0.1 * torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert drift_of(other) > found
    both = MultiOutput(likelihood, Gaussian(2.0))
    two = both.information([both.summary((part, part), None) for part in outputs.split(20)])
    assert two is not None and math.isclose(two, found + float(outputs.var(0, correction=0).sum()) / 4, rel_tol=1e-9)


def test_information_of_a_large_vocabulary_or_of_ignored_positions() -> None:
    logits = torch.randn(6, 5, 700, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    assert Categorical(class_dim=-1).information([Categorical(class_dim=-1).summary(logits, None, generator)]) is None
    labels = torch.zeros(6, 5).long()
    labels[2:, 1:] = -100
    tokens = Categorical(class_dim=-1)
    found = tokens.information([tokens.summary(logits, labels)])
    p = logits[labels == 0].softmax(-1)
    wanted = -(p.mean(0) * p.mean(0).log()).sum() + (p * p.log()).sum(-1).mean()
    assert found is not None and math.isclose(found, float(wanted), rel_tol=1e-9)


@pytest.mark.parametrize(("factor", "expected"), [(3.0, None), (0.1, 0.004), (30.0, 0.04)])
def test_the_default_budget_is_a_tenth_of_what_there_is_to_lose(factor: float, expected: float | None) -> None:
    model, x = net(), inputs()
    with torch.no_grad():
        model[-1].weight.mul_(factor)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, torch.zeros(50).long())], probe=50, progress=False)
    p = model(x).detach().softmax(1)
    tenth = 0.1 * float(-(p.mean(0) * p.mean(0).log()).sum() + (p * p.log()).sum(1).mean())
    found = default_budget(memory)
    assert math.isclose(found, tenth if expected is None else expected, rel_tol=1e-9)
    assert 0.004 < tenth < 0.04 or expected is not None
    moved(model, 3.0)
    limpet.repair(model, memory, [(inputs(100, seed=9), torch.randint(0, 3, (100,)))], budget="auto", progress=False)
    assert 0.8 * found < memory.drift().upper <= found


def test_a_noise_variance_that_is_estimated_scales_the_drift() -> None:
    model, x = net(2), inputs()
    y = model(x).detach() + 0.1 * torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    memory = limpet.OnlineLaplace(model, likelihood=Gaussian("estimate"))
    memory.consolidate([(x, y)], probe=50, progress=False)
    before = model(x).detach()
    variance = float((before - y).square().mean())
    moved(model)
    wanted = float((model(x).detach() - before).square().sum(1).mean()) / (2 * variance)
    assert math.isclose(memory.drift(), wanted, rel_tol=1e-9)
    spread = float(before.var(0, correction=0).sum()) / (2 * variance)
    assert math.isclose(information(memory.probes, memory.likelihood), spread, rel_tol=1e-9)


def test_a_likelihood_that_has_none_says_so() -> None:
    class Poisson(Likelihood):
        name = "poisson"

        def negative_log_likelihood(self, outputs: Any, targets: Any) -> Tensor:
            return F.poisson_nll_loss(outputs, targets, reduction="sum")

        def sample(self, outputs: Any, generator: Any) -> Tensor:
            return torch.poisson(outputs.exp(), generator=generator)

    model, x = net(1), inputs()
    memory = limpet.OnlineLaplace(model, likelihood=Poisson())
    with pytest.raises(UnsupportedError, match="`summary` and `divergence`"):
        memory.consolidate([(x, torch.ones(50, 1))], probe=5, progress=False)


def test_a_large_vocabulary_is_remembered_by_some_labels_without_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    before = 2 * torch.randn(400, 5000, generator=generator, dtype=torch.float64)
    now = before + 0.3 * torch.randn(400, 5000, generator=generator, dtype=torch.float64)
    likelihood = Categorical()
    exact = kl(before, now)
    summary = likelihood.summary(before, None, torch.Generator().manual_seed(1))
    assert {name: tuple(tensor.shape) for name, tensor in summary.items()} == {
        "labels": (400, 80),
        "log_probabilities": (400, 80),
        "weights": (400, 80),
    }
    found = likelihood.divergence(summary, now)
    error = float((found - exact).std()) / math.sqrt(400)
    assert abs(float(found.mean() - exact.mean())) < 3 * error
    assert error < 0.1 * float(exact.mean())
    # lumping what is left together, as if it were one label, would be too small
    top = before.log_softmax(-1).topk(64, -1)
    q = now.log_softmax(-1).gather(-1, top.indices)
    rest = [(1 - one.exp().sum(-1)).clamp_min(1e-12) for one in (top.values, q)]
    lumped = (top.values.exp() * (top.values - q)).sum(-1) + rest[0] * (rest[0] / rest[1]).log()
    assert float(lumped.mean()) < float(exact.mean()) - 3 * error
    assert float(likelihood.divergence(summary, before).abs().max()) < 1e-12


def test_positions_without_a_target_do_not_count() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x = torch.randn(10, 6, 4, dtype=torch.float64)
    y = torch.randint(0, 3, (10, 6)).masked_fill(torch.rand(10, 6) < 0.4, -100)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, y)], probe=10, progress=False)
    before = model(x).detach()
    moved(model)
    each = kl(before, model(x).detach())[y != -100]
    assert math.isclose(memory.drift(), float(each.mean()), rel_tol=1e-12)


def test_examples_without_a_target_do_not_count_either() -> None:
    model, x = net(), inputs()
    y = torch.zeros(50).long().masked_fill(torch.arange(50) % 3 == 0, -100)
    before = copy.deepcopy(model)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, y)], probe=50, progress=False)
    moved(model)
    wanted = float(kl(before(x).detach(), model(x).detach())[y != -100].mean())
    assert math.isclose(memory.drift(), wanted, rel_tol=1e-12)
    assert math.isclose(memory.drift(reference=before), wanted, rel_tol=1e-12)


def test_with_the_model_before_an_estimated_variance_scales_it_too() -> None:
    model, x = net(2), inputs()
    before = copy.deepcopy(model)
    memory = limpet.OnlineLaplace(model, likelihood=Gaussian("estimate"))
    memory.consolidate([(x, model(x).detach() + 0.1)], probe=50, progress=False)
    moved(model)
    assert math.isclose(memory.drift(reference=before), memory.drift(), rel_tol=1e-9)


def test_a_probe_keeps_the_form_of_its_batches_and_a_copy_of_them() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 3).double()

        def forward(self, pair: Any) -> Tensor:
            return self.inner(torch.cat(list(pair.values()) if isinstance(pair, dict) else pair, 1))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, a, b = Two(), inputs(), inputs(seed=2)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([((a, b), torch.zeros(50).long())], probe=50, progress=False)
    a += 1  # somebody's own business
    assert float(memory.drift()) == 0
    assert len(memory.probes[0].batches[0][0]) == 2


def test_a_probe_that_cannot_be_made_leaves_the_memory_as_it_was() -> None:
    model, x = net(), inputs()
    memory = limpet.OnlineLaplace(model)
    forward = lambda m, batch: (m(batch[0]), batch[1])  # noqa: E731
    with pytest.raises(UnsupportedError, match="store only tensors, numbers and strings"):
        memory.consolidate([(x, torch.zeros(50).long(), object())], forward=forward, probe=5, progress=False)
    assert memory.tasks == 0 and not memory.probes
    with pytest.raises(ValueError, match="at most 1000"):
        memory.consolidate([(x, torch.zeros(50).long())], probe=2000, progress=False)


def test_which_blocks_carry_it() -> None:
    model, x = net(), inputs()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, torch.zeros(50).long())], probe=50, progress=False)
    with torch.no_grad():
        model[2].weight += 1e-3 * torch.randn_like(model[2].weight)
    found = memory.drift(blocks=True)
    assert found.blocks.keys() == {"0", "2"}
    assert found.blocks["0"] == 0 and math.isclose(found.blocks["2"], found, rel_tol=1e-6)
    moved(model, 1e-3)
    found = memory.drift(blocks=True)
    assert math.isclose(sum(found.blocks.values()), found, rel_tol=1e-6)
    # for so small a change the shares are those of the quadratic, cross terms divided evenly
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    memory_of = dict(zip(weights, [*before_weights(memory)], strict=True))
    alone = {}
    for layer in ("0", "2"):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name] if name.startswith(layer) else memory_of[name])
        alone[layer] = float(memory.drift())
    cross = float(found) - sum(alone.values())
    for layer, value in alone.items():
        assert math.isclose(found.blocks[layer], value + cross / 2, rel_tol=0.02)


def before_weights(memory: Any) -> list[Tensor]:
    return [tensor for held in memory.posterior.held.values() for tensor in held.block.split(held.mean)]


def test_the_probe_goes_with_the_file_which_says_that_it_holds_inputs(tmp_path: Path) -> None:
    model, x = net(), inputs()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([{"input": x, "labels": torch.zeros(50).long()}], probe=7, progress=False)
    moved(model)
    memory.save(tmp_path / "memory.safetensors")
    again = limpet.load(tmp_path / "memory.safetensors", model)
    assert float(again.drift()) == float(memory.drift()) > 0
    assert again.nbytes == memory.nbytes
    assert "a probe that holds 7 inputs" in str(again.report())
    assert "holds" in metadata(memory)["settings"]["probes"][0]
    with safe_open(tmp_path / "memory.safetensors", "pt") as file:
        names = list(file.keys())
        kept = file.get_tensor("extra/probe/0/0/inputs/input")
    assert torch.equal(kept, x[:7])
    assert not any("labels" in name for name in names)  # targets are nobody's business


def test_a_damaged_probe_is_rejected() -> None:
    model, x = net(), inputs()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, torch.zeros(50).long())], probe=7, progress=False)
    state = changed(memory.state_dict())  # without checksums
    facts = metadata(memory)["settings"]["probes"]
    for wrong in (
        "no list",
        [{}],
        [{**facts[0], "batches": [{"tensor": "missing"}]}],
        [{**facts[0], "scale": "x"}],
    ):
        with pytest.raises(MemoryFileError):
            memory.load_state_dict(changed(state, settings={"probes": wrong}))
    short = {**state["tensors"]}
    name = next(name for name in short if name.startswith("extra/probe/0/0/outputs"))
    del short[name]
    with pytest.raises(MemoryFileError):
        memory.load_state_dict({"metadata": state["metadata"], "tensors": short})
    nan = {**state["tensors"], name: torch.full_like(state["tensors"][name], math.nan)}
    with pytest.raises(MemoryFileError, match="nan"):
        memory.load_state_dict({"metadata": state["metadata"], "tensors": nan})
    assert float(memory.drift()) == 0


def test_what_stands_in_the_way_of_a_probe_is_said() -> None:
    model, x = net(), inputs()
    memory = limpet.OnlineLaplace(model)
    data = [(x, torch.zeros(50).long())]
    memory.consolidate(data, progress=False)
    with pytest.raises(LimpetError, match="no probe"):
        memory.drift()
    moved(model)
    with pytest.raises(LimpetError, match="moved since"):
        memory.add_probe(data)
    with pytest.raises(UnsupportedError, match="does not support probe="):
        limpet.SynapticIntelligence(model).consolidate(probe=3)
    with pytest.raises(ValueError, match="probe"):
        memory.consolidate(data, probe=0, progress=False)


def test_a_new_head_is_noticed_and_the_old_one_can_be_given() -> None:
    model, x = net(), inputs()
    memory = limpet.OnlineLaplace(model, exclude=["2"])
    memory.consolidate([(x, torch.zeros(50).long())], probe=50, progress=False)
    head, before = model[2], model(x).detach()
    model[2] = nn.Linear(8, 3).double()
    with pytest.warns(LimpetWarning, match=r"not covered by the memory \(such as 2\.bias\)"):
        memory.drift()
    forward = lambda m, batch: head(m[1](m[0](batch[0])))  # noqa: E731
    assert float(memory.drift(forward=forward)) == 0
    moved(model[0])
    wanted = float(kl(before, forward(model, (x, None)).detach()).mean())
    assert math.isclose(memory.drift(forward=forward), wanted, rel_tol=1e-12)


def test_measuring_leaves_the_model_as_it_was() -> None:
    model, x = net(), inputs()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, torch.zeros(50).long())], probe=50, progress=False)
    moved(model)
    model.train()
    model[0].weight.requires_grad_(False)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    memory.drift(blocks=True)
    assert model.training and not model[0].weight.requires_grad and model[0].weight.grad is None
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("budget", [0.3, 0.1, 0.03])
def test_a_repair_keeps_a_budget_of_drift(budget: float) -> None:
    model, x = net(), inputs(400)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(x, torch.zeros(400).long())], probe=200, progress=False)
    moved(model, 0.5)
    tuned = copy.deepcopy(model.state_dict())
    assert memory.drift() > budget
    new = [(inputs(100, seed=9), torch.randint(0, 3, (100,)))]
    repair = limpet.repair(model, memory, new, budget=budget, progress=False)
    assert 0.9 * budget <= memory.drift().upper <= budget and memory.drift() < 0.97 * budget
    assert float(repair.measured().drift or 0) == float(memory.drift())
    repair.undo()
    generous = limpet.repair(model, memory, new, budget=100.0, progress=False)
    assert generous.strength == 0
    assert all(torch.equal(model.state_dict()[name], value) for name, value in tuned.items())


def test_a_budget_holds_on_the_data_of_which_the_probe_is_a_sample() -> None:
    """With the mean alone, half of all small probes would exceed it."""
    model, x = net(), inputs(3000)
    tuned, new = copy.deepcopy(model), [(inputs(100, seed=9), torch.randint(0, 3, (100,)))]
    moved(tuned, 0.5)
    start, above, budget, draws = copy.deepcopy(model.state_dict()), 0, 0.1, 25
    with torch.no_grad():
        before = model(x).log_softmax(1)
    for draw in range(draws):
        model.load_state_dict(start)
        memory = limpet.OnlineLaplace(model)
        memory.consolidate([(x[:400], torch.zeros(400).long())], progress=False)
        rows = torch.randperm(3000, generator=torch.Generator().manual_seed(draw))[:30]
        memory.add_probe([x[rows]])
        model.load_state_dict(tuned.state_dict())
        limpet.repair(model, memory, new, budget=budget, progress=False)
        with torch.no_grad():
            drift = (before.exp() * (before - model(x).log_softmax(1))).sum(1).mean()
        above += bool(drift > budget)
        assert 0.4 * budget < drift < 1.3 * budget
    assert above <= 0.2 * draws


def test_a_budget_that_cannot_be_kept_leaves_the_model_and_says_why() -> None:
    model, x = net(), inputs()
    memory = limpet.OnlineLaplace(model, exclude=["2"])
    memory.consolidate([(x, torch.zeros(50).long())], probe=50, progress=False)
    moved(model, 0.5)
    tuned = copy.deepcopy(model.state_dict())
    with pytest.warns(LimpetWarning), pytest.raises(LimpetError, match=r"no strength brings the drift within 0\.001"):
        limpet.repair(model, memory, [(x, torch.ones(50).long())], budget=0.001, progress=False)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in tuned.items())


def test_a_drift_is_a_number_that_can_be_copied_and_shown() -> None:
    drift = Drift([1.0, 2.0, 6.0], [10, 10, 10])
    assert float(drift) == 0.3 and copy.deepcopy(drift).standard_error == drift.standard_error
    assert str(drift) == "0.3 +- 0.15 nats"
    assert json.dumps(float(drift)) == "0.3"


def test_exact_drift_of_a_language_model_is_kl_over_the_whole_vocabulary() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    before = copy.deepcopy(model)
    moved(model, 0.1)
    rows = torch.randint(0, 300, (6, 9))
    mask = torch.ones(6, 9, dtype=torch.long)
    mask[0, 5:] = 0
    batch = {"input_ids": rows, "attention_mask": mask}
    probe = Probe.record(before, [batch], Categorical(), None, held=[], seed=0)
    found = exact_drift(model, before, [probe], Categorical())
    with torch.no_grad():
        logits = [m(input_ids=rows, attention_mask=mask).logits[:, :-1] for m in (before, model)]
    each = kl(logits[0].double(), logits[1].double())[mask[:, 1:].bool()]
    assert math.isclose(found, float(each.mean()), rel_tol=1e-5)


class Encoder(nn.Module):
    """An encoder with a small head, which the memory does not cover."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 8))
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def encoder(excluded: str = "head") -> tuple[Encoder, limpet.OnlineLaplace, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = Encoder().double(), inputs()
    memory = limpet.OnlineLaplace(model, exclude=[excluded])
    memory.consolidate([(x, torch.arange(50) % 3)], probe=50, progress=False)
    return model, memory, x, model(x).detach()


@pytest.mark.parametrize("outputs", [3, 5], ids=["of the same shape", "with more outputs"])
def test_drift_is_measured_through_the_old_head_if_it_was_replaced(outputs: int, tmp_path: Path) -> None:
    model, memory, x, before = encoder()
    memory.save(tmp_path / "m.safetensors")
    old = copy.deepcopy(model.head)
    torch.manual_seed(7)
    model.head = nn.Linear(8, outputs).double()
    assert float(memory.drift()) == pytest.approx(0, abs=1e-12)
    moved(model)
    new = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    expected = float(kl(before, old(model.body(x)).detach()).mean())
    for found in (memory.drift(), limpet.load(tmp_path / "m.safetensors", model).drift()):
        assert math.isclose(found, expected, rel_tol=1e-12)
    parts = memory.drift(blocks=True).blocks
    assert set(parts) == {"body.0", "body.2"} and math.isclose(sum(parts.values()), expected, rel_tol=1e-9)
    for name, p in model.named_parameters():
        assert p is new[name][0] and torch.equal(p, new[name][1])


def test_a_head_that_trains_on_is_part_of_the_drift() -> None:
    model, memory, x, before = encoder()
    with torch.no_grad():
        model.head.weight += 0.1 * torch.randn(3, 8, dtype=torch.float64)
    with pytest.warns(LimpetWarning, match="contribute to this drift"):
        found = memory.drift()
    assert found > 0 and math.isclose(found, float(kl(before, model(x).detach()).mean()), rel_tol=1e-12)


def test_a_new_head_with_the_seed_of_the_old_one_is_told_from_one_that_trains_on() -> None:
    model, memory, x, before = encoder()
    old = copy.deepcopy(model.head)
    new = copy.deepcopy(model.head)  # as it was initialized, before the old one was trained
    with torch.no_grad():
        new.weight += 0.05 * torch.randn(3, 8, generator=torch.Generator().manual_seed(3)).double()
    for replaced in (False, True):
        model.head = copy.deepcopy(new if replaced else old)
        memory.probes = tuple(replace(probe, new_head=None) for probe in memory.probes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for _ in range(2):  # the second training begins with a head that the first has trained
            with memory.protect(optimizer, examples=50):
                optimizer.zero_grad()
                torch.autograd.backward(F.cross_entropy(model(-x), torch.arange(50) % 3))
                optimizer.step()
        cosine = torch.cosine_similarity(model.head.weight.flatten(), old.weight.flatten(), dim=0)
        assert 0.5 < cosine.item() < 0.999
        with nullcontext() if replaced else pytest.warns(LimpetWarning, match="contribute to this drift"):
            found = memory.drift()
        expected = kl(before, (old if replaced else model.head)(model.body(x)).detach()).mean()
        assert found > 1e-4 and math.isclose(found, float(expected), rel_tol=1e-9)
    model.head = old
    expected = kl(before, model(x).detach()).mean()
    assert math.isclose(memory.drift(), float(expected), rel_tol=1e-9)


def test_most_of_a_model_is_not_stored_as_a_head() -> None:
    model, memory, _, _ = encoder(excluded="body.2")
    assert memory.probes[0].head == {} and set(memory.probes[0].outside) == {"body.2.weight", "body.2.bias"}
    model.body[2] = nn.Linear(40, 8).double()
    with pytest.warns(LimpetWarning, match="contribute to this drift"):
        assert memory.drift() > 0


def test_a_head_is_stored_beside_frozen_parameters_that_are_most_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Encoder().double(), inputs()
    model.body[2].requires_grad_(False)  # like embeddings: not covered, and 328 of 555 weights
    memory = limpet.OnlineLaplace(model, exclude=["head"])
    memory.consolidate([(x, torch.arange(50) % 3)], probe=50, progress=False)
    assert set(memory.probes[0].head) == {"head.weight", "head.bias"}
    before, old = model(x).detach(), copy.deepcopy(model.head)
    memory.save(tmp_path / "m.safetensors")
    model.head = nn.Linear(8, 3).double()
    with torch.no_grad():
        model.body[0].weight.mul_(1.1)
    expected = float(kl(before, old(model.body(x)).detach()).mean())
    for found in (memory.drift(), limpet.load(tmp_path / "m.safetensors", model).drift()):
        assert math.isclose(found, expected, rel_tol=1e-12)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian", "bernoulli"])
def test_outputs_of_another_shape_are_not_compared(likelihood: str) -> None:
    """Not even if they could be broadcast; a training that ends with a repair says so before it begins."""
    torch.manual_seed(0)
    model, x = Encoder().double(), inputs()
    targets = {"categorical": torch.arange(50) % 3}.get(likelihood, torch.randint(0, 2, (50, 3)).double())
    memory = limpet.OnlineLaplace(model, likelihood=likelihood, exclude=["body.0", "head"], strength="auto")
    memory.consolidate([(x, targets)], probe=50, progress=False)
    assert not memory.probes[0].head  # it would be more than a tenth of the model
    model.head = nn.Linear(8, 1).double()
    with pytest.raises(UnsupportedError, match="through the old one"), warnings.catch_warnings():
        warnings.simplefilter("ignore", LimpetWarning)
        memory.drift()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with pytest.raises(LimpetError, match="through the old one"), memory.protect(optimizer, examples=50):
        raise AssertionError("the block must not be entered")
    with memory.protect(optimizer, examples=50, mode="gradient") as protection:  # it is not protecting any more
        torch.autograd.backward(model(x).square().mean())
        optimizer.step()
    assert protection.steps == 1

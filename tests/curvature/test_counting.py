"""N is counted once, by the likelihood from real batches, and contradictions raise."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

import limpet
from limpet.curvature.counting import ROWS
from limpet.errors import CurvatureError, LimpetWarning
from limpet.likelihoods import Bernoulli, Categorical, Gaussian
from limpet.methods.repair_pass import HeldOutSplit

F = nn.functional


def tokens(rows: int = 40, length: int = 10) -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(rows, length, 4), torch.randint(0, 5, (rows, length)))


def flattened(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch[0]).flatten(0, 1), batch[1].flatten()


def trace(memory: limpet.OnlineLaplace) -> float:
    return sum(float(held.precision.trace()) for held in memory.posterior.held.values())


def memory_of(model: nn.Module, **options: Any) -> limpet.OnlineLaplace:
    return limpet.OnlineLaplace(model, prior_precision=0.0, **options)


def test_a_count_is_an_integer_that_knows_its_rows() -> None:
    count = limpet.Count(400, rows=40)
    assert count == 400 and count + 1 == 401 and count.unit == "predicted positions"
    assert str(count) == "400 predicted positions in 40 rows" and str(limpet.Count(7, rows=7)) == "7 rows"
    assert count.scaled(80) == 800 and count.scaled(80).rows == 80
    again = pickle.loads(pickle.dumps(count))
    assert again == count and again.rows == 40


def test_rows_and_positions() -> None:
    model, data = nn.Linear(4, 5), tokens()
    loader = DataLoader(data, batch_size=7, shuffle=True)
    labels = data.tensors[1].clone()
    labels[:, :3] = -100
    memory = memory_of(model)
    before = torch.random.get_rng_state()
    assert memory.count(loader) == 400 and memory.count(loader).rows == 40
    assert memory.count([(data.tensors[0], labels)]) == 280
    assert memory.count([(data.tensors[0][:, 0], labels[:, 5])]) == 40
    assert memory.count([(data.tensors[0], labels)], forward=flattened) == 280
    assert memory.count(DataLoader(data, batch_size=7, sampler=SubsetRandomSampler(range(12)))) == 120
    assert memory.count([data.tensors[0]]) == 400  # without targets the outputs decide
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(CurvatureError, match="examples=N"):
        memory.count(iter(loader))
    regression = limpet.OnlineLaplace(nn.Linear(4, 3), likelihood=Gaussian(reduction="sum"))
    assert regression.count([(torch.randn(6, 4), torch.randn(6, 3))]) == 6


class Long(Dataset[tuple[Tensor, Tensor]]):
    """Rows of growing length, padded: the first ones would misrepresent the others."""

    read = 0

    def __len__(self) -> int:
        return 5 * ROWS

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i >= len(self):
            raise IndexError
        self.read += 1
        labels = torch.full((10,), -100)
        labels[: 1 + 9 * i // len(self)] = 0
        return torch.zeros(10, 4), labels


def test_a_large_data_set_is_counted_on_evenly_spaced_rows() -> None:
    data = Long()
    found = memory_of(nn.Linear(4, 5)).count(DataLoader(data, batch_size=100))
    true = sum(1 + 9 * i // len(data) for i in range(len(data)))
    assert found.rows == 5 * ROWS and abs(found - true) < 0.001 * true
    assert data.read <= ROWS + 64


def test_a_likelihood_that_needs_outputs_runs_the_model() -> None:
    class Custom(Categorical):
        name = "custom"

        def count_targets(self, targets: Any) -> int | None:
            return None

    memory = limpet.OnlineLaplace(nn.Linear(4, 5), likelihood=Custom())
    assert memory.count(DataLoader(tokens(), batch_size=7)) == 400


def test_examples_below_what_was_seen_raise() -> None:
    """400 rows for 4,000 positions scaled the Fisher down ten times."""
    model, data = nn.Linear(4, 5), tokens(400)
    loader = DataLoader(data, batch_size=20)
    memory = memory_of(model)
    with pytest.raises(CurvatureError, match=r"examples=400 contradicts the batches, which contain 4,000 predicted"):
        memory.consolidate(loader, examples=400)
    with pytest.raises(CurvatureError, match="contradicts"):  # rows, although only some of the positions are read
        memory.consolidate(loader, examples=2000, limit=1000)
    assert memory.tasks == 0
    memory.consolidate(loader, examples=memory.count(loader), limit=1000)
    assert memory.examples == 4000
    other = memory_of(model)
    other.consolidate(loader, examples=40_000)  # these batches are a tenth of the task
    assert other.examples == 40_000


def test_a_limit_keeps_the_scale_when_forward_flattens_positions() -> None:
    """3,648 instead of 15,003: the rows of the outputs were taken for those of the data set."""
    model, data = nn.Linear(4, 5), tokens(400)
    traces, counts = {}, {}
    for name, forward in (("plain", None), ("flattened", flattened)):
        for limit in (None, 1000):
            memory = memory_of(model, fisher="sampled")
            memory.consolidate(DataLoader(data, batch_size=20), limit=limit, forward=forward)
            traces[name, limit], counts[name, limit] = trace(memory), memory.examples
    assert set(counts.values()) == {4000}
    assert max(traces.values()) < 1.1 * min(traces.values()), traces


def joined(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Pack rows into one, as collators without padding do."""
    x, y = (torch.cat(some).unsqueeze(0) for some in zip(*rows, strict=True))
    return x, y


@pytest.mark.parametrize(("collate", "limit"), [(None, 7), (None, 25), (joined, 45), (joined, None)])
def test_rows_that_a_limit_cuts_or_a_collator_joins(collate: Any, limit: int | None) -> None:
    """A batch that the limit cuts to one row is one row; a batch that the collator made one row is all of them."""
    loader = DataLoader(tokens(), batch_size=4, collate_fn=collate)
    for batches in (loader, HeldOutSplit(loader, hold_out=False)):
        memory = memory_of(nn.Linear(4, 5), fisher="sampled")
        memory.consolidate(batches, limit=limit)
        assert memory.examples == 400


def test_protection_with_another_count_than_the_pass_warns() -> None:
    model, data = nn.Linear(4, 5), tokens()
    memory = memory_of(model)
    memory.consolidate(DataLoader(data, batch_size=20))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for examples, words in ((40, "10 times too strong"), (4000, "10 times too weak"), (390, None)):
        with memory.protect(optimizer, examples=examples):
            F.cross_entropy(model(data.tensors[0]).flatten(0, 1), data.tensors[1].flatten()).backward()
            optimizer.step()
        if words is None:
            memory.consolidate(DataLoader(data, batch_size=20))
        else:
            with pytest.warns(LimpetWarning, match=words):
                memory.consolidate(DataLoader(data, batch_size=20))


@pytest.mark.parametrize("fisher", ["exact", "sampled", "empirical"])
@pytest.mark.parametrize("kind", ["bernoulli", "gaussian"])
def test_a_mean_over_outputs_is_held_at_the_scale_of_the_loss(kind: str, fisher: str) -> None:
    """With the default losses of torch the penalty was D (and for F.mse_loss D / 2) times too strong."""
    torch.manual_seed(0)
    width = 20
    model = nn.Linear(6, width).double()
    x = torch.randn(4000, 6).double()
    y = torch.bernoulli(model(x).sigmoid()) if kind == "bernoulli" else model(x) + 0.5**0.5 * torch.randn(4000, width)
    y = y.detach()
    loss = F.binary_cross_entropy_with_logits if kind == "bernoulli" else F.mse_loss
    likelihood = Bernoulli(reduction="mean") if kind == "bernoulli" else Gaussian(0.5, reduction="mean")
    memory = limpet.OnlineLaplace(model, likelihood=likelihood, prior_precision=0.0, fisher=fisher, structure="dense")
    memory.consolidate([(x, y)])
    start = [p.detach().clone() for p in model.parameters()]
    direction = [0.01 * torch.randn_like(p) for p in model.parameters()]

    @torch.no_grad()
    def at(t: float) -> float:
        for p, w, d in zip(model.parameters(), start, direction, strict=True):
            p.copy_(w + t * d)
        return float(loss(model(x), y))

    rise = (at(1) + at(-1) - 2 * at(0)) / 2
    at(1)
    assert float(memory.penalty().detach()) / 4000 == pytest.approx(rise, rel=1e-4 if fisher == "exact" else 0.1)
    constant = 0 if kind == "bernoulli" else 0.5 * float(torch.log(torch.tensor(2 * torch.pi * 0.5)))
    assert likelihood.loss(model(x), y).item() == pytest.approx(loss(model(x), y).item() + constant)
    assert limpet.likelihoods.from_description(likelihood.describe()).reduction == "mean"  # type: ignore[attr-defined]


def test_several_outputs_without_a_reduction_warn() -> None:
    x, y = torch.randn(8, 3), torch.rand(8, 4)
    with pytest.warns(LimpetWarning, match="4 times too strong"):
        limpet.OnlineLaplace(nn.Linear(3, 4), likelihood="bernoulli").consolidate([(x, y)])
    with pytest.raises(ValueError, match="sum"):
        limpet.MultiOutput(Categorical(), Gaussian(reduction="mean"))
    with pytest.raises(ValueError, match="reduction must be"):
        Bernoulli(reduction="average")

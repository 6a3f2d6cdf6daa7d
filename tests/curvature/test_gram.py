"""Sums of outer products: in strips, in parts, and mirrored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from allocated import allocations
from limpet.curvature import Fisher, FisherPass, Structure
from limpet.curvature.gram import STRIP_FROM, add_gram, mirror_, strips
from limpet.layers import Call, Convolution
from limpet.layers import base as layers
from limpet.layers.base import flat_parts
from limpet.likelihoods import Categorical
from limpet.model import discover


@pytest.mark.parametrize("width", [0, 1, 5, STRIP_FROM - 1, STRIP_FROM, 257, 500, 785])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ones", [False, True])
def test_strips_give_the_plain_product(width: int, dtype: torch.dtype, ones: bool) -> None:
    torch.manual_seed(0)
    rows = torch.randn(37, width).to(dtype)
    sums = torch.promote_types(dtype, torch.float32)
    side = width + ones
    start = torch.randn(40, side, dtype=sums)
    total = start.mT @ start
    wide = torch.cat([rows, torch.ones(37, 1, dtype=dtype)], 1).double() if ones else rows.double()
    expected = total.double() + wide.mT @ wide
    add_gram(total, rows, ones=ones, diagonal=False)
    found = mirror_(total)
    assert found is total and total.dtype == sums
    assert torch.equal(total, total.mT)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(total.double(), expected, rtol=tolerance, atol=tolerance * 37)


@pytest.mark.parametrize("width", [1, 100, 256, 300, 784, 1250, 4097])
def test_strips_cover_every_row_once(width: int) -> None:
    found = [i for start, stop in strips(width) for i in range(start, stop)]
    assert found == list(range(width))
    operations = sum((stop - start) * (width - start) for start, stop in strips(width))
    assert width < STRIP_FROM or operations < 0.65 * width**2


def test_groups_are_mirrored_each_by_itself() -> None:
    rows = torch.randn(3, 11, 300, dtype=torch.float64)
    total = torch.zeros(3, 300, 300, dtype=torch.float64)
    add_gram(total, rows, ones=False, diagonal=False)
    torch.testing.assert_close(mirror_(total.triu()), rows.mT @ rows)


@pytest.mark.parametrize("entries", [1, 100, 1 << 20])
def test_rows_in_parts_are_the_same_rows(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "ROWS_AT_ONCE", {"cpu": entries})
    gradient = torch.randn(7, 5, 6)
    for rows in (gradient, gradient.mT.contiguous().mT, gradient[:1], gradient[:, :1], gradient[:0]):
        parts = list(flat_parts(rows))
        assert torch.equal(torch.cat(parts), rows.flatten(0, 1))
        assert len(parts) == 1 or all(part.numel() <= max(entries, 30) for part in parts)


CONVOLUTIONS = [
    (nn.Conv2d(4, 6, 3), (4, 7, 8)),
    (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), (4, 7, 8)),
    (nn.Conv2d(4, 6, 3, groups=2, padding="same", padding_mode="circular"), (4, 7, 8)),
    (nn.Conv2d(4, 6, (2, 3), padding="same"), (4, 7, 8)),
    (nn.Conv1d(4, 6, 3, stride=2), (4, 9)),
    (nn.Conv3d(2, 3, 2, padding=1), (2, 3, 4, 3)),
]


@pytest.mark.parametrize(("module", "shape"), CONVOLUTIONS)
def test_patches_in_parts_are_the_patches(
    module: nn.Module, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "ROWS_AT_ONCE", {"cpu": 1000})
    for names in (("weight", "bias"), ("bias",)):
        for x in (torch.randn(9, *shape), torch.randn(*shape)):
            layer = Convolution(module, names)
            call = Call(layer, x)
            data = layer.read(x)
            assert layer.shape(x) == call.shape == data.shape and torch.equal(call.data, data)
            assert layer.row_count(call) == data.shape[-3] * data.shape[-2]
            parts = list(layer.parts(call))
            assert torch.equal(torch.cat([part for _, part in parts], -3), data)
            for examples, part in parts:
                assert torch.equal(data[..., examples, :, :], part)
        assert "weight" not in names or len(parts) == 1


def fisher(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Fisher:
    one_pass = FisherPass(model, discover(model), Categorical(), Structure("kronecker", 4096), fisher="exact")
    return one_pass.run([batch], progress=False)


def test_a_pass_is_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 2, groups=1), nn.Flatten(), nn.Linear(100, 3)
    ).double()
    batch = torch.randn(8, 2, 6, 6, dtype=torch.float64), torch.randint(0, 3, (8,))
    whole = fisher(model, batch)
    monkeypatch.setattr(layers, "ROWS_AT_ONCE", {"cpu": 200})
    parts = fisher(model, batch)
    for name, (term,) in whole.terms.items():
        for a, b in zip(term.factors(), parts.terms[name][0].factors(), strict=True):  # type: ignore[union-attr]
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_patches_of_a_batch_are_never_in_memory_at_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 5, padding=2), nn.Flatten(), nn.Linear(2 * 32 * 32, 3))
    batch = torch.randn(64, 3, 32, 32), torch.randint(0, 3, (64,))
    one_pass = FisherPass(model, discover(model), Categorical(), Structure("kronecker", 256), fisher="exact")
    with allocations() as found:
        one_pass.run([batch], progress=False)
    patches = 64 * 32**2 * 75 * 4
    assert found.peak < patches


def test_two_convolutions_of_one_geometry_share_the_factor_of_their_input() -> None:
    x = torch.randn(3, 4, 7, 8)
    layer, same, other = (
        Convolution(module, ("weight", "bias"))
        for module in (nn.Conv2d(4, 6, 3), nn.Conv2d(4, 2, 3), nn.Conv2d(4, 2, 3, padding=1))
    )
    key = layer.input_key(Call(layer, x))
    assert key == same.input_key(Call(same, x)) != other.input_key(Call(other, x))
    assert key != layer.input_key(Call(layer, x.clone()))

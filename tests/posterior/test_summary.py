"""The report lists every parameter, and warnings name what is not protected."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

import limpet
import networks
from limpet.errors import NotProtectedWarning


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), networks.Lambda(networks.pool), nn.Linear(4, 5), nn.Linear(5, 3)]
    net = nn.Sequential(*layers)
    net[3].weight.requires_grad_(False)
    return net


def test_every_parameter_has_a_row() -> None:
    net = model()
    with pytest.warns(NotProtectedWarning, match=r"1 frozen parameters .*3\.weight.*2 running statistics"):
        memory = limpet.OnlineLaplace(net, exclude=["4"], strength=3.0)
    memory.consolidate([(torch.randn(8, 2, 5, 5), torch.randint(0, 3, (8,)))])
    rows = {row.name: row for row in memory.report().rows}
    assert set(rows) == {n for n, _ in net.named_parameters()} | {"1.running_mean", "1.running_var"}
    assert {name for name, row in rows.items() if row.protected} == {
        "0.weight", "0.bias", "1.weight", "1.bias", "3.bias",
    }  # fmt: skip
    assert rows["0.weight"].structure == "kronecker" and rows["0.weight"].note == "convolution"
    assert rows["1.weight"].structure == "diagonal"
    assert "frozen" in rows["3.weight"].note
    assert "excluded" in rows["4.weight"].note
    assert "running statistics" in rows["1.running_mean"].note
    assert sum(row.bytes for row in rows.values()) == memory.nbytes == memory.report().nbytes
    table = str(memory.report(full=True))
    assert all(name in table for name in rows) and "5 of 10 protected" in table
    assert "strength 3, 1 tasks, 8 examples" in table


def test_the_table_has_a_line_per_block_and_one_for_repeated_layers() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False))
    memory = limpet.OnlineLaplace(net, exclude=["3"])
    memory.consolidate([(torch.randn(8, 6), torch.randint(0, 6, (8,)))], progress=False)
    lines = {line.split("  ")[0]: re.split(r"  +", line) for line in str(memory.report()).splitlines()}
    for name in ("0", "1"):  # numbers alone are kept
        assert lines[name][:4] == [name, "1", "weight 6x6, bias 6", "kronecker"]
    assert lines["3.weight"][-2:] == ["NO", "excluded with exclude=[...]"]
    assert lines["2.running_mean"][1] == "1" and "running statistics" in lines["2.running_mean"][-1]

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    deep = limpet.OnlineLaplace(Deep())
    deep.consolidate([(torch.randn(8, 6), torch.randint(0, 3, (8,)))], progress=False)
    cells = [re.split(r"  +", line) for line in str(deep.report()).splitlines()]
    held = list(deep.posterior.held.values())
    size = sum(one.nbytes for one in held[:4])
    assert cells[3] == ["layers.*", "4", "weight 6x6, bias 6", "kronecker", f"{size:,}", "yes", "linear"]
    assert cells[4] == ["layers.4", "1", "weight 3x6, bias 3", "kronecker", f"{held[4].nbytes:,}", "yes", "linear"]
    assert len(cells) == 6 and len(deep.report().rows) == 10
    assert len(str(deep.report(full=True)).splitlines()) == 3 + 10 + 1


def test_what_is_measured_directly_is_said() -> None:
    net, x, y = networks.build("attention")
    memory = limpet.OnlineLaplace(net)
    memory.consolidate([(x, y)])
    notes = {row.name: row.note for row in memory.report().rows}
    assert "not supported by any layer class" in notes["attention.out_proj.weight"]
    assert "not supported by any layer class" in notes["attention.in_proj_weight"]
    assert notes["last.weight"] == "linear"


def test_no_warning_where_all_is_protected() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory = limpet.OnlineLaplace(nn.Linear(3, 2))
    assert all("no task yet" in row.note for row in memory.report().rows)


def test_long_sides_are_told() -> None:
    net = nn.Linear(10, 3)
    for max_factor_size, told in (
        (11, ""),
        (8, " (inputs in 2 pieces)"),
        (2, " (inputs in 5 pieces, outputs in 2 pieces)"),
    ):
        memory = limpet.OnlineLaplace(net, max_factor_size=max_factor_size)
        memory.consolidate([(torch.randn(8, 10), torch.randint(0, 3, (8,)))], progress=False)
        assert memory.report().rows[0].structure == f"kronecker{told}"
    memory = limpet.OnlineLaplace(net, max_factor_size=1)
    assert memory.report().rows[0].structure == "kronecker (inputs diagonal, outputs in 3 pieces)"

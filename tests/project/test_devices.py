"""On every device there is, the same memory as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import limpet
from reference import close

DEVICES = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("structure", "offload"),
    [("diagonal", False), ("kronecker", False), ("kronecker", True), ("kronecker-sum", False), ("dense", False)],
)
@pytest.mark.parametrize("method", [limpet.OnlineLaplace, limpet.PerTaskLaplace])
def test_devices_follow_the_model(
    device: str, structure: str, offload: bool, method: type[limpet.OnlineLaplace], tmp_path: Path
) -> None:
    found = []
    for place in ("cpu", device):
        model = network().to(place)
        memory = method(model, structure=structure, offload=offload)
        x, y = torch.randn(8, 2, 5, 5, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for _ in range(2):
            with memory.protect(optimizer, examples=8, every=2):
                for _ in range(3):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x.to(place)), y.to(place)).backward()
                    optimizer.step()
            memory.consolidate([(x, y)])
            adam = torch.optim.Adam(model.parameters(), lr=1e-4)
            with memory.protect(adam, examples=8, mode="gradient"):
                adam.step()
        assert all(held.mean.device.type == torch.device(place).type for held in memory.posterior.held.values())
        memory.save(tmp_path / "m.safetensors")
        again = limpet.load(tmp_path / "m.safetensors", model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        assert torch.equal(again.penalty(), memory.penalty())
        found.append(memory.penalty().detach().cpu())
    close(found[1], found[0], 1e-4)

"""The correctness part of benchmarks/peers.py: what limpet's blocks are, and what results/peers says of all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conftest import benchmark

pytestmark = [pytest.mark.slow, pytest.mark.reference, pytest.mark.filterwarnings("ignore")]
peers = benchmark("peers")
CASES = {case.name: case for case in peers.CASES}
USED_ONCE = ["MLP", "conv net"]

DENSE = {
    "limpet, kronecker": {
        "MLP": 0.25,
        "conv net": 0.7,
        "module used twice": 0.65,
        "tied linears": 0.55,
        "embedding tied to head": 0.7,
        "grouped convolution": 0.7,
        "BatchNorm, eval": 0.36,
    },
    "limpet, diagonal": {
        "MLP": 0.75,
        "conv net": 0.66,
        "module used twice": 0.8,
        "tied linears": 0.77,
        "embedding tied to head": 0.73,
        "grouped convolution": 0.73,
        "BatchNorm, eval": 0.36,
    },
}
"""How far from the dense Fisher the approximations may be."""


def named(name: str) -> Any:
    (peer,) = [peer for peer in peers.PEERS if peer.name == name]
    return peer


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", DENSE)
def test_limpet_has_the_form_it_states(name: str, case: str) -> None:
    found = peers.judged(named(name), CASES[case])
    assert found["form"] < 1e-10
    assert found["dense"] < DENSE[name][case]


@pytest.mark.parametrize("case", CASES)
def test_the_memory_has_it_too(case: str) -> None:
    """Two terms of one block, of the modules that share a weight, are brought into one eigenbasis."""
    found = peers.judged(named("limpet, kronecker, `consolidate`"), CASES[case])
    assert found["form"] < (0.23 if "tied" in case else 1e-10)
    assert found["dense"] < DENSE["limpet, kronecker"][case]


@pytest.mark.parametrize("case", USED_ONCE)
def test_where_a_layer_is_used_once_every_library_agrees(case: str) -> None:
    others = [peer for peer in peers.available() if peer.package not in ("limpet", "torch")]
    if not others:
        pytest.skip("none of the other libraries is installed")
    for peer in others:
        found = peers.judged(peer, CASES[case])
        if (peer.name, case) == ("laplace-torch, kron, BackPACK", "conv net"):
            assert found["trace"] > 10  # its scale of convolutions is another
        else:
            assert found["form"] < 1e-6, peer.name


def test_what_is_published_is_what_comes_out() -> None:
    record = json.loads((peers.RESULTS / "peers.json").read_text())
    for peer in peers.available():
        if record["versions"].get(peer.package) not in (None, peers.installed(peer.package)):
            continue  # another release of a library may do better
        for name, case in CASES.items():
            kept, found = record["errors"][peer.name][name], peers.judged(peer, case)
            assert kept.keys() == found.keys(), (peer.name, name)
            for key in ("dense", "form", "trace"):
                if key in kept:
                    assert found[key] == pytest.approx(kept[key], rel=1e-4, abs=1e-6), (peer.name, name, key)
    table = peers.table(record)
    assert table in (peers.RESULTS / "README.md").read_text()


def test_the_decision_is_made_of_the_same_times() -> None:
    record = json.loads((peers.RESULTS / "peers.json").read_text())
    (page,) = peers.RESULTS.parents[1].glob("docs/decisions/0001-*.md")
    rows = {
        "curvlinops 3.0.1": "curvlinops, KFAC",
        "nngeometry 0.4": "nngeometry, KFAC",
        "laplace-torch 0.3, by curvlinops": "laplace-torch, kron, curvlinops",
        "limpet": "limpet, kronecker",
    }
    for name, peer in rows.items():
        times = [record["costs"][network][peer]["time"] for network in ("MLP", "LeNet")]
        cells = [" / ".join(peers.short(one[fisher]) for one in times) for fisher in ("sampled", "exact")]
        assert f"| {name} | {' | '.join(cells)} |" in page.read_text()

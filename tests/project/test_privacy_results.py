"""The page of results/privacy says what its records say."""

from __future__ import annotations

from pathlib import Path

from conftest import benchmark

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "results" / "privacy" / "README.md"


def test_the_tables_are_those_of_the_records() -> None:
    found = benchmark("recovery").tables()
    assert len(found) == 2
    for table in found:
        assert table in PAGE.read_text(), "python -m benchmarks recovery --tables prints the tables"


def test_all_records_are_there() -> None:
    recovery = benchmark("recovery")
    attacks = recovery.common.read_records(recovery.ATTACKS)
    wanted = {(count, mitigation) for count in recovery.COUNTS for mitigation in recovery.MITIGATIONS}
    assert len(attacks) == len(wanted) and {(one["count"], one["mitigation"]) for one in attacks} == wanted
    costs = recovery.common.read_records(recovery.COSTS)
    assert {one["mitigation"] for one in costs} == {"no memory", *recovery.MITIGATIONS}


def test_privacy_prevents_the_attack_and_the_security_page_says_what_it_finds() -> None:
    recovery = benchmark("recovery")
    attacks = {(one["count"], one["mitigation"]): one for one in recovery.common.read_records(recovery.ATTACKS)}
    for (count, mitigation), one in attacks.items():
        if mitigation.startswith("epsilon"):
            assert one["recovered"] == one["alike"] == 0, count
    assert attacks[1, "none"]["recovered"] == 1 and attacks[10, "none"]["recovered"] == 10
    found = f"all of 10 images of MNIST and {attacks[20, 'none']['recovered']} of 20"
    assert found in " ".join((ROOT / "SECURITY.md").read_text().split())

"""The page of results/reliability says what its records say."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "results" / "reliability"
PAGE = (FOLDER / "README.md").read_text()


def test_the_page_has_the_counts_of_the_records() -> None:
    total = 0
    for line in (FOLDER / "damage.jsonl").read_text().splitlines():
        record = json.loads(line)
        ends = {end: sum(n for key, n in record.items() if key.endswith(end)) for end in ("rejected", "harmless")}
        assert sum(ends.values()) == record["count"]
        assert f"| {record['kind']} | {record['count']:,} | {ends['rejected']:,} | {ends['harmless']:,} |" in PAGE
        total += record["count"]
    assert total == 130_000
    kills: dict[str, int] = {}
    for line in (FOLDER / "kills.jsonl").read_text().splitlines():
        record = json.loads(line)
        kills[record["killed"]] = kills.get(record["killed"], 0) + record["kills"]
        assert record["command"] in PAGE or record["killed"] in ("run", "sweep")
    assert sum(kills.values()) >= 500
    for name, count in zip(("memory.save", "consolidate(", "limpet run", "limpet sweep"), kills.values(), strict=True):
        assert any(name in line and f"| {count} |" in line for line in PAGE.splitlines())

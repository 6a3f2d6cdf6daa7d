"""Shared by all benchmarks: command-line options, records, and the versions stored in a record."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import limpet

RESULTS = Path(__file__).parents[1] / "results"


def parser(description: str | None, *, threads: int | None = None) -> argparse.ArgumentParser:
    """An argument parser with the option --threads, by default one thread or as many as torch uses."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument(
        "--threads", type=int, default=threads or torch.get_num_threads(), help="threads that torch uses"
    )
    return found


def parse(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line and set the number of threads."""
    found = options.parse_args()
    torch.set_num_threads(found.threads)
    return found


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Add a record to a .jsonl file, at once, so that a benchmark that is stopped can resume."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def marker(name: str) -> str:
    """The line after which a page has the table of this name."""
    return f"<!-- table: {name} -->\n"


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """A page with these tables between their markers.

    Args:
        text: The page.
        tables: By name, what stands between `<!-- table: NAME -->` and the next `<!-- end of table -->`.

    Returns:
        The new text.
    """
    for name, table in tables.items():
        begin, end = marker(name), "<!-- end of table -->"
        before, found, after = text.partition(begin)
        if not found or end not in after:
            raise ValueError(f"the page has no place for this table: add {begin.strip()} and {end}")
        text = before + begin + f"{table}\n" + end + after.partition(end)[2]
    return text


def versions(*packages: str) -> dict[str, str]:
    """The versions of limpet, torch and Python, and of other packages that took part."""
    found = {"limpet": limpet.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return found | {package: version(package) for package in packages}


def versions_text(*packages: str) -> str:
    """The same on one line."""
    return ", ".join(f"{name.replace('python', 'Python')} {found}" for name, found in versions(*packages).items())


def peak(run: Callable[[], object]) -> tuple[int, Any]:
    """The most bytes that were allocated at once during a call, and what it gave."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        found = run()
    assert watched.profiler is not None and watched.profiler.kineto_results is not None
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most, found

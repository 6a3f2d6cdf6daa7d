"""The tables of a plan, and how their numbers are written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from limpet.planning.block_cost import BlockCost
from limpet.planning.load import total
from limpet.posterior.summary import aligned


def blocks_table(rows: Sequence[BlockCost], most: int | None) -> list[str]:
    """Return the lines of a table of blocks.

    Args:
        rows: The cost of every block.
        most: The maximum number of groups of equal blocks to list, largest first; None for all.

    Returns:
        The lines.
    """
    cells: list[tuple[str, ...]] = [
        ("block", "blocks", "shape", "structure", "bytes", "of all", "operations a step", "and a task")
    ]
    groups = _group_equal(rows)
    for name, some in groups[:most]:
        own, first = total(some, "bytes"), some[0]
        shape, of_all = "x".join(map(str, first.shape)), percent(own / total(rows, "bytes"))
        operations = (f"{total(some, what):.2g}" for what in ("step", "update"))
        cells.append((name, str(len(some)), shape, first.structure, in_bytes(own), of_all, *operations))
    left = [row for _, some in groups[most:] for row in some] if most is not None else []
    rest = [f"and {len(left)} smaller blocks, {in_bytes(total(left, 'bytes'))} in total"] if left else []
    return [*aligned(cells), *rest]


def _group_equal(rows: Sequence[BlockCost]) -> list[tuple[str, list[BlockCost]]]:
    """Group rows that differ only in the numbers in their names, under a name with asterisks; most bytes first."""
    found: dict[Any, list[BlockCost]] = {}
    for row in rows:
        found.setdefault((re.sub(r"\d+", "*", row.block), row.shape, row.structure), []).append(row)
    named = [(name if len(some) > 1 else some[0].block, some) for (name, _, _), some in found.items()]
    return sorted(named, key=lambda one: -total(one[1], "bytes"))


def percent(share: float) -> str:
    """Format a fraction as a percentage.

    Examples:
        >>> percent(0.00123), percent(0.123), percent(12.3)
        ('0.12 %', '12 %', '1,230 %')
    """
    return f"{100 * share:,.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.2g} %"


def in_bytes(number: float) -> str:
    """Format a number of bytes with a unit.

    Examples:
        >>> in_bytes(0), in_bytes(4321), in_bytes(8.4e9)
        ('nothing', '4.32 kB', '8.4 GB')
    """
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.{3 if number / size < 999.5 else 4}g} {unit}"
    return f"{number:.0f} bytes" if number else "nothing"

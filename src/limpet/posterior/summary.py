"""Report on which parameters and running statistics of a model a memory protects."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from limpet.model import PER_SAMPLE, is_excluded, named_parameters, running_statistics
from limpet.model.adapters import adapted_parameters, adapter_parameters
from limpet.posterior import BlockPosterior, Posterior
from limpet.precision import Kronecker, KroneckerSum, Precision
from limpet.precision.block_diagonal import in_words
from limpet.precision.truncated_basis import TruncatedBasis


@dataclass(frozen=True)
class ParameterRow:
    """Row of a report: one parameter or buffer of the model.

    Args:
        name: Name of the parameter or buffer.
        shape: Its shape.
        block: Name of its block, empty if it has none.
        structure: Structure of the block's precision.
        bytes: Its share of the block's size, in bytes.
        protected: Whether it is protected.
        note: The kind of layer, or why it is not protected.
    """

    name: str
    shape: tuple[int, ...]
    block: str
    structure: str
    bytes: int
    protected: bool
    note: str


@dataclass(frozen=True)
class Report:
    """Report on what a memory protects; `str(report)` formats it as a table.

    The table has a line per block. Blocks that differ only in numbers in their names, such as the same layer of every
    transformer block, share a line. With `full`, it has a line per parameter.

    Args:
        title: Title line of the table.
        rows: One row for every parameter and every running statistic.
        nbytes: Size of the memory, in bytes.
        full: Whether the table has a line per parameter.
    """

    title: str
    rows: tuple[ParameterRow, ...]
    nbytes: int
    full: bool = False

    def __str__(self) -> str:
        cells = self._by_parameter() if self.full else self._by_block()
        protected = sum(row.protected for row in self.rows)
        total = f"{protected} of {len(self.rows)} protected, {self.nbytes:,} bytes"
        return "\n".join([self.title, *aligned(cells), total])

    def _by_parameter(self) -> list[tuple[str, ...]]:
        header = ("parameter", "shape", "block", "structure", "bytes", "protected", "note")
        lines = [
            (row.name, _size(row), row.block, row.structure, f"{row.bytes:,}", _yes(row), row.note) for row in self.rows
        ]
        return [header, *lines]

    def _by_block(self) -> list[tuple[str, ...]]:
        blocks: dict[str, list[ParameterRow]] = {}
        for row in self.rows:
            blocks.setdefault(f"block {row.block}" if row.block else f"parameter {row.name}", []).append(row)
        alike: dict[tuple[str, ...], list[tuple[str, int]]] = {}
        for rows in blocks.values():
            first, name = rows[0], rows[0].block or rows[0].name
            own = ", ".join(f"{row.name.rpartition('.')[2]} {_size(row)}" for row in rows)
            notes = "; ".join(dict.fromkeys(row.note for row in rows))
            key = (numberless(name), own, first.structure, _yes(first), notes)
            alike.setdefault(key, []).append((name, sum(row.bytes for row in rows)))
        header = ("block", "number", "parameters", "structure", "bytes", "protected", "note")
        lines = [
            (
                found[0][0] if len(found) == 1 else pattern,
                str(len(found)),
                parameters,
                structure,
                f"{sum(size for _, size in found):,}",
                protected,
                note,
            )
            for (pattern, parameters, structure, protected, note), found in alike.items()
        ]
        return [header, *lines]


def numberless(name: str) -> str:
    """Replace the numbers among the parts of a name, unless there is nothing else.

    Examples:
        >>> numberless("model.layers.11.mlp.fc1"), numberless("2")
        ('model.layers.*.mlp.fc1', '2')
    """
    parts = name.split(".")
    return name if all(map(str.isdigit, parts)) else ".".join("*" if part.isdigit() else part for part in parts)


def _size(row: ParameterRow) -> str:
    return "x".join(map(str, row.shape)) or "scalar"


def _yes(row: ParameterRow) -> str:
    return "yes" if row.protected else "NO"


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Format a table with aligned columns as a list of lines. The first row is the header."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def report(
    posterior: Posterior, title: str, *, exclude: Collection[str], unused: Collection[str], full: bool = False
) -> Report:
    """Create a report with a row for every parameter and every running statistic of the model.

    Args:
        posterior: The posterior to report on.
        title: Title line of the table.
        exclude: The excluded names or patterns.
        unused: Names of the parameters that had no gradient in the newest task.
        full: Whether the table has a line per parameter.

    Returns:
        The report.
    """
    places = {name: held for held in posterior.held.values() for name in held.block.parameters}
    adapted = adapted_parameters(posterior.model)
    parts = adapter_parameters(posterior.model)
    rows = []
    for name, parameter in named_parameters(posterior.model).items():
        held = places.get(name)
        shape = tuple(parameter.shape)
        if held is None and parameter in parts and adapted:
            note = "part of an adapter: its update of the layer's weight is protected"
            rows.append(ParameterRow(name, shape, "", "", 0, not is_excluded(name, exclude), note))
        elif held is None:
            rows.append(ParameterRow(name, shape, "", "", 0, False, _why_not(name, parameter, exclude)))
        else:
            note = _note(held, name, parameter, unused, bool(adapted.get(parameter)))
            rows.append(
                ParameterRow(name, shape, held.block.name, described(held.precision), _share(held, name), True, note)
            )
    for name, lost in posterior.unreachable().items():
        note = "measured, but no longer in the model: removed, renamed or wrapped"
        held = places[name]
        rows.append(ParameterRow(name, tuple(lost), held.block.name, "", _share(held, name), False, note))
    for name, size in running_statistics(posterior.model).items():
        rows.append(ParameterRow(name, size, "", "", 0, False, "running statistics: they follow the newest data"))
    return Report(title, tuple(rows), posterior.nbytes, full)


def described(precision: Precision) -> str:
    """Describe the structure of a precision, including which factors are diagonal or block-diagonal."""
    inner = precision.eigenbasis if isinstance(precision, KroneckerSum) else precision
    if not isinstance(inner, Kronecker):
        return precision.structure
    sides = {"inputs": inner.inputs, "outputs": inner.outputs}
    ranks = {name: basis.rank for name, basis in sides.items() if isinstance(basis, TruncatedBasis)}
    return in_words(precision.structure, {name: (basis.diagonal, basis.sizes) for name, basis in sides.items()}, ranks)


def _note(held: BlockPosterior, name: str, parameter: nn.Parameter, unused: Collection[str], adapted: bool) -> str:
    if not held.tasks:
        return "no task yet: prior only"
    if name in unused:
        return "no gradient in the newest task"
    if adapted:
        return f"{held.block.kind}, through its adapters"
    if not parameter.requires_grad:
        return "frozen since it was measured"
    if held.block.kind == PER_SAMPLE:
        return "not supported by any layer class: exact diagonal, measured per sample"
    if "+" in held.block.kind:
        return f"{held.block.kind}: two uses of one weight, with one term each; cross terms are omitted"
    return held.block.kind


def _share(held: BlockPosterior, name: str) -> int:
    """A parameter's share of the block's bytes, by size; the first parameter gets the remainder of the division."""
    numbers = [shape.numel() for shape in held.block.shapes]
    shares = [held.nbytes * n // max(sum(numbers), 1) for n in numbers]
    shares[0] += held.nbytes - sum(shares)
    return shares[held.block.parameters.index(name)]


def _why_not(name: str, parameter: nn.Parameter, exclude: Collection[str]) -> str:
    if is_excluded(name, exclude):
        return "excluded with exclude=[...]"
    if not parameter.requires_grad:
        return "frozen (requires_grad=False)"
    return "new since the last consolidation"

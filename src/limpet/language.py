"""The memory of a published language model, from a sample of text that stands for what it should keep."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from limpet.errors import LimpetError
from limpet.methods import OnlineLaplace
from limpet.parallel import Shared

SUFFIXES = (".txt", ".md", ".csv")


def texts(source: str) -> Iterator[str]:
    """The texts of a file (.csv: of its column "text"), of all such files in a folder, or of a data set on the hub."""
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        if not files:
            raise LimpetError(f"{source} holds no {', '.join(SUFFIXES)} file")
        for file in files:
            yield from texts(str(file))
    elif path.suffix == ".csv" and path.exists():
        csv.field_size_limit(sys.maxsize)
        with path.open(newline="") as lines:
            yield from _column(source, csv.DictReader(lines))
    elif path.exists():
        yield path.read_text(errors="replace")
    else:
        yield from _from_hub(source)


def _from_hub(name: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError as missing:
        raise LimpetError(
            f"there is no file {name}, and data sets of the hub need datasets: pip install datasets"
        ) from missing
    try:
        rows = datasets.load_dataset(name, split="train", streaming=True)
    except Exception as error:  # whatever the hub, the network or the set's own code raise
        raise LimpetError(f"{name} is no file here, and no data set that could be read: {error}") from error
    yield from _column(name, rows)


def _column(source: str, rows: Iterable[Any]) -> Iterator[str]:
    for row in rows:
        if "text" not in row:
            raise LimpetError(f'{source} has no column "text", but {", ".join(map(repr, row))}: rename the one to read')
        yield row["text"]


def rows(tokenizer: Any, sources: Sequence[str], *, tokens: int, length: int) -> Tensor:
    """So many tokens, the same number of every source, in rows of `length`: texts set end to end."""
    each, found = -(-tokens // len(sources)), []
    for source in sources:
        found.append(_first(tokenizer, texts(source), each, length))
        if not len(found[-1]):
            raise LimpetError(f"{source} holds fewer than {length} tokens: give more text, or a smaller --length")
    return torch.cat(found)


def _first(tokenizer: Any, some: Iterable[str], tokens: int, length: int) -> Tensor:
    ids: list[int] = []
    for text in some:
        for start in range(0, len(text), 1 << 16):  # a book is not tokenised for its first page
            ids += tokenizer(text[start : start + (1 << 16)], add_special_tokens=False)["input_ids"]
            if len(ids) >= tokens:
                break
        if len(ids) >= tokens:
            break
    whole = min(-(-tokens // length), len(ids) // length)
    return torch.tensor(ids[: whole * length], dtype=torch.long).reshape(whole, length)


def vocabulary(model: Any) -> list[nn.Module]:
    """The layers that go from and to tokens: by far the largest, and the last that fine-tuning changes."""
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [layer for layer in layers if layer is not None]


def remember(
    model: Any,
    batches: Sequence[Tensor],
    *,
    with_vocabulary: bool = False,
    checkpoint: Path | None = None,
    progress: bool = True,
    **settings: Any,
) -> OnlineLaplace:
    """The memory of a causal language model as it is, whose weights are the mean before and after.

    `settings` are those of `OnlineLaplace`. On many ranks each takes its turn with the batches, which are the same on
    all of them.
    """
    exclude = [] if with_vocabulary else vocabulary(model)
    memory = OnlineLaplace(model, **{"strength": "auto", "prior_mean": "initial", "exclude": exclude, **settings})
    every = Shared([{"input_ids": batch} for batch in batches])
    memory.consolidate(every, checkpoint=checkpoint, progress=progress)
    return memory

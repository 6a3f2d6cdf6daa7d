"""Memories of causal language models, computed from sample text or from samples of the model itself."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from limpet.distributed import ReplicatedBatches
from limpet.errors import LimpetError
from limpet.forgetting.self_samples import self_samples
from limpet.io.hub import load_error
from limpet.methods import OnlineLaplace

__all__ = [
    "chat_prefix",
    "consolidate_lm",
    "count_tokens",
    "iter_texts",
    "pack_tokens",
    "prefixes",
    "self_samples",
    "vocabulary",
]

SUFFIXES = (".txt", ".md", ".csv")


def iter_texts(source: str) -> Iterator[str]:
    """Iterate over the texts of a file, a folder or a dataset on the Hub.

    Args:
        source: A .txt, .md or .csv file (of which the column "text" is read), a folder, which is searched recursively
            for such files, or the name of a dataset on the Hub (of which the column "text" of the training split is
            streamed).

    Yields:
        The texts.

    Raises:
        LimpetError: If there are no texts in the folder, no column "text", or the dataset cannot be loaded.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        if not files:
            raise LimpetError(f"{source} contains no {', '.join(SUFFIXES)} file")
        for file in files:
            yield from iter_texts(str(file))
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
            f"there is no file {name}, and datasets on the Hub require the datasets library: pip install datasets"
        ) from missing
    try:
        rows = datasets.load_dataset(name, split="train", streaming=True)
    except Exception as error:  # the Hub, the network and the dataset's own code may raise anything
        raise load_error(name, error, "is not a local file, and not a dataset that can be loaded") from error
    yield from _column(name, rows)


def _column(source: str, rows: Iterable[Any]) -> Iterator[str]:
    for row in rows:
        if "text" not in row:
            columns = ", ".join(map(repr, row))
            raise LimpetError(f'{source} has no column "text", only {columns}: rename the column to read to "text"')
        yield row["text"]


def pack_tokens(tokenizer: Any, sources: Sequence[str], *, tokens: int, length: int) -> Tensor:
    """Tokenize texts and pack them into rows of equal length, end to end.

    Args:
        tokenizer: The tokenizer of the model.
        sources: Files, folders or datasets, as in `iter_texts`.
        tokens: The number of tokens in total, divided equally among the sources and rounded to whole rows. A source
            with less text contributes what it has.
        length: The number of tokens per row.

    Returns:
        Token ids of shape (rows, length).

    Raises:
        LimpetError: If a source has fewer than `length` tokens.
    """
    each, found = -(-tokens // len(sources)), []
    for source in sources:
        found.append(_first(tokenizer, iter_texts(source), each, length))
        if not len(found[-1]):
            raise LimpetError(f"{source} has fewer than {length} tokens: provide more text, or a smaller --length")
    return torch.cat(found)


def _first(tokenizer: Any, some: Iterable[str], tokens: int, length: int) -> Tensor:
    ids: list[int] = []
    for text in some:
        for start in range(0, len(text), 1 << 16):  # tokenize no more of a long text than needed
            ids += tokenizer(text[start : start + (1 << 16)], add_special_tokens=False)["input_ids"]
            if len(ids) >= tokens:
                break
        if len(ids) >= tokens:
            break
    whole = min(-(-tokens // length), len(ids) // length)
    return torch.tensor(ids[: whole * length], dtype=torch.long).reshape(whole, length)


def count_tokens(tokenizer: Any, sources: Sequence[str]) -> int:
    """Count the tokens of local files.

    Args:
        tokenizer: The tokenizer of the model.
        sources: Files or folders.

    Returns:
        The number of tokens, or 0 if any source is not local, since counting would download the whole dataset.
    """
    if not all(Path(source).exists() for source in sources):
        return 0
    texts = (text for source in sources for text in iter_texts(source))
    return sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)


def prefixes(tokenizer: Any, path: Path) -> list[list[int]]:
    """Tokenize a file of prompts, as user turns if the tokenizer has a chat template.

    Args:
        tokenizer: The tokenizer of the model.
        path: A text file with one prompt per line.

    Returns:
        The token ids of every prompt.

    Raises:
        LimpetError: If the file contains no prompt.
    """
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise LimpetError(f"{path} contains no prompts: write one per line")
    if getattr(tokenizer, "chat_template", None):
        chats = [[{"role": "user", "content": line}] for line in lines]
        lines = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        start = []
    else:
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [start + list(tokenizer(line, add_special_tokens=False)["input_ids"]) for line in lines]


def chat_prefix(tokenizer: Any) -> list[int]:
    """The token ids that precede the first user message in the tokenizer's chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise LimpetError("the tokenizer has no chat template: omit --chat")
    mark = "limpet"
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    return list(tokenizer(text.partition(mark)[0], add_special_tokens=False)["input_ids"])


def vocabulary(model: Any) -> list[nn.Module]:
    """The input and output embeddings: by far the largest layers, and usually those that fine-tuning changes least."""
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [layer for layer in layers if layer is not None]


def consolidate_lm(
    model: Any,
    batches: Sequence[Tensor],
    *,
    with_vocabulary: bool = False,
    checkpoint: Path | None = None,
    probe: Sequence[Tensor] = (),
    progress: bool = True,
    **settings: Any,
) -> OnlineLaplace:
    """Compute the memory of a causal language model at its current weights.

    The prior mean and the posterior mean are both the current weights.

    Args:
        model: The model.
        batches: Token ids of shape (rows, length). In distributed runs, pass the same batches on all ranks; the ranks
            process them in turn.
        with_vocabulary: Whether to include the input and output embeddings.
        checkpoint: As in `memory.consolidate`.
        probe: Further batches to measure drift on, preferably not among `batches`.
        progress: Whether to show a progress bar.
        **settings: Options of `limpet.OnlineLaplace`.

    Returns:
        The memory.
    """
    exclude = [] if with_vocabulary else vocabulary(model)
    memory = OnlineLaplace(model, **{"strength": "auto", "prior_mean": "initial", "exclude": exclude, **settings})
    replicated = ReplicatedBatches([{"input_ids": batch} for batch in batches])
    memory.consolidate(replicated, checkpoint=checkpoint, progress=progress)
    if len(probe):
        memory.add_probe([{"input_ids": batch} for batch in probe])
    return memory

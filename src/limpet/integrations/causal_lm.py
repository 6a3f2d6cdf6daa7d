"""The memory of a published language model, from a sample of text that stands for what it should keep."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from limpet.curvature.progress import Progress
from limpet.distributed import ReplicatedBatches
from limpet.errors import LimpetError
from limpet.methods import OnlineLaplace
from limpet.model import preserve_state

SUFFIXES = (".txt", ".md", ".csv")


def iter_texts(source: str) -> Iterator[str]:
    """The texts of a file (.csv: of its column "text"), of all such files in a folder, or of a data set on the hub."""
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        if not files:
            raise LimpetError(f"{source} holds no {', '.join(SUFFIXES)} file")
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


def pack_tokens(tokenizer: Any, sources: Sequence[str], *, tokens: int, length: int) -> Tensor:
    """So many tokens, the same number of every source, in rows of `length`: texts set end to end."""
    each, found = -(-tokens // len(sources)), []
    for source in sources:
        found.append(_first(tokenizer, iter_texts(source), each, length))
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


def count_tokens(tokenizer: Any, sources: Sequence[str]) -> int:
    """The tokens of local files; 0 where one of the sources is not, since nobody reads a whole data set for that."""
    if not all(Path(source).exists() for source in sources):
        return 0
    every = (text for source in sources for text in iter_texts(source))
    return sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in every)


def prefixes(tokenizer: Any, path: Path) -> list[list[int]]:
    """The lines of a file as tokens: as the user's turn of a chat where the tokenizer has a template for it.

    Args:
        tokenizer: That of the model.
        path: A text file with a prompt on every line.

    Returns:
        Token numbers for every prompt.
    """
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise LimpetError(f"{path} holds no prompt: give a line for each")
    if getattr(tokenizer, "chat_template", None):
        chats = [[{"role": "user", "content": line}] for line in lines]
        lines = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        start = []
    else:
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [start + list(tokenizer(line, add_special_tokens=False)["input_ids"]) for line in lines]


def chat_prefix(tokenizer: Any) -> list[int]:
    """The tokens with which the first turn of a user begins in the tokenizer's chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise LimpetError("the tokenizer has no chat template: leave out --chat")
    mark = "limpet"
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    return list(tokenizer(text.partition(mark)[0], add_special_tokens=False)["input_ids"])


@torch.no_grad()
def self_samples(
    model: Any,
    tokens: int,
    *,
    length: int = 96,
    prefixes: Sequence[Sequence[int]] | None = None,
    batch_size: int = 32,
    temperature: float = 1.0,
    seed: int = 0,
    progress: bool = True,
) -> Tensor:
    """Text that a causal language model draws itself, which stands for what it knows where there are no data.

    Every token is drawn from the model's own distribution, by its number in the row and the seed alone, so the same
    text comes of any batch size. The end of a text is a token as any other, after which the next one begins.

    Args:
        model: The model, which is left as it was.
        tokens: How many tokens to draw, prefixes not counted.
        length: Tokens of a row, its prefix included.
        prefixes: What rows begin with, in turns; by default the token that texts begin with.
        batch_size: Rows that are drawn at a time, with a cache of keys and values.
        temperature: What the logits are divided by.
        seed: Of the draws.
        progress: Whether there is a bar.

    Returns:
        Rows (n, length) of token numbers.
    """
    starts = [list(prefix) for prefix in prefixes or [[_first_token(model)]]]
    if not all(0 < len(start) < length for start in starts):
        raise LimpetError(f"a prefix has from 1 to {length - 1} tokens: give shorter ones, or a larger length")
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, not {temperature!r}")
    lengths: list[int] = []
    left = tokens
    while left > 0:
        lengths.append(length - len(starts[len(lengths) % len(starts)]))
        left -= lengths[-1]
    wanted = torch.rand(len(lengths), length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = torch.zeros(len(lengths), length, dtype=torch.long)
    bar = Progress(sum(lengths), show=progress, label="limpet: samples", unit="tokens")
    try:
        with preserve_state(model):
            for size in sorted(set(lengths)):  # rows whose prefixes are of one length go together
                same = [i for i, one in enumerate(lengths) if one == size]
                for begin in range(0, len(same), batch_size):
                    some = same[begin : begin + batch_size]
                    prefix = torch.tensor([starts[i % len(starts)] for i in some])
                    rows[some] = _continued(model, prefix, wanted[some], temperature, bar)
    finally:
        bar.close()
    return rows


def _first_token(model: Any) -> int:
    for name in ("bos_token_id", "eos_token_id"):
        found = getattr(model.config, name, None)
        if isinstance(found, int):
            return found
    raise LimpetError("the model does not say what token a text begins with: give prefixes")


def _continued(model: Any, prefix: Tensor, wanted: Tensor, temperature: float, bar: Progress) -> Tensor:
    """The prefixes with what the model draws after them; `wanted` are uniform numbers for every place."""
    device = next(model.parameters()).device
    row, cache, given = prefix, None, prefix
    while row.shape[1] < wanted.shape[1]:
        told = model(input_ids=given.to(device), past_key_values=cache, use_cache=True)
        cache = told.past_key_values
        cumulative = (told.logits[:, -1].double().cpu() / temperature).softmax(-1).cumsum(-1)
        place = wanted[:, row.shape[1], None] * cumulative[:, -1:]
        given = torch.searchsorted(cumulative, place).clamp_max(cumulative.shape[1] - 1)
        row = torch.cat([row, given], 1)
        bar.update(len(row))
    return row


def vocabulary(model: Any) -> list[nn.Module]:
    """The layers that go from and to tokens: by far the largest, and the last that fine-tuning changes."""
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
    """The memory of a causal language model as it is, whose weights are the mean before and after.

    Args:
        model: The model.
        batches: Token numbers (rows, length); on many ranks the same on all, and each takes its turn with them.
        with_vocabulary: Whether the layers from and to tokens are held, too.
        checkpoint: As for `memory.consolidate`.
        probe: Further rows to measure drift on, best such as are not among the batches.
        progress: Whether there is a bar.
        **settings: Those of `limpet.OnlineLaplace`.

    Returns:
        The memory.
    """
    exclude = [] if with_vocabulary else vocabulary(model)
    memory = OnlineLaplace(model, **{"strength": "auto", "prior_mean": "initial", "exclude": exclude, **settings})
    every = ReplicatedBatches([{"input_ids": batch} for batch in batches])
    memory.consolidate(every, checkpoint=checkpoint, progress=progress)
    if len(probe):
        memory.add_probe([{"input_ids": batch} for batch in probe])
    return memory

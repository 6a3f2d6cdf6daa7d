"""Suite "skill": a language model is taught a convention, and then learns a text; does it still follow the convention?

A sentence about an order is followed by a JSON object with names and codes that are arbitrary, which the model never
writes by itself. What is lost is the share of 200 held-out sentences whose object is not exactly right (greedy
decoding). Memory, replay and rehearsal have rows of the convention, not of the test.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fine_tuning import BATCH, LENGTH, NEW_BLOCKS, adamw, adapted, fresh
from retention.language import LanguageBench
from retention.pair import Pair
from retention.training import KEPT

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Greta", "Henry", "Ida", "Jonas", "Karin", "Leo", "Mia")
ITEMS = ("lamps", "chairs", "tables", "books", "pens", "cups", "plates", "clocks", "mirrors", "ropes", "keys", "hats")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TAUGHT, TESTED, TAUGHT_STEPS, TAUGHT_RATE, ANSWER = 700, 200, 300, 2e-3, 24

PAIRS = {"german": Pair("german")}


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    """Different sentences, each with its object."""
    sizes = (len(NAMES), 9, len(ITEMS), len(DAYS))
    total = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    found = []
    for number in torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count].tolist():
        picks = []
        for size in sizes:
            number, pick = divmod(number, size)
            picks.append(pick)
        name, some, item, day = NAMES[picks[0]], picks[1] + 1, ITEMS[picks[2]], picks[3]
        answer = f'{{"zk":"{name.upper()}","q":{some},"it":"{item[:-1]}","d":"w{day + 1}"}}'
        found.append((f"{name} orders {some} {item} for {DAYS[day]}.", answer))
    return found


def rows_of(tokenizer: Any, pairs: list[tuple[str, str]]) -> Tensor:
    """The sentences with their objects, one after another, in rows."""
    text = "".join(f"{sentence}\n{answer}\n\n" for sentence, answer in pairs)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def teach(model: Any, rows: Tensor, seed: int) -> Any:
    """Train adapters on these rows, and merge them."""
    torch.manual_seed(seed)
    trained = adapted(model)
    optimizer, rate = adamw(trained, TAUGHT_RATE, TAUGHT_STEPS)
    generator = torch.Generator().manual_seed(seed)
    trained.train()
    for _ in range(TAUGHT_STEPS):
        some = rows[torch.randint(0, len(rows), (BATCH,), generator=generator)]
        optimizer.zero_grad()
        torch.autograd.backward(trained(input_ids=some, labels=some).loss)
        optimizer.step()
        rate.step()
    return trained.merge_and_unload()


@torch.no_grad()
def wrong(model: Any, tokenizer: Any, pairs: list[tuple[str, str]], size: int = 100) -> list[int]:
    """For every sentence, 1 if what the model writes after it is not its object.

    The sentence has a blank line before it, as in the rows: at the very beginning of a text, names are read worse.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        pairs: The sentences, with their objects.
        size: Number of sentences to decode at a time.

    Returns:
        Zeros and ones.
    """
    found: list[int] = []
    model.eval()
    padded = copy.deepcopy(tokenizer)
    padded.padding_side, padded.pad_token = "left", padded.pad_token or padded.eos_token
    for start in range(0, len(pairs), size):
        some = pairs[start : start + size]
        told = padded([f"\n\n{sentence}\n" for sentence, _ in some], return_tensors="pt", padding=True)
        written = model.generate(
            input_ids=told["input_ids"], attention_mask=told["attention_mask"], max_new_tokens=ANSWER, do_sample=False,
            use_cache=True, pad_token_id=padded.pad_token_id,
        )  # fmt: skip
        texts = padded.batch_decode(written[:, told["input_ids"].shape[1] :], skip_special_tokens=True)
        found += [int(text.split("\n")[0] != answer) for text, (_, answer) in zip(texts, some, strict=True)]
    return found


class SkillBench(LanguageBench):
    """With a model that was taught the convention; each seed has its own."""

    def __init__(self, options: argparse.Namespace, name: str, pair: Pair, seed: int) -> None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        pairs = sentences(TAUGHT + TESTED, seed)
        self.test = pairs[TAUGHT:]
        rows = rows_of(tokenizer, pairs[:TAUGHT])
        folder: Path = options.work / f"taught {seed}"
        if not folder.exists():
            untaught = fresh(options.model)
            errors = [sum(wrong(untaught, tokenizer, self.test))]
            taught = teach(untaught, rows, seed)
            errors.append(sum(wrong(taught, tokenizer, self.test)))
            print(f"wrong before the convention is taught and after it: {errors} of {TESTED}", flush=True)
            part = folder.with_name(f"{folder.name}.part")
            tokenizer.save_pretrained(part)
            taught.save_pretrained(part)
            part.rename(folder)
        super().__init__(argparse.Namespace(**vars(options) | {"model": str(folder)}), name, pair, seed)
        kept = round(KEPT * NEW_BLOCKS)
        self.pool, self._rows = rows[:kept], rows

    @property
    def memories(self) -> Path:
        return Path(self.work / f"memory {self.seed}")

    def remembered(self) -> tuple[Tensor, Tensor]:
        cut = len(self._rows) * 3 // 4
        return self._rows[:cut], self._rows[cut:]

    def rehearsed(self) -> list[Tensor]:
        return list(torch.split(self._rows, BATCH))

    def lost(self, model: Any) -> list[float]:
        return [float(one) for one in wrong(model, self.tokenizer, self.test)]

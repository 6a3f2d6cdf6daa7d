"""Run what is still missing of a suite: one record for each method, pair and seed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common
from common import versions
from retention.after import METHODS as AFTER
from retention.bench import LanguageBench, Pair
from retention.during import METHODS as DURING
from retention.method import During


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a record unique."""
    return tuple(record.get(name) for name in ("pair", "seed", "trained", "method", "value"))


@dataclass(frozen=True)
class Suite:
    """What a suite learns, how it measures, and in which unit."""

    pairs: Mapping[str, Pair]
    bench: Callable[[argparse.Namespace, str, Pair, int], LanguageBench]
    lost: str


def run(suite: Suite, options: argparse.Namespace) -> None:
    """Run every method that is asked for and has no record yet.

    Args:
        suite: The suite.
        options: The command line: model, texts, pairs, seeds, methods, work and out.
    """
    wanted = {pair: list(_wanted(options.methods, development=pair == "development")) for pair in options.pairs}
    _check(suite, options)
    options.work.mkdir(parents=True, exist_ok=True)
    for pair in options.pairs:
        for seed in options.seeds:
            _run(suite, options, pair, seed, wanted[pair])


def _check(suite: Suite, options: argparse.Namespace) -> None:
    """Stop before anything is run if a text or the plain runs are missing."""
    needed = {text for pair in options.pairs for text in (suite.pairs[pair].new, *suite.pairs[pair].others)}
    missing = ", ".join(sorted(needed - options.texts.keys()))
    if missing:
        raise SystemExit(f"texts that are missing: {missing}; add them with --text NAME=FILE")
    done = {key(record) for record in common.read_records(options.out)}
    for pair in options.pairs if "plain" not in options.methods else ():
        without = [seed for seed in options.seeds if (pair, seed, "plain", "", 0.0) not in done]
        if without:
            raise SystemExit(f"{pair}, seeds {without}: every method is compared with plain training; run it too")


def _run(
    suite: Suite, options: argparse.Namespace, pair: str, seed: int, wanted: Sequence[tuple[str, str, float | None]]
) -> None:
    bench: LanguageBench | None = None
    done = {key(record): record for record in common.read_records(options.out)}
    for trained, after, value in wanted:
        now: dict[str, Any] = {"pair": pair, "seed": seed, "trained": trained, "method": after, "value": value}
        if key(now) in done:
            continue
        bench = bench or suite.bench(options, pair, suite.pairs[pair], seed)
        if after:
            plain = done[key(now | {"trained": "plain", "method": "", "value": 0.0})]["curve"][-1]["new"]
            found = bench.move(AFTER[after], trained, plain)
        else:
            found = bench.train(DURING[trained], float(value or 0.0))
        record = now | found | {"versions": versions("transformers", "peft")}
        common.append_record(options.out, record)
        done[key(record)] = record


def _wanted(methods: Sequence[str], *, development: bool) -> Iterator[tuple[str, str, float | None]]:
    """What to train with, what to do afterwards, and the value of a setting; training first."""
    for name in methods:
        if name in DURING:
            for value in _values(DURING[name], development=development):
                yield name, "", value
    for name in methods:
        if name in AFTER:
            for trained in AFTER[name].after:
                if (trained in methods or trained == "plain") and not (development and DURING[trained].candidates):
                    yield trained, name, None


def _values(method: During, *, development: bool) -> tuple[float, ...]:
    return method.candidates if development and method.candidates else (chosen(method),)


def chosen(method: During) -> float:
    """The value of its setting that was chosen on the development pair; 0 if there is nothing to choose."""
    if method.candidates and method.chosen is None:
        raise SystemExit(f"{method.name}: run the development pair first, and set `chosen`")
    return 0.0 if method.chosen is None else method.chosen

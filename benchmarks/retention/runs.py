"""Run what is still missing of a suite: one record for each method, pair and seed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common
from common import versions
from retention.after import METHODS as AFTER
from retention.bench import Bench, Pair
from retention.during import METHODS as DURING
from retention.method import During

DEVELOPMENT = "development"
"""The pair that settings are chosen on."""

Run = tuple[str, str, float | None]
"""What to train with, what to do afterwards ("": nothing), and the value of a setting of the training."""


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a record unique."""
    return tuple(record.get(name) for name in ("pair", "seed", "trained", "method", "value"))


@dataclass(frozen=True)
class Suite:
    """What a suite learns, and how it measures.

    Attributes:
        pairs: What is learned, by name.
        bench: Makes the bench of a pair and a seed.
        lost: What is lost, as a word for headers.
        settings: The name that chosen settings have: suites with the same network and optimizer share them.
        texts: Whether its data are texts of the command line.
        without: Names of methods that do not apply.
    """

    pairs: Mapping[str, Pair]
    bench: Callable[[argparse.Namespace, str, Pair, int], Bench]
    lost: str
    settings: str
    texts: bool = True
    without: tuple[str, ...] = ()


def run(suite: Suite, options: argparse.Namespace) -> None:
    """Run every method that is asked for and has no record yet.

    Args:
        suite: The suite.
        options: The command line: model, texts, pairs, seeds, methods, work and out.
    """
    wanted = {pair: list(_wanted(suite, options.methods, pair)) for pair in options.pairs}
    _check(suite, options)
    options.work.mkdir(parents=True, exist_ok=True)
    for pair in options.pairs:
        for seed in options.seeds:
            _run(suite, options, pair, seed, wanted[pair])


def _check(suite: Suite, options: argparse.Namespace) -> None:
    """Stop before anything is run if a text or the plain runs are missing."""
    pairs = [suite.pairs[name] for name in options.pairs if suite.texts]
    needed = {text for pair in pairs for text in (pair.new, *pair.others)}
    missing = ", ".join(sorted(needed - options.texts.keys()))
    if missing:
        raise SystemExit(f"texts that are missing: {missing}; add them with --text NAME=FILE")
    done = {key(record) for record in common.read_records(options.out)}
    for pair in options.pairs if "plain" not in options.methods else ():
        without = [seed for seed in options.seeds if (pair, seed, "plain", "", 0.0) not in done]
        if without:
            raise SystemExit(f"{pair}, seeds {without}: every method is compared with plain training; run it too")


def _run(suite: Suite, options: argparse.Namespace, pair: str, seed: int, wanted: Sequence[Run]) -> None:
    bench: Bench | None = None
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


def _wanted(suite: Suite, methods: Sequence[str], pair: str) -> Iterator[Run]:
    """What to run for a pair; training first. On the development pair, all candidates."""
    applicable = [name for name in methods if name not in suite.without]
    for name in applicable:
        if name in DURING:
            method = DURING[name]
            candidates = method.candidates if pair == DEVELOPMENT else ()
            for value in candidates or (chosen(method, suite.settings),):
                yield name, "", value
    for name in applicable:
        if name in AFTER and not (AFTER[name].adapters_only and suite.pairs[pair].full):
            for trained in AFTER[name].after:
                tuned = pair == DEVELOPMENT and DURING[trained].candidates
                if trained == "plain" or (trained in applicable and not tuned):
                    yield trained, name, None


def chosen(method: During, settings: str) -> float:
    """The value of its setting that was chosen on the development pair; a fixed one if there is nothing to choose."""
    if not method.candidates:
        return method.fixed
    if settings not in method.chosen:
        raise SystemExit(f"{method.name}: run the development pair first, and set `chosen`")
    return method.chosen[settings]

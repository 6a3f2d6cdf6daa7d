"""Run what is still missing of a suite: one record for each method, pair and seed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import common
from common import versions
from retention.after import METHODS as AFTER
from retention.bench import FARTHEST
from retention.during import METHODS as DURING
from retention.method import After, During
from retention.pair import Pair

PLAIN = {"trained": "plain", "method": "", "value": 0.0}

DEVELOPMENT = "development"
"""The pair that settings are chosen on."""

SEEDS, DEVELOPMENT_SEEDS = [0, 1, 2], [10]
"""Seeds of the compared pairs, and of the development pair, so that settings are not chosen on rows of the others."""

Run = tuple[str, str, float | None]
"""What to train with, what to do afterwards ("": nothing), and the value of a setting."""


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a record unique."""
    return tuple(record.get(name) for name in ("pair", "seed", "trained", "method", "value"))


class Runner(Protocol):
    """What runs methods, for a pair and a seed."""

    def stored(self, name: str) -> bool:
        """Whether what a method has trained is still there."""

    def train(self, method: During, value: float) -> dict[str, Any]:
        """The record of a method that acts during training."""

    def move(self, method: After, trained: str, plain: float) -> dict[str, Any]:
        """The record of one that acts afterwards, on what another has trained."""


@dataclass(frozen=True)
class Suite:
    """What a suite learns, and how it measures.

    Attributes:
        pairs: What is learned, by name.
        bench: Makes what runs methods, for a pair and a seed.
        lost: What is lost, as a word for headers.
        settings: The name that chosen settings have: suites with the same network and optimizer share them.
        texts: Whether its data are texts of the command line.
        without: Names of methods that do not apply.
        paths: Whether methods that act after training are measured along their paths. If not, they have one setting.
    """

    pairs: Mapping[str, Pair]
    bench: Callable[[argparse.Namespace, str, Pair, int], Runner]
    lost: str
    settings: str
    texts: bool = True
    without: tuple[str, ...] = ()
    paths: bool = True


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
        for seed in seeds(options, pair):
            _run(suite, options, pair, seed, wanted[pair])


def seeds(options: argparse.Namespace, pair: str) -> list[int]:
    """The seeds to run a pair with: those of the command line, or the usual ones."""
    return options.seeds or (DEVELOPMENT_SEEDS if pair == DEVELOPMENT else SEEDS)


def _check(suite: Suite, options: argparse.Namespace) -> None:
    """Stop before anything is run if a text, its file or the plain runs are missing."""
    pairs = [suite.pairs[name] for name in options.pairs if suite.texts]
    needed = {text for pair in pairs for text in (pair.new, *pair.others)}
    missing = ", ".join(sorted(needed - options.texts.keys()))
    if missing:
        raise SystemExit(f"texts that are missing: {missing}; add them with --text NAME=FILE")
    done = {key(record) for record in common.read_records(options.out)}
    for pair in options.pairs if "plain" not in options.methods else ():
        without = [seed for seed in seeds(options, pair) if (pair, seed, "plain", "", 0.0) not in done]
        if without:
            raise SystemExit(f"{pair}, seeds {without}: every method is compared with plain training; run it too")
    absent = [name for name in sorted(needed) if not Path(options.texts[name]).is_file()]
    if absent:
        raise SystemExit(f"--text {absent[0]}={options.texts[absent[0]]}: there is no such file")


def _run(suite: Suite, options: argparse.Namespace, pair: str, seed: int, wanted: Sequence[Run]) -> None:
    bench: Runner | None = None
    done = {key(record): record for record in common.read_records(options.out)}
    for trained, after, value in wanted:
        now: dict[str, Any] = {"pair": pair, "seed": seed, "trained": trained, "method": after, "value": value}
        if key(now) in done and _followed(done[key(now)], after, done.get(key(now | PLAIN))):
            continue
        bench = bench or suite.bench(options, pair, suite.pairs[pair], seed)
        if after:
            if not bench.stored(trained):  # as on another machine than that of its record
                bench.train(DURING[trained], chosen(DURING[trained], suite.settings))
            method = AFTER[after] if value is None else replace(AFTER[after], settings=(value,))
            found = bench.move(method, trained, _new_loss(done[key(now | PLAIN)]))
        else:
            found = bench.train(DURING[trained], float(value or 0.0))
        record = now | found | {"versions": versions("transformers", "peft")}
        common.append_record(options.out, record)
        done[key(record)] = record


def _followed(record: Mapping[str, Any], after: str, plain: Mapping[str, Any] | None) -> bool:
    """Whether a path was followed as far as it goes today; all other runs are complete."""
    if plain is None or not after or "curve" not in record:
        return True
    settings, measured = list(AFTER[after].settings), [point["setting"] for point in record["curve"]]
    beyond = record["curve"][-1]["new"] > FARTHEST * _new_loss(plain)
    return measured == settings or (beyond and measured == settings[: len(measured)])


def _new_loss(record: Mapping[str, Any]) -> float:
    """The loss on the new data at the end of a run with a curve."""
    return float(record["curve"][-1]["new"]) if "curve" in record else 0.0


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
            for trained in AFTER[name].after if suite.paths else ("plain",):
                tuned = pair == DEVELOPMENT and DURING[trained].candidates
                if trained == "plain" or (trained in applicable and not tuned):
                    for setting in (None,) if suite.paths else _settings(AFTER[name], suite, pair):
                        yield trained, name, setting


def _settings(method: After, suite: Suite, pair: str) -> tuple[float, ...]:
    """The settings of a method that acts after training, in a suite without paths."""
    if pair == DEVELOPMENT or len(method.settings) == 1:
        return method.settings
    return (chosen(method, suite.settings),)


def chosen(method: During | After, settings: str) -> float:
    """The value of its setting that was chosen on the development pair; a fixed one if there is nothing to choose."""
    if isinstance(method, During) and not method.candidates:
        return method.fixed
    if settings not in method.chosen:
        raise SystemExit(f"{method.name}: run the development pair first, and set `chosen`")
    return method.chosen[settings]

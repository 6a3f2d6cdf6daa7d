"""Retention: what a fine-tuned network still knows, with limpet and with what people would do instead.

    python -m benchmarks retention drift --model M --text german=A.html reviews=B.csv ...   # all runs still missing
    python -m benchmarks retention skill --model M --text german=A.html
    python -m benchmarks retention sequence --model MiniLM --text reviews=R.csv german=A.html french=B.html ...
    python -m benchmarks retention vision --pairs svhn
    python -m benchmarks retention drift --draw                                             # the tables
    python -m benchmarks retention drift --draw --pairs german --write      # and put them into the pages that show them

Settings of every method were chosen on the pair "development" of a suite, and are part of the methods (`chosen`). A run
is recorded when it ends, so an interrupted command resumes with the next one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import common
from retention import drift, figure, report, runs, sequence, skill, vision
from retention.after import METHODS as AFTER
from retention.during import METHODS as DURING

PAGES = (
    common.RESULTS / "retention" / "README.md",
    common.RESULTS.parent / "docs" / "which-method.md",
    common.RESULTS.parent / "README.md",
)
"""Pages that have tables of this benchmark."""

GENERATIVE = ("self-rehearsal", "self-rehearsal of one row", "OSF", "intruder reduction")
"""Methods for language models with adapters."""

SUITES = {
    "drift": runs.Suite(drift.PAIRS, drift.DriftBench, "drift", "language"),
    "skill": runs.Suite(skill.PAIRS, skill.SkillBench, "wrong", "language"),
    "sequence": runs.Suite(sequence.PAIRS, sequence.Sequence, "right", "sequence", without=GENERATIVE, paths=False),
    "vision": runs.Suite(
        vision.PAIRS,
        vision.VisionBench,
        "wrong",
        "vision",
        texts=False,
        without=GENERATIVE,
    ),
}


def main() -> None:
    parser = common.parser(__doc__, threads=1)
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--text", nargs="+", default=[], metavar="NAME=FILE", help=".txt, .html or .csv")
    parser.add_argument("--pairs", nargs="+", default=["german"], help="what is learned, by default German")
    parser.add_argument("--seeds", type=int, nargs="+", help="by default 0 1 2, and 10 for the development pair")
    parser.add_argument("--methods", nargs="+", choices=[*DURING, *AFTER], default=[*DURING, *AFTER])
    parser.add_argument("--work", type=Path, default=Path("retention"), help="where models and memories are kept")
    parser.add_argument("--out", type=Path, help="by default SUITE.jsonl in results/retention")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--write", action="store_true", help="put the tables into the pages that have a place for them")
    parser.add_argument("--figure", type=Path, help="draw the curves of all methods into this file")
    options = common.parse(parser)
    suite = SUITES[options.suite]
    unknown = [pair for pair in options.pairs if pair not in suite.pairs]
    if unknown:
        parser.error(f"--pairs {unknown[0]!r}: this suite has {', '.join(map(repr, suite.pairs))}")
    if any("=" not in one for one in options.text):
        parser.error("--text has the form NAME=FILE, for example german=text.html")
    if runs.DEVELOPMENT in options.pairs and set(options.seeds or ()) & set(runs.SEEDS):
        parser.error(f"the development pair needs other seeds than those that are compared, {runs.SEEDS}")
    options.texts = dict(one.split("=", 1) for one in options.text)
    options.out = options.out or common.RESULTS / "retention" / f"{options.suite}.jsonl"
    if not options.draw:
        runs.run(suite, options)
    _show(suite, options)


def tables_of(suite: runs.Suite, results: report.Results) -> dict[str, str]:
    """The tables of a pair, by what distinguishes their names."""
    return report.tables(results, suite.lost) if suite.paths else {"": sequence.table(results)}


def _show(suite: runs.Suite, options: argparse.Namespace) -> None:
    """Print the tables, and draw and write what is asked for."""
    drawn, tables = {}, dict[str, str]()
    for pair in options.pairs:
        results = report.Results(common.read_records(options.out), pair)
        if not results.runs:
            print(f"\n{pair}:\n\n{options.out} has no records of this pair")
            continue
        drawn[pair] = results
        for name, table in tables_of(suite, results).items():
            tables[f"{options.suite}, {pair}{name}"] = table
            print(f"\n{pair}{name}:\n\n{table}")
        if pair == runs.DEVELOPMENT:
            print(f"\nbest settings: {report.best(results) if suite.paths else sequence.best(results)}")
    if options.write:
        for page in PAGES:
            text = page.read_text()
            page.write_text(
                common.with_tables(text, {name: t for name, t in tables.items() if common.marker(name) in text})
            )
    if options.figure and drawn and suite.paths:
        figure.draw(drawn, suite.lost, options.figure)


if __name__ == "__main__":
    main()

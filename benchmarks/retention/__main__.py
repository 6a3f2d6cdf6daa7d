"""Retention: what a fine-tuned network still knows, with limpet and with what people would do instead.

    python -m benchmarks retention drift --model M --text german=A.html reviews=B.csv ...   # all runs still missing
    python -m benchmarks retention drift --draw                                             # the tables

Settings of every method were chosen on the pair "development" (French, 100 steps). A run is recorded when it ends, so
an interrupted command resumes with the next one.
"""

from __future__ import annotations

from pathlib import Path

import common
from retention import drift, report
from retention.after import METHODS as AFTER
from retention.during import METHODS as DURING


def main() -> None:
    parser = common.parser(__doc__, threads=1)
    parser.add_argument("suite", choices=["drift"])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--text", nargs="+", default=[], metavar="NAME=FILE", help=".txt, .html or .csv")
    parser.add_argument("--pairs", nargs="+", choices=list(drift.PAIRS), default=["german"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=[*DURING, *AFTER], default=[*DURING, *AFTER])
    parser.add_argument("--work", type=Path, default=Path("retention"), help="where models and memories are kept")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "retention" / "drift.jsonl")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = common.parse(parser)
    options.texts = dict(one.split("=", 1) for one in options.text)
    if not options.draw:
        drift.run(options)
    for pair in options.pairs:
        print(f"\n{pair}:\n\n{report.table(report.Results(common.read_records(options.out), pair))}")


if __name__ == "__main__":
    main()

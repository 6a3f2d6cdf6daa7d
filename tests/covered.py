"""Run a script, with its coverage measured if it is the first rank of a torchrun: `covered.py SCRIPT ARGUMENT ...`.

Every rank runs the same lines, and measuring takes half as much time again.
"""

import os
import runpy
import sys

import coverage

CONFIG = "RANK_COVERAGE"
"""The environment variable with the configuration that the first rank measures its coverage by; see .ci/run."""

if __name__ == "__main__":
    if CONFIG in os.environ and os.environ.get("RANK", "0") == "0":
        os.environ["COVERAGE_PROCESS_START"] = os.environ[CONFIG]
        coverage.process_startup()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

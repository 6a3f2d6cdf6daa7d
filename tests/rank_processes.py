"""Start the ranks of a test, forked from one process that has imported what they use.

An interpreter that imports torch, transformers and peft takes ten seconds of a core, and a rank is done with most tests
in less than that. The ranks are processes of their own with a gloo process group, as those of a launcher.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import coverage

COVERAGE = "RANK_COVERAGE"
"""The environment variable with the configuration that the first rank measures its coverage by; see .ci/run.

Every rank runs the same lines, and measuring takes half as much time again, so four ranks are not measured.
"""

PRELOADED = ("many_ranks", "failing_ranks", "peft", "language_models")

Main = Callable[[Sequence[str]], None]


def started(main: Main, ranks: int, *words: str, timeout: float = 400) -> list[tuple[int | None, str]]:
    """Run `main(words)` on every rank, and end all of them, whatever happens.

    Args:
        main: What a rank does, a function of a module. If it is one of several, it joins the process group.
        ranks: How many.
        words: Its argument.
        timeout: Seconds until they are ended.

    Returns:
        The exit code and the output of every rank.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(ranks)]
        processes = [
            context.Process(target=_rank, args=(main, words, environment, str(file)))
            for environment, file in zip(_environments(ranks), files, strict=True)
        ]
        try:
            for process, file in zip(processes, files, strict=True):
                file.touch()  # also of a rank that ends before it says anything
                process.start()
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [(process.exitcode, file.read_text()) for process, file in zip(processes, files, strict=True)]


def _environments(ranks: int) -> Iterator[dict[str, str]]:
    """The environment variables of every rank, as torchrun sets them; those of here for a single one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    for rank in range(ranks):
        environment = dict(os.environ) | (address | {"RANK": str(rank)} if ranks > 1 else {})
        if rank or ranks > 2:
            environment.pop(COVERAGE, None)
        yield environment


def _rank(main: Main, words: Sequence[str], environment: dict[str, str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.clear()
    os.environ.update(environment)
    if COVERAGE not in environment:
        main(words)
        return
    measured = coverage.Coverage(config_file=environment[COVERAGE], data_suffix=True)
    measured.start()
    try:
        main(words)
    finally:
        measured.stop()
        measured.save()

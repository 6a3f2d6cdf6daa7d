"""Test the library's warnings and logger: where they point, which rank issues them, and what is logged."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import limpet
from limpet import errors
from limpet.errors import LimpetWarning, warn

SCRIPT = """
import logging, sys, warnings
import torch.distributed as dist
from limpet import distributed
from limpet.errors import LimpetWarning, warn
dist.init_process_group("gloo")
rank = dist.get_rank()
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="logged %(name)s: %(message)s")
warnings.simplefilter("always")
warnings.showwarning = lambda message, *_: sys.stdout.write(f"rank {rank} warns: {message}\\n")
warn("all say this", LimpetWarning)
warn("of this shard", LimpetWarning, every_rank=True)
if rank == 1:
    with distributed.alone():
        warn("alone", LimpetWarning)
dist.barrier()  # a rank that ends while the other is still connecting breaks its connection
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_what_all_ranks_say_is_issued_by_rank_0_and_logged_by_the_others(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=200)
    told = sorted(line for line in done.stdout.splitlines() if "warns" in line or "logged" in line)
    assert told == [
        "logged limpet: rank 1: all say this",
        "rank 0 warns: limpet: all say this",
        "rank 0 warns: limpet: of this shard",
        "rank 1 warns: limpet: alone",
        "rank 1 warns: limpet: of this shard",
    ], done.stderr


def test_another_rank_logs_what_rank_0_warns_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.warns(LimpetWarning, match="said once") as caught:
        warn("said once", LimpetWarning)
    assert caught[0].filename == __file__
    monkeypatch.setattr(errors, "_rank", lambda: 3)
    with caplog.at_level(logging.INFO, logger="limpet"), warnings.catch_warnings():
        warnings.simplefilter("error")
        warn("said once", LimpetWarning)
    assert caplog.messages == ["rank 3: said once"]
    with pytest.warns(LimpetWarning, match="of this shard"):
        warn("of this shard", LimpetWarning, every_rank=True)


def test_files_that_are_read_and_written_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(3, 2)
    path = tmp_path / "memory.safetensors"
    with caplog.at_level(logging.INFO, logger="limpet"):
        limpet.OnlineLaplace(model).save(path)
        limpet.load(path, model)
    assert caplog.messages == [
        f"saved the memory of 0 tasks to {path}",
        f"loaded the memory of 0 tasks from {path}",
    ]


def test_the_logger_prints_nothing_unless_it_is_configured() -> None:
    script = "import logging, limpet\nlogging.getLogger('limpet').warning('not configured')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout == ""

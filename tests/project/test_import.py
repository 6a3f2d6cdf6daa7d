"""What `import limpet` costs, and what it does not bring along."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import requires

import pytest

IMPORTED_AS = {
    "huggingface-hub": "huggingface_hub",
    "mkdocs-material": "mkdocs",
    "mkdocstrings": "mkdocstrings",
    "pillow": "PIL",
    "pyyaml": "yaml",
}
CORE = {"torch", "numpy", "safetensors"}
NEVER = {"huggingface_hub", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"}
NEVER |= {"torch._dynamo", "torch.utils.tensorboard"}
"""Heavy things that no extra names: what the hub needs, and the parts of torch that only many processes do."""


def run(code: str) -> str:
    # bytecode is kept, as it is where a package was installed
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=kept).stdout


def extras() -> set[str]:
    """The packages of all extras, by the names they are imported as."""
    stated = [re.match(r"[\w.-]+", line) for line in requires("limpet") or [] if "extra ==" in line]
    names = {found.group().lower() for found in stated if found} - {"limpet"}
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names} - CORE


def modules(code: str) -> set[str]:
    return set(run(f"{code}\nimport sys\nprint(*sys.modules)").split())


def test_no_extra_is_imported() -> None:
    heavy = extras() | NEVER
    assert {"transformers", "peft", "lightning", "datasets", "matplotlib", "rich", "ray", "typer"} <= heavy
    found = modules("import limpet") - modules("import torch")  # torch itself brings tqdm, where it is installed
    assert "limpet" in found
    assert not {name for name in found if any(name == one or name.startswith(f"{one}.") for one in heavy)}
    assert {name.partition(".")[0] for name in found} <= {"limpet", *CORE}


@pytest.mark.slow
@pytest.mark.timing
def test_it_takes_hardly_longer_than_torch() -> None:
    def seconds(name: str) -> float:
        return float(
            run(f"import time\nbegin = time.process_time()\nimport {name}\nprint(time.process_time() - begin)")
        )

    run("import limpet")  # now the bytecode is there
    pairs = [(seconds("limpet"), seconds("torch")) for _ in range(9)]
    own, of_torch = map(min, zip(*pairs, strict=True))  # the runs that other processes disturbed the least
    assert own <= 1.15 * of_torch, pairs

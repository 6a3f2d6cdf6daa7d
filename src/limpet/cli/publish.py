"""The command `limpet publish`, which checks a memory against the model it is for and uploads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from limpet.cli.base import app, console
from limpet.cli.memories import check_choice, check_folder
from limpet.cli.repair import Base, Device, Dtype, loaded, ready
from limpet.errors import LimpetError

NO_DRIFT = 0.01
"""Largest drift, in nats, of the model that a memory was made for: what another dtype or device may cause."""


@app.command("publish")
def publish_command(
    memory: Annotated[str, typer.Argument(help="Memory to publish: a file that `limpet consolidate` wrote.")],
    model: Base,
    out: Annotated[Path, typer.Option("--out", "-o", help="Output path of the file to publish.")],
    probe: Annotated[
        str | None,
        typer.Option(help="keep or drop the inputs in the memory, if it has any: keep only what everybody may read."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="What the memory was computed from, for the model card: 'its own samples'.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(help="Repository on the Hugging Face Hub to upload to, as user/model. By default nothing is."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="If the repository is created, make it private.")] = False,
    dtype: Dtype = "float32",
    device: Device = None,
) -> None:
    """Check a memory against the published model, and upload it without the weights.

    The model has to have the outputs that are recorded in the memory. The file names the model and the checksums of its
    weights instead of containing them, and is loaded onto the model once more. A section for the model card is written
    next to it.

    Examples:
    limpet consolidate --model user/model --self-samples 12000 --rank 128 --storage-dtype float16 -o memory.safetensors

    limpet publish memory.safetensors --model user/model --probe keep -o small.safetensors --to user/model
    """
    from limpet.io import hub
    from limpet.io.atomic import write_text
    from limpet.io.tensor_file import Tensors

    _, checkpoints = ready(dtype)
    check_choice("--probe", probe, (None, "keep", "drop"))
    check_folder(out)
    network = checkpoints.read_base(model, dtype, device)
    own = loaded(memory, network, None, None)
    rows = sum(one.rows for one in own.probes)
    if rows and probe is None:
        raise LimpetError(
            f"{memory} contains {rows} inputs as they are, to measure drift on: pass --probe keep if everybody may "
            "read them, such as samples of the model itself, or --probe drop"
        )
    if probe == "drop":
        own.probes, rows = (), 0
    if rows and not (drift := own.drift()) <= NO_DRIFT:
        raise LimpetError(
            f"the outputs of {model} are not those in the memory (drift: {drift}): publish it with the model it was "
            "made for"
        )
    own.save(out, base=model)  # raises if the memory was made at other weights
    again = loaded(str(out), network, None, None)
    digest, weights = Tensors(out).sha256(), sum(p.numel() for p in network.parameters())
    page = out.with_suffix(".md")
    write_text(page, hub.model_card(again.examples, to or model, data, sha256=digest))
    size = out.stat().st_size
    console.print(f"{out}: {size / 1e6:.1f} MB, {size / (2 * weights):.2f} of the weights in bfloat16", highlight=False)
    console.print(f"SHA-256 {digest}\nsection for the model card written to {page}", highlight=False)
    if to is None:
        console.print("not uploaded: pass --to user/model", highlight=False)
        return
    console.print(f"uploaded: {hub.upload(out, to, private=private or None)}", highlight=False)

"""Commands for language models: `limpet repair`, `limpet drift` and `limpet compress`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from limpet.cli.base import app, console
from limpet.cli.memories import check_choice, check_folder, needed
from limpet.errors import LimpetError

Base = Annotated[
    str, typer.Option("--model", help="Base model, before fine-tuning: a local folder or a Hugging Face Hub id.")
]
Tuned = Annotated[Path, typer.Option(help="Fine-tuned model: the folder of a PEFT adapter or of a full checkpoint.")]
File = Annotated[
    str,
    typer.Option(
        "--memory", help="Memory of the base model, created by `limpet consolidate`: a file, or hub://user/model."
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a --memory on the Hub. Defaults to the main branch.")
]
Sha256 = Annotated[
    str | None, typer.Option(help="SHA-256 that the --memory file must have, as `limpet inspect` prints it.")
]
Dtype = Annotated[str, typer.Option(help="Dtype of the model: float32 or bfloat16.")]
Device = Annotated[
    str | None, typer.Option(help="Device to run the model on, e.g. cpu or cuda. Defaults to a GPU if available.")
]


@app.command("repair")
def repair_command(
    model: Base,
    tuned: Tuned,
    memory: File,
    data: Annotated[
        list[str],
        typer.Option(
            help="Text the model was fine-tuned on: a file, a folder or a Hub dataset. Can be used multiple times."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Output folder for the repaired adapter or checkpoint.")],
    strength: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Weight of the base model's curvature relative to that of --data; larger values recover more. "
            "Defaults to 1.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Instead of --strength: use the largest strength that increases the loss on a held-out part of --data "
            "by at most this many nats per token.",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Instead of --strength: use the smallest strength at which the drift is at most this many nats per "
            "token. Requires a memory with a probe.",
        ),
    ] = None,
    scale: Annotated[float, typer.Option(min=0, help="Factor by which the repaired update is multiplied.")] = 1.0,
    rank: Annotated[
        int | None, typer.Option(min=1, help="Truncate the repaired adapters to this rank if it is lower.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens of --data to measure the curvature on.")] = 8_000,
    length: Annotated[int, typer.Option(min=2, help="Sequence length in tokens.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of sequences per batch.")] = 4,
    revision: Revision = None,
    sha256: Sha256 = None,
    dtype: Dtype = "float32",
    device: Device = None,
) -> None:
    """Recover what a fine-tuned model has forgotten, without the original training data.

    Examples:
    limpet repair --model base-model --tuned my-adapter --memory memory.safetensors --data new.txt -o repaired
    """
    import limpet
    from limpet.integrations import causal_lm

    torch, checkpoints = ready(dtype)
    if out.resolve() in (tuned.resolve(), Path(model).resolve()):
        raise LimpetError("-o is the folder of an input model: choose another output folder")
    network = checkpoints.read_tuned(model, tuned, dtype, device)
    tokenizer = checkpoints.read_tokenizer(str(tuned), model)
    own = loaded(memory, network, revision, sha256, lambda: checkpoints.read_base(model, dtype, device))
    rows = causal_lm.pack_tokens(tokenizer, data, tokens=tokens, length=length)
    batches = [{"input_ids": part} for part in torch.split(rows, batch_size)]
    total = max(causal_lm.count_tokens(tokenizer, data), rows[:, 1:].numel())
    console.print(f"curvature from {rows[:, 1:].numel():,} of {total:,} tokens of the new text", highlight=False)
    found = limpet.repair(
        network,
        own,
        batches,
        strength=strength,
        tolerance=tolerance,
        budget=budget,
        scale=scale,
        rank=rank,
        examples=total,
    )
    before, after = found.compared()
    for name, old, new in (
        ("loss on the new text", before.loss, after.loss),
        ("drift", before.drift, after.drift),
    ):
        if old is not None and new is not None:
            console.print(f"{name}: {old:.4f} tuned, {new:.4f} repaired (nats per token)", highlight=False)
    if after.drift is None:
        console.print(
            "drift: not measured because the memory has no probe (limpet consolidate --self-samples adds one)"
        )
    checkpoints.write_tuned(network, out, tuned)
    console.print(f"{out}: {len(found.blocks)} blocks repaired at strength {after.strength:.3g}", highlight=False)


@app.command("drift")
def drift_command(
    model: Base,
    tuned: Tuned,
    memory: File,
    at_most: Annotated[
        float | None, typer.Option(min=0, help="Exit with status 1 if the drift exceeds this many nats per token.")
    ] = None,
    layers: Annotated[
        int,
        typer.Option(
            min=0, help="Number of layers to list by share of the drift; 0 lists none and skips the backward pass."
        ),
    ] = 5,
    revision: Revision = None,
    sha256: Sha256 = None,
    dtype: Dtype = "float32",
    device: Device = None,
) -> None:
    """Measure the drift of a fine-tuned model: KL(base || tuned) in nats per token, on the memory's probe.

    Examples:
    limpet drift --model base-model --tuned my-adapter --memory memory.safetensors --at-most 0.05
    """
    _, checkpoints = ready(dtype)
    network = checkpoints.read_tuned(model, tuned, dtype, device)
    before = checkpoints.read_base(model, dtype, device)
    own = loaded(memory, network, revision, sha256, before)
    found = own.drift(reference=before, blocks=layers > 0)
    console.print(
        f"drift: {float(found):.4f} +- {found.standard_error:.4f} nats per token, on {found.examples} sequences",
        highlight=False,
    )
    for name, value in sorted(found.blocks.items(), key=lambda item: -item[1])[:layers]:
        share = 100 * value / float(found) if found else 0.0
        console.print(f"  {share:5.1f} %  {name}", highlight=False, markup=False)
    if at_most is not None and not found <= at_most:  # nan exceeds every bound
        console.print(f"drift exceeds --at-most {at_most:g}", highlight=False)
        raise typer.Exit(1)


@app.command("compress")
def compress_command(
    memory: Annotated[str, typer.Argument(help="Memory to compress: a file, or hub://user/model.")],
    model: Base,
    out: Annotated[Path, typer.Option("--out", "-o", help="Output path of the smaller memory file.")],
    rank: Annotated[int | None, typer.Option(min=1, help="Number of eigenvectors to keep of every factor.")] = None,
    energy: Annotated[
        float | None, typer.Option(min=0, max=1, help="Part of the trace of every factor to keep, e.g. 0.99.")
    ] = None,
    max_bytes: Annotated[str | None, typer.Option(help="Size of the curvature, e.g. 60MB.")] = None,
    storage_dtype: Annotated[
        str, typer.Option(help="How eigenvectors are stored: float32, float16, bfloat16 or int8.")
    ] = "float16",
    with_weights: Annotated[
        bool,
        typer.Option(help="Store the weights of the model too. By default the file names the model and its checksums."),
    ] = False,
    revision: Revision = None,
    sha256: Sha256 = None,
    dtype: Dtype = "float32",
    device: Device = None,
) -> None:
    """Make a small memory file of a large one: truncated Kronecker factors, and no copy of the published weights.

    Examples:
    limpet compress memory.safetensors --model HuggingFaceTB/SmolLM2-135M-Instruct --rank 128 -o small.safetensors
    """
    import limpet
    from limpet.methods.compress import Target

    _, checkpoints = ready(dtype)
    check_choice("--storage-dtype", storage_dtype, ("float32", "float16", "bfloat16", "int8"))
    if sum(given is not None for given in (rank, energy, max_bytes)) != 1:
        raise LimpetError("pass exactly one of --rank, --energy and --max-bytes")
    check_folder(out)
    kind = None if storage_dtype == "float32" else storage_dtype
    try:
        Target(rank, energy, None, max_bytes, kind)
    except ValueError as error:
        raise LimpetError(str(error)) from error
    network = checkpoints.read_base(model, dtype, device)
    own = loaded(memory, network, revision, sha256)
    if not isinstance(own, limpet.OnlineLaplace | limpet.PerTaskLaplace | limpet.ApproximateLaplace):
        raise LimpetError(f"{memory} is of method {own.method}, which has no Kronecker factors to truncate")
    ranks = own.compress(rank=rank, energy=energy, max_bytes=max_bytes, storage_dtype=kind)
    try:
        own.save(out, base=None if with_weights else model)
    except LimpetError as error:
        if with_weights:
            raise
        raise LimpetError(f"{error}. With --with-weights the file contains the mean") from error
    chosen = sorted({each for pair in ranks.values() for each in pair})
    console.print(
        f"{out}: {out.stat().st_size / 1e6:.1f} MB, {len(ranks)} blocks of ranks {chosen[0]} to {chosen[-1]}",
        highlight=False,
    )


def loaded(memory: str, network: Any, revision: str | None, sha256: str | None, base: Any = None) -> Any:
    """Load a memory of weights; options that do not fit are reported like other errors."""
    import limpet

    try:
        found = limpet.load(memory, network, revision=revision, sha256=sha256, base=base)
    except ValueError as error:
        raise LimpetError(str(error)) from error
    if not isinstance(found, limpet.Memory):
        raise LimpetError(
            f"{memory} holds outputs ({found.method}), but this command needs a memory of the weights: create one with "
            "limpet consolidate"
        )
    return found


def ready(dtype: str) -> tuple[Any, Any]:
    """Check the dtype and import torch and `limpet.integrations.checkpoints`."""
    if dtype not in ("float32", "bfloat16"):
        raise LimpetError(f"--dtype must be one of float32, bfloat16, not {dtype!r}")
    needed("transformers")
    torch = needed("torch")
    from limpet.integrations import checkpoints

    return torch, checkpoints

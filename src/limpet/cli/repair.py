"""`limpet repair` and `limpet drift`: fine-tuned language models, repaired and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from limpet.cli.base import app, console
from limpet.cli.memories import needed
from limpet.errors import LimpetError

Base = Annotated[str, typer.Option("--model", help="The model before fine-tuning: a folder, or its name on the hub.")]
Tuned = Annotated[Path, typer.Option(help="The fine-tuned model: the folder of a peft adapter or of a checkpoint.")]
File = Annotated[Path, typer.Option("--memory", help="The memory of the model before, made by limpet consolidate.")]
Dtype = Annotated[str, typer.Option(help="What the model computes in: float32 or bfloat16.")]
Device = Annotated[str | None, typer.Option(help="Where the model runs: cpu, cuda; by default a GPU if any.")]


@app.command("repair")
def repair_command(
    model: Base,
    tuned: Tuned,
    memory: File,
    data: Annotated[
        list[str], typer.Option(help="The text it was fine-tuned on: a file, a folder or a data set. Repeatable.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for the repaired adapter or checkpoint.")],
    strength: Annotated[float | None, typer.Option(min=0, help="Weight of the old curvature; 1 by default.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Instead: nats per token that the new text may lose.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=0, help="Instead: nats per token of drift that may remain.")
    ] = None,
    scale: Annotated[float, typer.Option(min=0, help="What the repaired update is multiplied by.")] = 1.0,
    rank: Annotated[int | None, typer.Option(min=1, help="Cut adapters to this rank.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text that curvature is measured on.")] = 8_000,
    length: Annotated[int, typer.Option(min=2, help="Tokens of one sequence.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 4,
    dtype: Dtype = "float32",
    device: Device = None,
) -> None:
    """Undo what a fine-tune has forgotten, without old data.

    limpet repair --model HuggingFaceTB/SmolLM2-135M-Instruct --tuned my-adapter --memory memory.safetensors
    --data new.txt -o repaired
    """
    import limpet
    from limpet.integrations import causal_lm

    torch, checkpoints = _ready(dtype)
    if out.resolve() in (tuned.resolve(), Path(model).resolve()):
        raise LimpetError("-o is the folder of a model that is read: give another one")
    network = checkpoints.read_tuned(model, tuned, dtype, device)
    tokenizer = checkpoints.read_tokenizer(str(tuned), model)
    own = limpet.load(memory, network)
    rows = causal_lm.pack_tokens(tokenizer, data, tokens=tokens, length=length)
    batches = [{"input_ids": part} for part in torch.split(rows, batch_size)]
    total = max(causal_lm.count_tokens(tokenizer, data), rows[:, 1:].numel())
    told = f"{rows[:, 1:].numel():,} of {total:,} tokens of the new text"
    console.print(f"curvature from {told}", highlight=False)
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
        console.print("drift: not measured, the memory has no probe (limpet consolidate --self-samples adds one)")
    checkpoints.write_tuned(network, out, tuned)
    console.print(f"{out}: {len(found.blocks)} blocks repaired at strength {after.strength:.3g}", highlight=False)


@app.command("drift")
def drift_command(
    model: Base,
    tuned: Tuned,
    memory: File,
    at_most: Annotated[
        float | None, typer.Option(min=0, help="Exit with status 1 where the drift is above so many nats.")
    ] = None,
    layers: Annotated[int, typer.Option(min=0, help="How many layers to name; 0 saves a backward pass.")] = 5,
    dtype: Dtype = "float32",
    device: Device = None,
) -> None:
    """Measure how far a fine-tuned model is from the one before: KL(before || now) per token, on the memory's probe.

    limpet drift --model HuggingFaceTB/SmolLM2-135M-Instruct --tuned my-adapter --memory memory.safetensors
    --at-most 0.05
    """
    import limpet

    _, checkpoints = _ready(dtype)
    network = checkpoints.read_tuned(model, tuned, dtype, device)
    own = limpet.load(memory, network)
    before = checkpoints.read_base(model, dtype, device)
    found = own.drift(reference=before, blocks=layers > 0)
    told = f"{float(found):.4f} +- {found.standard_error:.4f} nats per token, on {found.examples} sequences"
    console.print(f"drift: {told}", highlight=False)
    for name, value in sorted(found.blocks.items(), key=lambda item: -item[1])[:layers]:
        share = 100 * value / float(found) if found else 0.0
        console.print(f"  {share:5.1f} %  {name}", highlight=False, markup=False)
    if at_most is not None and not found <= at_most:  # nan is above every bound
        console.print(f"above --at-most {at_most:g}", highlight=False)
        raise typer.Exit(1)


def _ready(dtype: str) -> tuple[Any, Any]:
    """torch, and the module that reads and writes models."""
    if dtype not in ("float32", "bfloat16"):
        raise LimpetError(f"--dtype is one of float32, bfloat16, not {dtype!r}")
    needed("transformers")
    torch = needed("torch")
    from limpet.integrations import checkpoints

    return torch, checkpoints

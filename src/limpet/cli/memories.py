"""`limpet consolidate`, `inspect` and `plan`: memories, made, looked into and foreseen."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from limpet.cli.base import Structure, app, console
from limpet.errors import LimpetError


@app.command("consolidate")
def consolidate_command(
    model: Annotated[str, typer.Option(help="A causal language model: a folder, or its name on the hub.")],
    data: Annotated[
        list[str],
        typer.Option(help="Text it should keep: a file, a folder, or a set on the hub. Repeat for several."),
    ] = [],  # noqa: B006
    self_samples: Annotated[
        int | None, typer.Option(min=1, help="Instead of data: so many tokens that the model draws itself.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Samples begin with the lines of this file, in turns, as chat prompts if it can."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Samples begin as a user's turn in the chat template.")] = False,
    probe: Annotated[
        int | None,
        typer.Option(min=0, help="Sequences to measure drift on, kept in the file; 40 of its own with --self-samples."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of what the model draws.")] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="The memory file.")] = Path("memory.safetensors"),
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens are looked at.")] = 20_000,
    length: Annotated[int, typer.Option(min=2, help="Tokens of one sequence.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 4,
    structure: Structure = None,
    with_vocabulary: Annotated[bool, typer.Option(help="Hold embedding and head too.")] = False,
    max_factor_size: Annotated[
        int | None, typer.Option("--max-factor-size", "--max-side", min=1, help="The longest side that is kept whole.")
    ] = None,
    storage_dtype: Annotated[
        str | None, typer.Option("--storage-dtype", "--at-rest", help="float16 or bfloat16: bases in two bytes.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 for half the room.")] = "float32",
    device: Annotated[
        str | None, typer.Option(help="Where the model runs: cpu, cuda; by default a GPU if any.")
    ] = None,
) -> None:
    """Make the memory of a published language model, from text that stands for what it should keep, or from its own.

    limpet consolidate --model HuggingFaceTB/SmolLM2-135M-Instruct --data speeches.txt -o memory.safetensors

    limpet consolidate --model HuggingFaceTB/SmolLM2-135M-Instruct --self-samples 12000 -o memory.safetensors

    Called again after it was stopped, it goes on where it was. Beside the file it writes a section for the model card.
    On many processes (torchrun --nproc-per-node 8 -m limpet consolidate ...) each reads its part of the text.
    """
    from limpet import distributed
    from limpet.integrations import causal_lm
    from limpet.io import hub
    from limpet.methods.memory import MAX_FACTOR_SIZE
    from limpet.precision import STRUCTURES
    from limpet.precision.storage import DTYPES

    needed("transformers")
    torch = needed("torch")
    from limpet.integrations import checkpoints

    _choice("--dtype", dtype, ("float32", "bfloat16"))
    _choice("--structure", structure, (None, *STRUCTURES))
    _choice("--storage-dtype", storage_dtype, (None, *DTYPES))
    if bool(data) == (self_samples is not None):
        raise LimpetError("give text it should keep (--data), or let it draw its own (--self-samples 12000)")
    if self_samples is None and (prompts or chat):
        raise LimpetError("--prompts and --chat are what samples begin with: they go with --self-samples")
    if prompts and chat:
        raise LimpetError("--prompts and --chat both say what samples begin with: give one of them")
    with distributed.launched() as first:
        network = checkpoints.read_base(model, dtype, device)
        tokenizer = checkpoints.read_tokenizer(model)
        held_out = (0 if self_samples is None else 40) if probe is None else probe
        if self_samples is None:
            rows = causal_lm.pack_tokens(tokenizer, data, tokens=tokens + held_out * length, length=length)
            source = ", ".join(Path(one).name for one in data)
        else:
            starts = [causal_lm.chat_prefix(tokenizer)] if chat else None
            starts = starts if prompts is None else causal_lm.prefixes(tokenizer, prompts)
            wanted = self_samples + held_out * (length - 1)
            rows = causal_lm.self_samples(network, wanted, length=length, prefixes=starts, seed=seed)
            source = "its own samples"
        rows, kept = rows[held_out:], rows[:held_out]
        if not len(rows):
            raise LimpetError(f"all {len(kept)} sequences are for the probe: give more text, or a smaller --probe")
        if first:
            console.print(f"{len(rows)} sequences of {length} tokens from {source}", highlight=False)
        memory = causal_lm.consolidate_lm(
            network,
            torch.split(rows, batch_size),
            probe=torch.split(kept, batch_size) if held_out else (),
            with_vocabulary=with_vocabulary,
            checkpoint=out.with_suffix(".pass"),
            structure=structure or "kronecker",
            max_factor_size=max_factor_size or MAX_FACTOR_SIZE,
            storage_dtype=storage_dtype,
        )
        if not first:
            return
        memory.save(out)
    page = out.with_suffix(".md")
    page.write_text(hub.model_card(memory.examples, model, source))
    console.print(f"{out}: {memory.nbytes / 1e6:.1f} MB; a section for the model card is in {page}", highlight=False)


def _choice(option: str, value: str | None, allowed: Collection[str | None]) -> None:
    if value not in allowed:
        raise LimpetError(f"{option} is one of {', '.join(one for one in allowed if one)}, not {value!r}")


def needed(name: str) -> Any:
    """A package of an extra, or a line that says what to install."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise LimpetError(f"this command needs {missing.name}: pip install 'limpet[transformers]'") from missing


@app.command("inspect")
def inspect_command(
    path: Annotated[Path, typer.Argument(help="A memory file.")],
    plot: Annotated[Path | None, typer.Option(help="Draw what a new task would overwrite, into this PNG.")] = None,
) -> None:
    """Show what is in a memory file: its layers, how much of each is held, and its tasks.

    limpet inspect memory.safetensors --plot stakes.png
    """
    from limpet.experiments.console import show_inspection
    from limpet.methods.inspect import inspect

    found = inspect(path)
    show_inspection(console, found)
    if plot is not None:
        from limpet.experiments.figures import stakes

        stakes(found).savefig(plot, dpi=130)
        console.print(str(plot), highlight=False)


@app.command("plan")
def plan_command(
    model: Annotated[
        str, typer.Option(help="A name on the hub, a folder with a config.json, or package.module:factory.")
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Processes that train together.")] = 1,
    structure: Annotated[str | None, typer.Option(help="One structure; by default all of them.")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks that have been taken in.")] = 10,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens (or examples) of a training step, all ranks.")] = 4096,
    rank: Annotated[int | None, typer.Option(min=1, help="Train by LoRA adapters of this rank.")] = None,
    max_factor_size: Annotated[
        int | None, typer.Option("--max-factor-size", "--max-side", min=1, help="The longest side that is kept whole.")
    ] = None,
    storage_dtype: Annotated[
        str | None, typer.Option("--storage-dtype", "--at-rest", help="float16 or bfloat16: bases in two bytes.")
    ] = None,
    auto_strength: Annotated[bool, typer.Option("--auto-strength", help="Tasks of different strengths.")] = False,
    exclude: Annotated[list[str], typer.Option(help="Leave these out, as exclude=[...] does. Repeatable.")] = [],  # noqa: B006
) -> None:
    """Say what a memory of a model would cost, without reading or allocating one weight of it.

    limpet plan --model meta-llama/Llama-3.2-1B --ranks 8 --rank 16
    """
    from limpet.errors import UnsupportedError
    from limpet.methods.memory import MAX_FACTOR_SIZE
    from limpet.planning.meta_model import blueprint
    from limpet.planning.plan import plan
    from limpet.precision import STRUCTURES

    network = blueprint(model)
    for number, name in enumerate([structure] if structure else STRUCTURES):
        try:
            found = plan(
                network,
                structure=name,
                ranks=ranks,
                tasks=tasks,
                tokens=tokens,
                rank=rank,
                max_factor_size=max_factor_size or MAX_FACTOR_SIZE,
                storage_dtype=storage_dtype,
                auto_strength=auto_strength,
                exclude=exclude,
            ).table(most=12)
        except ValueError as error:
            raise LimpetError(str(error)) from error
        except UnsupportedError as refused:
            if structure:
                raise
            found = f"{name}: refused: {refused}"
        console.print("\n" * bool(number) + found, markup=False, highlight=False, soft_wrap=True)

"""Memory commands: `limpet consolidate`, `inspect` and `plan`."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from limpet.cli.base import Structure, app, console
from limpet.errors import LimpetError

MaxFactorSize = Annotated[
    int | None,
    typer.Option(
        "--max-factor-size",
        "--max-side",
        min=1,
        help="Largest size of a Kronecker factor stored as a full matrix; larger factors are stored as block-diagonal "
        "matrices, very large ones as diagonals. Defaults to 4096.",
    ),
]
StorageDtype = Annotated[
    str | None,
    typer.Option(
        "--storage-dtype",
        "--at-rest",
        help="Store the eigenbases of the Kronecker factors in float16 or bfloat16. Defaults to full precision.",
    ),
]


@app.command("consolidate")
def consolidate_command(
    model: Annotated[str, typer.Option(help="Causal language model: a local folder or a Hugging Face Hub id.")],
    data: Annotated[
        list[str],
        typer.Option(
            help="Text the model should retain: a file, a folder or a Hub dataset. Can be used multiple times."
        ),
    ] = [],  # noqa: B006
    self_samples: Annotated[
        int | None,
        typer.Option(min=1, help="Number of tokens to sample from the model itself, as a replacement for --data."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Text file with one prompt per line. Samples start with the prompts in turn, formatted with the "
            "model's chat template if it has one."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Start each sample with the tokens that precede the first user message in the model's chat template.",
        ),
    ] = False,
    probe: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of held-out sequences stored in the memory for measuring drift. "
            "Defaults to 40 with --self-samples, otherwise 0.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for --self-samples.")] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="Output path of the memory file.")] = Path(
        "memory.safetensors"
    ),
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens of --data to use, besides the probe.")] = 20_000,
    length: Annotated[int, typer.Option(min=2, help="Sequence length in tokens.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of sequences per batch.")] = 4,
    structure: Structure = None,
    with_vocabulary: Annotated[bool, typer.Option(help="Also protect the token embedding and the LM head.")] = False,
    max_factor_size: MaxFactorSize = None,
    storage_dtype: StorageDtype = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of eigenvectors to keep of every Kronecker factor; --storage-dtype may then be int8 as well. "
            "Defaults to all of them.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the model: float32 or bfloat16.")] = "float32",
    device: Annotated[
        str | None, typer.Option(help="Device to run the model on, e.g. cpu or cuda. Defaults to a GPU if available.")
    ] = None,
) -> None:
    """Build the memory of a pretrained language model from representative text or from its own samples.

    Examples:
    limpet consolidate --model HuggingFaceTB/SmolLM2-135M-Instruct --data speeches.txt -o memory.safetensors

    limpet consolidate --model HuggingFaceTB/SmolLM2-135M-Instruct --self-samples 12000 -o memory.safetensors

    An interrupted run resumes when the same command is run again. A section for the model card is written next to the
    memory file. To use several processes, run torchrun --nproc-per-node 8 -m limpet consolidate ...; each process
    reads its share of the text.
    """
    from limpet import distributed
    from limpet.integrations import causal_lm
    from limpet.io import hub
    from limpet.io.atomic import write_text
    from limpet.io.lock import FileLock
    from limpet.methods.memory import MAX_FACTOR_SIZE
    from limpet.precision import STRUCTURES
    from limpet.precision.storage import DTYPES, EIGHT_BITS

    needed("transformers")
    torch = needed("torch")
    from limpet.integrations import checkpoints

    check_choice("--dtype", dtype, ("float32", "bfloat16"))
    check_choice("--structure", structure, (None, *STRUCTURES))
    check_choice("--storage-dtype", storage_dtype, (None, *DTYPES) if rank is None else (None, *DTYPES, EIGHT_BITS))
    if rank is not None and structure not in (None, "kronecker"):
        raise LimpetError(f"--rank truncates Kronecker factors, but --structure is {structure}: omit one of them")
    text = OldText(data, self_samples, prompts, chat, tokens, length, seed)
    text.check()
    check_folder(out)
    with ExitStack() as stack:
        first = stack.enter_context(distributed.launched())
        if first:  # for all ranks: they write the same checkpoint and memory
            stack.enter_context(FileLock(out.with_name(f"{out.name}.lock"), out))
        network = checkpoints.read_base(model, dtype, device)
        tokenizer = checkpoints.read_tokenizer(model)
        held_out = (0 if self_samples is None else 40) if probe is None else probe
        rows = text.rows(network, tokenizer, held_out)
        rows, kept = rows[held_out:], rows[:held_out]
        if not len(rows):
            raise LimpetError(
                f"all {len(kept)} sequences are used by the probe: provide more text, or a smaller --probe"
            )
        if first:
            console.print(f"{len(rows)} sequences of {length} tokens from {text.source}", highlight=False)
        memory = causal_lm.consolidate_lm(
            network,
            torch.split(rows, batch_size),
            probe=torch.split(kept, batch_size) if held_out else (),
            with_vocabulary=with_vocabulary,
            checkpoint=out.with_suffix(".pass"),
            structure=structure or "kronecker",
            max_factor_size=max_factor_size or MAX_FACTOR_SIZE,
            storage_dtype=storage_dtype,
            rank=rank,
        )
        if not first:
            return
        memory.save(out)
    page = out.with_suffix(".md")
    write_text(page, hub.model_card(memory.examples, model, text.source))
    console.print(f"{out}: {memory.nbytes / 1e6:.1f} MB; section for the model card written to {page}", highlight=False)


@dataclass(frozen=True)
class OldText:
    """What a memory is made from: text, or samples of the model. The attributes are options of `limpet consolidate`."""

    data: list[str]
    self_samples: int | None
    prompts: Path | None
    chat: bool
    tokens: int
    length: int
    seed: int

    def check(self) -> None:
        """Raise an error if the options contradict each other."""
        if bool(self.data) == (self.self_samples is not None):
            raise LimpetError(
                "pass either --data (text the model should retain) or --self-samples (e.g. --self-samples 12000)"
            )
        if self.self_samples is None and (self.prompts or self.chat):
            raise LimpetError("--prompts and --chat only apply to --self-samples: add --self-samples, or remove them")
        if self.prompts and self.chat:
            raise LimpetError("--prompts and --chat both define how samples start: pass only one of them")

    @property
    def source(self) -> str:
        """Where the text is from, for people."""
        return ", ".join(Path(one).name for one in self.data) if self.self_samples is None else "its own samples"

    def rows(self, network: Any, tokenizer: Any, held_out: int) -> Any:
        """Return the sequences, of which the first `held_out` are for the probe."""
        from limpet.integrations import causal_lm

        if self.self_samples is None:
            tokens = self.tokens + held_out * self.length
            return causal_lm.pack_tokens(tokenizer, self.data, tokens=tokens, length=self.length)
        starts = [causal_lm.chat_prefix(tokenizer)] if self.chat else None
        starts = starts if self.prompts is None else causal_lm.prefixes(tokenizer, self.prompts)
        wanted = self.self_samples + held_out * (self.length - 1)
        return causal_lm.self_samples(network, wanted, length=self.length, prefixes=starts, seed=self.seed)


def check_folder(out: Path) -> None:
    """Raise an error if the folder of an output file does not exist, before anything is computed for it."""
    if not out.parent.is_dir():
        raise LimpetError(f"there is no folder {out.parent} to save {out.name} in: create it first")


def check_choice(option: str, value: str | None, allowed: Collection[str | None]) -> None:
    """Raise an error if the value of an option is not one of those allowed."""
    if value not in allowed:
        raise LimpetError(f"{option} must be one of {', '.join(name for name in allowed if name)}, not {value!r}")


def needed(name: str) -> Any:
    """Import an optional dependency, or raise an error that says what to install."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise LimpetError(f"this command requires {missing.name}: pip install 'limpet[transformers]'") from missing


@app.command("inspect")
def inspect_command(
    path: Annotated[Path, typer.Argument(help="Path to a memory file.")],
    plot: Annotated[
        Path | None,
        typer.Option(help="Save a plot of how strongly each layer constrains new tasks to this image file."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="List every block; by default, blocks of repeated layers share a line.")
    ] = False,
) -> None:
    """Show the contents of a memory file: its layers, how strongly each is constrained, and its tasks.

    Examples:
    limpet inspect memory.safetensors --plot layers.png
    """
    from limpet.experiments.console import show_inspection
    from limpet.methods.inspect import inspect

    found = inspect(path)
    show_inspection(console, found, full=full)
    if plot is not None:
        from limpet.experiments.figures import stakes

        stakes(found).savefig(plot, dpi=130)
        console.print(str(plot), highlight=False)


@app.command("plan")
def plan_command(
    model: Annotated[
        str,
        typer.Option(
            help="Model: a Hugging Face Hub id, a folder with a config.json, or package.module:factory for a function "
            "that returns the model."
        ),
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Number of data-parallel processes.")] = 1,
    structure: Annotated[str | None, typer.Option(help="Curvature structure. Defaults to all of them.")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks to be consolidated.")] = 10,
    tokens: Annotated[
        int, typer.Option(min=1, help="Number of tokens (or examples) per training step, over all processes.")
    ] = 4096,
    rank: Annotated[
        int | None,
        typer.Option(min=1, help="Assume LoRA adapters of this rank on every linear layer except the head."),
    ] = None,
    factor_rank: Annotated[
        int | None, typer.Option(min=1, help="Rank of the memory: eigenvectors that it keeps of each factor.")
    ] = None,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="Assume a quantized base (QLoRA), of which the memory has no mean.")
    ] = False,
    max_factor_size: MaxFactorSize = None,
    storage_dtype: StorageDtype = None,
    auto_strength: Annotated[
        bool, typer.Option("--auto-strength", help="Assume strength='auto', which gives each task its own strength.")
    ] = False,
    exclude: Annotated[
        list[str], typer.Option(help="Name of a module or parameter to leave unprotected. Can be used multiple times.")
    ] = [],  # noqa: B006
) -> None:
    """Estimate the storage and compute needed to protect a model, without loading its weights.

    Examples:
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
                factor_rank=factor_rank,
                quantized=quantized,
                max_factor_size=max_factor_size or MAX_FACTOR_SIZE,
                storage_dtype=storage_dtype,
                auto_strength=auto_strength,
                exclude=exclude,
            ).table(most=12)
        except ValueError as error:
            raise LimpetError(str(error)) from error
        except UnsupportedError as error:
            if structure:
                raise
            found = f"{name}: not supported: {error}"
        console.print("\n" * bool(number) + found, markup=False, highlight=False, soft_wrap=True)

"""The command line: `limpet run`, `sweep`, `report`, `list`, `consolidate`, `inspect` and `plan`."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from limpet.errors import LimpetError, LimpetWarning

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as missing:  # the core is installed without the extra
    sys.exit(f"limpet: the command line needs {missing.name}: pip install 'limpet[experiments]'")

if TYPE_CHECKING:
    from limpet.experiments import Preset, Recipe

app = typer.Typer(
    help="Networks that learn new things without forgetting the old ones: the experiments, one command each.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console()

Experiment = Annotated[str, typer.Argument(help="A task sequence: `limpet list` shows them.")]
Method = Annotated[str | None, typer.Option(help="What is done against forgetting: `limpet list` shows them.")]
Structure = Annotated[str | None, typer.Option(help="kronecker, diagonal, kronecker-sum or dense.")]
Tasks = Annotated[int | None, typer.Option(help="How many tasks, where the sequence leaves it open.")]
Scenario = Annotated[str | None, typer.Option(help="task, domain or class, for split sequences.")]
Strength = Annotated[
    str | None, typer.Option(help="What the Fisher is multiplied by (for si: its c); auto: what the memory measured.")
]
Epochs = Annotated[int | None, typer.Option(help="Epochs a task.")]
Seeds = Annotated[list[int], typer.Option("--seed", min=0, help="Repeat the option for several seeds.")]
PresetName = Annotated[str | None, typer.Option("--preset", help="'paper' for the paper's settings, or a YAML file.")]
Settings = Annotated[list[str], typer.Option("--set", help="Any setting of a recipe: --set training.lr=0.1")]
Files = Annotated[list[Path], typer.Option("--with", help="A Python file that registers methods, tasks or networks.")]
Threads = Annotated[int | None, typer.Option(help="Threads of one run.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where it stopped.")]


@app.command("run")
def run_command(
    experiment: Experiment,
    method: Method = None,
    structure: Structure = None,
    tasks: Tasks = None,
    scenario: Scenario = None,
    strength: Strength = None,
    epochs: Epochs = None,
    seed: Seeds = [0],  # noqa: B006
    preset: PresetName = None,
    setting: Settings = [],  # noqa: B006
    files: Files = [],  # noqa: B006
    threads: Threads = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; by default runs/EXPERIMENT/METHOD/seedN.")
    ] = None,
    resume: Resume = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="The most that a kill can cost.")] = 20,
) -> None:
    """Learn a sequence of tasks with one method, and write a folder with everything that came of it.

    limpet run permuted-mnist --method online-laplace --structure kronecker --seed 0 --seed 1
    """
    from limpet.experiments import run
    from limpet.experiments.console import show_metrics
    from limpet.experiments.panel import Panel

    chosen, _, words = _recipe(
        experiment, method, structure, tasks, scenario, strength, epochs, preset, setting, files, threads
    )
    if out is not None and len(seed) > 1:
        raise LimpetError("--out is the folder of one run: leave it out where there are several seeds")
    for number in seed:
        recipe = chosen.model_copy(update={"seed": number})
        folder = out or _folder(recipe, words) / f"seed{number}"
        with Panel(f"{_key(recipe)}, {recipe.label}, seed {number}", console) as panel:
            record = run(recipe, folder, resume=resume, watcher=panel, checkpoint_seconds=checkpoint_seconds)
        show_metrics(console, record)
        console.print(f"  [dim]{folder}[/dim]", highlight=False)


@app.command("sweep")
def sweep_command(
    experiment: Experiment,
    method: Method = None,
    structure: Structure = None,
    tasks: Tasks = None,
    scenario: Scenario = None,
    epochs: Epochs = None,
    seed: Seeds = [0],  # noqa: B006
    preset: PresetName = None,
    setting: Settings = [],  # noqa: B006
    files: Files = [],  # noqa: B006
    grid: Annotated[
        list[str], typer.Option(help="Values to try: --grid memory.strength=1,3,10; by default the preset's.")
    ] = [],  # noqa: B006
    scheduler: Annotated[
        str, typer.Option(help="grid (every trial to its end) or asha (stop the poor ones).")
    ] = "grid",
    cpus: Annotated[int, typer.Option(help="Processors of one trial.")] = 1,
    gpus: Annotated[float, typer.Option(help="GPUs of one trial.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep; by default under runs/sweeps/.")] = None,
    resume: Resume = False,
) -> None:
    """Try every combination of a grid on Ray Tune, and name the best.

    limpet sweep disjoint-mnist --structure diagonal --seed 0 --seed 1
    """
    from limpet.experiments.sweep import ended, plan, sweep

    if scheduler not in ("grid", "asha"):
        raise LimpetError(f"--scheduler is grid or asha, not {scheduler!r}")
    chosen, source, words = _recipe(
        experiment, method, structure, tasks, scenario, None, epochs, preset, setting, files, cpus
    )
    values = dict(_grid(text) for text in grid) or source.grid(chosen)
    folder = out or Path("runs") / "sweeps" / _folder(chosen, words).relative_to("runs")
    trials = plan(chosen, values, seed, folder)
    console.print(f"{len(trials)} trials: {', '.join(f'{k} in {v}' for k, v in values.items())}, seeds {seed}")
    columns = (TextColumn("trials ended"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        shown = bar.add_task("trials", total=len(trials))
        with _every_second(lambda: bar.update(shown, completed=ended(trials))):
            result = sweep(
                trials, folder, asha=scheduler == "asha", cpus=cpus, gpus=gpus, resume=resume, say=console.print
            )
    table = Table(*values, f"{result.measured} accuracy (%)", "seeds")
    for outcome in result.outcomes:
        score = escape(outcome.failure or "stopped early") if outcome.score is None else f"{outcome.score:.2f}"
        style = "bold" if outcome.settings == result.best else ""
        table.add_row(*map(str, outcome.settings.values()), score, f"{len(outcome.scores)} of {len(seed)}", style=style)
    console.print(table)
    if result.measured == "test":
        console.print("[dim]chosen by test accuracy; --set training.validation=10000 holds data out to choose by[/dim]")
    console.print(f"[dim]{folder}[/dim]", highlight=False)


@app.command("report")
def report_command(
    folders: Annotated[list[Path], typer.Argument(help="Folders with runs, at any depth; or results/.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; by default the first folder.")] = None,
) -> None:
    """Draw the paper's figures and tables from run folders: PNG, SVG, Markdown, and summary.json.

    limpet report runs/ --out results/
    """
    from limpet.experiments.report import report

    with console.status("drawing ..."):
        written = report(folders, out or folders[0])
    for path in written:
        console.print(str(path), highlight=False)


@app.command("consolidate")
def consolidate_command(
    model: Annotated[str, typer.Option(help="A causal language model: a folder, or its name on the hub.")],
    data: Annotated[
        list[str],
        typer.Option(help="Text it should keep: a file, a folder, or a set on the hub. Repeat for several."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The memory file.")] = Path("memory.safetensors"),
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens are looked at.")] = 20_000,
    length: Annotated[int, typer.Option(min=2, help="Tokens of one sequence.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 4,
    structure: Structure = None,
    with_vocabulary: Annotated[bool, typer.Option(help="Hold embedding and head too.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 for half the room.")] = "float32",
) -> None:
    """Make the memory of a published language model, from text that stands for what it should keep.

    limpet consolidate --model HuggingFaceTB/SmolLM2-135M-Instruct --data speeches.txt -o memory.safetensors

    Called again after it was stopped, it goes on where it was. Beside the file it writes a section for the model card.
    On many processes (torchrun --nproc-per-node 8 -m limpet.cli consolidate ...) each reads its part of the text.
    """
    from limpet import hub, language, parallel

    transformers, torch = _needed("transformers"), _needed("torch")
    if dtype not in ("float32", "bfloat16"):
        raise LimpetError(f"--dtype is float32 or bfloat16, not {dtype!r}")
    try:
        network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        told = str(error).splitlines()[0]
        raise LimpetError(f"{model} is no causal language model that could be read: {told}") from error
    rows = language.rows(tokenizer, data, tokens=tokens, length=length)
    with parallel.launched() as first:
        if first:
            console.print(f"{len(rows)} sequences of {length} tokens from {', '.join(data)}", highlight=False)
        memory = language.remember(
            network,
            torch.split(rows, batch_size),
            structure=structure or "kronecker",
            with_vocabulary=with_vocabulary,
            checkpoint=out.with_suffix(".pass"),
        )
        if not first:
            return
        memory.save(out)
    page = out.with_suffix(".md")
    page.write_text(hub.card(memory, model, ", ".join(Path(source).name for source in data)))
    console.print(f"{out}: {memory.nbytes / 1e6:.1f} MB; a section for the model card is in {page}", highlight=False)


def _needed(name: str) -> Any:
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
    from limpet.inspection import inspect

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
    max_side: Annotated[int | None, typer.Option(min=1, help="The longest side that keeps a dense factor.")] = None,
    at_rest: Annotated[str | None, typer.Option(help="bfloat16: bases and eigenvalues in two bytes.")] = None,
    auto_strength: Annotated[bool, typer.Option("--auto-strength", help="Tasks of different strengths.")] = False,
    exclude: Annotated[list[str], typer.Option(help="Leave these out, as exclude=[...] does. Repeatable.")] = [],  # noqa: B006
) -> None:
    """Say what a memory of a model would cost, without reading or allocating one weight of it.

    limpet plan --model meta-llama/Llama-3.2-1B --ranks 8 --rank 16
    """
    from limpet.blueprint import blueprint
    from limpet.errors import UnsupportedError
    from limpet.methods.memory import MAX_SIDE
    from limpet.plan import plan
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
                max_side=max_side or MAX_SIDE,
                at_rest=at_rest,
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


@app.command("list")
def list_command(files: Files = []) -> None:  # noqa: B006
    """Show the task sequences, methods, networks and presets there are."""
    from limpet.experiments import METHODS, NETWORKS, SEQUENCES
    from limpet.experiments.recipe import load_preset, preset_names
    from limpet.experiments.registry import load_file
    from limpet.experiments.sequences import SCENARIOS

    for path in files:
        load_file(path)
    for title, registry in (("task sequences", SEQUENCES), ("methods", METHODS), ("networks", NETWORKS)):
        table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
        for name in registry.names():
            first_line = (registry[name].__doc__ or "").strip().splitlines()[:1]
            table.add_row(f"[cyan]{name}[/cyan]", " ".join(first_line))
        console.print(table)
    table = Table(title="presets", title_justify="left", title_style="bold", box=None, show_header=False)
    for name in preset_names():
        table.add_row(f"[cyan]{name}[/cyan]", load_preset(name).about)
    console.print(table)
    for name, meaning in SCENARIOS.items():
        console.print(f"[dim]scenario {name}: {meaning}[/dim]", highlight=False)


def _recipe(
    experiment: str,
    method: str | None,
    structure: str | None,
    tasks: int | None,
    scenario: str | None,
    strength: str | None,
    epochs: int | None,
    preset: str | None,
    setting: list[str],
    files: list[Path],
    threads: int | None,
) -> tuple[Recipe, Preset, list[str]]:
    """The recipe that the options stand for, its preset, and what in it is unlike the preset, for the folder's name."""
    from limpet.experiments import SEQUENCES
    from limpet.experiments.methods import with_structure
    from limpet.experiments.recipe import load_preset, parse_setting
    from limpet.experiments.registry import load_file

    for path in files:
        load_file(path)
    SEQUENCES[experiment]  # an unknown name is said before anything else
    source = load_preset(experiment, preset)
    named = {"method": method, "structure": structure, "tasks": tasks, "scenario": scenario, "threads": threads}
    shortcuts = {"memory.strength": strength, "training.epochs": epochs}
    texts = [f"{key}={value}" for key, value in shortcuts.items() if value is not None] + setting
    extra: dict[str, Any] = dict(map(parse_setting, texts))
    overrides = {key: value for key, value in named.items() if value is not None} | extra
    if "seed" in extra:
        raise LimpetError("seeds are given by --seed, not by --set")
    if files:
        overrides["files"] = [str(path.resolve()) for path in files]
    # The structure may be the method's default, for which the preset has settings of its own.
    first = with_structure(source.resolve(overrides))
    recipe = source.resolve({**overrides, **({"structure": first.structure} if first.structure else {})})
    words = [preset.replace("/", "-")] if preset else []
    return recipe, source, words + [f"{key.rpartition('.')[2]}={value}" for key, value in extra.items()]


def _grid(text: str) -> tuple[str, list[Any]]:
    from limpet.experiments.recipe import parse_setting

    name, equals, values = text.partition("=")
    if not equals:
        raise LimpetError(f"--grid takes name=value,value, such as memory.strength=1,3,10, not {text!r}")
    return name, [parse_setting(f"{name}={value}")[1] for value in values.split(",")]


def _key(recipe: Recipe) -> str:
    from limpet.experiments.sequences import experiment_key

    return experiment_key(recipe.experiment, recipe.tasks, recipe.scenario)


def _folder(recipe: Recipe, words: list[str]) -> Path:
    return Path("runs") / _key(recipe) / "+".join([recipe.label.replace("/", "-"), *words])


@contextmanager
def _every_second(action: Callable[[], None]) -> Iterator[None]:
    """Do something once a second while the body runs, and once more at its end."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(1):
            action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        action()


def _one_line(message: Warning | str, *_: Any, **__: Any) -> None:
    Console(stderr=True).print(
        f"[yellow]note:[/yellow] {escape(str(message).removeprefix('limpet: '))}", highlight=False
    )


def main() -> None:
    """The entry point: every error that limpet raises on purpose is one line."""
    warnings.simplefilter("once", LimpetWarning)
    warnings.showwarning = _one_line
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app(standalone_mode=True)
    except (LimpetError, OSError, UnicodeDecodeError) as error:
        Console(stderr=True).print(f"[red]limpet:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

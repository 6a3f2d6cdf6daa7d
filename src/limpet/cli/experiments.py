"""Experiment commands: `limpet run`, `sweep`, `report` and `list`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from limpet.cli.base import Structure, app, console
from limpet.errors import LimpetError

if TYPE_CHECKING:
    from limpet.experiments import Preset, Recipe

Experiment = Annotated[str, typer.Argument(help="Task sequence to learn; see `limpet list`.")]
Method = Annotated[
    str | None, typer.Option(help="Continual-learning method; see `limpet list`. Defaults to online-laplace.")
]
Tasks = Annotated[int | None, typer.Option(help="Number of tasks to learn. Defaults to the preset's.")]
Scenario = Annotated[
    str | None,
    typer.Option(help="Scenario of split-mnist and split-cifar10: task, domain or class; see `limpet list`."),
]
Strength = Annotated[
    str | None,
    typer.Option(
        help="Factor by which the Fisher of each task is multiplied (for si: the constant c), or 'auto' to choose it "
        "from measured loss curves. Larger values protect more. Defaults to the preset's."
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Number of epochs per task. Defaults to the preset's.")]
Seeds = Annotated[
    list[int], typer.Option("--seed", min=0, help="Random seed. Can be used multiple times, for one run each.")
]
PresetName = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="Preset to use: 'paper' for the paper's settings, or a path to a YAML file. "
        "Defaults to the preset named after the experiment.",
    ),
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set", help="Override a setting of the preset, e.g. --set training.lr=0.1. Can be used multiple times."
    ),
]
Files = Annotated[
    list[Path],
    typer.Option(
        "--with", help="Python file that registers custom methods, tasks or networks. Can be used multiple times."
    ),
]
Threads = Annotated[int | None, typer.Option(help="Number of CPU threads. Defaults to PyTorch's setting.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint in the output folder.")]


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
        Path | None, typer.Option(help="Output folder of the run. Defaults to runs/EXPERIMENT/METHOD/seedN.")
    ] = None,
    resume: Resume = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="Minimum number of seconds between checkpoints.")] = 20,
) -> None:
    """Train on a sequence of tasks with one method and save metrics, memory, model and logs to a folder.

    Examples:
    limpet run permuted-mnist --method online-laplace --structure kronecker --seed 0 --seed 1
    """
    from limpet.experiments import run
    from limpet.experiments.console import show_metrics
    from limpet.experiments.live_display import LiveDisplay

    chosen, _, words = _recipe(
        experiment, method, structure, tasks, scenario, strength, epochs, preset, setting, files, threads
    )
    if out is not None and len(seed) > 1:
        raise LimpetError("--out names the folder of a single run: omit it when --seed is given more than once")
    for number in seed:
        recipe = chosen.model_copy(update={"seed": number})
        folder = out or _folder(recipe, words) / f"seed{number}"
        with LiveDisplay(f"{_key(recipe)}, {recipe.label}, seed {number}", console) as panel:
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
        list[str],
        typer.Option(
            help="Values to try, e.g. --grid memory.strength=1,3,10. Can be used multiple times. "
            "Defaults to the grid of the preset."
        ),
    ] = [],  # noqa: B006
    scheduler: Annotated[
        str,
        typer.Option(help="Trial scheduler: grid (run every trial to completion) or asha (stop poor trials early)."),
    ] = "grid",
    cpus: Annotated[int, typer.Option(help="Number of CPUs per trial.")] = 1,
    gpus: Annotated[float, typer.Option(help="Number of GPUs per trial; may be fractional.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Output folder of the sweep. Defaults to a folder in runs/sweeps/.")
    ] = None,
    resume: Resume = False,
) -> None:
    """Search a grid of settings with Ray Tune and report the best combination.

    Examples:
    limpet sweep disjoint-mnist --structure diagonal --seed 0 --seed 1
    """
    from limpet.experiments.sweep import ended, plan, sweep

    if scheduler not in ("grid", "asha"):
        raise LimpetError(f"--scheduler must be 'grid' or 'asha', not {scheduler!r}")
    chosen, source, words = _recipe(
        experiment, method, structure, tasks, scenario, None, epochs, preset, setting, files, cpus
    )
    values = dict(_grid(text) for text in grid) or source.grid(chosen)
    folder = out or Path("runs") / "sweeps" / _folder(chosen, words).relative_to("runs")
    trials = plan(chosen, values, seed, folder)
    console.print(f"{len(trials)} trials: {', '.join(f'{k} in {v}' for k, v in values.items())}, seeds {seed}")
    columns = (TextColumn("trials finished"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
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
        console.print(
            "[dim]selected by test accuracy; use --set training.validation=10000 to select on held-out data[/dim]"
        )
    console.print(f"[dim]{folder}[/dim]", highlight=False)


@app.command("report")
def report_command(
    folders: Annotated[list[Path], typer.Argument(help="Folders that are searched recursively for finished runs.")],
    out: Annotated[Path | None, typer.Option(help="Output folder. Defaults to the first of the folders.")] = None,
) -> None:
    """Generate the paper's figures and tables from finished runs, as PNG, Markdown and summary.json.

    Examples:
    limpet report runs/ --out results/

    Runs that are not in the tables are listed at the end, with the reason.
    """
    from limpet.experiments.omissions import omissions
    from limpet.experiments.report import write_report
    from limpet.experiments.results import gather

    place = out or folders[0]
    with console.status("drawing ..."):
        experiments = gather([place, *folders] if place.is_dir() else folders)
        written = write_report(experiments, place)
    for path in written:
        console.print(str(path), highlight=False)
    for line in omissions(experiments, folders):
        console.print(f"[dim]not in the tables:[/dim] {escape(line)}", highlight=False, soft_wrap=True)


@app.command("list")
def list_command(files: Files = []) -> None:  # noqa: B006
    """List the available task sequences, methods, networks and presets."""
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
        console.print(f"[dim]scenario {name}, {meaning}[/dim]", highlight=False)


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
    """Return the recipe for the options, its preset, and the parts of the folder name that deviate from the preset."""
    from limpet.experiments import SEQUENCES
    from limpet.experiments.methods import with_structure
    from limpet.experiments.recipe import load_preset
    from limpet.experiments.registry import load_file
    from limpet.experiments.settings import parse_setting

    for path in files:
        load_file(path)
    SEQUENCES[experiment]  # report an unknown name before anything else
    source = load_preset(experiment, preset)
    named = {"method": method, "structure": structure, "tasks": tasks, "scenario": scenario, "threads": threads}
    shortcuts = {"memory.strength": strength, "training.epochs": epochs}
    texts = [f"{key}={value}" for key, value in shortcuts.items() if value is not None] + setting
    extra: dict[str, Any] = dict(map(parse_setting, texts))
    overrides = {key: value for key, value in named.items() if value is not None} | extra
    if "seed" in extra:
        raise LimpetError("set seeds with --seed, not --set")
    if files:
        overrides["files"] = [str(path.resolve()) for path in files]
    # The structure may be the method's default, and the preset may have settings specific to that structure.
    first = with_structure(source.resolve(overrides))
    recipe = source.resolve({**overrides, **({"structure": first.structure} if first.structure else {})})
    words = [preset.replace("/", "-")] if preset else []
    return recipe, source, words + [f"{key.rpartition('.')[2]}={value}" for key, value in extra.items()]


def _grid(text: str) -> tuple[str, list[Any]]:
    """Parse `name=value,value` into a dotted name and its values."""
    from limpet.experiments.settings import parse_setting

    name, equals, values = text.partition("=")
    if not equals:
        raise LimpetError(f"--grid takes name=value,value, e.g. memory.strength=1,3,10, not {text!r}")
    return name, [parse_setting(f"{name}={value}")[1] for value in values.split(",")]


def _key(recipe: Recipe) -> str:
    from limpet.experiments.sequences import experiment_key

    return experiment_key(recipe.experiment, recipe.tasks, recipe.scenario)


def _folder(recipe: Recipe, words: list[str]) -> Path:
    return Path("runs") / _key(recipe) / "+".join([recipe.label.replace("/", "-"), *words])


@contextmanager
def _every_second(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` once a second while the body runs, and once more when it ends."""
    stopped = threading.Event()

    def repeat() -> None:
        while not stopped.wait(1):
            action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        action()

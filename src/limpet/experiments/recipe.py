"""Recipes: typed configuration of everything that determines the result of a run, with YAML presets.

A preset consists of `about` (a description), `recipe` (settings shared by all methods), `methods` (overrides for a
method or method/structure) and `grids` (the values that a sweep tries). Settings are merged in that order, and options
of the command line are applied last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from limpet.errors import LimpetError
from limpet.experiments.registry import lineage, suggestion
from limpet.experiments.settings import checked, merged, nested, parse

PRESETS = resources.files("limpet.experiments") / "presets"


class Part(BaseModel):
    """Base class of configuration objects: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Pixels(Part):
    """Normalization of pixels: (x / 255 - mean) / std.

    Attributes:
        mean: Mean of the pixels in [0, 1], which is subtracted.
        std: Standard deviation, by which they are divided.
    """

    mean: float = 0.0
    std: float = Field(1.0, gt=0)


class NetworkChoice(Part):
    """The network.

    Attributes:
        name: Name of the network; `limpet list` shows all.
        options: Keyword arguments of its function, such as `hidden` for mlp or `width` for resnet. Those of the preset
            do not apply to another network.
    """

    name: str = "mlp"
    options: dict[str, Any] = {}


class Training(Part):
    """Training on one task.

    The initial learning rate of task t = 0, 1, ... is lr / (1 + task_decay t), as in appendix D of the paper; from the
    second task on it is also divided by max(1, strength_decay strength), as in section 4.2. Within a task it is
    constant, follows a cosine to zero, or is multiplied by `drop` every `drop_epochs` epochs or `drop_updates` updates
    ("step").

    Attributes:
        optimizer: "sgd" or "adam".
        lr: Learning rate of the first task.
        momentum: Momentum of SGD.
        nesterov: Whether the momentum is Nesterov's.
        batch_size: Number of examples per update.
        epochs: Number of epochs per task; with `patience`, the minimum.
        schedule: Learning-rate schedule within a task: "constant", "cosine" or "step".
        drop: Factor of the step schedule.
        drop_epochs: Number of epochs between steps.
        drop_updates: Number of updates between steps; takes precedence over `drop_epochs`.
        task_decay: Decay of the initial learning rate with the number of tasks.
        strength_decay: Decay of the initial learning rate with the strength of the memory.
        validation: Number of training examples per task held out for validation.
        patience: Stop a task once its validation accuracy has not improved for this many epochs.
        max_epochs: Maximum number of epochs per task with `patience`.
        freeze_batch_norm: Keep the statistics that batch norm normalizes with from the second task on. They are
            measured over the data of the first task at its end. Otherwise they follow the newest task, which changes
            the outputs on earlier ones, and no memory protects against it. Weights and biases are trained and
            protected either way.
        clip_norm: Largest norm of the gradient of the loss, to which it is scaled down; the penalty is not clipped. By
            default ("auto") 1 while batch norm is frozen, without which a ResNet diverges at learning rates that it
            needs for the first task, and no clipping otherwise.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = Field(0.05, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = True
    batch_size: int = Field(250, ge=1)
    epochs: int = Field(5, ge=1)
    schedule: Literal["constant", "cosine", "step"] = "cosine"
    drop: float = Field(0.1, gt=0, le=1)
    drop_epochs: int | None = Field(None, ge=1)
    drop_updates: int | None = Field(None, ge=1)
    task_decay: float = Field(0.0, ge=0)
    strength_decay: float = Field(0.0, ge=0)
    validation: int = Field(0, ge=0)
    patience: int | None = Field(None, ge=1)
    max_epochs: int = Field(100, ge=1)
    freeze_batch_norm: bool = False
    clip_norm: Annotated[float, Field(gt=0)] | Literal["auto"] | None = "auto"

    @model_validator(mode="after")
    def _check_patience(self) -> Training:
        if self.patience is not None and not self.validation:
            raise ValueError("patience needs a validation set: set training.validation")
        if self.patience is not None and self.schedule == "cosine":
            raise ValueError(
                "a cosine schedule ends at training.epochs and cannot be combined with patience: use "
                "training.schedule=constant or step"
            )
        return self


class MemorySettings(Part):
    """Settings of a memory.

    Attributes:
        repair: Strength of repairs, for methods that use them.
        rehearsal: Weight of the divergence on drawn inputs, for methods that use it.
        strength: Multiplier of the Fisher (c for Synaptic Intelligence), or "auto".
        budget: Instead of a strength, the allowed loss increase on earlier tasks per task, in nats per example.
        prior_precision: Precision of the Gaussian prior.
        fisher: How the Fisher is estimated: "auto", "exact", "sampled" or "empirical".
        smoothing: Measure the curvature at perturbed weights whose predicted loss increase is this many nats per
            example; 0 measures it at the mode.
        limit: Maximum number of examples per task used for the curvature.
        every: Number of SGD steps per proximal step. More than 1 is faster, but can diverge where the loss itself is
            strongly curved, as in a network with frozen batch norm.
        mode: How the penalty is applied: "auto", "proximal" or "gradient".
        damping: Damping of Synaptic Intelligence.
        rank: Number of eigenvectors to keep of each Kronecker factor; all of them by default.
        energy: Part of the trace of each Kronecker factor that its eigenvectors should hold, instead of a rank.
    """

    repair: float = Field(1.0, ge=0)
    rehearsal: float = Field(1.0, ge=0)
    strength: Annotated[float, Field(ge=0)] | Literal["auto"] = 1.0
    budget: float | None = Field(None, gt=0)
    prior_precision: float = Field(1.0, ge=0)
    fisher: Literal["auto", "exact", "sampled", "empirical"] = "auto"
    smoothing: float = Field(0.0, ge=0)
    limit: int | None = Field(None, ge=1)
    every: int = Field(1, ge=1)
    mode: Literal["auto", "proximal", "gradient"] = "auto"
    damping: float = Field(0.1, gt=0)
    rank: int | None = Field(None, ge=1)
    energy: float | None = Field(None, gt=0, le=1)


class Evaluation(Part):
    """Evaluation on test data.

    Attributes:
        batch_size: Number of examples per batch.
        rows: Numbers of the tasks (from 1) after which all tasks so far are tested; empty for all tasks.
        track: Number of test examples per task for the accuracy curve over epochs; 0 for no curve.
    """

    batch_size: int = Field(1000, ge=1)
    rows: list[int] = []
    track: int = Field(0, ge=0)


class Recipe(Part):
    """Configuration of one run.

    Attributes:
        experiment: Name of the task sequence.
        tasks: Number of tasks; by default that of the sequence.
        scenario: "task", "domain" or "class"; by default the first one that the sequence supports.
        method: Name of the continual-learning method.
        structure: Curvature structure; by default the method's.
        seed: Seed of tasks, initial weights, batches and sampling.
        threads: Number of PyTorch threads; by default PyTorch's own choice.
        device: PyTorch device; "auto" selects an accelerator if available.
        pixels: Mean and standard deviation that pixels in [0, 1] are normalized with.
        network: Name and options of the network.
        training: Optimizer, schedule and epochs of one task.
        memory: Settings of the memory.
        evaluation: How test accuracy is measured.
        files: Python files that register custom methods, networks or task sequences.
    """

    experiment: str = "permuted-mnist"
    tasks: int | None = Field(None, ge=1)
    scenario: Literal["task", "domain", "class"] | None = None
    method: str = "online-laplace"
    structure: str | None = None
    seed: int = Field(0, ge=0, lt=2**31)
    threads: int | None = Field(None, ge=1)
    device: str = "auto"
    pixels: Pixels = Pixels()
    network: NetworkChoice = NetworkChoice()
    training: Training = Training()
    memory: MemorySettings = MemorySettings()
    evaluation: Evaluation = Evaluation()
    files: list[str] = []

    @property
    def label(self) -> str:
        """Name of the method in results, such as "online-laplace/kronecker" or "si"."""
        return f"{self.method}/{self.structure}" if self.structure else self.method


class Preset(Part):
    """Settings from a YAML file of the package or of the user.

    Attributes:
        about: Description of the preset.
        recipe: Settings shared by all methods.
        methods: Overrides by method ("online-laplace") or method and structure ("online-laplace/kronecker"). They also
            apply to registered subclasses of the method, below overrides of their own.
        grids: Values that a sweep tries, by method or method and structure; also for registered subclasses.
    """

    about: str = ""
    recipe: dict[str, Any] = {}
    methods: dict[str, dict[str, Any]] = {}
    grids: dict[str, dict[str, list[Any]]] = {}

    def resolve(self, overrides: Mapping[str, Any]) -> Recipe:
        """Build a recipe from the preset.

        Args:
            overrides: Settings by dotted name, such as {"method": "si", "training.lr": 0.1}.

        Returns:
            The recipe, with the preset's settings for its method and the overrides applied.

        Raises:
            LimpetError: If a setting is unknown or has an invalid value.
        """
        first = nested(overrides)
        chosen = checked(Recipe, _layered([self.recipe, first]), "recipe")
        own = (self.methods.get(name, {}) for name in _labels(chosen))
        return checked(Recipe, _layered([self.recipe, *own, first]), "recipe")

    def grid(self, recipe: Recipe) -> dict[str, list[Any]]:
        """Return the values that a sweep of this recipe tries: {dotted name: values}."""
        return next((self.grids[name] for name in reversed(_labels(recipe)) if self.grids.get(name)), {})


def _labels(recipe: Recipe) -> list[str]:
    """The names whose settings apply to a recipe: each method it derives from, without and with the structure."""
    names = lineage(recipe.method)
    return [
        label for name in names for label in ((name, f"{name}/{recipe.structure}") if recipe.structure else (name,))
    ]


def preset_names() -> list[str]:
    """Return the names of the presets in the package."""
    return sorted(Path(entry.name).stem for entry in PRESETS.iterdir() if entry.name.endswith(".yaml"))


def load_preset(experiment: str, which: str | None = None) -> Preset:
    """Load the preset of an experiment.

    Args:
        experiment: Name of the task sequence.
        which: Suffix of the preset's name ("paper") or path to a YAML file; by default the preset without a suffix.

    Returns:
        The preset; without `which`, an empty one if the package has none for the experiment.

    Raises:
        LimpetError: If the preset or file does not exist or is invalid.
    """
    if which and which.endswith((".yaml", ".yml")):
        path = Path(which)
        if not path.is_file():
            raise LimpetError(f"file not found: {which}")
        try:
            text = path.read_text(encoding="utf-8")
        except ValueError as error:
            raise LimpetError(f"{which} is not a text file: {error}") from error
        return checked(Preset, parse(text, which), which)
    name = f"{experiment}-{which}" if which else experiment
    if name not in preset_names():
        if which:
            raise LimpetError(f"unknown preset {name!r}{suggestion(name, preset_names())}")
        return Preset(recipe={"experiment": experiment})  # a user-defined sequence
    return checked(Preset, parse((PRESETS / f"{name}.yaml").read_text(), name), name)


def _layered(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge layers of settings, the later ones on top. Options of a network do not carry over to another network."""
    values: dict[str, Any] = {}
    for layer in layers:
        before, after = (one.get("network") for one in (values, layer))
        if isinstance(before, Mapping) and isinstance(after, Mapping) and "name" in after:
            other = after["name"] != before.get("name", NetworkChoice().name)
            values = {**values, "network": {}} if other else values
        values = merged(values, layer)
    return values

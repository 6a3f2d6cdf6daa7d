"""Recipes: everything that decides the result of a run, as typed configuration, with YAML presets in the package.

A preset has the parts `about` (a line of text), `recipe` (what all methods share), `methods` (what one of them changes)
and `grids` (what a sweep of it tries). A recipe is resolved from it in that order; the command line comes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from limpet.errors import LimpetError
from limpet.experiments.registry import suggestion

M = TypeVar("M", bound=BaseModel)

PRESETS = resources.files("limpet.experiments") / "presets"


class Part(BaseModel):
    """A part of a recipe: unknown keys are errors, and nothing changes once it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Pixels(Part):
    """A network sees (x / 255 - mean) / std."""

    mean: float = 0.0
    std: float = Field(1.0, gt=0)


class NetworkChoice(Part):
    """A network by name, and what its function takes."""

    name: str = "mlp"
    options: dict[str, Any] = {}


class Training(Part):
    """How one task is learned.

    The learning rate of task t = 0, 1, ... begins at lr / (1 + task_decay t), as in appendix D of the paper, or at
    lr / max(1, strength_decay strength) from the second task on, as in its section 4.2. Within a task it stays
    ("constant"), falls to zero on a cosine, or is multiplied by `drop` every `drop_epochs` epochs or `drop_updates`
    updates ("step"). With `patience` a task ends once its validation error has not improved for so many epochs, at the
    earliest after `epochs` and at the latest after `max_epochs`.
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

    @model_validator(mode="after")
    def _stops_early_by_something(self) -> Training:
        if self.patience is not None and not self.validation:
            raise ValueError("patience needs a validation set: set training.validation")
        if self.patience is not None and self.schedule == "cosine":
            raise ValueError(
                "a cosine ends at training.epochs, so it does not go with patience: choose another schedule"
            )
        return self


class MemorySettings(Part):
    """What a memory is given: its strength (c for Synaptic Intelligence) or a budget, what each task may cost the older
    ones in nats per example, and how it measures and holds; and the strength of repairs, for methods that have them.
    """

    repair: float = Field(1.0, ge=0)
    strength: Annotated[float, Field(ge=0)] | Literal["auto"] = 1.0
    budget: float | None = Field(None, gt=0)
    prior_precision: float = Field(1.0, ge=0)
    fisher: Literal["auto", "exact", "sampled", "empirical"] = "auto"
    smoothing: float = Field(0.0, ge=0)
    limit: int | None = Field(None, ge=1)
    every: int = Field(8, ge=1)
    mode: Literal["auto", "proximal", "gradient"] = "auto"
    damping: float = Field(0.1, gt=0)


class Evaluation(Part):
    """How much is measured: after which tasks (`rows`; empty: after each one) all tasks so far are tested, and on how
    many test images (`track`) the curve over epochs is made (0: no curve).
    """

    batch_size: int = Field(1000, ge=1)
    rows: list[int] = []
    track: int = Field(0, ge=0)


class Recipe(Part):
    """One run."""

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
        """The method as results name it: "online-laplace/kronecker", "si"."""
        return f"{self.method}/{self.structure}" if self.structure else self.method


class Preset(Part):
    """A YAML file of the package or of the user's own."""

    about: str = ""
    recipe: dict[str, Any] = {}
    methods: dict[str, dict[str, Any]] = {}
    grids: dict[str, dict[str, list[Any]]] = {}

    def resolve(self, overrides: Mapping[str, Any]) -> Recipe:
        """The recipe for a method, with settings by dotted name on top: {"method": "si", "training.lr": 0.1}."""
        first = nested(overrides)
        chosen = checked(Recipe, merged(self.recipe, first), "recipe")
        layers = [self.recipe, self.methods.get(chosen.method, {}), self.methods.get(chosen.label, {}), first]
        values: dict[str, Any] = {}
        for layer in layers:
            values = merged(values, layer)
        return checked(Recipe, values, "recipe")

    def grid(self, recipe: Recipe) -> dict[str, list[Any]]:
        """What a sweep of this recipe tries: {dotted name: values}."""
        return self.grids.get(recipe.label) or self.grids.get(recipe.method) or {}


def preset_names() -> list[str]:
    """The presets in the package."""
    return sorted(Path(entry.name).stem for entry in PRESETS.iterdir() if entry.name.endswith(".yaml"))


def load_preset(experiment: str, which: str | None = None) -> Preset:
    """The preset of an experiment; `which` is the end of its name ("paper") or a YAML file of one's own."""
    if which and which.endswith((".yaml", ".yml")):
        path = Path(which)
        if not path.is_file():
            raise LimpetError(f"there is no file {which}")
        return checked(Preset, parse(path.read_text(), which), which)
    name = f"{experiment}-{which}" if which else experiment
    if name not in preset_names():
        if which:
            raise LimpetError(f"there is no preset {name!r}{suggestion(name, preset_names())}")
        return Preset(recipe={"experiment": experiment})  # a sequence of the user's own
    return checked(Preset, parse((PRESETS / f"{name}.yaml").read_text(), name), name)


def parse(text: str, name: str) -> dict[str, Any]:
    """YAML that must be a mapping."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise LimpetError(f"{name} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise LimpetError(f"{name} must be a mapping of names to values")
    return values


def parse_setting(text: str) -> tuple[str, Any]:
    """`training.lr=0.1` as a dotted name and a value."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise LimpetError(f"--set takes name=value, such as training.lr=0.1, not {text!r}")
    try:
        return name.strip(), _number(yaml.safe_load(value))
    except yaml.YAMLError as error:
        raise LimpetError(f"--set {text}: the value is not YAML") from error


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e5 as a word; people mean the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def checked(kind: type[M], values: Mapping[str, Any], name: str) -> M:
    """The values as their typed form, or one line that says which is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise LimpetError(f"{name}: there is no setting {where!r}{_near(kind, first['loc'])}") from None
        if first["type"] == "value_error":
            raise LimpetError(f"{name}: {first['msg'].removeprefix('Value error, ')}") from None
        raise LimpetError(f"{name}: {where}: {first['msg']} (it is {first['input']!r})") from None


def _near(kind: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    for part in loc[:-1]:
        inner = kind.model_fields[str(part)].annotation if str(part) in kind.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return ""
        kind = inner
    return suggestion(str(loc[-1]), kind.model_fields)


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """{"training.lr": 1} as {"training": {"lr": 1}}."""
    tree: dict[str, Any] = {}
    for name, value in dotted.items():
        *path, last = name.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise LimpetError(f"{name} is set inside {part}, which is set to a value itself")
        place[last] = value
    return tree


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, with `above` on top, part by part."""
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both

"""A network that learns the tasks of a recipe one after another, protected by a memory."""

from __future__ import annotations

from typing import Any

import torch

from limpet.experiments import METHODS, load_preset
from limpet.experiments.methods import Laplace, with_structure
from limpet.experiments.tasks import Lessons


class Learner:
    """The untrained network of a preset with other settings, its tasks, and the method with the memory."""

    def __init__(self, experiment: str, settings: dict[str, Any]) -> None:
        self.recipe = with_structure(load_preset(experiment).resolve(settings))
        self.lessons = Lessons(self.recipe, torch.device("cpu"))
        self.model = self.lessons.network()
        method = METHODS[self.recipe.method](self.model, self.recipe)
        assert isinstance(method, Laplace)
        self.method = method

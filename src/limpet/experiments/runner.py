"""Runs: train a method on a sequence of tasks. A run can be killed and resumed with bit-identical results.

A checkpoint is written after an epoch or a task, at most every `checkpoint_seconds`. All later computation depends only
on the recipe and the checkpoint, so repeating it gives the same result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import nn

from limpet.errors import LimpetError, MemoryFileError
from limpet.experiments.data import Examples
from limpet.experiments.log import Log
from limpet.experiments.methods import Method, with_structure
from limpet.experiments.metrics import Score, score
from limpet.experiments.networks import parameter_count
from limpet.experiments.recipe import Recipe
from limpet.experiments.record import ROUND, Curve, Record, RunFolder, Seconds, environment, peak_memory, summarised
from limpet.experiments.registry import METHODS, load_file
from limpet.experiments.sequences import experiment_key
from limpet.experiments.settings import checked
from limpet.experiments.tasks import Lesson, Lessons
from limpet.experiments.training import Position, TaskTraining, load_optimizer_state, optimizer_state
from limpet.io.atomic import remove
from limpet.methods.state_header import Content

CHECKPOINT_SECONDS = 20.0


class Watcher:
    """Observer of a run. Subclasses override the callbacks they need."""

    def begun(self, record: Record, tasks: int) -> None:
        """Called when the run starts or resumes.

        Args:
            record: The record so far.
            tasks: Total number of tasks.
        """

    def updated(self, task: int, epoch: int, done: int, total: int, method: Method) -> None:
        """Called after every update of the weights.

        Args:
            task: Index of the task.
            epoch: Index of the epoch.
            done: Number of updates done in this epoch.
            total: Number of updates per epoch.
            method: The method, whose `status()` can be queried.
        """

    def learned(self, record: Record) -> None:
        """Called after a task has been learned and tested.

        Args:
            record: The record so far.
        """


def run(
    recipe: Recipe,
    folder: str | Path,
    *,
    resume: bool = False,
    watcher: Watcher | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    wait: float = 0.0,
) -> Record:
    """Run a recipe and write its results to a folder, which is locked in the meantime.

    Args:
        recipe: The recipe.
        folder: Output folder.
        resume: Continue the run in the folder, if any. A finished run is loaded instead of repeated.
        watcher: Observer of the run.
        checkpoint_seconds: Minimum number of seconds between checkpoints.
        wait: Number of seconds to wait for another process that writes to the folder.

    Returns:
        The record of the run.

    Raises:
        LimpetError: If the folder contains a run and `resume` is false or its recipe differs, if its files are damaged,
            if the recipe is invalid, or if training diverges.
        LockedError: If another process is writing to the folder.
    """
    for path in recipe.files:
        load_file(path)
    recipe = with_structure(recipe)
    place = RunFolder(folder)
    with place.lock(wait):
        place.tidy()
        begun = place.recipe.exists()
        before = _before(place, recipe, resume) if begun else None
        if before is not None:
            return before
        with _global_state(recipe):
            one_run = Run(recipe, place, watcher or Watcher(), checkpoint_seconds)
            if not begun:
                place.begin(recipe)
            return one_run.go()


def _before(place: RunFolder, recipe: Recipe, resume: bool) -> Record | None:
    """Check the run in a folder, and return its record if it has finished."""
    if not resume:
        raise LimpetError(f"{place.path} already contains a run: continue it with --resume, or choose another folder")
    _check_same(place.load_recipe(), recipe, place)
    before = place.load_record()
    if before is not None:
        _check_same(before.recipe, recipe, place)
        remove(place.checkpoint)  # of a process that was killed before it could delete it
    return before


def _check_same(kept: Recipe, asked: Recipe, place: RunFolder) -> None:
    """Raise an error if the recipe of a resumed run has changed."""
    theirs, ours = kept.model_dump(), asked.model_dump()
    for key in theirs:
        if theirs[key] != ours[key]:
            raise LimpetError(
                f"{place.path} was run with a different recipe ({key}: {theirs[key]!r}, now {ours[key]!r}): use the "
                "original settings, or choose another folder"
            )


@contextmanager
def _global_state(recipe: Recipe) -> Iterator[None]:
    """Set the number of threads; restore it and the global random state afterwards."""
    threads = torch.get_num_threads()
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        torch.set_num_threads(threads)


def _device(name: str) -> torch.device:
    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise LimpetError(f"device {name!r} is not available: {error}") from error


class Run:
    """A run, from the start or from a checkpoint.

    Args:
        recipe: The recipe, with its structure filled in.
        folder: Output folder.
        watcher: Observer of the run.
        checkpoint_seconds: Minimum number of seconds between checkpoints.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, watcher: Watcher, checkpoint_seconds: float) -> None:
        self.recipe, self.folder, self.watcher, self.checkpoint_seconds = recipe, folder, watcher, checkpoint_seconds
        self.device = _device(recipe.device)
        self.lessons = Lessons(recipe, self.device)
        self.model, self.method = self._new_network(0)
        self.training: TaskTraining | None = None  # of the current task
        values = {
            "recipe": recipe,
            "experiment": experiment_key(recipe.experiment, recipe.tasks, recipe.scenario),
            "environment": environment(torch.get_num_threads(), self.device),
            "names": self.lessons.names(),
            "parameters": parameter_count(self.model),
        }
        self.record = checked(Record, values, "run")
        self.seconds = {"training": 0.0, "curvature": 0.0, "evaluation": 0.0}  # of the current task
        self._saved = time.monotonic()

    def _new_network(self, task: int) -> tuple[nn.Module, Method]:
        model = self.lessons.network(task)
        return model, METHODS[self.recipe.method](model, self.recipe)

    def go(self) -> Record:
        """Learn all remaining tasks and return the record."""
        for _ in self.learn():
            pass
        return self.record

    def learn(self) -> Iterator[Record]:
        """Learn the remaining tasks one by one, yielding the record after each."""
        self._load()
        if not self.record.untrained:
            scores = [self._score(i) for i in range(len(self.lessons))]
            self._note(untrained=[round(one.accuracy, ROUND) for one in scores])
        self.watcher.begun(self.record, len(self.lessons))
        epoch = self.training.position.epoch if self.training else 0
        with closing(Log(self.folder.tensorboard, self.record, epoch=epoch)) as log:
            while self.record.tasks < len(self.lessons):
                self._learn(self.record.tasks, log)
                log.learned(self.record)
                self.watcher.learned(self.record)
                yield self.record
        self._finish()

    def _learn(self, number: int, log: Log) -> None:
        """Learn one task: train, consolidate, test."""
        if self.method.joint and not self._is_row(
            number
        ):  # trained from scratch for every row, so skip tasks without one
            self._add_row([], epochs=0)
            return
        if self.training is None and self.method.fresh and number:
            self.model, self.method = self._new_network(number)
        training = self.training = self.training or self._training(number)
        with self.method.hold(training.optimizer, training.examples):
            while not training.done:
                epoch = training.position.epoch
                updated = partial(self.watcher.updated, number, epoch, method=self.method)
                with self._clock("training"):
                    loss = training.epoch(updated)
                if not training.done:
                    with self._clock("curvature"):
                        self.method.epoch(training.lessons[-1])
                with self._clock("evaluation"):
                    self._look(number, training)
                log.epoch(epoch + 1, {"loss": loss, **self.method.status().numbers()})
                self._checkpoint()
        with self._clock("training"):
            training.finish()
        with self._clock("curvature"):
            self.method.learned(training.lessons[-1], lambda: map(self.lessons.lesson, range(number)))
        with self._clock("evaluation"):
            row = self._row(number)
        self.training = None
        self._add_row(row, epochs=training.position.epoch)
        self._checkpoint()

    def _training(self, number: int) -> TaskTraining:
        lessons = self.lessons.up_to(number) if self.method.joint else [self.lessons.lesson(number)]
        return TaskTraining(self.model, lessons, self.recipe, number, fresh=self.method.fresh)

    def _finish(self) -> None:
        if self.recipe.training.validation and (self.method.joint or not self.method.fresh):
            held_out = (self._score_held_out([self.lessons.lesson(i)]) for i in range(len(self.lessons)))
            self._note(validation=[round(score, ROUND) for score in held_out])
        self._note(metrics=summarised(self.record), kept_bytes=self.method.nbytes)
        self._note(peak_memory_bytes=peak_memory(self.device))
        self.method.save(self.folder.memory)
        self.folder.save_model(self.model)
        self.folder.save_record(self.record)
        remove(self.folder.checkpoint)

    # --- evaluation ------------------------------------------------------------------------------------------

    def _is_row(self, number: int) -> bool:
        """Return whether all tasks are tested after this one."""
        rows = self.recipe.evaluation.rows
        return not rows or number + 1 in rows or number + 1 == len(self.lessons)

    def _row(self, number: int) -> list[Score]:
        """Score every task up to this one, and the next one for forward transfer."""
        if self.method.fresh and not self.method.joint:  # earlier networks have not changed
            matrices = self.record.accuracy, self.record.nll, self.record.calibration
            kept = [Score(*(float(matrix[i][i] or 0) for matrix in matrices)) for i in range(number)]
            return [*kept, self._score(number)]
        return [self._score(i) for i in range(min(number + 2, len(self.lessons)))] if self._is_row(number) else []

    def _add_row(self, row: list[Score], epochs: int) -> None:
        record = self.record
        accuracy, nll, calibration = (
            [round(value, ROUND) for value in column] for column in (zip(*row, strict=True) if row else ([], [], []))
        )
        spent = {name: [*before, round(self.seconds[name], 3)] for name, before in record.seconds.model_dump().items()}
        self._note(
            accuracy=[*record.accuracy, accuracy],
            nll=[*record.nll, nll],
            calibration=[*record.calibration, calibration],
            epochs=[*record.epochs, epochs],
            seconds=Seconds(**spent),
        )
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def _note(self, **values: object) -> None:
        self.record = self.record.model_copy(update=values)

    def _look(self, number: int, training: TaskTraining) -> None:
        """Evaluate after an epoch: validation accuracy and the tracked curve."""
        if self.recipe.training.patience is not None:
            training.judge(self._score_held_out(training.lessons))
        size = self.recipe.evaluation.track
        if size:
            accuracy = [round(self._score(i, size).accuracy, ROUND) for i in range(number + 1)]
            point = Curve(task=number, epoch=training.position.epoch, accuracy=accuracy)
            self._note(curve=[*self.record.curve, point])

    def _score(self, number: int, size: int | None = None) -> Score:
        test, head = self.lessons.test(number), self.lessons.sequence.head(number)
        return self._score_on(test if size is None else test.take(slice(0, size)), head)

    def _score_held_out(self, lessons: list[Lesson]) -> float:
        scores = [self._score_on(one.held_out, one.head).accuracy for one in lessons]
        return sum(scores) / len(scores)

    def _score_on(self, examples: Examples, head: int) -> Score:
        return score(self.model, examples, head, self.recipe.evaluation.batch_size)

    @contextmanager
    def _clock(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - begin

    # --- checkpoints -----------------------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        """Write a checkpoint if the last one is old enough."""
        if time.monotonic() - self._saved < self.checkpoint_seconds:
            return
        method = self.method.state()
        tensors = {f"model/{name}": tensor.clone() for name, tensor in self.model.state_dict().items()}
        tensors.update({f"method/{name}": tensor for name, tensor in method["tensors"].items()})
        training = None
        if self.training is not None:
            values, buffers = optimizer_state(self.training.optimizer)
            tensors.update({f"optimizer/{name}": tensor for name, tensor in buffers.items()})
            training = {"position": asdict(self.training.position), "optimizer": values}
        metadata = {
            "record": self.record.model_dump(mode="json"),
            "seconds": self.seconds,
            "method": method["metadata"],
            "training": training,
        }
        self.folder.save_checkpoint(Content(metadata, tensors))
        self._saved = time.monotonic()

    def _load(self) -> None:
        """Restore the last checkpoint, if any."""
        content = self.folder.load_checkpoint()
        if content is None:
            return
        try:
            self._restore(content)
        except (AttributeError, IndexError, KeyError, MemoryFileError, RuntimeError, TypeError, ValueError) as error:
            raise LimpetError(
                f"{self.folder.checkpoint} is not a checkpoint of this run, or of another version of limpet: delete it "
                f"to start the run again ({type(error).__name__}: {error})"
            ) from error

    def _restore(self, content: Content) -> None:
        metadata = content.metadata
        parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "method": {}, "optimizer": {}}
        for key, tensor in content.tensors.items():
            part, _, name = key.partition("/")
            parts[part][name] = tensor
        record = checked(Record, metadata["record"], str(self.folder.checkpoint))
        _check_same(record.recipe, self.recipe, self.folder)
        self.record = record
        self.seconds = {name: float(metadata["seconds"][name]) for name in self.seconds}
        self.model.load_state_dict(parts["model"])
        self.method.load({"metadata": metadata["method"], "tensors": parts["method"]})
        if metadata["training"] is not None:
            self.training = self._training(self.record.tasks)
            self.training.position = Position(**metadata["training"]["position"])
            load_optimizer_state(self.training.optimizer, metadata["training"]["optimizer"], parts["optimizer"])

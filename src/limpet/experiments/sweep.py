"""Sweeps on Ray Tune. The folders of the runs are the state of a sweep: a trial begun again goes on with its own.

So a driver that is killed needs nothing of Ray's to go on, and a trial that lost its machine goes on from its last
checkpoint, as long as the folder is on storage that all machines see.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from limpet.errors import LimpetError
from limpet.experiments.recipe import Part, Recipe, checked, merged, nested
from limpet.experiments.record import Record, RunFolder, compact_json, write_text
from limpet.experiments.runner import Watcher, run
from limpet.experiments.sequences import SEQUENCES

STARTS = 3
FAILURE = "failure.txt"
PASSED_ON = ("LIMPET_DATA", "LIMPET_CACHE", "HF_HOME", "HF_TOKEN")
"""Environment variables that workers on other machines need too."""


class Trial(Part):
    """One run of a sweep."""

    settings: dict[str, Any]
    recipe: Recipe
    folder: str


class Outcome(Part):
    """What became of the trials with the same settings: a score for every seed that came to its end."""

    settings: dict[str, Any]
    scores: list[float]
    failure: str | None = None

    @property
    def rank(self) -> tuple[int, float]:
        """What the best one has most of: seeds that came to their end, then the mean over them."""
        return len(self.scores), self.score or 0.0

    @property
    def score(self) -> float | None:
        """The mean over seeds."""
        return sum(self.scores) / len(self.scores) if self.scores else None


class SweepResult(Part):
    """What `sweep.json` holds. `measured` says what the scores are: "validation" or "test" accuracy."""

    measured: Literal["validation", "test"]
    outcomes: list[Outcome]
    best: dict[str, Any]


def plan(recipe: Recipe, grid: dict[str, list[Any]], seeds: list[int], out: Path) -> list[Trial]:
    """Every combination of the grid with every seed, each with a folder of its own."""
    if "seed" in grid:
        raise LimpetError("seeds are given by --seed, not in the grid")
    if not grid:
        raise LimpetError("there is nothing to try: give a grid, such as --grid memory.strength=1,3,10")
    trials = []
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        for seed in dict.fromkeys(seeds):
            name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())
            changed = merged(recipe.model_dump(), nested({**settings, "seed": seed}))
            chosen = checked(Recipe, changed, "grid")
            trials.append(Trial(settings=settings, recipe=chosen, folder=str(out.resolve() / name / f"seed{seed}")))
    return trials


def sweep(
    trials: list[Trial],
    out: Path,
    *,
    asha: bool = False,
    cpus: float = 1,
    gpus: float = 0,
    resume: bool = False,
    say: Callable[[str], None] = print,
) -> SweepResult:
    """Run the trials, as many at once as the cluster has resources for. `resume` goes on with what is there."""
    result_file, plan_file = out / "sweep.json", out / "plan.json"
    planned = compact_json([trial.model_dump(mode="json") for trial in trials])
    if plan_file.exists() and not resume:
        raise LimpetError(f"{out} holds a sweep already: go on with --resume, or choose another folder")
    if plan_file.exists() and plan_file.read_text() != planned:
        raise LimpetError(
            f"{out} holds a sweep of other trials: leave the settings as they were, or choose another folder"
        )
    if result_file.exists():
        return checked(SweepResult, json.loads(result_file.read_text()), str(result_file))
    out.mkdir(parents=True, exist_ok=True)
    write_text(plan_file, planned)
    started = connect(say)
    try:
        _tune(trials, out, asha, {"cpu": cpus, "gpu": gpus})
    finally:
        if started:
            shutdown()
    result = collect(trials)
    write_text(result_file, compact_json(result.model_dump(mode="json")))
    return result


def _tune(trials: list[Trial], out: Path, asha: bool, needs: dict[str, float]) -> None:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    scheduler: Any = None  # every trial to its end
    if asha:
        tasks = _tasks(trials[0].recipe)
        grace = max(1, tasks // 10)
        # A trial that has reached max_t is stopped, so the step after the last task is the end of the run itself.
        scheduler = ASHAScheduler(time_attr="step", max_t=tasks + 1, grace_period=grace, reduction_factor=3)
    tuner = tune.Tuner(
        tune.with_resources(_trial, needs),
        param_space={"trial": tune.grid_search([trial.model_dump(mode="json") for trial in trials])},
        tune_config=tune.TuneConfig(metric="score", mode="max", scheduler=scheduler, reuse_actors=True),
        run_config=tune.RunConfig(
            name="ray",
            storage_path=str(out.resolve()),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=2),
        ),
    )
    failed = [str(error).strip().splitlines()[-1] for error in tuner.fit().errors]
    if failed:
        raise LimpetError(
            f"{len(failed)} of {len(trials)} trials failed, the first with: {failed[0]}; mend it and --resume"
        )


def shutdown() -> None:
    """Leave the cluster, or end the one that was started."""
    import ray

    ray.shutdown()


def connect(say: Callable[[str], None]) -> bool:
    """Join the cluster that this machine belongs to, or start one. A first start can time out on a loaded machine.

    False where Ray was running in this process already; it is then left running.
    """
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # Ray's older output is silent when asked to be
    try:
        import ray
    except ImportError as error:
        raise LimpetError("sweeps run on Ray Tune: pip install 'limpet[sweep]'") from error
    if ray.is_initialized():
        return False
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    for attempt in range(1, STARTS + 1):
        try:
            ray.init(
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=False,
                runtime_env={"env_vars": passed_on},
            )
            return True
        except Exception as error:  # noqa: PERF203  # Ray raises many kinds: RuntimeError, TimeoutError, its own
            ray.shutdown()
            if attempt == STARTS:
                raise LimpetError(f"Ray did not start in {STARTS} attempts, the last time with: {error}") from error
            say(f"Ray did not start (attempt {attempt} of {STARTS}); trying again in {5 * attempt} s")
            time.sleep(5 * attempt)
    return False


class _Reporter(Watcher):
    """Tells Ray Tune the mean accuracy after every task, also of tasks that an earlier attempt learned."""

    def begun(self, record: Record, tasks: int) -> None:
        for count in range(1, record.tasks + 1):
            self._report(record.model_copy(update={"accuracy": record.accuracy[:count]}))

    def learned(self, record: Record) -> None:
        self._report(record)

    def _report(self, record: Record) -> None:
        from ray import tune

        if record.accuracy[-1]:
            tune.report({"score": record.mean_accuracy, "step": record.tasks})


def _trial(config: dict[str, Any]) -> None:
    """What a worker does."""
    from ray import tune

    trial = checked(Trial, config["trial"], "trial")
    failure = Path(trial.folder) / FAILURE
    failure.unlink(missing_ok=True)
    try:
        record = run(trial.recipe, trial.folder, resume=True, watcher=_Reporter())
    except LimpetError as error:  # it would fail again: a result like any other
        failure.parent.mkdir(parents=True, exist_ok=True)
        write_text(failure, str(error))
        tune.report({"score": 0.0, "step": 0})
    else:
        tune.report({"score": _score(record), "step": record.tasks + 1})


def _tasks(recipe: Recipe) -> int:
    return SEQUENCES[recipe.experiment](recipe.tasks, scenario=recipe.scenario).tasks


def ended(trials: list[Trial]) -> int:
    """How many trials have come to their end, or failed."""
    places = (Path(trial.folder) for trial in trials)
    return sum((place / "run.json").exists() or (place / FAILURE).exists() for place in places)


def _score(record: Record) -> float:
    validation = record.metrics.get("validation_accuracy")
    return record.mean_accuracy if validation is None else validation


def collect(trials: list[Trial]) -> SweepResult:
    """What the folders say."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(json.dumps(trial.settings), []).append(trial)
    outcomes = [_outcome(group) for group in groups.values()]
    best = max(outcomes, key=lambda outcome: outcome.rank)
    if not best.scores:
        failures = [outcome.failure for outcome in outcomes if outcome.failure]
        raise LimpetError(f"no trial came to its end{f', the first because {failures[0]}' if failures else ''}")
    first = next(record for trial in trials if (record := RunFolder(trial.folder).load_record()) is not None)
    measured: Literal["validation", "test"] = "validation" if first.validation else "test"
    return SweepResult(measured=measured, outcomes=outcomes, best=best.settings)


def _outcome(group: list[Trial]) -> Outcome:
    records = [RunFolder(trial.folder).load_record() for trial in group]
    failures = [path.read_text() for trial in group if (path := Path(trial.folder) / FAILURE).is_file()]
    return Outcome(
        settings=group[0].settings,
        scores=[_score(record) for record in records if record is not None],
        failure=failures[0] if failures else None,
    )

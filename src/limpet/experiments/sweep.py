"""Grid sweeps on Ray Tune. The run folders are the only state of a sweep: a restarted trial resumes from its folder.

A killed sweep therefore resumes without any state of Ray, and a trial whose node was lost resumes from its last
checkpoint, provided that the folder is on storage shared by all nodes.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from limpet.errors import LimpetError
from limpet.experiments.recipe import Part, Recipe
from limpet.experiments.record import Record, RunFolder, compact_json, load_json, with_checksum
from limpet.experiments.runner import Watcher, run
from limpet.experiments.sequences import SEQUENCES
from limpet.experiments.settings import checked, merged, nested
from limpet.io.atomic import write_text
from limpet.io.lock import LOCK, LockedError, folder_lock

STARTS = 3
FAILURE = "failure.txt"
RAY = "ray"
"""Folder of Ray Tune's own files in that of a sweep."""
WAIT = 60.0
"""Seconds that a trial waits for its folder: workers of a killed sweep live on for a moment."""
PASSED_ON = ("LIMPET_DATA", "LIMPET_CACHE", "HF_HOME")
"""Environment variables that are passed on to workers. Ray writes them to its logs, so credentials such as HF_TOKEN are
not among them. Workers of a cluster that is started here inherit those; other nodes need their own."""


class Trial(Part):
    """One run of a sweep: its grid settings, complete recipe and folder."""

    settings: dict[str, Any]
    recipe: Recipe
    folder: str


class Outcome(Part):
    """Outcome of the trials with the same settings: a score for every seed that finished."""

    settings: dict[str, Any]
    scores: list[float]
    failure: str | None = None

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key: the number of finished seeds, then their mean score."""
        return len(self.scores), self.score or 0.0

    @property
    def score(self) -> float | None:
        """Mean score over seeds; None if none finished."""
        return sum(self.scores) / len(self.scores) if self.scores else None


class SweepResult(Part):
    """Contents of `sweep.json`.

    Attributes:
        measured: Whether scores are "validation" or "test" accuracies.
        outcomes: The outcome of each combination of settings.
        best: The settings with the best outcome.
    """

    measured: Literal["validation", "test"]
    outcomes: list[Outcome]
    best: dict[str, Any]


def plan(recipe: Recipe, grid: dict[str, list[Any]], seeds: list[int], out: Path) -> list[Trial]:
    """Create one trial for every combination of the grid and every seed.

    Args:
        recipe: The recipe to vary.
        grid: Values to try, by dotted name.
        seeds: The seeds.
        out: Folder of the sweep; each trial gets its own subfolder.

    Returns:
        The trials.

    Raises:
        LimpetError: If the grid is empty or contains an invalid setting.
    """
    if "seed" in grid:
        raise LimpetError("set seeds with --seed, not in the grid")
    if not grid:
        raise LimpetError("the grid is empty: pass one, e.g. --grid memory.strength=1,3,10")
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
    """Run the trials on Ray Tune, as many in parallel as the cluster has resources for.

    Args:
        trials: The trials, from `plan`.
        out: Folder of the sweep.
        asha: Stop poor trials early with ASHA instead of running all of them to completion.
        cpus: Number of CPUs per trial.
        gpus: Number of GPUs per trial.
        resume: Continue the sweep in the folder, if any. A finished sweep is loaded instead of repeated.
        say: Called with status messages.

    Returns:
        The outcomes and the best settings.

    Raises:
        LimpetError: If the folder contains another sweep, its files are damaged, Ray cannot be started, or trials fail.
        LockedError: If another process is writing to the folder.
    """
    with folder_lock(out):
        return _sweep(trials, out, asha, {"cpu": cpus, "gpu": gpus}, resume, say)


def _sweep(
    trials: list[Trial], out: Path, asha: bool, needs: dict[str, float], resume: bool, say: Callable[[str], None]
) -> SweepResult:
    """Run a sweep in a locked folder."""
    result_file, plan_file = out / "sweep.json", out / "plan.json"
    for path in (*out.glob(".plan.json.*"), *out.glob(".sweep.json.*")):
        path.unlink(missing_ok=True)  # the temporary file of a killed process
    planned = [trial.model_dump(mode="json") for trial in trials]
    if plan_file.exists() and not resume:
        raise LimpetError(f"{out} already contains a sweep: continue it with --resume, or choose another folder")
    if plan_file.exists() and load_json(plan_file, "plan of a sweep") != planned:
        raise LimpetError(
            f"{out} contains a sweep of different trials: use the original settings, or choose another folder"
        )
    if result_file.exists():
        return _checked_result(result_file, planned)
    write_text(plan_file, compact_json(planned))
    shutil.rmtree(out / RAY, ignore_errors=True)  # of a killed sweep; its state is never read back
    started = connect(say)
    try:
        _tune(trials, out, asha, needs)
    finally:
        if started:
            shutdown()
    _tidy(trials)
    result = collect(trials)
    write_text(result_file, compact_json(with_checksum(result.model_dump(mode="json"))))
    return result


def _tidy(trials: list[Trial]) -> None:
    """Delete what workers have left that were ended in the middle of a trial, as those of trials stopped early are."""
    for place in (RunFolder(trial.folder) for trial in trials):
        if (place.path / LOCK).exists():
            with suppress(LockedError), place.lock(WAIT):
                place.tidy()


def _checked_result(path: Path, planned: list[dict[str, Any]]) -> SweepResult:
    """Read the result of a finished sweep of these trials."""
    result = checked(SweepResult, load_json(path, "result of a sweep"), str(path))
    settings = list({json.dumps(trial["settings"]): trial["settings"] for trial in planned}.values())
    if [outcome.settings for outcome in result.outcomes] != settings or result.best not in settings:
        raise LimpetError(f"{path} is damaged, it has the outcomes of other trials: delete it and use --resume")
    return result


def _tune(trials: list[Trial], out: Path, asha: bool, needs: dict[str, float]) -> None:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    scheduler: Any = None  # runs every trial to completion
    if asha:
        tasks = _tasks(trials[0].recipe)
        grace = max(1, tasks // 10)
        # ASHA stops a trial that reaches max_t, so the end of the run is reported as one more step after the last task.
        scheduler = ASHAScheduler(time_attr="step", max_t=tasks + 1, grace_period=grace, reduction_factor=3)
    tuner = tune.Tuner(
        tune.with_resources(_trial, needs),
        param_space={"trial": tune.grid_search([trial.model_dump(mode="json") for trial in trials])},
        tune_config=tune.TuneConfig(metric="score", mode="max", scheduler=scheduler, reuse_actors=True),
        run_config=tune.RunConfig(
            name=RAY,
            storage_path=str(out.resolve()),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=2),
        ),
    )
    failed = [str(error).strip().splitlines()[-1] for error in tuner.fit().errors]
    if failed:
        raise LimpetError(
            f"{len(failed)} of {len(trials)} trials failed, the first with: {failed[0]}; fix the cause and use --resume"
        )


def shutdown() -> None:
    """Disconnect from the Ray cluster, stopping it if it was started here."""
    import ray

    ray.shutdown()


def connect(say: Callable[[str], None]) -> bool:
    """Connect to the existing Ray cluster or start a local one.

    Starting is retried, because it can time out on a busy machine.

    Args:
        say: Called with status messages.

    Returns:
        True if Ray was initialized here; False if it was already running in this process and should be left running.

    Raises:
        LimpetError: If Ray is not installed or does not start.
    """
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # only Ray's older output respects verbose=0
    try:
        import ray
    except ImportError as error:
        raise LimpetError("sweeps require Ray Tune: pip install 'limpet[sweep]'") from error
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
                raise LimpetError(f"Ray did not start in {STARTS} attempts; the last error was: {error}") from error
            say(f"Ray did not start (attempt {attempt} of {STARTS}); retrying in {5 * attempt} s")
            time.sleep(5 * attempt)
    return False


class _Reporter(Watcher):
    """Report the mean accuracy after every task to Ray Tune, including tasks learned before a restart."""

    def begun(self, record: Record, tasks: int) -> None:
        """Report the tasks learned before a restart."""
        for count in range(1, record.tasks + 1):
            self._report(record.model_copy(update={"accuracy": record.accuracy[:count]}))

    def learned(self, record: Record) -> None:
        """Report the latest task."""
        self._report(record)

    def _report(self, record: Record) -> None:
        from ray import tune

        if record.accuracy[-1]:
            tune.report({"score": record.mean_accuracy, "step": record.tasks})


def _trial(config: dict[str, Any]) -> None:
    """Run one trial in a Ray worker."""
    from ray import tune

    trial = checked(Trial, config["trial"], "trial")
    failure = Path(trial.folder) / FAILURE
    failure.unlink(missing_ok=True)
    try:
        record = run(trial.recipe, trial.folder, resume=True, watcher=_Reporter(), wait=WAIT)
    except LockedError:  # it may succeed later: Ray tries again
        raise
    except LimpetError as error:  # deterministic failure: record it as a result instead of retrying
        failure.parent.mkdir(parents=True, exist_ok=True)
        write_text(failure, str(error))
        tune.report({"score": 0.0, "step": 0})
    else:
        tune.report({"score": _score(record), "step": record.tasks + 1})


def _tasks(recipe: Recipe) -> int:
    return SEQUENCES[recipe.experiment](recipe.tasks, scenario=recipe.scenario).tasks


def ended(trials: list[Trial]) -> int:
    """Return the number of trials that have finished or failed."""
    places = (Path(trial.folder) for trial in trials)
    return sum((place / "run.json").exists() or (place / FAILURE).exists() for place in places)


def _score(record: Record) -> float:
    validation = record.metrics.get("validation_accuracy")
    return record.mean_accuracy if validation is None else validation


def collect(trials: list[Trial]) -> SweepResult:
    """Collect the outcomes of the trials from their folders.

    Raises:
        LimpetError: If no trial finished.
    """
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(json.dumps(trial.settings), []).append(trial)
    outcomes = [_outcome(group) for group in groups.values()]
    best = max(outcomes, key=lambda outcome: outcome.rank)
    if not best.scores:
        failures = [outcome.failure for outcome in outcomes if outcome.failure]
        raise LimpetError(f"no trial finished{f'; the first failure was: {failures[0]}' if failures else ''}")
    first = next(record for trial in trials if (record := RunFolder(trial.folder).load_record()) is not None)
    measured: Literal["validation", "test"] = "validation" if first.validation else "test"
    return SweepResult(measured=measured, outcomes=outcomes, best=best.settings)


def _outcome(group: list[Trial]) -> Outcome:
    records = [RunFolder(trial.folder).load_record() for trial in group]
    failures = [path.read_text(errors="replace") for trial in group if (path := Path(trial.folder) / FAILURE).is_file()]
    return Outcome(
        settings=group[0].settings,
        scores=[_score(record) for record in records if record is not None],
        failure=failures[0] if failures else None,
    )

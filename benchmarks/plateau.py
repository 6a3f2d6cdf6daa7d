"""Ideas that could bring many tasks, learned one after another, closer to all tasks at once: one at a time.

    python -m benchmarks plateau --experiment permuted-mnist --tasks 20
    python -m benchmarks plateau --experiment disjoint-mnist --seeds 0 1 2
    python -m benchmarks plateau --experiment permuted-mnist --tasks 20 --draw

Every idea changes one thing in the preset of the experiment, and everything else stays as it is. The figures are mean
test accuracies over all tasks after the last one. The data come from the Hugging Face hub, or from LIMPET_DATA.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
from common import versions
from learner import Learner
from limpet.experiments.methods import Shuffled
from limpet.experiments.metrics import score
from limpet.experiments.tasks import Lesson
from limpet.experiments.training import TaskTraining
from limpet.precision import Kronecker
from limpet.precision.weighted import WeightedSum
from repair_figures import markdown

NOISE_EVERY, NOISE_SCALE = 16, 0.3
AVERAGED_EPOCHS = 1.0

Hook = Callable[[Learner, TaskTraining, int], AbstractContextManager[Any]]
"""What surrounds the training on a task, from the learner, the training and the number of the task."""


def nothing(*_: Any) -> AbstractContextManager[Any]:
    """Train as usual."""
    return nullcontext()


def nowhere(*_: Any) -> None:
    """Do nothing after a task."""


@dataclass(frozen=True)
class Idea:
    """One change.

    Attributes:
        settings: Settings of the recipe.
        train: What surrounds the training on a task, within the protection.
        consolidate: What surrounds the consolidation of a task, likewise.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    train: Hook = nothing
    consolidate: Callable[[Learner, Lesson], AbstractContextManager[Any]] = nothing


# --- noise and averages of weights --------------------------------------------------------------------------------


@contextmanager
def noise(learner: Learner, training: TaskTraining, number: int) -> Iterator[None]:
    """Gradients at weights with noise from the memory, of which there is a new draw every few steps."""
    memory, model = learner.method.memory, learner.model
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(number)
    state: dict[str, Any] = {"step": 0, "noise": {}}

    def displace(*_: Any) -> None:
        if not (model.training and number and torch.is_grad_enabled()):
            return
        if state["step"] % NOISE_EVERY == 0:
            state["noise"] = {}
            for held in memory.posterior.held.values():
                drawn = NOISE_SCALE * held.precision.sample(generator)
                state["noise"] |= held.block.scatter(drawn)
        state["step"] += 1
        with torch.no_grad():
            for name, z in state["noise"].items():
                parameters[name].add_(z)

    def restore(*_: Any) -> None:
        with torch.no_grad():
            for name, z in state["noise"].items():
                parameters[name].sub_(z)

    before = model.register_forward_pre_hook(displace)
    # before the proximal step, which is a hook after the step, and before the step itself
    after = training.optimizer.register_step_pre_hook(restore)
    try:
        yield
    finally:
        before.remove()
        after.remove()


@contextmanager
def averaged(learner: Learner, training: TaskTraining, _: int) -> Iterator[None]:
    """The mean of the weights over the last epoch."""
    model = learner.model
    first = (learner.recipe.training.epochs - AVERAGED_EPOCHS) * training.updates_per_epoch
    total: list[Tensor] = [torch.zeros_like(parameter) for parameter in model.parameters()]
    steps = 0

    def add(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps > first:
            for one, parameter in zip(total, model.parameters(), strict=True):
                one.add_(parameter.detach())

    handle = training.optimizer.register_step_post_hook(add)
    try:
        yield
    finally:
        handle.remove()
    with torch.no_grad():
        for one, parameter in zip(total, model.parameters(), strict=True):
            parameter.copy_(one / (steps - first))


# --- eigenvalues with the true diagonal ---------------------------------------------------------------------------


def diagonal_ratios(learner: Learner, lesson: Lesson) -> dict[str, Tensor]:
    """The diagonal of the Fisher in the eigenbases of the memory over what the factors give, by block (EKFAC).

    Both are measured on the same examples, with one sampled label each.
    """
    model, memory = learner.model, learner.method.memory
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        module.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: (inputs[0], output)}))
        for name, module in layers.items()
    ]
    found: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    generator, left = torch.Generator().manual_seed(learner.recipe.seed), learner.recipe.memory.limit or 10_000
    model.eval()
    try:
        for inputs, _, head in Shuffled(lesson, learner.recipe.seed):
            logits = model(inputs, head)
            labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).squeeze(-1)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            gradients = torch.autograd.grad(loss, [output for _, output in seen.values()])
            for (name, (a, _)), g in zip(list(seen.items()), gradients, strict=True):
                precision = memory.posterior.held[name].precision
                assert isinstance(precision, Kronecker)
                columns, rows = precision.inputs.columns, precision.outputs.columns
                assert isinstance(columns, Tensor) and isinstance(rows, Tensor)
                a2 = (torch.cat([a.detach(), torch.ones(len(a), 1)], 1) @ columns).square()
                g2 = (g @ rows).square()
                sums = (g2.mT @ a2, g2.sum(0), a2.sum(0))
                found[name] = sums if name not in found else tuple(map(torch.add, found[name], sums))  # type: ignore[assignment]
            left -= len(inputs)
            if left <= 0:
                break
    finally:
        for handle in handles:
            handle.remove()
    seen_rows = learner.recipe.memory.limit or 10_000
    return {
        name: both / (torch.outer(g, a) / seen_rows).clamp_min(1e-12 * float(both.max()))
        for name, (both, g, a) in found.items()
    }


@contextmanager
def true_diagonal(learner: Learner, lesson: Lesson) -> Iterator[None]:
    """Eigenvalues of the newest task that are those of its factors times the measured ratio."""
    original, added = WeightedSum.add, list[tuple[Tensor, float]]()

    def add(self: WeightedSum, plain: Tensor, strength: float, carry: Any = None) -> WeightedSum:
        added.append((plain, strength))
        return original(self, plain, strength, carry)

    with mock.patch.object(WeightedSum, "add", add):
        yield
    held = learner.method.memory.posterior.held
    ratios = diagonal_ratios(learner, lesson)
    for (name, one), (plain, strength) in zip(held.items(), added[-len(held) :], strict=True):
        precision: Any = one.precision
        values = precision.values.add(plain * (ratios[name] - 1), strength)
        learner.method.memory.posterior.held[name] = replace(one, precision=replace(precision, values=values))


IDEAS = {
    "as it is": Idea(),
    "exact sum": Idea({"structure": "kronecker-sum"}),
    "true diagonal (EKFAC)": Idea(consolidate=true_diagonal),
    "protection, then repair": Idea({"method": "protect-repair"}),
    "repair after every epoch": Idea({"method": "repair-rounds"}),
    "distillation on Gaussian inputs": Idea({"method": "gaussian-rehearsal"}),
    "distillation on Gaussian inputs, weight 0.1": Idea({"method": "gaussian-rehearsal", "memory.rehearsal": 0.1}),
    "weight noise": Idea(train=noise),
    "averaged weights": Idea(train=averaged),
}


def run(experiment: str, tasks: int | None, name: str, seed: int, strength: float | None) -> dict[str, Any]:
    """Learn all tasks with an idea.

    Args:
        experiment: The preset.
        tasks: Number of tasks.
        name: The idea.
        seed: The seed.
        strength: The strength of the memory; that of the preset if None.

    Returns:
        The record.
    """
    idea, begin = IDEAS[name], time.perf_counter()
    settings: dict[str, Any] = {"seed": seed, **idea.settings}
    settings |= {} if tasks is None else {"tasks": tasks}
    settings |= {} if strength is None else {"memory.strength": strength}
    learner = Learner(experiment, settings)
    for number in range(len(learner.lessons)):
        lesson = learner.lessons.lesson(number)
        training = TaskTraining(learner.model, [lesson], learner.recipe, number, fresh=not number)
        with (
            learner.method.hold(training.optimizer, training.examples),
            idea.train(learner, training, number),
        ):
            while not training.done:
                training.epoch(nowhere)
                if not training.done:
                    learner.method.epoch(lesson)
        with idea.consolidate(learner, lesson):
            learner.method.learned(lesson, lambda: ())
    right = [score(learner.model, learner.lessons.test(i), 0, 1000).accuracy for i in range(len(learner.lessons))]
    return {
        "experiment": experiment,
        "tasks": len(learner.lessons),
        "idea": name,
        "seed": seed,
        "strength": learner.recipe.memory.strength,
        "mean": round(sum(right) / len(right), 3),
        "first": round(right[0], 2),
        "last": round(right[-1], 2),
        "seconds": round(time.perf_counter() - begin),
        "versions": versions(),
    }


def table(records: Sequence[dict[str, Any]]) -> str:
    """The means over seeds, by idea and strength."""
    grouped: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        grouped[record["idea"], record["strength"]].append(record)
    rows = []
    for (idea, strength), some in grouped.items():
        means = torch.tensor([record["mean"] for record in some], dtype=torch.float64)
        spread = f" ± {float(means.std()):.2f}" if len(some) > 1 else ""
        ends = [f"{sum(record[end] for record in some) / len(some):.1f}" for end in ("first", "last")]
        rows.append([idea, f"{strength:g}", f"{float(means.mean()):.2f}{spread}", *ends, str(len(some))])
    return markdown(["idea", "strength", "mean %", "first", "last", "seeds"], rows)


def main() -> None:
    parser = common.parser(__doc__, threads=1)
    parser.add_argument("--experiment", choices=["permuted-mnist", "disjoint-mnist"], default="permuted-mnist")
    parser.add_argument("--tasks", type=int, help="number of permutations")
    parser.add_argument("--ideas", nargs="+", choices=list(IDEAS), default=list(IDEAS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--strength", type=float, help="by default that of the preset")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    options = common.parse(parser)
    tasks = None if options.experiment == "disjoint-mnist" else options.tasks or 20
    suffix = "" if tasks is None else "-50"
    path = common.RESULTS / f"{options.experiment}{suffix}" / "ideas.jsonl"
    done = {(r["tasks"], r["idea"], r["seed"], r.get("asked")) for r in common.read_records(path)}
    for seed in () if options.draw else options.seeds:
        for name in options.ideas:
            if (tasks or 2, name, seed, options.strength) in done:
                continue
            record = run(options.experiment, tasks, name, seed, options.strength) | {"asked": options.strength}
            print({key: record[key] for key in ("idea", "seed", "mean", "first", "last", "seconds")}, flush=True)
            common.append_record(path, record)
    print(table([record for record in common.read_records(path) if record["tasks"] == (tasks or 2)]))


if __name__ == "__main__":
    main()

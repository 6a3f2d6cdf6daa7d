"""Test runs: recorded metrics match the method, and interrupted runs resume with bit-identical results."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import limpet
from limpet.errors import LimpetError, NotProtectedWarning
from limpet.experiments import (
    METHODS,
    NETWORKS,
    SEQUENCES,
    Examples,
    Network,
    Recipe,
    Record,
    TaskSequence,
    Watcher,
    load_preset,
    run,
)
from limpet.experiments.methods import Method
from limpet.experiments.metrics import score
from limpet.experiments.networks import build
from limpet.experiments.recipe import preset_names
from limpet.experiments.record import RunFolder
from limpet.experiments.runner import Run
from limpet.experiments.settings import checked, parse_setting


@SEQUENCES.register("test-blobs")
class Blobs(TaskSequence):
    """Four classes, a blob each, elsewhere in every task."""

    shape, heads = (6,), (4,)

    def examples(self, number: int, split: str) -> Examples:
        centres = 2 * torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        generator = torch.Generator().manual_seed(10 * number + (split == "test"))
        labels = torch.randint(0, 4, (120,), generator=generator)
        return Examples(centres[labels] + torch.randn(120, 6, generator=generator), labels)


@SEQUENCES.register("test-headed")
class Headed(Blobs):
    """The same with a head for every task."""

    heads = (4, 4, 4)


def recipe(method: str = "online-laplace", structure: str | None = None, **changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "experiment": "test-blobs",
        "tasks": 3,
        "method": method,
        "structure": structure,
        "threads": 1,
        "network": {"options": {"hidden": [8]}},
        "training": {"epochs": 2, "batch_size": 20, **changes.pop("training", {})},
        "memory": {"strength": 3.0, "every": 4, **changes.pop("memory", {})},
        **changes,
    }
    return checked(Recipe, values, "test")


class StoppedError(Exception):
    pass


class StopAt(Watcher):
    """Raises at one of the moments that a watcher sees."""

    def __init__(self, moment: int) -> None:
        self.left = moment

    def updated(self, task: int, epoch: int, done: int, total: int, method: Method) -> None:
        self.left -= 1
        if self.left == 0:
            raise StoppedError


ALL = [
    ("fine-tuning", None, {}),
    ("joint", None, {}),
    ("one-network-per-task", None, {}),
    ("online-laplace", "kronecker", {}),
    ("online-laplace", "kronecker", {"experiment": "test-headed"}),
    ("online-laplace", "diagonal", {"training": {"optimizer": "adam", "lr": 0.01}}),
    ("online-laplace", "kronecker-sum", {}),
    ("per-task-laplace", "diagonal", {"memory": {"mode": "gradient", "strength": 0.1}}),
    ("approximate-laplace", "kronecker", {"memory": {"limit": 50}}),
    ("online-laplace", "kronecker", {"memory": {"budget": 0.02}}),
    ("repair", "kronecker", {"training": {"optimizer": "adam", "lr": 0.01}}),
    ("repair", "diagonal", {"experiment": "test-headed"}),
    ("repair-rounds", "kronecker", {"memory": {"limit": 50, "repair": 3.0}}),
    ("protect-repair", "kronecker", {}),
    ("gaussian-rehearsal", "kronecker", {"memory": {"rehearsal": 0.3}}),
    ("si", None, {"training": {"optimizer": "adam", "lr": 0.01}}),
    (
        "si",
        None,
        {
            "training": {"validation": 20, "patience": 1, "max_epochs": 5, "schedule": "constant"},
            "evaluation": {"track": 30},
        },
    ),
]


NO_MEMORY = ("fine-tuning", "joint", "one-network-per-task")


def timeless(record: Record) -> dict[str, Any]:
    values = record.model_dump()
    for key in ("seconds", "peak_memory_bytes", "environment"):
        del values[key]
    return values


@pytest.mark.parametrize(("method", "structure", "changes"), ALL)
@pytest.mark.filterwarnings("ignore:limpet. no TensorBoard")
def test_a_stopped_run_goes_on_to_the_same_bits(
    tmp_path: Path, method: str, structure: str | None, changes: dict[str, Any]
) -> None:
    chosen = recipe(method, structure, **{key: dict(v) if isinstance(v, dict) else v for key, v in changes.items()})
    whole = run(chosen, tmp_path / "whole")
    moments = [1, 6, 7, 13, 17, 5, 29]  # updates after which it stops, each time counted from where it goes on
    attempts = 0
    while True:
        try:
            moment = moments[attempts] if attempts < len(moments) else 10**9
            stopped = run(chosen, tmp_path / "stopped", resume=True, watcher=StopAt(moment), checkpoint_seconds=0)
            break
        except StoppedError:
            attempts += 1
    assert attempts >= 4
    assert timeless(stopped) == timeless(whole)
    first, second = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "stopped")
    assert first.model.read_bytes() == second.model.read_bytes()
    assert first.memory.exists() == second.memory.exists() == (method not in NO_MEMORY)
    if first.memory.exists():
        assert first.memory.read_bytes() == second.memory.read_bytes()
    assert not second.checkpoint.exists()


def test_a_run_is_the_loop_that_a_person_would_write(tmp_path: Path) -> None:
    """The same steps by hand, with the public face alone."""
    chosen = recipe(training={"schedule": "constant"})
    record = run(chosen, tmp_path / "run")
    sequence = SEQUENCES["test-blobs"](3, seed=0)
    model = build("mlp", {"hidden": [8]}, (6,), (4,), seed=0)
    memory = limpet.OnlineLaplace(model, strength=3.0)
    rows = []
    for number in range(3):
        train = sequence.examples(number, "train")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        with memory.protect(optimizer, examples=120, every=4):
            for epoch in range(2):
                order = torch.randperm(120, generator=torch.Generator().manual_seed(number * 1009 + epoch))
                for rows_of_batch in order.split(20):
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(
                        model(train.inputs[rows_of_batch]), train.labels[rows_of_batch]
                    ).backward()
                    optimizer.step()
        shuffled = torch.randperm(120, generator=torch.Generator().manual_seed(0))
        memory.consolidate([(train.inputs[shuffled], train.labels[shuffled])])
        seen = range(min(number + 2, 3))
        rows.append([round(score(model, sequence.examples(i, "test"), 0, 1000).accuracy, 4) for i in seen])
    assert record.accuracy == rows
    other = limpet.load(tmp_path / "run" / "memory.safetensors", model)
    for name, held in memory.posterior.held.items():
        torch.testing.assert_close(other.posterior.held[name].mean, held.mean)


def test_one_network_per_task_and_joint(tmp_path: Path) -> None:
    alone = run(recipe("one-network-per-task"), tmp_path / "alone")
    assert [row[:-1] for row in alone.accuracy[1:]] == alone.accuracy[:-1]  # nothing is forgotten
    together = run(recipe("joint", evaluation={"rows": [1]}), tmp_path / "joint")
    assert [len(row) for row in together.accuracy] == [2, 0, 3] and together.epochs == [2, 0, 2]
    plain = run(recipe("fine-tuning"), tmp_path / "plain")
    assert together.mean_accuracy > plain.mean_accuracy + 5
    # task 1 is learned by all three in the same way
    assert alone.accuracy[0][0] == together.accuracy[0][0] == plain.accuracy[0][0]


def test_validation_is_held_out_and_stops_early(tmp_path: Path) -> None:
    training = {"validation": 20, "patience": 2, "max_epochs": 9, "epochs": 1, "schedule": "constant", "lr": 1e-8}
    record = run(recipe("fine-tuning", training=training), tmp_path / "run")
    assert record.epochs == [3, 3, 3]  # the first epoch is the best, two more do not improve
    assert len(record.validation) == 3 and record.metrics["validation_accuracy"] is not None


def test_divergence_is_said(tmp_path: Path) -> None:
    with pytest.raises(LimpetError, match=r"diverged in epoch \d of task 1: try a smaller training.lr"):
        run(recipe("fine-tuning", training={"lr": 1e9}), tmp_path / "run")


def test_divergence_under_a_penalty_that_is_skipped_names_that_setting(tmp_path: Path) -> None:
    first = Run(recipe(memory={"every": 4}), RunFolder(tmp_path), Watcher(), 1e9)
    training = first._training(1)
    with torch.no_grad():
        next(first.model.parameters()).fill_(math.nan)
    with pytest.raises(LimpetError, match=r"of task 2: try memory.every=1 \(now 4\), or a smaller training.lr"):
        training.epoch(lambda *_: None)
    other = first._training(0)
    with pytest.raises(LimpetError, match=r"of task 1: try a smaller training.lr"):
        other.epoch(lambda *_: None)


@NETWORKS.register("test-normed")
def normed(shape: tuple[int, ...], heads: tuple[int, ...]) -> nn.Module:
    """One hidden layer with batch norm."""
    return Network(nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.ReLU()), 8, heads)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["online-laplace", "fine-tuning", "si"])
def test_frozen_batch_norm_keeps_the_statistics_of_the_first_task(method: str, tmp_path: Path) -> None:
    network = {"name": "test-normed", "options": {}}
    for frozen in (False, True):
        chosen = recipe(method, network=network, training={"freeze_batch_norm": frozen})
        one = Run(chosen, RunFolder(tmp_path / str(frozen)), Watcher(), 1e9)
        linear, norm = (one.model.get_submodule(f"body.{i}") for i in (0, 1))
        assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None and norm.running_var is not None
        means, variances, weights = [], [], []
        for _ in one.learn():
            if not means:
                hidden = linear(one.lessons.lesson(0).train.inputs).detach()
            means.append(norm.running_mean.clone())
            variances.append(norm.running_var.clone())
            weights.append(norm.weight.detach().clone())
        assert not torch.equal(weights[0], weights[1])  # weights are trained either way
        assert norm.momentum == 0.1
        if frozen:
            torch.testing.assert_close(means[0], hidden.mean(0))  # of all data, at the weights of the end
            torch.testing.assert_close(variances[0], hidden.var(0), rtol=0.1, atol=0)  # of batches, on average
            assert all(torch.equal(mean, means[0]) for mean in means)
            assert all(torch.equal(variance, variances[0]) for variance in variances)
        else:
            assert not torch.equal(means[1], means[0])


def test_gradients_are_clipped_while_batch_norm_is_frozen(tmp_path: Path) -> None:
    def largest(task: int, **training: Any) -> float:
        """The largest norm of a gradient that the optimizer sees in an epoch of steep loss."""
        chosen = recipe("fine-tuning", network={"name": "test-normed", "options": {}}, training=training)
        one = Run(chosen, RunFolder(tmp_path), Watcher(), 1e9)
        with torch.no_grad():
            one.model.get_parameter("heads.0.weight").mul_(100)
        training_of_task, norms = one._training(task), [0.0]

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            gradients = [p.grad.flatten() for p in one.model.parameters() if p.grad is not None]
            norms.append(float(torch.cat(gradients).norm()))

        training_of_task.optimizer.register_step_pre_hook(look)
        training_of_task.epoch(lambda *_: None)
        return max(norms)

    assert largest(0, freeze_batch_norm=True) > 5
    assert largest(1, freeze_batch_norm=False) > 5
    assert largest(1, freeze_batch_norm=True) == pytest.approx(1, rel=1e-4)
    assert largest(1, freeze_batch_norm=True, clip_norm=None) > 5
    assert largest(0, clip_norm=2.5) == pytest.approx(2.5, rel=1e-4)


@pytest.mark.parametrize("method", ["joint", "one-network-per-task"])
def test_a_new_network_learns_its_statistics(method: str, tmp_path: Path) -> None:
    network = {"name": "test-normed", "options": {}}
    records = [
        run(recipe(method, network=network, training={"freeze_batch_norm": frozen}), tmp_path / str(frozen))
        for frozen in (False, True)
    ]
    assert records[0].accuracy == records[1].accuracy and records[0].nll == records[1].nll


@pytest.mark.parametrize("method", ["online-laplace", "si"])
def test_the_warning_about_running_statistics_names_the_setting(method: str, tmp_path: Path) -> None:
    network = {"name": "test-normed", "options": {}}
    with pytest.warns(NotProtectedWarning, match=r"2 running statistics .*--set training.freeze_batch_norm=true"):
        Run(recipe(method, network=network), RunFolder(tmp_path), Watcher(), 1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = recipe(method, network=network, training={"freeze_batch_norm": True})
        Run(chosen, RunFolder(tmp_path), Watcher(), 1e9)


def test_divergence_in_the_last_update_is_said(tmp_path: Path) -> None:
    with pytest.raises(LimpetError, match="outputs contain inf or nan: training diverged"):
        run(recipe("fine-tuning", training={"lr": 1e30, "batch_size": 120, "epochs": 1}), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"patience": 2, "schedule": "constant"}}, "patience needs a validation set"),
        ({"training": {"patience": 2, "validation": 20}}, "cannot be combined with patience"),
        ({"training": {"validation": 120}}, "task 1 has only 120 examples"),
        ({"device": "cuda:77"}, "device 'cuda:77' is not available"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
        ({"memory": {"strength": float("inf")}}, "should be a finite number"),
    ],
)
def test_recipes_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LimpetError, match=message):
        run(recipe(**changes), tmp_path / "run")


@pytest.mark.parametrize("place", ["learned", "_row", "_finish"])
def test_stopped_between_epochs_and_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    chosen = recipe(training={"batch_size": 25}, memory={"smoothing": 0.01})  # 10 updates: a pull is pending
    whole = run(chosen, tmp_path / "whole")
    for _ in range(3):
        owner: Any = METHODS["online-laplace"] if place == "learned" else Run
        with monkeypatch.context() as broken, pytest.raises(StoppedError):
            broken.setattr(owner, place, lambda *_: (_ for _ in ()).throw(StoppedError()))
            run(chosen, tmp_path / "stopped", resume=True, checkpoint_seconds=0)
    assert timeless(run(chosen, tmp_path / "stopped", resume=True)) == timeless(whole)
    first, second = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "stopped")
    assert first.memory.read_bytes() == second.memory.read_bytes()


def test_the_users_own_state_is_as_it_was(tmp_path: Path) -> None:
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    run(recipe(), tmp_path / "run")
    assert torch.equal(torch.random.get_rng_state(), before) and torch.get_num_threads() == threads


def test_the_folder(tmp_path: Path) -> None:
    record = run(recipe(), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert folder.load_record() == record and folder.load_recipe() == record.recipe
    values = json.loads(folder.record.read_text())
    assert values["environment"]["versions"]["torch"] == torch.__version__
    assert values["kept_bytes"] > 0 and values["peak_memory_bytes"] > 1e6 and values["parameters"] == 6 * 8 + 8 + 36
    assert {len(v) for v in values["seconds"].values()} == {3} and min(values["seconds"]["training"]) > 0
    assert any(folder.tensorboard.iterdir())
    with pytest.raises(LimpetError, match="already contains a run: continue it with --resume"):
        run(recipe(), folder.path)
    with pytest.raises(LimpetError, match=r"a different recipe \(seed: 0, now 1\)"):
        run(recipe(seed=1), folder.path, resume=True)
    assert run(recipe(), folder.path, resume=True) == record


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(LimpetError, match="this sequence has 5 tasks"):
        run(recipe(experiment="vision", tasks=7), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", preset_names())
def test_presets_resolve_for_every_method(name: str) -> None:
    preset = load_preset(name)
    for method in METHODS.names():
        for structure in METHODS[method].structures or (None,):
            chosen = preset.resolve({"method": method, "structure": structure})
            assert chosen.experiment == name.removesuffix("-paper") and chosen.method == method
            for setting in preset.grid(chosen):
                part, _, last = setting.partition(".")
                assert last in getattr(chosen, part).model_dump()


def test_presets_know_the_paper() -> None:
    """Section 4 and appendix D."""
    permuted = load_preset("permuted-mnist", "paper")
    training = permuted.resolve({}).training
    assert (training.lr, training.momentum, training.drop_epochs, training.patience) == (0.1, 0.9, 5, 5)
    assert permuted.resolve({"method": "si"}).training.optimizer == "adam"
    assert permuted.grid(permuted.resolve({}))["memory.strength"] == [1, 3, 10, 30, 100]
    assert permuted.grid(permuted.resolve({"method": "si"}))["memory.strength"] == [0.01, 0.03, 0.1, 0.3, 1]
    disjoint = load_preset("disjoint-mnist", "paper")
    chosen = disjoint.resolve({"structure": "diagonal"})
    assert (chosen.training.drop_updates, chosen.training.strength_decay) == (1000, 0.001)
    assert len(disjoint.grid(chosen)["memory.strength"]) == 13


def test_a_subclass_of_a_method_inherits_its_presets() -> None:
    from limpet.experiments import methods

    @METHODS.register("test-own-laplace")
    class Own(methods.OnlineLaplace):
        """A method of one's own."""

    try:
        permuted = load_preset("permuted-mnist")
        for structure in ("kronecker", "diagonal"):
            inherited = permuted.resolve({"method": "test-own-laplace", "structure": structure})
            original = permuted.resolve({"structure": structure})
            assert inherited.memory == original.memory
            assert permuted.grid(inherited) == permuted.grid(original) != {}
        assert inherited.memory.strength == 10  # that of the diagonal
        own = permuted.model_copy(
            update={"methods": {**permuted.methods, "test-own-laplace": {"memory": {"limit": 7}}}}
        )
        chosen = own.resolve({"method": "test-own-laplace", "structure": "diagonal"})
        assert chosen.memory.limit == 7 and chosen.memory.strength == 10
        paper = load_preset("permuted-mnist", "paper")  # what it has for plain training is not for every method
        assert paper.resolve({"method": "test-own-laplace"}).training.task_decay == 0.1
    finally:
        del METHODS._items["test-own-laplace"]


def test_another_network_does_not_get_the_options_of_the_preset_s() -> None:
    preset = load_preset("split-cifar10")
    assert preset.resolve({}).network.options == {"channels": [20, 50], "hidden": 500}
    assert preset.resolve({"network.options.hidden": 9}).network.options == {"channels": [20, 50], "hidden": 9}
    assert preset.resolve({"network.name": "lenet"}).network.options == {"channels": [20, 50], "hidden": 500}
    chosen = preset.resolve({"network.name": "resnet", "network.options.width": 8})
    assert chosen.network.options == {"width": 8}


def test_a_preset_of_ones_own(tmp_path: Path) -> None:
    own = {"recipe": {"training": {"lr": 0.5}}, "methods": {"si": {"training": {"epochs": 7}}}}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(own))
    chosen = load_preset("permuted-mnist", str(path)).resolve({"method": "si", "training.batch_size": 9})
    assert (chosen.training.lr, chosen.training.epochs, chosen.training.batch_size) == (0.5, 7, 9)
    path.write_text("recipe: {training: {lrr: 1}}")
    with pytest.raises(LimpetError, match=r"unknown setting 'training.lrr': did you mean 'lr'"):
        load_preset("permuted-mnist", str(path)).resolve({})
    path.write_text("- 1")
    with pytest.raises(LimpetError, match="must be a mapping"):
        load_preset("permuted-mnist", str(path))


def test_settings_on_the_command_line() -> None:
    assert parse_setting("training.lr=1e-3") == ("training.lr", 0.001)
    assert parse_setting("network.options={hidden: [5]}") == ("network.options", {"hidden": [5]})
    assert parse_setting("training.patience=null") == ("training.patience", None)
    with pytest.raises(LimpetError, match="name=value"):
        parse_setting("lr")


@pytest.mark.parametrize("setting", [{"rank": 2}, {"energy": 0.9}])
def test_truncated_factors_are_a_setting(setting: dict[str, Any], tmp_path: Path) -> None:
    run(recipe(memory=setting), tmp_path / "run")
    model = build("mlp", {"hidden": [8]}, (6,), (4,), seed=0)
    memory = limpet.load(tmp_path / "run" / "memory.safetensors", model)
    assert "of rank" in str(memory.report()) and memory.tasks == 3

"""Tests that several processes compute the same results as one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import warnings
from functools import reduce
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import limpet
import many_ranks
import networks
import sharded_adapters
from conftest import benchmark
from limpet import distributed
from limpet.errors import MemoryFileError
from limpet.planning.plan import plan
from rank_processes import started

pytestmark = pytest.mark.ranks
SCRIPT = Path(__file__).parents[1].joinpath("many_ranks.py")


def torchrun(ranks: int, *words: str, restarts: int, timeout: float = 400) -> None:
    """Run a job of many_ranks.py by a launcher that restarts it. Whatever happens, no process of it is left."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, "--max-restarts", str(restarts), str(SCRIPT), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        told, _ = process.communicate(timeout=timeout)
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            child.kill()
        process.kill()
    assert process.returncode == 0 or gone(told, ranks), told


def gone(told: str, ranks: int) -> bool:
    """Whether all ranks had done their job: gloo sometimes aborts while its processes take leave of each other."""
    return all(f"rank {rank} is done" in told for rank in range(ranks))


def on_ranks(ranks: int, *words: str, fails: bool = False) -> str:
    """What the ranks print that do a job of many_ranks.py."""
    found = started(many_ranks.main, ranks, *words)
    told = "".join(text for _, text in found)
    if fails:
        assert all(code != 0 for code, _ in found)
    else:
        assert gone(told, ranks) and all(code in (0, -signal.SIGABRT) for code, _ in found), found
    return told


def run(ranks: int, job: str, folder: Path) -> None:
    """Run a job of many_ranks.py, in this process if it is for one rank."""
    if ranks > 1:
        on_ranks(ranks, job, str(folder))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        many_ranks.job(job, [str(folder)], 0, 1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run(1, "pass", folder)
    return folder


def test_outputs_are_protected_on_two_ranks_as_on_one(tmp_path: Path) -> None:
    for size in (1, 2):
        (tmp_path / str(size)).mkdir()
        run(size, "outputs", tmp_path / str(size))
    one, many = (load_file(tmp_path / size / "distilled.safetensors") for size in ("1", "2"))
    assert all(torch.allclose(tensor, many[name], atol=1e-6) for name, tensor in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("job", ["pass", "pass-sharded"])
def test_the_memory_of_many_ranks_is_that_of_one(job: str, ranks: int, alone: Path, tmp_path: Path) -> None:
    on_ranks(ranks, job, str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == len(many_ranks.networks_on(ranks)) * len(many_ranks.STRUCTURES) * len(many_ranks.FISHERS)
    for name in names:
        network = name.rpartition("-")[0]
        model, _, _ = networks.build(network)
        one, many = (limpet.load(folder / name, model) for folder in (alone, tmp_path))
        assert one.examples == many.examples == 48 and one.tasks == many.tasks == 2
        assert one.posterior.held.keys() == many.posterior.held.keys()
        for key, held in one.posterior.held.items():
            other = many.posterior.held[key]
            expected = held.precision.dense()
            assert torch.equal(other.mean, held.mean)
            assert (other.precision.dense() - expected).norm() < 1e-5 * expected.norm(), (name, key)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["train", "train-sharded"])
def test_fifty_protected_steps_on_many_ranks_are_those_of_one(job: str, tmp_path: Path) -> None:
    for ranks in (1, 2, 4):
        (tmp_path / str(ranks)).mkdir()
        run(ranks, job, tmp_path / str(ranks))
    for path in (tmp_path / "1").iterdir():
        one, two, four = (load_file(tmp_path / ranks / path.name) for ranks in ("1", "2", "4"))
        for key, tensor in two.items():
            assert (four[key] - tensor).norm() < 1e-6 * tensor.norm(), (path.name, key)
        if "None" in path.name:  # forecasts without their curve, which a model in pieces has not, so budgets differ
            for key, tensor in one.items():
                assert (two.get(key, tensor) - tensor).norm() < 1e-6 * tensor.norm(), (path.name, key)
        else:
            assert 0.045 < two["forecast"] <= 0.0501


@pytest.mark.slow
def test_adapters_of_a_sharded_model_are_protected_as_in_one_process(tmp_path: Path) -> None:
    sharded_adapters.remember(tmp_path)
    sharded_adapters.run(tmp_path, 0, 1)
    for ranks in (2, 4):
        on_ranks(ranks, "adapters", str(tmp_path))
    for name in sharded_adapters.RUNS:
        one = load_file(tmp_path / f"{name} 1.safetensors")
        assert 0 < one["drift before"] < one["drift"] and one["penalised"] == 12 and one["reached"] == 6
        for ranks in (2, 4) if name in sharded_adapters.runs_on(4) else (2,):
            many = load_file(tmp_path / f"{name} {ranks}.safetensors")
            assert one.keys() == many.keys()
            for key, tensor in one.items():
                assert (many[key] - tensor).norm() <= 1e-6 * tensor.norm(), (name, ranks, key)
            saved = [tmp_path / f"{name} {size} memory.safetensors" for size in (1, ranks)]
            model = sharded_adapters.adapted(1)
            first, second = (limpet.load(path, model) for path in saved)
            assert isinstance(first, limpet.Memory) and isinstance(second, limpet.Memory)
            assert second.penalty().item() == pytest.approx(first.penalty().item(), rel=1e-9)
            assert second.tasks == (2 if name == "gradient" else 1)
            for block, held in first.posterior.held.items():
                expected = held.precision.dense()
                found = second.posterior.held[block].precision.dense()
                assert (found - expected).norm() < 1e-6 * expected.norm(), (name, ranks, block)
            assert float(second.drift()) == pytest.approx(float(first.drift()), rel=1e-9)
    assert load_file(tmp_path / "budget 1.safetensors")["forecast"] <= 0.0005 * 1.01
    made = [limpet.load(tmp_path / f"made {size}.safetensors", sharded_adapters.adapted(1)) for size in (1, 2, 4)]
    for block, held in made[0].posterior.held.items():  # type: ignore[union-attr]
        expected = held.precision.dense()
        for other in made[1:]:
            found = other.posterior.held[block].precision.dense()  # type: ignore[union-attr]
            assert (found - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.slow
def test_loss_curves_of_a_sharded_model_are_those_of_one_process(tmp_path: Path) -> None:
    """With strength "auto", which they determine, and with smoothing."""
    for ranks in (1, 2, 4):
        (tmp_path / str(ranks)).mkdir()
        run(ranks, "curves", tmp_path / str(ranks))
    names = [path.name for path in (tmp_path / "1").iterdir()]
    assert len(names) == 4
    for name in names:
        one, *others = (load_file(tmp_path / ranks / name) for ranks in ("1", "2", "4"))
        for other in others:
            assert one.keys() == other.keys()
            for key, tensor in one.items():
                if "vectors" not in key:  # the signs of eigenvectors are arbitrary
                    assert (other[key] - tensor).norm() <= 1e-6 * tensor.norm(), (name, key)


@pytest.mark.slow
def test_a_model_may_be_sharded_over_one_rank(tmp_path: Path) -> None:
    on_ranks(1, "single", str(tmp_path))


@pytest.mark.slow
def test_a_memory_kept_on_four_ranks_is_the_same_on_two_and_on_one(tmp_path: Path) -> None:
    on_ranks(4, "keep", str(tmp_path))
    for ranks in (2, 1):
        on_ranks(ranks, "reload", str(tmp_path))
    kept = load_file(tmp_path / "memory.safetensors")
    assert any(name.startswith("force/") for name in kept) and any(name.endswith("slope") for name in kept)
    for name in ("memory.safetensors", "now", "later"):
        for ranks in (2, 1):
            again = load_file(tmp_path / f"{name} on {ranks}.safetensors")
            assert again.keys() == kept.keys()
            assert all(torch.equal(again[key], tensor) for key, tensor in kept.items()), (name, ranks)
    model, _, _ = networks.build("transformer")
    with pytest.warns(UserWarning), pytest.raises(MemoryFileError, match=r"limpet.load\(folder, model\)"):
        dcp.load({"memory": limpet.PerTaskLaplace(model)}, checkpoint_id=tmp_path / "now", no_dist=True)


def same_memory(one: Path, other: Path, tolerance: float) -> None:
    model, _, _ = networks.build("transformer")
    a, b = (limpet.load(path, model) for path in (one, other))
    assert a.examples == b.examples and a.posterior.held.keys() == b.posterior.held.keys()
    for name, held in a.posterior.held.items():
        expected = held.precision.dense()
        assert (b.posterior.held[name].precision.dense() - expected).norm() < tolerance * expected.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_a_pass_goes_on_after_a_kill_on_as_many_ranks_and_on_others(kind: str, tmp_path: Path) -> None:
    whole, restarted = tmp_path / "whole", tmp_path / "restarted"
    for folder in (whole, restarted):
        folder.mkdir()
    many_ranks.stoppable(whole, kind, "nobody", 0, 1)
    torchrun(2, "stoppable", str(restarted), kind, "one", restarts=1)
    assert (restarted / "killed").exists() and not list(restarted.glob("pass*"))
    same_memory(whole / "memory.safetensors", restarted / "memory.safetensors", 1e-6)
    before, after = {"replicated": (4, 1), "sharded": (2, 4)}[kind]  # fewer ranks, and more
    folder = tmp_path / "others"
    folder.mkdir()
    on_ranks(before, "stoppable", str(folder), kind, "all", fails=True)
    assert list(folder.glob("pass*"))
    told = on_ranks(after, "stoppable", str(folder), kind, "nobody")
    calls = sum(int(words.split()[0]) for words in told.split(" made ")[1:])
    assert 0 < calls < 11 + 3 * after  # less than all batches and every rank's audits
    same_memory(whole / "memory.safetensors", folder / "memory.safetensors", 1e-6)


@pytest.mark.slow
@pytest.mark.timing
def test_two_ranks_take_a_task_in_sooner_than_one() -> None:
    record = benchmark("ranks").measured_speed(rounds=2)
    assert record["error"] < 1e-5
    # the round that other work on the machine disturbed least; the medians of a quiet one are in results/ranks
    assert min(record["ratios"]) <= 0.62


@pytest.mark.slow
@pytest.mark.timing
def test_no_rank_holds_the_memory_of_a_model_in_pieces(tmp_path: Path) -> None:
    def told(ranks: int) -> list[dict[str, Any]]:
        on_ranks(ranks, "bytes", str(tmp_path))
        return [json.loads((tmp_path / f"{rank} of {ranks}.json").read_text()) for rank in range(ranks)]

    (one,), many = told(1), told(4)
    for again in [told(4)]:  # on a busy machine gloo lets go of messages late: the least is what is needed
        for rank, same in zip(many, again, strict=True):
            for kind in ("complete", "truncated"):
                rank[kind]["peaks"] = [min(two) for two in zip(rank[kind]["peaks"], same[kind]["peaks"], strict=True)]
    for kind in ("complete", "truncated"):
        assert sum(rank[kind]["bytes"] for rank in many) == one[kind]["bytes"]
        assert max(rank[kind]["bytes"] for rank in many) <= 0.30 * one[kind]["bytes"]
    for rank in many:  # without what LAPACK needs, which is not a tensor
        complete, truncated = rank["complete"], rank["truncated"]
        assert complete["peaks"][0] <= rank["pieces"] + complete["bytes"] + 2 * complete["block"]
        # the precision of before stays until the new one is whole, but the weights of only one block are gathered
        more = complete["bytes"] - complete["means"]
        assert max(complete["peaks"]) <= rank["pieces"] + complete["bytes"] + more + complete["block"]
        assert max(complete["peaks"]) <= 0.6 * one["complete"]["bytes"] < one["complete"]["peaks"][0]
        # most of it is the mean, of which there is never a second one
        assert max(truncated["peaks"]) <= rank["pieces"] + truncated["bytes"] + 3 * truncated["block"]


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts pages as Linux does")
def test_what_a_rank_keeps_and_sends_is_foreseen() -> None:
    """Resident memory, and bytes handed to collectives."""
    ranks = benchmark("ranks")
    each = ranks.measured_costs(4)["each"]

    def most(*keys: Any) -> float:
        return max(float(reduce(lambda found, key: found[key], keys, told)) for told in each)

    planned = [plan(ranks.deep(), tasks=tasks, ranks=4).sharded for tasks in range(1, ranks.TASKS + 1)]
    last = planned[-1]
    assert last.memory == pytest.approx(most("bytes"), rel=0.05)
    for task in range(ranks.TASKS):
        assert planned[task].peak == pytest.approx(most("peaks", task), rel=0.05)
    for mode in ("gradient, every=1", "proximal, every=1"):
        assert last.sent_step == pytest.approx(most(mode, "sent"), rel=0.05)
        assert last.ready == pytest.approx(most(mode, "peak"), rel=0.25)
    assert last.sent_task == pytest.approx(most("consolidate", "swapped"), rel=0.05)
    assert ranks.BATCHES * last.sent_batch == pytest.approx(most("consolidate", "reduced"), rel=0.05)


@pytest.mark.slow
def test_whole_numbers_are_added_up_as_such() -> None:
    on_ranks(2, "reduced")


@pytest.mark.slow
def test_a_callback_with_a_sharded_memory(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    on_ranks(2, "callback", str(tmp_path))
    model, _, _ = networks.build("transformer")
    assert limpet.load(tmp_path / "checkpoint-3", model).tasks == 1


@pytest.mark.slow
def test_what_is_wrong_on_one_rank_is_heard_on_all() -> None:
    told = on_ranks(2, "wrong")
    for rank in (0, 1):
        heard = f"rank {rank} heard: consolidate failed on rank 1: CurvatureError: the model's outputs contain inf"
        assert heard in told
    assert "alone: " in told


def test_one_process_knows_no_others() -> None:
    import torch.distributed as dist

    assert distributed.current() is None and not dist.is_initialized()

"""Test the benchmark of retention: how methods are compared, what rivals compute, and that a suite resumes."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # as `python -m benchmarks` does

from fine_tuning import LINEAR  # noqa: E402
from language_models import llama  # noqa: E402
from limpet.experiments.data import Examples  # noqa: E402
from retention import __main__ as command  # noqa: E402
from retention import compare, drift, language, report, runs, sequence, skill, update, vision  # noqa: E402
from retention.after import METHODS as AFTER  # noqa: E402
from retention.after.lines import factor  # noqa: E402
from retention.during import METHODS as DURING  # noqa: E402
from retention.method import During  # noqa: E402
from retention.pair import Pair  # noqa: E402

SMALL = Pair("german", ("reviews",), steps=40, rate=2e-2, moments=(20, 40))


def adapted() -> Any:
    """A model with adapters that change it."""
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=3, lora_alpha=6, target_modules=LINEAR))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    return model


@torch.no_grad()
def deltas(model: Any) -> dict[str, torch.Tensor]:
    """The change of every weight matrix, by the active adapter and in the base."""
    before = dict(llama().named_modules())
    return {
        name: module.get_delta_weight(module.active_adapters[0])
        + module.get_base_layer().weight
        - before[name.removeprefix("base_model.model.")].weight
        for name, module in update.adapted_layers(model).items()
    }


def cells(table: str) -> dict[str, list[str]]:
    """The cells of a table, by the first of their row."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows}


def points(*pairs: tuple[float, float]) -> list[compare.Point]:
    return [compare.Point(new, np.array([lost, lost + 2])) for new, lost in pairs]


def test_what_is_lost_is_interpolated_at_a_new_loss() -> None:
    curve = points((3.0, 8.0), (3.2, 4.0), (3.1, 7.0))
    assert compare.at_loss(curve, 3.15) == pytest.approx([5.5, 7.5])
    assert compare.at_loss(curve, 3.2) == pytest.approx([4, 6])
    assert compare.at_loss(curve, 9.9) == pytest.approx([4, 6])  # a point that has learned more is at least as good
    assert compare.at_loss(curve, 2.9) is None
    assert compare.at_loss(points((3.0, 1.0), (3.2, 4.0)), 3.1) == pytest.approx([1, 3])


def test_the_bootstrap_has_the_error_of_rows_and_of_seeds() -> None:
    rng = np.random.default_rng(0)
    one = compare.paired({0: rng.normal(1.0, 2.0, 400)})
    assert one.error == pytest.approx(2.0 / 20, rel=0.15)
    assert one.low < one.mean < one.high and one.high - one.low == pytest.approx(4 * one.error, rel=0.1)
    seeds = compare.paired({seed: np.full(50, float(seed)) for seed in range(3)})
    assert seeds.mean == 1 and seeds.error == pytest.approx(np.std(range(3), ddof=1) / np.sqrt(3), rel=0.05)


class Adapters:
    """What methods need of a bench, for a model with adapters."""

    pair = SMALL
    updates, displaced = language.LanguageBench.updates, language.LanguageBench.displaced


@pytest.mark.parametrize("name", ["scaling", "LiNeS", "TIES", "intruder reduction"])
def test_the_trained_adapter_is_there_again_after_a_path(name: str) -> None:
    model, method = adapted(), AFTER[name]
    before = deltas(model)
    with method.path(Adapters(), model) as go:  # type: ignore[arg-type]
        for setting in (*method.settings, method.settings[0]):  # to any point, in any order
            go(setting)
            now = deltas(model)
            assert any(not torch.allclose(now[key], tensor) for key, tensor in before.items()), setting
            if name == "scaling":
                assert all(torch.allclose(now[key], setting * tensor, atol=1e-7) for key, tensor in before.items())
            if name == "LiNeS":
                first, last = (f"base_model.model.model.layers.{i}.mlp.up_proj" for i in (0, 1))
                assert torch.allclose(now[first], setting * before[first], atol=1e-7)
                assert torch.equal(now[last], before[last])
    after = deltas(model)
    assert len(method.settings) > 3 and all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert model.active_adapters == ["default"]


def test_updates_of_weights_are_changed_as_those_of_adapters() -> None:
    model, before = adapted().merge_and_unload(), dict(llama().named_parameters())
    found = {layer.name: layer for layer in update.weight_updates(model.requires_grad_(True), before)}
    expected = deltas(adapted())
    moved = {name for name, layer in found.items() if layer.update.any()}
    assert moved == {f"{name.removeprefix('base_model.model.')}.weight" for name in expected}
    key = "model.layers.0.mlp.up_proj.weight"
    trained = found[key].weight.detach().clone()
    with update.changing(list(found.values())) as change:
        change(lambda layer: 0.25 * layer.update)
        expected_weight = before[key] + 0.25 * expected[f"base_model.model.{key.removesuffix('.weight')}"]
        assert torch.allclose(found[key].weight, expected_weight, atol=1e-7)
    assert torch.equal(found[key].weight, trained)


def test_lines_grows_with_the_depth() -> None:
    assert [factor(i, 0.4, 3) for i in range(4)] == pytest.approx([0.4, 0.6, 0.8, 1.0])
    assert update.depths(["a.layers.3.x", "a.layer.12.y.z"]) == {"a.layers.3.x": 3, "a.layer.12.y.z": 12}
    assert update.depths(["a", "b"]) == {"a": 0, "b": 1}
    names = ["embed", "layers.0.x", "layers.1.x", "norm"]  # what is outside of the blocks goes with its neighbor
    assert list(update.depths([f"model.{name}.weight" for name in names]).values()) == [0, 0, 1, 1]


@pytest.mark.parametrize("name", ["replay of 1%", "replay of 5%"])
def test_an_old_example_counts_as_much_as_one_of_the_batch(name: str) -> None:
    class Old:
        def old_loss(self, model: Any, share: float) -> torch.Tensor:
            assert f"replay of {share:.0%}" == name
            return torch.tensor(2.0 + 4.0)  # of two examples

    extra = DURING[name].extra
    assert extra is not None
    new = torch.tensor([1.0, 3.0, 5.0])
    total = new.mean() + extra(Old(), None, DURING[name].fixed)(None, torch.empty(3, 7))  # type: ignore[arg-type]
    pooled = torch.cat([new, torch.tensor([2.0, 4.0])]).mean()
    assert total == pytest.approx(float(pooled * 5 / 3))  # its multiple, as AdamW does not see it


def test_replay_in_a_sequence_draws_from_its_share_of_the_old_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: set[int] = set()

    def logits(_: Any, batch: dict[str, torch.Tensor], head: Any) -> torch.Tensor:
        drawn.update(batch["number"].tolist())
        return torch.zeros(len(batch["number"]), 2)

    monkeypatch.setattr(sequence, "logits", logits)
    stage = object.__new__(sequence.Stage)
    stage.heads, stage.draws = {"imdb": None}, torch.Generator().manual_seed(0)
    numbers = torch.split(torch.arange(48), 16)
    stage.earlier = {"imdb": [{"number": some, "labels": torch.zeros_like(some)} for some in numbers]}
    for _ in range(100):
        stage.old_loss(None, 0.05)
    assert drawn == set(range(24))  # 5 % of 480


def test_ties_keeps_the_largest_entries_of_an_update() -> None:
    model = adapted()
    before = deltas(model)
    with AFTER["TIES"].path(Adapters(), model) as go:  # type: ignore[arg-type]
        go(0.2)
        for key, tensor in deltas(model).items():
            whole = before[key]
            kept = whole * (whole.abs() >= whole.abs().flatten().topk(int(0.2 * whole.numel())).values[-1])
            assert torch.allclose(tensor, kept, atol=1e-6) and 0 < int((kept != 0).sum()) <= 0.2 * kept.numel(), key


def test_the_distance_of_adapters_is_that_of_weights() -> None:
    model = adapted()
    expected = sum(tensor.square().sum().item() for tensor in deltas(model).values())
    assert Adapters().displaced(model).item() == pytest.approx(expected, rel=1e-5)  # type: ignore[misc]


def test_the_setting_that_loses_the_least_at_equal_new_loss_is_chosen() -> None:
    def record(trained: str, value: float, *curve: tuple[float, float]) -> dict[str, Any]:
        found = {"pair": "development", "seed": 10, "trained": trained, "method": "", "value": value, "before": {}}
        return found | {"curve": [{"new": new, "lost": [lost]} for new, lost in curve]}

    records = [
        record("plain", 0.0, (2.0, 1.0)),
        record("L2-SP", 0.001, (2.0, 0.9)),
        record("L2-SP", 0.01, (2.05, 0.7), (2.04, 0.5)),
        record("L2-SP", 0.1, (2.09, 0.3)),  # reaches 1.05 only
        record("L2-SP", 1.0, (2.3, 0.1)),  # has not learned enough
        record("distillation", 0.3, (2.4, 0.3)),
        record("distillation", 1.0, (2.3, 0.4)),
    ]
    assert report.best(report.Results(records, "development")) == {"L2-SP": 0.01, "distillation": 1.0}


def test_methods_are_compared_at_the_new_loss_of_plain_training() -> None:
    def record(seed: int, trained: str, method: str, *curve: tuple[float, float]) -> dict[str, Any]:
        others = {"others": {"reviews": 4 + curve[-1][1]}} if seed == 0 else {}
        points = [{"setting": 1.0, "new": new, "lost": [lost, lost + 0.2], **others} for new, lost in curve]
        found = {"pair": "german", "seed": seed, "trained": trained, "method": method, "value": 0.0}
        found["seconds"] = 2 if method else 9
        kept = {"seconds": 30 + seed, "megabytes": 2} if method == "repair" else {}
        return found | {"curve": points, "before": {"others": {"reviews": 4.0}}, "kept": kept}

    records = [
        record(seed, *run)
        for seed in (0, 1)
        for run in (
            ("plain", "", (4.0, 0.5), (2.0, 0.9 + seed)),
            ("plain", "scaling", (2.1, 0.5 + seed)),
            ("plain", "repair", (2.1, 0.1 + seed)),
        )
    ]
    results, scaling = report.Results(records, "german"), report.Row("plain", "scaling")
    assert results.lost(scaling, 0, 1.05) == pytest.approx([0.5, 0.7])
    assert results.lost(scaling, 0, 1.02) == pytest.approx([0.74, 0.94])  # 0.4 of the way
    difference = results.against(report.Row("plain", "repair"), scaling, 1.05)
    assert difference is not None and difference.mean == pytest.approx(-0.4) and difference.error < 1e-9
    lines = cells(report.table(results, "drift"))
    assert lines["repair"][1:] == ["2.100", "0.700", "1.180", "0.700", "0.700", "+0.10 (1.05)", "11", "30", "2", "2"]
    assert lines["scaling"][1:3] == ["", ""] and lines["scaling"][8:10] == ["", ""]
    assert lines["early stopping"][4] == "1.455" and lines["early stopping"][6] == "+0.90 (1.50)"
    pairs = [(report.Row("plain", "repair"), scaling), (report.Row("plain", "LiNeS"), scaling)]
    assert cells(report.differences(results, pairs)) == {
        "": ["at 1.02", "at 1.05", "at 1.10", "seeds"],
        "---": ["---"] * 4,
        "repair minus scaling": ["-0.160 +- 0.000", "-0.400 +- 0.000", "-0.400 +- 0.000", "2"],
    }


def test_seeds_with_different_settings_are_not_averaged() -> None:
    base = {"pair": "german", "trained": "L2-SP", "method": "", "curve": []}
    with pytest.raises(ValueError, match="L2-SP: its seeds have different settings"):
        report.Results([base | {"seed": seed, "value": 10.0**-seed} for seed in (2, 3)], "german")


def test_a_path_that_was_not_followed_as_far_as_today_is_run_again() -> None:
    settings = AFTER["repair"].settings
    plain = {"curve": [{"new": 2.0}]}

    def followed(values: Sequence[float], new: float) -> bool:
        record = {"value": None, "curve": [{"setting": value, "new": new} for value in values]}
        return runs._followed(record, "repair", plain)

    assert followed(settings, 2.1) and not followed(settings[:-2], 2.1)
    assert followed(settings[:-2], 2.3) and not followed((5.0, *settings[1:-2]), 2.3)
    assert runs._followed({"value": 3.0, "right": []}, "repair", plain)  # one setting, of a suite without paths


def test_methods_show_where_their_defaults_end_if_they_have_some() -> None:
    base = {"pair": "german", "seed": 0, "trained": "plain", "value": 0.0, "seconds": 9, "before": {}}
    curve = [{"setting": 0.03 * 3**i, "new": 2.0 + i / 20, "lost": [0.9 - i / 5]} for i in range(3)]
    some = {"": 3, "LiNeS": 3, "protect": 1, "repair": 3}
    records = [base | {"method": method, "curve": curve[:number]} for method, number in some.items()]
    records[2]["curve"] = [curve[0] | {"setting": AFTER["protect"].default}]
    ends = {name: line[1:3] for name, line in cells(report.table(report.Results(records, "german"), "drift")).items()}
    assert ends["LiNeS"] == ["", ""] and ends["protect"] == ["2.000", "0.900"]
    assert ends["repair"] == ["", ""]  # its path ended before its default
    assert ends["early stopping"] == ["2.100", "0.500"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--pairs", "klingon"], "this suite has 'development', 'german'"),
        (["--text", "german"], "NAME=FILE"),
        (["--text", "german=a.txt"], "missing: english, reviews, speeches"),
        (["--text", *(f"{name}=a.txt" for name in ("german", "english", "reviews", "speeches"))], "every method"),
        (
            ["--methods", "plain", "--text", *(f"{one}=a.txt" for one in ("german", "english", "reviews", "speeches"))],
            "--text english=a.txt: there is no such file",
        ),
        (["--draw", "--pairs", "speeches"], "no records"),
        (["--pairs", "development", "--seeds", "10", "2"], "the development pair needs other seeds"),
    ],
)
def test_wrong_input_is_told_before_anything_runs(
    given: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    files = ["--out", str(tmp_path / "drift.jsonl"), "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", ["retention", "drift", "--methods", "scaling", *files, *given])
    shown = ""
    try:
        command.main()
    except SystemExit as stop:
        shown = str(stop)
    captured = capsys.readouterr()
    assert told in shown + captured.out + captured.err and not (tmp_path / "work").exists()


def test_a_setting_that_was_not_chosen_is_told_before_anything_runs(tmp_path: Path) -> None:
    texts = dict.fromkeys(("german", "english", "reviews", "speeches"), "a.txt")
    asked = Namespace(pairs=["german"], seeds=[0], texts=texts, methods=["plain", "missing"], work=tmp_path / "work")
    method = During("missing", "nothing", candidates=(1.0, 2.0))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match="missing: run the development pair"):
        patch.setitem(DURING, "missing", method)
        runs.run(command.SUITES["drift"], asked)
    assert not asked.work.exists()


def character_tokenizer(vocabulary: dict[str, int]) -> Any:
    """A tokenizer whose tokens are characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    """A small model with its tokenizer, and texts."""
    place = tmp_path_factory.mktemp("retention")
    fast = character_tokenizer({"<s>": 0, **{chr(97 + i): 1 + i for i in range(20)}})
    model = llama(vocab_size=21, bos_token_id=0, eos_token_id=0, max_position_embeddings=64, initializer_range=0.3)
    model.save_pretrained(place / "model")
    fast.save_pretrained(place / "model")
    generator = torch.Generator().manual_seed(0)
    for name, letters_used in (("german", 4), ("reviews", 20)):
        picks = torch.randint(0, letters_used, (120_000,), generator=generator).tolist()
        (place / f"{name}.txt").write_text("".join(chr(97 + i) for i in picks))
    texts = {name: str(place / f"{name}.txt") for name in ("german", "reviews")}
    return Namespace(
        model=str(place / "model"), texts=texts, work=place / "work", out=place / "drift.jsonl", pairs=["small"],
        seeds=[0], methods=[*DURING, "scaling", "repair", "protect"],
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:limpet. the drift may be")
@pytest.mark.slow
def test_a_suite_resumes_and_its_curves_begin_at_the_trained_model(
    options: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = runs.Suite({"small": SMALL}, drift.DriftBench, "drift", "language")
    for module, name, value in (
        (language, "NEW_BLOCKS", 200), (drift, "NEW_BLOCKS", 200), (language, "HELD_OUT", 6), (drift, "OTHER_ROWS", 6),
        (drift, "TEST_ROWS", 8), (drift, "PROBE_ROWS", 8), (drift, "MEMORY_TOKENS", 1300), (drift, "REHEARSED", 60),
        (runs, "chosen", lambda method, _: 1.0 if method.candidates else method.fixed),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    short = Namespace(**vars(options) | {"methods": ["plain"]})
    runs.run(suite, short)
    first = options.out.read_text()
    for path in options.work.glob("small 0 plain*"):  # what is missing is trained again
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    runs.run(suite, options)
    assert options.out.read_text().startswith(first)  # what was there is not run again
    records = {(r["trained"], r["method"]): r for r in map(json.loads, options.out.read_text().splitlines())}
    assert len(records) == len(DURING) + 7 and all(np.isfinite(p["new"]) for r in records.values() for p in r["curve"])
    plain = records["plain", ""]["curve"]
    assert plain[-1]["new"] < plain[0]["new"] and set(plain[-1]["others"]) == {"reviews"}
    total = {
        key: np.array([compare.decoded(point["lost"]).mean() for point in r["curve"]]) for key, r in records.items()
    }
    scaled = total["plain", "scaling"]
    assert (np.diff(scaled) < 0).all() and scaled[0] < total["plain", ""][-1]
    repaired = [total["plain", ""][-1], *total["plain", "repair"]]
    assert (np.diff(repaired) < 0).all()
    (protected,) = records["plain", "protect"]["curve"]  # a point of the same path
    new = [point["new"] for point in (plain[-1], *records["plain", "repair"]["curve"])]
    after = int(np.searchsorted(new, protected["new"]))
    assert (np.diff(new) > 0).all() and repaired[after - 1] > compare.decoded(protected["lost"]).mean() > repaired[
        after
    ]
    assert sum("others" in point for point in records["plain", "repair"]["curve"]) == 1
    before = options.out.read_text()
    runs.run(suite, options)
    assert options.out.read_text() == before


@pytest.mark.slow
def test_a_convention_is_taught_decoded_and_compared_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = skill.sentences(50, seed=0)
    assert len(set(pairs)) == 50 and pairs == skill.sentences(80, seed=0)[:50]
    name, answer = pairs[0]
    assert name.split()[0].upper() in answer and json.loads(answer)["q"] == int(name.split()[2])
    monkeypatch.setattr(skill, "TAUGHT_RATE", 3e-3)
    monkeypatch.setattr(skill, "ANSWER", 60)  # tokens are characters here
    characters = sorted({character for pair in pairs for character in "\n".join(pair)})
    tokenizer = character_tokenizer({"<s>": 0, **{character: 1 + i for i, character in enumerate(characters)}})
    size = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 128}
    model = llama(vocab_size=1 + len(characters), **size, bos_token_id=0, eos_token_id=0, initializer_range=0.1)
    assert skill.wrong(model, tokenizer, pairs[:2]) == [1, 1]
    taught = skill.teach(model, skill.rows_of(tokenizer, pairs[:1] * 80), seed=0)  # more than one is too much for it
    sentence, answer = pairs[0]
    assert len(pairs[1][0]) > len(sentence)  # so that one of a batch is padded
    asked = [pairs[0], pairs[1], (sentence, answer.replace("zk", "zz")), pairs[0]]
    assert skill.wrong(taught, tokenizer, asked, size=2) == [0, 1, 1, 0]


@pytest.mark.slow
def test_a_network_learns_other_images_with_its_batch_norm_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def images(name: str, split: str) -> Examples:
        """Ten classes, each with its own color; Fashion-MNIST has one channel and fewer pixels."""
        generator = torch.Generator().manual_seed(len(name) + len(split))
        labels = torch.randint(0, 10, (400,), generator=generator)
        channels, size = (1, 28) if name == "fashion_mnist" else (3, 32)
        colors = torch.randint(0, 256, (10, channels, 1, 1), generator=torch.Generator().manual_seed(len(name)))
        noise = torch.randint(-20, 21, (400, channels, size, size), generator=generator)
        return Examples((colors[labels] + noise).clamp(0, 255).to(torch.uint8), labels)

    for name, value in {
        "images": images, "OLD_IMAGES": 320, "OLD_EPOCHS": 4, "NEW_IMAGES": 320, "TEST_IMAGES": 200,
        "MEASURED": 48, "PROBE": 32,
    }.items():  # fmt: skip
        monkeypatch.setattr(vision, name, value)
    pair = Pair("fashion_mnist", steps=30, rate=3e-3, moments=(15, 30))
    bench = vision.VisionBench(Namespace(work=tmp_path), "small", pair, 0)
    model = bench.fresh(DURING["plain"], 0.0)
    batch = bench.batch(torch.Generator().manual_seed(0))
    assert batch["pixel_values"].shape == (32, 3, 32, 32)
    model.eval()
    assert bench.displaced(model) == 0 and bench.distilled(model, batch, torch.empty(0)).abs() < 1e-6
    before = bench.lost(model)
    assert np.mean(before) < 0.3 and not torch.equal(model.classifier.weight, bench.teacher.classifier.weight)

    record = bench.train(DURING["plain"], 0.0)
    trained = bench.trained("plain")
    assert bench.stored("plain") and not bench.stored("pla")
    norms = {name: tensor for name, tensor in trained.state_dict().items() if "norm" in name or "features.1." in name}
    assert norms and all(torch.equal(tensor, bench.teacher.state_dict()[name]) for name, tensor in norms.items())
    assert (
        compare.decoded(record["before"]["lost"]).tolist() == before
        and record["curve"][-1]["new"] < 0.8 * record["before"]["new"]
    )
    updates = bench.updates(trained)
    moved = sum(float(layer.update.square().sum()) for layer in updates)
    assert bench.displaced(trained).item() == pytest.approx(moved, rel=1e-5) and moved > 0.01
    assert not any("classifier" in layer.name or "norm" in layer.name for layer in updates)
    with AFTER["scaling"].path(bench, trained) as go:
        go(0.0)
        assert bench.lost(trained) == before
    weight, memory = trained.features[3].first.weight, bench.diagonal_memory(trained)
    (gradient,) = torch.autograd.grad(memory.penalty(), [weight])
    for strength in (1.0, 1e5):
        (own,) = torch.autograd.grad(DURING["diagonal EWC"].extra(bench, trained, strength)(None, None), [weight])
        assert torch.allclose(own, strength / bench.examples * gradient, rtol=1e-5) and own.abs().max() > 1e-6
    repaired = bench.move(replace(AFTER["repair"], settings=(1.0,)), "plain", record["curve"][-1]["new"])["curve"]
    assert compare.decoded(repaired[-1]["lost"]).mean() < compare.decoded(record["curve"][-1]["lost"]).mean() - 0.1


@pytest.mark.filterwarnings("ignore:limpet. the drift may be")
@pytest.mark.slow
def test_tasks_are_learned_in_sequence_and_the_first_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = [f"w{i}" for i in range(40)]
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[PAD]", "[CLS]", "[SEP]", *words])}, "[PAD]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="[PAD]").save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=43, max_position_embeddings=64, **size, initializer_range=0.1)
    transformers.BertModel(config).save_pretrained(tmp_path / "model")
    rng = np.random.default_rng(0)

    def text(first: int, count: int = 12) -> str:
        return " ".join(words[first + i] for i in rng.integers(0, 12, count))

    rows = [f"{text(8 * label + 4 * (source == 'imdb'))},{label},{source}" for source in ("imdb", "rotten_tomatoes")
            for label in (0, 1) for _ in range(200)]  # fmt: skip
    (tmp_path / "reviews.csv").write_text("\n".join(["text,label,source", *rows]))
    for name, first in (("german", 0), ("french", 26)):
        (tmp_path / f"{name}.txt").write_text(text(first, 8000))
    for name, value in {"TRAINED": 288, "TESTED": 64, "EPOCHS": 3}.items():
        monkeypatch.setattr(sequence, name, value)
    settings = {
        "L2-SP": 1e3,
        "scaling": 0.0,
        "diagonal EWC": 1.0,
        "distillation": 1.0,
        "replay of 5%": 0.05,
        "plain": 0.0,
    }
    monkeypatch.setattr(runs, "chosen", lambda method, _: settings[method.name])
    pairs = {name: replace(pair, rate=2e-3) for name, pair in sequence.PAIRS.items()}
    suite = replace(command.SUITES["sequence"], pairs=pairs)
    asked = Namespace(
        model=str(tmp_path / "model"), work=tmp_path / "work", out=tmp_path / "sequence.jsonl", seeds=[0],
        texts={name.split(".")[0]: tmp_path / name for name in ("reviews.csv", "german.txt", "french.txt")},
        methods=[*settings, "protect"], pairs=["reviews last"],
    )  # fmt: skip
    runs.run(suite, asked)
    records = {(r["trained"], r["method"]): r for r in map(json.loads, asked.out.read_text().splitlines())}
    plain = records["plain", ""]
    assert [len(row) for row in plain["right"]] == [1, 2, 3, 4] and len(plain["right"][0][0]) == 64
    assert len({r["right"][0][0] for r in records.values()}) == 1
    again = sequence.Sequence(asked, "reviews last", pairs["reviews last"], 0).train(DURING["plain"], 0.0)
    assert again["right"] == plain["right"] and len(list(asked.work.glob("plain *"))) == 2  # two tasks were stored
    learned = sequence.accuracies(plain, 0)[0]
    assert learned > 90
    scaled = records["plain", "scaling"]  # the weights of the first task, in the end
    assert scaled["right"][-1][0] == plain["right"][0][0] and sequence.accuracies(scaled)[0] == learned
    held = records["plain", "protect"]
    assert sequence.largest_loss(held) < sequence.largest_loss(plain)
    table = sequence.table(report.Results(records.values(), "reviews last"))
    gain = np.mean(sequence.accuracies(held)) - np.mean(sequence.accuracies(plain))
    assert f"| {np.mean(sequence.accuracies(held)):.1f} | {gain:+.1f} +- " in table and gain > 0


def test_the_setting_of_a_sequence_with_the_highest_accuracy_is_chosen() -> None:
    def record(trained: str, method: str, value: float, *last: str) -> dict[str, Any]:
        found = {"pair": "development", "seed": 10, "trained": trained, "method": method, "value": value}
        return found | {"right": [["1111"], list(last)]}

    records = [
        record("plain", "", 0.0, "1000", "1111"),
        record("plain", "scaling", 0.9, "1100", "1111"),
        record("plain", "scaling", 0.5, "1110", "1111"),
        record("L2-SP", "", 0.01, "1111", "1111"),
        record("L2-SP", "", 0.1, "1111", "0000"),
    ]
    results = report.Results(records, "development")
    assert sequence.best(results) == {"scaling": 0.5, "L2-SP": 0.01}
    assert [row.name for row in results.runs][1:4] == ["L2-SP 0.01", "L2-SP 0.1", "scaling 0.9"]
    assert sequence.largest_loss(records[0]) == 75 and sequence.accuracies(records[2]) == [75, 100]

"""The page of results/retention says what its records say, and settings are those of the development pairs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # as `python -m benchmarks` does

import common
from retention import report, sequence
from retention.__main__ import GENERATIVE, PAGES, SUITES, tables_of
from retention.after import METHODS as AFTER
from retention.compare import decoded
from retention.during import METHODS as DURING

FOLDER = Path(__file__).parents[2] / "results" / "retention"


def results(suite: str, pair: str) -> Any:
    return report.Results(common.read_records(FOLDER / f"{suite}.jsonl"), pair)


def test_the_tables_are_those_of_the_records() -> None:
    """`python -m benchmarks retention SUITE --draw --write --pairs ...` writes them."""
    places = [(page, name) for page in PAGES for name in re.findall(r"<!-- table: (.+, .+) -->", page.read_text())]
    assert {"drift, development", "vision, development", "vision, svhn"} <= {name for _, name in places}
    for page, name in places:
        suite, pair = re.fullmatch(r"(\w+), (.+?)(?:, short|, differences)?", name).groups()  # type: ignore[union-attr]
        found = tables_of(SUITES[suite], results(suite, pair))
        tables = {f"{suite}, {pair}{rest}": table for rest, table in found.items()}
        assert common.with_tables(page.read_text(), {name: tables[name]}) == page.read_text(), (page.name, name)


@pytest.mark.parametrize("suite", ["vision", "sequence"])
def test_settings_are_the_best_of_the_development_pair(suite: str) -> None:
    name, found = SUITES[suite].settings, results(suite, "development")
    methods: list[Any] = [*DURING.values(), *(AFTER.values() if suite == "sequence" else ())]
    methods = [method for method in methods if method.name not in GENERATIVE]
    best = report.best(found) if suite == "vision" else sequence.best(found)
    several = {method.name for method in methods if len(candidates(method)) > 1}
    assert {method: value for method, value in best.items() if method in several} == {
        method.name: method.chosen[name] for method in methods if method.name in several
    }
    for method in methods:  # all candidates were run
        tried = {row.value for row in found.runs if method.name == (row.method or row.trained)}
        assert tried >= set(candidates(method)), method.name


def candidates(method: Any) -> tuple[float, ...]:
    return tuple(getattr(method, "candidates", None) or getattr(method, "settings", ()))


def test_what_the_page_says_about_images() -> None:
    text = " ".join((FOLDER / "README.md").read_text().split())
    development, svhn = results("vision", "development"), results("vision", "svhn")
    assert all(svhn.seeds(row) == [0, 1, 2] for row in svhn.runs)

    def before(found: Any) -> list[float]:
        return [100 * decoded(run["before"]["lost"]).mean() for run in found.runs[report.PLAIN].values()]

    def end(found: Any, row: report.Row) -> tuple[str, str]:
        """What is wrong at the end, in percent, and the new loss relative to plain training; means over seeds."""
        runs = found.runs[row]
        points = {seed: run["curve"][-1] for seed, run in runs.items()}
        wrong = sum(decoded(point["lost"]).mean() for point in points.values()) / len(points)
        ratio = sum(point["new"] / found.plain(seed) for seed, point in points.items()) / len(points)
        return f"{100 * wrong:.0f}", f"{ratio:.2f}"

    def at(found: Any, row: report.Row, ratio: float) -> str:
        return f"{100 * found.mean_lost(row, ratio):.0f}"

    plain, repair, scaling, protect = (
        report.Row(*names) for names in (("plain",), ("plain", "repair"), ("plain", "scaling"), ("plain", "protect"))
    )
    all_before = [*before(development), *before(svhn)]
    assert f"({min(all_before):.0f} to {max(all_before):.0f} % of the test images are wrong then" in text
    three = [at(svhn, row, 1.1) for row in (repair, scaling, plain)]
    assert f"{three[0]} % are wrong with repair, {three[1]} with scaling and {three[2]} by early stopping" in text
    means = [svhn.against(repair, scaling, ratio) for ratio in report.RATIOS]
    shown = ", ".join(f"{each.mean:+.3f} +- {each.error:.3f}" for each in means)
    assert f"Repair minus scaling is {shown}" in text
    assert [each.mean + 2 * each.error < 0 for each in means] == [False, True, True]
    for row, name in (
        (report.Row("replay of 5%"), "replay of 5 %"),
        (report.Row("distillation"), "distillation"),
        (protect, "`protect`"),
    ):
        assert "{} {} % at {}".format(name, *end(svhn, row)) in text, (name, end(svhn, row))
    dev = [
        at(development, row, 1.05)
        for row in (report.Row("replay of 5%"), report.Row("distillation", value=0.3), repair, scaling)
    ]
    assert "of 5 % {} %, distillation {}, repair {} and scaling {} % wrong at 1.05".format(*dev) in text
    assert "{} % wrong at {} times the new loss there".format(*end(development, protect)) in text


def test_what_the_pages_say_about_german() -> None:
    found = results("drift", "german")
    repair, scaling, one, four = (
        report.Row(*names)
        for names in (("plain", "repair"), ("plain", "scaling"), ("self-rehearsal of one row",), ("self-rehearsal",))
    )
    page, readme, decision = (
        " ".join(path.read_text().split())
        for path in (
            FOLDER / "README.md",
            PAGES[-1],
            FOLDER.parents[1] / "docs" / "decisions" / "0038-cheap-self-rehearsal.md",
        )
    )
    for row in (repair, one):  # "more than two standard errors"
        against = [found.against(row, scaling, ratio) for ratio in report.RATIOS]
        assert all(difference.mean + 2 * difference.error < 0 for difference in against), row
    at = {row: f"{found.mean_lost(row, 1.02):.3f}" for row in (repair, scaling, one)}
    assert f"drift of {at[one]} nats at 1.02, where repair has {at[repair]} and scaling {at[scaling]}" in page
    times = [[found.seconds(row, seed) / found.seconds(report.PLAIN, seed) for seed in found.seeds(row)]
             for row in (one, four)]  # fmt: skip
    one_time, four_time = (f"{sum(some) / len(some):.1f}" for some in times)
    assert f"{one_time} times the CPU seconds of plain training with one row, {four_time} times with four" in page
    assert f"{one_time} times the CPU seconds of plain training with one row, {four_time} times with four" in decision
    difference = [found.against(one, four, ratio) for ratio in report.RATIOS]
    assert max(abs(each.mean) for each in difference) < 0.01
    means = ", ".join(f"{each.mean:+.3f}" for each in difference)
    assert f"({means} nats at 1.02, 1.05 and 1.10)" in page and f"({means} nats at 1.02, 1.05 and 1.10)" in decision
    plain, rehearsed = (found.increases(row)[0] for row in (report.PLAIN, one))
    text = f"plain training loses {plain[0]:.2f} nats on reviews and {plain[1]:.2f} on speeches, "
    text += f"self-rehearsal of one row {rehearsed[0]:.2f} and {rehearsed[1]:.2f}"
    assert text in page and text in readme
    ratios = [f"{found.increases(row)[1]:.2f}" for row in (one, repair)]
    assert f"{rehearsed[1]:.2f} (at {ratios[0]}), repair nothing (at {ratios[1]})" in readme
    ties, lines, distilled = (
        report.Row(*names) for names in (("plain", "TIES"), ("plain", "LiNeS"), ("distillation",))
    )
    assert all(found.seeds(row) == [0] for row in (ties, lines, distilled))
    lost = [f"{found.lost(row, 0, 1.05).mean():.3f}" for row in (ties, lines, scaling)]
    assert f"more than scaling: {lost[0]} and {lost[1]} nats at 1.05, scaling {lost[2]} (one seed)" in page
    assert f"by half as much ({decoded(found.runs[distilled][0]['curve'][-1]['lost']).mean():.3f} nats" in page
    assert all(value < 0 for row in (repair, scaling) for value in found.increases(row)[0]), "they lose nothing there"


def test_what_the_page_says_about_the_skill() -> None:
    found, text = results("skill", "german"), " ".join((FOLDER / "README.md").read_text().split())
    readme, guide = (" ".join(page.read_text().split()) for page in (PAGES[-1], PAGES[1]))
    repair, scaling, one = (
        report.Row(*names) for names in (("plain", "repair"), ("plain", "scaling"), ("self-rehearsal of one row",))
    )
    seeds = found.seeds(repair)
    assert seeds == found.seeds(scaling) == [0, 1, 2] and found.seeds(one) == [0]
    assert all(decoded(found.runs[report.PLAIN][seed]["before"]["lost"]).mean() == 0 for seed in seeds)
    for ratio in report.RATIOS:  # "more than two standard errors"
        difference = found.against(repair, scaling, ratio)
        assert difference.mean + 2 * difference.error < 0
    wrong = {
        row: [f"{100 * found.mean_lost(row, ratio):.0f} %" for ratio in report.RATIOS] for row in (repair, scaling)
    }
    assert wrong[repair][1] == wrong[repair][2] and f"{wrong[repair][1]} are wrong at 1.05 and 1.10 times" in text
    assert f"scaling still has {wrong[scaling][1]} and {wrong[scaling][2]} wrong" in text
    assert f"and {wrong[repair][0]} at 1.02 times (scaling {wrong[scaling][0]})" in text
    assert f"{wrong[repair][1]} of the answers are wrong, after scaling {wrong[scaling][1]}" in readme
    paths = [found.runs[repair][seed]["curve"] for seed in seeds]
    at = [{point["setting"]: 100 * decoded(point["lost"]).mean() for point in path} for path in paths]
    ends = [path[-1]["new"] / found.plain(seed) for path, seed in zip(paths, seeds, strict=True)]
    first, second, third = (f"{one[100]:.0f}" for one in at)
    assert f"strength 100, with {first}, {second} and {third} % wrong" in text
    assert f"at {ends[0]:.2f}, {ends[1]:.2f} and {ends[2]:.2f} times (seeds 0 to 2)" in text
    assert f"at strength 30 at least {min(one[30] for one in at):.0f} % are wrong" in text
    assert all(one[1] == 100 for one in at)
    assert f"strengths 30 and 100, at {min(ends):.2f} to {max(ends):.2f} times the new loss" in guide
    ended = found.runs[report.Row("plain", "protect")][0]["curve"][-1]
    assert decoded(ended["lost"]).mean() == 0
    assert f"with nothing wrong at {ended['new'] / found.plain(0):.2f} times the new loss" in text
    curve = found.runs[one][0]["curve"]
    assert [point["step"] for point in curve if decoded(point["lost"]).mean() > 0] == [100]
    assert curve[3]["new"] > curve[2]["new"] and "at step 100 of 300 everything was wrong" in text
    assert f"at {curve[-1]['new'] / found.plain(0):.2f} times the new loss of plain training. On the way" in text


def test_what_the_page_says_about_the_sequence() -> None:
    text = " ".join((FOLDER / "README.md").read_text().split())
    orders = {name: results("sequence", name) for name in ("reviews first", "reviews last")}
    protect, repair, distilled = (
        report.Row(*names) for names in (("plain", "protect"), ("plain", "repair"), ("distillation",))
    )

    def accuracies(order: str, row: report.Row) -> list[float]:
        assert orders[order].seeds(row) == [0]
        return sequence.accuracies(orders[order].runs[row][0])

    def mean(order: str, row: report.Row) -> float:
        return sum(accuracies(order, row)) / 4

    for order, found in orders.items():
        best, following = sorted(found.runs, key=lambda row: -mean(order, row))[:2]
        lead = mean(order, protect) - mean(order, following)
        assert best == protect and lead <= sequence.difference(found, protect).error
    both = [mean(order, row) for order in orders for row in (protect, report.PLAIN)]
    assert "{:.1f} % (plain training {:.1f}) and {:.1f} % ({:.1f})".format(*both) in text
    differences = {order: sequence.difference(found, protect) for order, found in orders.items()}
    shown = [f"{one.mean:+.1f} +- {one.error:.1f}" for one in differences.values()]
    assert f"minus plain training {shown[0]} and {shown[1]} points" in text
    times = [found.runs[protect][0]["seconds"] / found.runs[report.PLAIN][0]["seconds"] for found in orders.values()]
    assert "takes {:.1f} and {:.1f} times the CPU seconds of plain training".format(*times) in text
    rate, kept = report.Row("lower learning rate"), report.Row("replay of 5%")
    first, last = (sorted(found.runs, key=lambda row: -mean(order, row))[1] for order, found in orders.items())
    assert (first, last) == (rate, kept) and "(a lower learning rate, then replay of 5 %)" in text
    for row, what in (
        (rate, "gains {:.1f} points in the first order and loses {:.1f}"),
        (distilled, "{:+.1f} and {:+.1f}"),
    ):
        found = [sequence.difference(results, row).mean for results in orders.values()]
        assert what.format(found[0], abs(found[1]) if row == rate else found[1]) in text
    learned = [
        "{:.1f}, {:.1f} and {:.1f} %".format(*(sequence.accuracies(run, stage)[stage] for stage in (1, 2, 3)))
        for run in (orders["reviews first"].runs[row][0] for row in (repair, report.PLAIN))
    ]
    assert f"are learned to {learned[0]}, in plain training to {learned[1]}" in text

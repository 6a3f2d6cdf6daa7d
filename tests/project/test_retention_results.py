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
from retention import report
from retention.__main__ import PAGES, SUITES
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
        found = report.tables(results(suite, pair), SUITES[suite].lost)
        tables = {f"{suite}, {pair}{rest}": table for rest, table in found.items()}
        assert common.with_tables(page.read_text(), {name: tables[name]}) == page.read_text(), (page.name, name)


@pytest.mark.parametrize("suite", ["vision"])
def test_settings_are_the_best_of_the_development_pair(suite: str) -> None:
    name = SUITES[suite].settings
    chosen = {method.name: method.chosen[name] for method in DURING.values() if name in method.chosen}
    assert report.best(results(suite, "development")) == chosen


def test_what_the_page_says_about_images() -> None:
    text = " ".join((FOLDER / "README.md").read_text().split())
    development, svhn = results("vision", "development"), results("vision", "svhn")

    def end(found: Any, row: report.Row, seed: int) -> tuple[str, str]:
        """What is wrong at the end, in percent, and the new loss relative to plain training."""
        point = found.runs[row][seed]["curve"][-1]
        return f"{100 * decoded(point['lost']).mean():.0f} %", f"{point['new'] / found.plain(seed):.2f} times"

    def at(found: Any, row: report.Row, ratio: float) -> str:
        return f"{100 * found.mean_lost(row, ratio):.0f}"

    repair, scaling, protect = (report.Row("plain", name) for name in ("repair", "scaling", "protect"))
    distilled = report.Row("distillation", value=0.3)
    before = [f"{100 * decoded(found.runs[report.PLAIN][seed]['before']['lost']).mean():.0f}"
              for found, seed in ((development, 10), (svhn, 0))]  # fmt: skip
    assert f"({before[0]} and {before[1]} % of the test images are wrong then" in text
    assert f"{at(svhn, repair, 1.1)} % on SVHN with repair, {at(svhn, scaling, 1.1)} % with scaling" in text
    three = [at(development, row, 1.05) for row in (distilled, repair, scaling)]
    assert f"({three[0]} % wrong at 1.05; repair {three[1]}, scaling {three[2]})" in text
    wrong, times = end(svhn, report.Row("distillation"), 0)
    assert f"it ends at {times} the new loss of plain training, with {wrong} wrong" in text
    wrong, times = end(development, protect, 10)
    assert f"{wrong} wrong at {times} the new loss (Fashion-MNIST)" in text
    wrong, times = end(svhn, protect, 0)
    assert f"{wrong} at {times} (SVHN)" in text


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
    assert all(value < 0 for row in (repair, scaling) for value in found.increases(row)[0]), "they lose nothing there"


def test_what_the_page_says_about_the_skill() -> None:
    found, text = results("skill", "german"), " ".join((FOLDER / "README.md").read_text().split())
    repair, scaling, one = (
        report.Row(*names) for names in (("plain", "repair"), ("plain", "scaling"), ("self-rehearsal of one row",))
    )
    assert decoded(found.runs[report.PLAIN][0]["before"]["lost"]).mean() == 0
    for ratio in (1.05, 1.1):
        assert found.mean_lost(repair, ratio) == 0
    scaled = [f"{100 * found.mean_lost(scaling, ratio):.0f} %" for ratio in (1.05, 1.1)]
    assert f"where scaling still has {scaled[0]} and {scaled[1]} wrong" in text
    readme, guide = (" ".join(page.read_text().split()) for page in (PAGES[-1], PAGES[1]))
    assert f"repair has all of it, scaling {100 * (1 - found.mean_lost(scaling, 1.05)):.0f} %" in readme
    path = {point["setting"]: decoded(point["lost"]).mean() for point in found.runs[repair][0]["curve"]}
    between = f"{100 * path[30]:.0f} % at strength 30 and {100 * path[100]:.0f} % at strength 100"
    assert f"at 1.02 times it has {100 * found.mean_lost(repair, 1.02):.0f} % wrong, by interpolation between" in text
    assert between in text and path[1] == 1
    back = found.runs[repair][0]["curve"][-1]["new"] / found.plain(0)
    ended = found.runs[report.Row("plain", "protect")][0]["curve"][-1]
    assert decoded(ended["lost"]).mean() == 0
    assert f"with nothing wrong at {ended['new'] / found.plain(0):.2f} times the new loss" in text
    assert f"comes back between strengths 30 and 100, at {back:.2f} times the new loss" in guide
    curve = found.runs[one][0]["curve"]
    assert [point["step"] for point in curve if decoded(point["lost"]).mean() > 0] == [100]
    assert curve[3]["new"] > curve[2]["new"] and "at step 100 of 300 everything was wrong" in text
    assert f"at {curve[-1]['new'] / found.plain(0):.2f} times the new loss of plain training. On the way" in text

"""The experiments run, their pages follow from their figures, and what cannot be otherwise is so."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "experiments"
DOCS = ROOT / "docs" / "experiments"
TRIED = ("batching", "overlap", "twins")


def run(*arguments, docs):
    command = [sys.executable, str(FOLDER / "run.py"), *arguments, "--docs", str(docs)]
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def docs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiments")
    run(*TRIED, "--quick", "--no-pages", docs=folder)
    return folder


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def cases(docs, name, workload):
    rows = json.loads((docs / "data" / f"{name}.json").read_text())["simulated"]["rows"]
    found = [row for row in rows if row["workload"] == workload]
    assert found
    return found


def test_static_batching_never_beats_continuous_where_answers_differ(docs):
    rows = cases(docs, "batching", "long-tailed answers")
    assert all(row["sides"]["continuous"]["goodput"] >= row["sides"]["static"]["goodput"] for row in rows)
    assert rows[-1]["sides"]["continuous"]["goodput"][0] > 1.5 * rows[-1]["sides"]["static"]["goodput"][0]


def test_overlap_hides_the_host(docs):
    """A token takes as long as the host and the device, or as the longer of them."""
    for row in cases(docs, "overlap", "chat"):
        on, off = (row["sides"][name]["tpot.mean"][0] * 1e3 for name in ("on", "off"))
        assert off - on == pytest.approx(row["x"], rel=0.15, abs=0.1)


def test_twins_share_within_a_step_in_one_design_and_not_in_the_other(docs):
    for row in cases(docs, "twins", "long prompts"):
        paged, fcfs, lpm = (
            row["sides"][name]["hit_tokens"][0] for name in ("unified, paged", "radix, fcfs", "radix, lpm")
        )
        assert (paged > 0) == (row["x"] > 1)
        assert paged >= lpm >= fcfs


def test_pages_and_plots_are_made_of_the_figures_alone(docs):
    pytest.importorskip("matplotlib", reason="plots need the extra report")
    run("batching", "--page-only", docs=docs)
    made = {path.name: path.read_bytes() for path in docs.iterdir() if path.is_file()}
    assert set(made) == {"index.md", "batching.md", "batching.svg"}
    page = made["batching.md"].decode()
    assert "class StaticBatching(Policy):" in page
    row = cases(docs, "batching", "equal answers")[0]
    assert f"| {row['sides']['static']['goodput'][0]:.2f} |" in page
    run("batching", "--page-only", docs=docs)
    assert made == {path.name: path.read_bytes() for path in docs.iterdir() if path.is_file()}


def test_the_published_pages_are_those_of_the_published_figures(module):
    pages, runner = module("_pages"), module("run")
    found = pages.known([runner.experiment(name) for name in runner.NAMES], DOCS)
    assert len(found) == len(runner.NAMES) == len(list((DOCS / "data").iterdir()))
    for one, kept in found:
        assert pages.page(one, kept) == (DOCS / f"{one.name}.md").read_text(), one.name
        assert (DOCS / f"{one.name}.svg").exists()
    assert pages.comparison(found) == (DOCS / "index.md").read_text()


def test_every_experiment_has_a_page_with_a_verdict_for_each_of_its_workloads(module):
    index = (DOCS / "index.md").read_text()
    for name in module("run").NAMES:
        one = module("run").experiment(name)
        assert one.name == name
        workloads = {case.workload for case in one.cases}
        assert {*workloads, "real"} == set(one.workloads)
        assert len(workloads) > 1 or len(one.cases) > 2, "somewhere it might flip"
        assert len(re.findall(rf"^\| \[.*\]\({name}\.md\) \| ", index, re.M)) >= len(workloads)
        for case in (*one.cases, *one.real):
            assert len({made.id for made in case.make(1, 0.05)}) > 1


def test_sides_differ_in_what_their_experiment_says_and_in_nothing_else(module):
    for name in module("run").NAMES:
        one = module("run").experiment(name)
        keys = {frozenset(key for side in one.sides for key in side.config)}
        assert len(keys) == 1
        for case in one.cases:
            assert not set(case.config) & set(next(iter(keys))), f"{name}: a case sets what sides set"


# ---- verdicts


def row(x=1.0, **sides):
    return {"workload": "w", "x": x, "sides": {name: {"goodput": values} for name, values in sides.items()}}


def test_a_winner_is_better_in_the_mean_and_worse_at_no_seed(module):
    verdict = module("_verdict").verdict
    assert verdict(row(a=[10, 10, 10], b=[12, 10, 13])).winner == "b"
    assert verdict(row(a=[10, 12, 10], b=[12, 11, 13])).winner is None, "worse at the second seed"
    assert verdict(row(a=[10.0, 10.0], b=[10.05, 10.05])).winner is None, "half a percent"


def test_gains_are_over_the_best_and_the_last_of_the_beaten(module):
    found = module("_verdict").verdict(row(a=[10, 20], b=[20, 40], c=[15, 30], d=[20, 40]))
    assert (found.leaders, found.next, found.last) == (("b", "d"), "c", "a")
    assert (found.over_next, found.over_last) == (pytest.approx(1 / 3), 1.0)
    assert module("_verdict").told([found], "rate") == "rate 1: tie of `b` and `d`, +33% over `c`, +100% over `a`"


def test_a_winner_over_one_that_has_nothing(module):
    found = module("_verdict").verdict(row(a=[0, 0], b=[1, 2]))
    assert (found.winner, found.over_next) == ("b", None)


def test_flips_need_other_leaders(module):
    flips = module("_verdict").flips
    first, tie, last = row(1, a=[2, 2], b=[1, 1]), row(2, a=[1, 1], b=[1, 1]), row(3, a=[1, 1], b=[2, 2])
    assert flips([first, tie]) == []
    ((one, other),) = flips([first, tie, last])
    assert (one.leaders, one.x, other.leaders, other.x) == (("a",), 1, ("b",), 3)

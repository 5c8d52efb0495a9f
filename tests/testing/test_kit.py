"""The kit itself: steps by hand, and the doubles that fail on purpose."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engine.testing
from engine.core import OutOfPages, SamplingParams, Transfer, Why
from engine.core.registry import Registry, make
from engine.testing import (
    FaultyCache,
    FaultyConnector,
    Harness,
    ScriptedExecutor,
    ScriptedModel,
    Situation,
    Violation,
    Workload,
    make_core,
)
from engine.testing.checking import suite_of


def test_the_old_name_stands():
    assert ScriptedExecutor is ScriptedModel


def test_steps_by_hand():
    harness = Harness(num_pages=8, page_size=4, max_batch_tokens=4)
    harness.add([1, 2, 3], max_tokens=3, request_id="a")
    harness.add([4, 5, 6], max_tokens=8, stop=[9], request_id="b")
    harness.plan()
    assert harness.rows == {"a": 3, "b": 1}
    assert harness.why("b") is Why.TOKEN_BUDGET
    harness.commit({"a": 7})
    assert harness.outputs == {"a": [7], "b": []}
    harness.step({"b": 8})
    assert harness.outputs == {"a": [7, 4], "b": [8]}
    harness.step({"b": 9})
    assert harness.outputs["b"] == [8, 9]
    assert harness.ended == {"a": "length", "b": "stop"}
    assert not harness.core.has_work


@pytest.mark.parametrize(("scheduler", "kvcache"), list(itertools.product(("unified", "radix"), ("paged", "radix"))))
def test_two_plans_in_flight_by_hand(scheduler, kvcache):
    harness = Harness(overlap=True, scheduler=scheduler, kvcache=kvcache)
    harness.add([1, 2, 3], max_tokens=3, request_id="a")
    harness.plan()
    harness.plan()
    assert harness.rows == {"a": 1}
    harness.commit({"a": 30})
    assert harness.outputs["a"] == [30]
    harness.plan()
    harness.commit({"a": 31})
    harness.commit({"a": 32})
    assert harness.outputs["a"] == [30, 31, 32]
    assert harness.ended == {"a": "length"}


def test_a_step_that_fails_by_hand():
    harness = Harness()
    harness.add([1, 2, 3], request_id="a")
    harness.plan()
    harness.fail("the device is gone")
    assert harness.ended == {"a": "error"}
    harness.add([1, 2, 3], max_tokens=2, request_id="b")
    assert harness.run()["b"] == [3, 4]


def test_accepted_drafts_are_chosen_too():
    harness = Harness(scheduler_options={"num_spec_tokens": 2})
    harness.executor.drafter = lambda request: (50, 51)
    harness.add([1, 2, 3], max_tokens=6, request_id="a")
    harness.step({"a": 9})
    harness.plan()
    assert harness.rows == {"a": 3}
    harness.commit({"a": [50, 51, 52]})
    assert harness.outputs["a"] == [9, 50, 51, 52]


def test_a_harness_that_never_ends_says_so():
    harness = Harness()
    harness.add([1, 2, 3], max_tokens=50)
    with pytest.raises(AssertionError, match="not finished after 5 steps"):
        harness.run(limit=5)


def test_a_faulty_cache_misses_and_forgets():
    cache = FaultyCache(make("kvcache", "paged"), seed=1, miss=0.5, forget=0.5)
    core = make_core(kvcache=cache, num_pages=16)
    for _ in range(20):
        core.add(list(range(12)), SamplingParams(max_tokens=3))
        core.step()
    while core.has_work:
        core.step()
    assert cache.misses > 0
    assert cache.forgotten > 0


def test_a_faulty_cache_fails_when_told_to():
    cache = FaultyCache(make("kvcache", "radix"), miss=0, forget=0)
    core = make_core(kvcache=cache)
    core.add([1, 2, 3])
    cache.fail_next = 1
    with pytest.raises(OutOfPages, match="a scripted failure"):
        core.step()


def test_a_deaf_connector_keeps_pages_fenced():
    connector = FaultyConnector(deaf=True)
    core = make_core(connectors=[connector])
    request = core.add([1, 2, 3], SamplingParams(max_tokens=2))
    core.step()
    pages = tuple(request.pages)
    core.transfer(Transfer("t", "push", request.id, pages))
    core.abort(request.id)
    for _ in range(5):
        core.step()
    assert [wish.id for wish in connector.opened] == ["t"]
    assert core.has_work
    assert core.pool.num_fenced == len(pages)


def test_a_store_on_a_disk_may_be_tried_again(tmp_path):
    """What an earlier run has left there is no content of another namespace."""
    suite = suite_of(Registry().select("connector", "file"), {"root": str(tmp_path)})
    for _ in range(2):
        suite().test_what_is_loaded_is_what_was_saved()


def test_a_workload_is_the_same_for_the_same_seed():
    situation = Situation(drafts=True, faults=True, flaky=True)
    runs = [Workload(3, situation, requests=10) for _ in range(2)]
    assert runs[0].run() == runs[1].run()
    assert runs[0].decisions == runs[1].decisions
    assert Workload(4, situation, requests=10).run() != runs[0].texts


def test_a_workload_sees_a_text_that_is_not_the_models():
    workload = Workload(0, Situation(), requests=5)
    workload.executor.script = lambda request: 1
    with pytest.raises(Violation, match="which is not what the model says"):
        workload.run()


def test_the_docs_tell_of_everything_that_is_public():
    text = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
    section = text.split("## Suites", 1)[1].split("## Steps by hand", 1)[0]
    assert {name for name in engine.testing.__all__ if f"`{name}`" not in section} == set()
    assert set(re.findall(r"^\| `(\w+Suite)` \|", section, re.MULTILINE)) == {
        suite.__name__ for suite in engine.testing.SUITES.values()
    }


def test_importing_the_kit_imports_nothing_heavy():
    code = "import sys, engine.testing; print([m for m in ('torch', 'fastapi', 'pytest') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"

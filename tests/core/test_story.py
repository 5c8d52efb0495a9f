"""A request's story says why it waited in each step, as it was decided then, what it found cached, and why no more."""

from __future__ import annotations

import json
import random

import pytest
from record_kit import ON, VOCABULARY, Crowd, busy_run, written

from engine.cli._explained import lines_of
from engine.core import SamplingParams
from engine.core.errors import EngineError, UnknownRequest
from engine.core.plan import Why
from engine.core.record.live import unblock
from engine.core.record.reading import read
from engine.core.record.story import MISSES, find, tell
from engine.core.request import State
from engine.plugins.executors.sim import SimExecutor
from engine.testing import make_core


def core_of(**setting):
    usual = {"page_size": 4, "num_pages": 60, "max_model_len": 120, "max_batch_tokens": 64, "record": ON}
    return make_core(executor=SimExecutor(SimExecutor.Options(vocab_size=VOCABULARY)), **{**usual, **setting})


def run(core):
    while core.has_work:
        core.step()


def story_of(core, request_id):
    return core.record.explain(request_id)["story"]


def reason_by_step(story):
    return {
        step: (wait["why"], wait["words"])
        for wait in story["waits"]
        for step in range(wait["steps"][0], wait["steps"][1] + 1)
    }


@pytest.mark.parametrize("kvcache", ["paged", "radix"])
@pytest.mark.parametrize("scheduler", ["unified", "radix"])
def test_every_reason_is_the_one_that_was_given_in_its_step(scheduler, kvcache):
    """What ``core.why`` said after each plan is what the story says afterwards, for everybody who waited."""
    core = core_of(
        scheduler=scheduler, kvcache=kvcache, num_pages=30, max_running=5, max_batch_tokens=48, max_waiting=30
    )
    crowd, said = Crowd(core, random.Random(3)), {}
    for _ in range(250):
        crowd.turn()
        plan = core.plan()
        for request in [*core.waiting, *core.parked.values()]:
            why = core.why(request.id)
            said.setdefault(request.id, {})[plan.index] = (why[0].value, why[1])
        core.commit(core.executor.execute(plan))
        core.take_deltas()
    assert len({why for steps in said.values() for why, _ in steps.values()}) >= 4
    for name, steps in said.items():
        told = reason_by_step(story_of(core, name))
        assert {step: told.get(step) for step in steps} == steps


@pytest.mark.parametrize("overlap", [False, True])
def test_from_memory_and_from_a_log_it_is_the_same(overlap, tmp_path):
    core = busy_run(500, overlap=overlap, kvcache="radix")
    core.record.write(tmp_path / "log.jsonl")
    log = read(tmp_path / "log.jsonl")
    reasons = set()
    for add in list(log.adds.values())[::3]:
        story = json.loads(json.dumps(tell(find(log, add.id))))
        assert json.loads(json.dumps(story_of(core, add.id))) == story
        assert story == json.loads(json.dumps(tell(find(log, str(add.n)))))
        end = log.ends[add.n]
        assert story["finish"] == end.finish
        if story["cached"] is not None:
            reasons.add(story["cached"]["missing"]["why"])
            assert story["cached"]["tokens"] == end.cached
        assert len(story["preemptions"]) <= end.preemptions
        assert sum(part["tokens"] for part in story["work"]) >= end.computed - end.cached
    assert {"last", "evicted", "never", "salt", "unread"} <= reasons
    with pytest.raises(EngineError, match="no request 'nobody'"):
        find(log, "nobody")
    core.close()


def test_what_is_torn_is_torn_in_memory_and_in_a_log(tmp_path):
    core = busy_run(3000, record_mb=1)
    core.add(list(range(50)), SamplingParams(max_tokens=30), request_id="open")
    core.step()
    core.record.write(tmp_path / "log.jsonl")
    log = read(tmp_path / "log.jsonl")
    torn = 0
    for add in list(log.adds.values())[::3]:
        story = json.loads(json.dumps(tell(find(log, add.id))))
        torn += not story["began"]
        assert json.loads(json.dumps(story_of(core, add.id))) == story
    assert torn
    assert tell(find(log, "open"))["finish"] is None
    core.close()


def test_it_says_what_it_waited_for_and_where_it_stood():
    core = core_of(max_running=1)
    for name in "abc":
        core.add([1, 2, 3], SamplingParams(max_tokens=4), request_id=name, metadata={"tenant": "acme"})
    core.step()
    core.step()
    said = core.record.explain("c")
    live = said["live"]
    assert (live["state"], live["position"], live["queue"]) == ("waiting", 2, 2)
    assert (live["why"], live["estimated_start"], live["tenant"]) == ("run_slots", None, "acme")
    assert live["unblock"] == "one of the 1 that run must end (max_running 1)"
    run(core)
    story = story_of(core, "c")
    waits = [(wait["why"], wait["position"], wait["queue"]) for wait in story["waits"]]
    assert waits == [("behind", [2, 2], [2, 2]), ("run_slots", [2, 1], [2, 1])]
    assert story["first_token"] is not None
    assert story["work"][-1]["tokens"] == 3  # decodes in a row are one part
    text = "\n".join(lines_of({"id": "c", "live": live, "story": story, "recorded": True}))
    for words in ("place 2 of 2 in the queue", "run_slots", "place 2 of 2, then 1 of 1", "ended     length"):
        assert words in text
    with pytest.raises(UnknownRequest, match="not among those"):
        core.record.explain("d")


def test_preemptions_say_for_whom():
    core = core_of(num_pages=6, max_model_len=24)
    core.add([1] * 10, SamplingParams(max_tokens=12), request_id="first")
    core.add([2] * 9, SamplingParams(max_tokens=12), request_id="second")
    run(core)
    [preemption] = story_of(core, "second")["preemptions"][:1]
    assert preemption["words"] == "preempted for first"
    assert preemption["lost"] >= 9
    assert len(story_of(core, "second")["cached"]["starts"]) > 1


def test_a_start_is_estimated_by_those_that_started_meanwhile():
    now = [0.0]
    core = core_of(max_running=1, clock=lambda: now[0])
    for number in range(6):
        core.add([number], SamplingParams(max_tokens=1), request_id=str(number))
    for _ in range(3):
        core.step()
        now[0] += 2.0
    live = core.record.explain("5")["live"]
    assert live["position"] == 3
    assert live["estimated_start"] == pytest.approx(3 * 2.0)
    now[0] += 60.0  # nothing moves: it does not look better by waiting
    assert core.record.explain("5")["live"]["estimated_start"] == pytest.approx(3 * 22.0)


@pytest.mark.parametrize("why", list(Why))
def test_there_are_words_for_what_unblocks_each_reason(why):
    core = core_of(max_running=1)
    first, second = (core.add([1, 2, 3, n], SamplingParams(max_tokens=2)) for n in range(2))
    core.step()
    assert len(unblock(core, second, why, "its words")) > 20
    assert first.state is State.RUNNING


def test_behind_names_the_one_that_the_queue_stopped_at():
    core = core_of(num_pages=10, max_model_len=40)
    core.add([1] * 20, SamplingParams(max_tokens=9), request_id="runs")
    core.step()
    core.add([2] * 30, SamplingParams(max_tokens=2), request_id="large")
    core.add([3] * 4, SamplingParams(max_tokens=2), request_id="small")
    core.step()
    assert core.record.explain("small")["live"]["unblock"] == (
        "large before it in the queue must start, which waits for pages: "
        "8 pages for its 30 tokens, 4 are free or evictable: 4 more must come free"
    )
    overview = core.record.requests()
    assert [(one["id"], one["position"], one["why"]) for one in overview["requests"]] == [
        ("runs", None, None), ("large", 1, "pages"), ("small", 2, "behind"),
    ]  # fmt: skip
    assert core.record.requests(most=1)["live"] == 3
    assert len(core.record.requests(most=1)["requests"]) == 1


# ---- the first page that was not found

LONG = list(range(100, 130))


def test_a_prompt_that_was_never_computed():
    core = core_of()
    core.add(LONG, SamplingParams(max_tokens=1), request_id="x")
    run(core)
    assert story_of(core, "x")["cached"]["missing"] == {
        "page": 0, "tokens": [0, 4], "why": "never", "words": MISSES["never"],
    }  # fmt: skip


@pytest.mark.parametrize("kvcache", ["paged", "radix"])
def test_reasons_of_the_first_miss(kvcache, tmp_path):
    core = core_of(kvcache=kvcache)

    def ask(name, tokens=LONG, **more):
        core.add(tokens, SamplingParams(max_tokens=2), request_id=name, **more)

    ask("first")
    run(core)
    ask("last", LONG[:28])
    ask("part", [*LONG[:9], *range(20)])
    ask("salt", salt="mine")
    ask("unread", read_cache=False)
    run(core)
    core.cache.flush()
    ask("flushed")
    run(core)
    core.rename_model("other")
    ask("weights")
    run(core)
    core.add(range(300, 330), SamplingParams(max_tokens=2), request_id="one")
    core.add(range(300, 330), SamplingParams(max_tokens=2), request_id="twin")
    run(core)
    for number in range(12):  # the pool holds 240 tokens
        ask(f"flood-{number}", [1000 + number, *range(60)])
        run(core)
    ask("evicted")
    run(core)
    log = written(core, tmp_path / "log.jsonl")
    found = {name: tell(find(log, name))["cached"] for name in log_names(log)}
    assert {name: found[name]["missing"]["why"] for name in WANTED} == WANTED
    assert found["part"]["tokens"] == 8
    assert found["part"]["missing"]["tokens"] == [8, 12]
    assert found["twin"]["missing"]["why"] == ("last" if kvcache == "paged" else "computing")


def log_names(log):
    return [add.id for add in log.adds.values()]


WANTED = {
    "first": "never", "last": "last", "part": "never", "salt": "salt", "unread": "unread", "flushed": "flushed",
    "weights": "weights", "evicted": "evicted",
}  # fmt: skip


def test_a_cache_that_remembers_nothing():
    core = core_of(kvcache_options={"enable_prefix_caching": False})
    for name in "ab":
        core.add(LONG, SamplingParams(max_tokens=1), request_id=name)
        run(core)
    assert story_of(core, "b")["cached"]["missing"]["why"] == "off"


def test_without_a_record_it_says_how_things_stand():
    core = core_of(record=None)
    core.add([1, 2, 3], SamplingParams(max_tokens=2), request_id="x", parked_on=["adapter"])
    said = core.record.explain("x")
    assert said["story"] is None
    assert said["live"]["unblock"] == "what it waits for outside the queue: adapter"
    assert "history   is not recorded" in "\n".join(lines_of(said))
    core.abort("x")
    with pytest.raises(UnknownRequest, match="engine record on"):
        core.record.explain("x")


def test_what_came_before_the_memory_is_told_from_there_on():
    core = core_of(record=None)
    core.add([1, 2, 3], SamplingParams(max_tokens=12), request_id="x")
    core.step()
    core.record.on()
    run(core)
    story = story_of(core, "x")
    assert story["began"] is False
    assert story["finish"] == "length"
    assert sum(part["tokens"] for part in story["work"]) > 8

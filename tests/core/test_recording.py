"""Recordings of our own runs replay equal, whatever the plugins, and say where another decision is made."""

from __future__ import annotations

import copy
import json
import random

import pytest

from engine.core import Policy, SamplingParams, hookimpl
from engine.core.registry import make
from engine.core.replay import own
from engine.core.replay.own import RecordingCore
from engine.core.replay.report import NotReplayable
from engine.testing import ScriptedExecutor, make_core


def record(scheduler: str, kvcache: str, *, overlap: bool, seed: int = 0) -> dict:
    """A busy run in a small pool, with aborts, drafts, failing rows and failing steps."""
    rng = random.Random(seed)
    executor = ScriptedExecutor()
    executor.drafter = lambda request: tuple(rng.randrange(100) for _ in range(request.num_tokens % 3))
    core = make_core(
        scheduler=scheduler, kvcache=kvcache, executor=executor, num_pages=16, overlap=overlap, core=RecordingCore
    )
    assert isinstance(core, RecordingCore)
    for number in range(60):
        if number < 30:
            prompt = [at % 7 for at in range(rng.randrange(1, 20))]
            parked = ["grammar"] if number % 9 == 0 else []
            core.add(prompt, SamplingParams(max_tokens=rng.randrange(1, 12)), salt="ab"[number % 2], parked_on=parked)
            for request_id in list(core.parked):
                core.ready(request_id, "grammar")
        if number == 12 and core.running:
            core.abort(core.running[0].id)
        if number == 15 and core.running:
            executor.row_errors = {core.running[0].id: "injected"}
        executor.fail_next = int(number == 20)
        core.step()
    while core.has_work:
        core.step()
    return json.loads(json.dumps(core.recording("run")))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kvcache", ["paged", "radix"])
@pytest.mark.parametrize("scheduler", ["unified", "radix"])
def test_a_recording_replays_equal(scheduler, kvcache, overlap):
    data = record(scheduler, kvcache, overlap=overlap)
    assert own.recognises(data)
    report = own.replay(data)
    assert report.equal, report.divergence.lines()
    assert report.steps == sum("plan" in event for event in data["events"]) > 20


@pytest.mark.parametrize("field", ["rows", "waits", "pages", "available"])
def test_a_spoilt_recording_is_told_with_its_step(field):
    data = copy.deepcopy(record("unified", "paged", overlap=False))
    spoilt = next(event["plan"] for event in data["events"] if "plan" in event and event["plan"][field])
    spoilt[field] = None
    report = own.replay(data)
    assert not report.equal
    assert report.divergence.step == spoilt["step"]
    assert f"! {field}" in "\n".join(report.divergence.lines())


def test_another_scheduler_decides_otherwise():
    data = record("unified", "paged", overlap=False)
    data["config"]["scheduler"] = {"name": "radix", "options": {}}
    assert not own.replay(data).equal


class BigFirst(Policy):
    """What a request carries decides who comes first."""

    name = "big-first"

    @hookimpl
    def order(self, waiting):
        return sorted(waiting, key=lambda request: -request.metadata.get("size", 0))


def carrying(policies=(), **more):
    """A recording of requests that carry something for policies."""
    core = make_core(core=RecordingCore, policies=list(policies), max_running=2)
    for number in range(6):
        core.add(
            [1, 2, number], SamplingParams(max_tokens=3), metadata={"tenant": "ab"[number % 2], "size": number, **more}
        )
    while core.has_work:
        core.step()
    return json.loads(json.dumps(core.recording("carrying")))


def test_what_policies_read_is_recorded_and_comes_back():
    data = carrying([BigFirst()])
    assert data["events"][1]["add"]["more"]["metadata"] == {"tenant": "b", "size": 1}
    assert own.replay(data, [BigFirst()]).equal
    assert not own.replay(data, []).equal
    for event in data["events"]:
        event.get("add", {"more": {}})["more"].pop("metadata", None)
    assert not own.replay(data, [BigFirst()]).equal


def test_what_json_does_not_bring_back_is_left_out_and_named():
    assert own.left_out(carrying()) == []
    data = carrying(when=(1, 2))
    assert own.left_out(data) == ["when"]
    assert set(data["events"][0]["add"]["more"]["metadata"]) == {"tenant", "size"}
    assert own.replay(data).equal


def test_the_policies_of_a_recording_are_made_anew():
    data = carrying([make("policy", "fair-share", {"weights": {"a": 5.0}})])
    assert own.replay(data).equal
    data["config"]["policies"][0]["name"] = "nobody"
    with pytest.raises(NotReplayable, match="unknown policy 'nobody'"):
        own.replay(data)

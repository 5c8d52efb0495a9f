"""Recordings of our own runs replay equal, whatever the plugins, and say where another decision is made."""

from __future__ import annotations

import copy
import json
import random

import pytest

from engine.core import SamplingParams
from engine.core.replay import own
from engine.core.replay.own import RecordingCore
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

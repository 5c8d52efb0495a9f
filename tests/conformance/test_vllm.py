"""The real vLLM 0.27.1 scheduler's decisions, replayed on ``unified`` and ``paged``.

The recordings lie in ``data/vllm.tar.xz``: synchronous scheduling (one step at a time) and asynchronous (each step is
planned before the outcome of the one before is known: our overlap mode).
"""

from __future__ import annotations

import copy
import json
import tarfile
from pathlib import Path

import pytest

from engine.core.replay import vllm
from engine.testing import DoNothing

ARCHIVE = Path(__file__).parent / "data" / "vllm.tar.xz"


def _load() -> dict[str, dict]:
    traces = {}
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            traces[member.name.removesuffix(".json")] = json.load(file)
    return traces


TRACES = _load()


@pytest.mark.parametrize("policies", [(), (DoNothing,)], ids=["alone", "do-nothing"])
@pytest.mark.parametrize("name", TRACES)
def test_every_step_is_decided_as_vllm_decided_it(name, policies):
    report = vllm.replay(TRACES[name], [policy() for policy in policies])
    assert report.equal, "\n".join([name, *report.divergence.lines()])
    assert report.steps == len(TRACES[name]["trace"])


def test_all_recordings_are_accounted_for():
    assert len(TRACES) == 98
    assert sum(trace["config"]["async"] for trace in TRACES.values()) == 20


@pytest.mark.parametrize(
    ("name", "field", "spoil"),
    [
        ("fcfs_basic", "scheduled", lambda value: value[:-1]),
        ("preempt_one", "free_blocks", lambda value: value + 1),
        ("prefix_shared_system_prompt", "cached_tokens", lambda value: dict.fromkeys(value, 1)),
        ("priority_order", "waiting", lambda value: value[::-1]),
        ("async_spec_preempt", "emitted", lambda value: dict.fromkeys(value, 9)),
    ],
)
def test_a_recording_that_differs_is_told_with_its_first_step(name, field, spoil):
    data = copy.deepcopy(TRACES[name])
    step = next(s for s in data["trace"] if s.get(field) and spoil(s[field]) != s[field])
    step[field] = spoil(step[field])
    report = vllm.replay(data)
    assert not report.equal
    assert report.divergence.step == step["step"]
    assert f"! {field}" in "\n".join(report.divergence.lines())

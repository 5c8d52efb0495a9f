"""The decisions of the real SGLang 0.5.18 classes, replayed on ``radix`` and ``radix``.

The recordings lie in ``data/sglang.tar.xz``, a folder a level.
"""

from __future__ import annotations

import copy
import json
import tarfile
from pathlib import Path

import pytest

from engine.core.replay import sglang, sglang_loop
from engine.core.replay.report import NotReplayable

ARCHIVE = Path(__file__).parent / "data" / "sglang.tar.xz"
COUNTS = {"radix": 28, "policy": 29, "adder": 43, "loop": 70}


def _load() -> dict[str, dict]:
    traces = {}
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            traces[member.name.removesuffix(".json")] = json.load(file)
    return traces


TRACES = _load()
DEFECTS = ["loop/upstream_bug_mixed_oom", "loop/upstream_bug_preempt_lost"]
DECIDED = [name for name in TRACES if name not in DEFECTS]


@pytest.mark.parametrize("name", DECIDED)
def test_every_operation_comes_to_what_sglang_came_to(name):
    report = sglang.replay(TRACES[name])
    assert report.equal, "\n".join([name, *report.divergence.lines()])
    assert report.steps > 0


@pytest.mark.parametrize("name", DEFECTS)
def test_what_goes_wrong_there_goes_right_here(name):
    """Victims of a preemption were lost; a mixed batch ran out of memory. Here every request ends with its output."""
    data = TRACES[name]
    with pytest.raises(NotReplayable, match="defect"):
        sglang.replay(data)
    player = sglang_loop.Player(data)
    for number in range(200):
        player.step(number)
        player.core.check()
    assert {name: result["reason"] for name, result in player.results.items()} == {
        request["id"]: "length" for request in data["requests"]
    }
    assert all(player.results[request["id"]]["output_len"] == request["max_tokens"] for request in data["requests"])


def test_nobody_is_preempted_for_one_who_then_finds_no_memory():
    player = sglang_loop.Player(TRACES["loop/upstream_bug_preempt_lost"])
    assert not any(player.step(number)["preempted"] for number in range(60))


def test_all_recordings_are_accounted_for():
    for level, count in COUNTS.items():
        members = [name for name in TRACES if name.startswith(f"{level}/")]
        assert len(members) == count
        assert {sglang.level(TRACES[name]) for name in members} == {level}


@pytest.mark.parametrize(
    ("name", "op", "field", "spoil"),
    [
        ("radix/basic_p4_lru", "evict", "freed", lambda value: value[::-1]),
        ("radix/basic_p1_lru", "match", "matched", lambda value: value + 1),
        ("radix/request_p16", "finish", "evictable", lambda value: value + 16),
        ("radix/isolation_p1", "insert", "shape", lambda value: value[:-1]),
        ("policy/order_lpm_p16", "calc", "order", lambda value: value[::-1]),
        ("policy/inbatch_cold", "calc", "deprioritized", lambda value: value[1:]),
    ],
)
def test_a_recording_that_differs_is_told_with_its_first_operation(name, op, field, spoil):
    data = copy.deepcopy(TRACES[name])
    numbers = [n for n, o in enumerate(data["ops"]) if o["op"] == op and o["result"].get(field)]
    number = next(n for n in numbers if spoil(data["ops"][n]["result"][field]) != data["ops"][n]["result"][field])
    data["ops"][number]["result"][field] = spoil(data["ops"][number]["result"][field])
    report = sglang.replay(data)
    assert not report.equal
    assert report.divergence.step == number
    assert f"! {field}" in "\n".join(report.divergence.lines())


@pytest.mark.parametrize(
    ("name", "field", "spoil"),
    [
        ("loop/retract_once", "retracted", lambda value: []),
        ("loop/order_lpm", "waiting", lambda value: value[::-1]),
        ("loop/ratio_decay", "new_token_ratio", lambda value: value + 1e-6),
        ("loop/eviction_lfu_p4", "evictable", lambda value: value + 4),
    ],
)
def test_an_iteration_that_differs_is_told(name, field, spoil):
    data = copy.deepcopy(TRACES[name])
    step = next(s for s in data["trace"] if s[field] and spoil(s[field]) != s[field])
    step[field] = spoil(step[field])
    report = sglang.replay(data)
    assert report.divergence.step == step["step"]
    assert f"! {field}" in "\n".join(report.divergence.lines())


def test_a_call_of_the_ledger_that_differs_is_told():
    data = copy.deepcopy(TRACES["adder/lock_shrinks"])
    data["rounds"][0]["calls"][0]["rem_total"] += 1
    report = sglang.replay(data)
    assert report.divergence.step == 1
    assert "! rem_total" in "\n".join(report.divergence.lines())


@pytest.mark.parametrize("name", ["priority_preempt", "priority_preempt_threshold0_lof"])
def test_the_loop_chooses_the_recorded_victims(name):
    """A recording of the ledger's calls alone does not say who was urgent; the loop of the same name does."""
    player = sglang_loop.Player(TRACES[f"loop/{name}"])
    chosen = []

    class Listening(player.core.scheduler.ledger_type):
        def victims(self, request, owed, threshold):
            found = super().victims(request, owed, threshold)
            chosen.append([request.id, [victim.id for victim in found]])
            return found

    player.core.scheduler.ledger_type = Listening
    for record in TRACES[f"loop/{name}"]["trace"]:
        player.step(record["step"])
    calls = [call for entry in TRACES[f"adder/loop_{name}"]["rounds"] for call in entry["calls"]]
    assert chosen == [[call["id"], call["victims"]] for call in calls if call["call"] == "preempt"]

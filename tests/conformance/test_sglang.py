"""The decisions of the real SGLang 0.5.18 classes, replayed on ``radix`` and ``radix``.

The recordings lie in ``data/sglang.tar.xz``, a folder a level.
"""

from __future__ import annotations

import copy
import json
import tarfile
from pathlib import Path

import pytest

from engine.core.replay import sglang

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
DECIDED = [name for name in TRACES if name.partition("/")[0] in sglang.LEVELS]


@pytest.mark.parametrize("name", DECIDED)
def test_every_operation_comes_to_what_sglang_came_to(name):
    report = sglang.replay(TRACES[name])
    assert report.equal, "\n".join([name, *report.divergence.lines()])
    assert report.steps > 0


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

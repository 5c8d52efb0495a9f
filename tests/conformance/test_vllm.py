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

from engine.core.registry import make
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


BLOCK_GRANULAR = {
    "abort_mid_prefill",
    "async_prefix_multi_turn",
    "async_spec_eagle",
    "async_spec_preempt",
    "fuzz_async_01",
    "fuzz_async_03",
    "fuzz_async_04",
    "fuzz_async_priority_00",
    "fuzz_async_tight_00",
    "fuzz_async_tight_01",
    "fuzz_fcfs_00",
    "fuzz_fcfs_03",
    "fuzz_fcfs_04",
    "fuzz_large_00",
    "fuzz_large_01",
    "fuzz_priority_02",
    "fuzz_spec_draft_model_00",
    "fuzz_spec_eagle_00",
    "fuzz_spec_ngram_01",
    "fuzz_tight_00",
    "fuzz_tight_02",
    "fuzz_tight_03",
    "lru_eviction_order",
    "lru_touch_refresh",
    "preempt_mid_prefill",
    "preempt_rehit_cache",
    "preempt_shared_prefix",
    "preempt_thrash",
    "prefix_duplicate_decode_blocks",
    "prefix_same_step_identical",
    "prefix_same_step_identical_chunked",
    "prefix_skip_read_duplicates",
    "priority_needy_chunk_not_enlarged",
    "priority_preempt",
    "priority_self_victim",
    "priority_thrash",
    "priority_ties",
    "priority_victim_tokens_returned",
    "spec_eagle_drop_block",
    "spec_ngram_preempt",
}


@pytest.mark.parametrize("name", TRACES)
def test_over_the_radix_cache_only_the_granularity_of_caching_differs(name):
    """``unified`` over ``radix``: the same decisions, until the caches hold something else.

    ``paged`` can match a page as soon as it is planned, also one of a decode, and keeps equal pages twice. ``radix``
    matches prompts once they are computed (the part of one in progress once its next chunk is planned, so an abort in
    between loses it) and outputs once they end, keeps one copy, and evicts whole stretches. So recordings part where a
    hit is longer or shorter, or where other pages are free; everything else of that step follows from these two.
    """
    config = TRACES[name]["config"]
    kv = make("kvcache", "radix", {"enable_prefix_caching": config["enable_prefix_caching"]})
    report = vllm.replay(TRACES[name], kvcache=kv)
    assert report.equal == (name not in BLOCK_GRANULAR)
    if report.divergence is not None:
        recorded, decided = report.divergence.recorded, report.divergence.decided
        parted = {field for field in recorded if recorded[field] != decided[field]}
        assert parted & {"cached_tokens", "free_blocks"}, parted

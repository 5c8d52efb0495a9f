"""What keeps anybody from waiting for ever: bounds against starvation, the queue's limit, and a time limit."""

from __future__ import annotations

import random

import pytest

from engine.core import Outcome, QueueFull, SamplingParams
from engine.testing import ScriptedExecutor, make_core


def core_of(**kwargs):
    options = kwargs.pop("options", {})
    settings = {"num_pages": 4000, "page_size": 4, "max_batch_tokens": 64, "max_running": 64, **kwargs}
    return make_core(
        scheduler="radix", kvcache="radix", executor=ScriptedExecutor(), scheduler_options=options, **settings
    )


def step(core):
    plan = core.plan()
    core.commit(core.executor.execute(plan) if plan else Outcome(plan, ()))
    core.take_deltas()
    return plan


@pytest.mark.parametrize("bound", [None, 1, 5])
def test_b06_a_running_stream_gets_its_token_under_steady_arrivals(bound):
    """Every step brings a prompt of one chunk. Without a bound the stream starves, as prefill first has it."""
    options = {} if bound is None else {"bound_starvation": True, "max_prefill_streak": bound}
    core = core_of(options=options)
    stream = core.add([1, 2, 3], SamplingParams(max_tokens=150), request_id="stream")
    step(core)
    gap = longest = 0
    for number in range(200):
        core.add([100 + number] * 60, SamplingParams(max_tokens=1))
        before = stream.num_output
        step(core)
        gap = 0 if stream.num_output > before else gap + 1
        longest = max(longest, gap)
    assert longest == (200 if bound is None else bound)
    assert core.stats()["scheduler_longest_prefill_streak"] == longest
    assert core.counters.flat()["finished_length"] > 90, "prefills go on"


def overtaken_by(core, cold, hot):
    """Steps of one hot arrival each, capacity for one; how many started before the cold one."""
    started = 0
    for number in range(200):
        core.add([*hot, number], SamplingParams(max_tokens=1))
        admitted = step(core).admitted
        if cold in admitted:
            return started
        started += len(admitted)
    return started


@pytest.mark.parametrize("limit", [None, 3, 20])
def test_b07_a_cold_request_starts_after_a_bounded_number_of_overtakings(limit):
    options = {"policy": "lpm", "prefill_max_requests": 1}
    if limit is not None:
        options |= {"bound_starvation": True, "max_overtakings": limit}
    core = core_of(options=options, max_batch_tokens=256)
    hot = list(range(160))
    core.add(hot, SamplingParams(max_tokens=1))
    step(core)
    cold = core.add([999] * 40, SamplingParams(max_tokens=1), request_id="cold")
    core.add([*hot, 999], SamplingParams(max_tokens=1))
    assert overtaken_by(core, cold, hot) == (200 if limit is None else limit)


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "lof", "random", "routing-key"])
@pytest.mark.parametrize("seed", range(3))
def test_b07_the_bound_holds_for_any_policy_and_arrivals(policy, seed):
    rng = random.Random(seed)
    limit, batch = 6, 2
    options = {
        "policy": policy, "prefill_max_requests": batch, "bound_starvation": True, "max_overtakings": limit,
        "max_prefill_streak": 2,
    }  # fmt: skip
    core = core_of(options=options, max_running=8)
    overtaken: dict = {}
    for _ in range(300):
        while rng.random() < 0.6:
            family, length = rng.randrange(4), rng.randrange(1, 60)
            request = core.add(
                [family] * length,
                SamplingParams(max_tokens=rng.randrange(1, 4)),
                metadata={"routing_key": str(family)},
            )
            overtaken[request] = 0
        for admitted in step(core).admitted:
            del overtaken[admitted]
            for request in overtaken:
                overtaken[request] += request.entry_index < admitted.entry_index
        # Who reached the limit goes before all others but those that reached it before, and the batch in the making.
        assert max(overtaken.values(), default=0) < limit + batch
    assert core.counters.flat()["finished_length"] > 100


def test_a_full_queue_refuses_the_newcomer_unless_it_is_more_urgent():
    plain = core_of(max_waiting=2)
    for name in "ab":
        plain.add([1], request_id=name, priority=5)
    with pytest.raises(QueueFull):
        plain.add([1], priority=0)
    core = core_of(max_waiting=2, options={"enable_priority_scheduling": True})
    for name in "ab":
        core.add([1], request_id=name, priority=5)
    with pytest.raises(QueueFull):
        core.add([1], priority=5)
    core.add([1], request_id="urgent", priority=4)
    assert [request.id for request in core.waiting] == ["a", "urgent"], "the latest of the least urgent went"
    (delta,) = core.take_deltas()
    assert (delta.request_id, delta.finish) == ("b", "abort")
    assert "more urgent" in delta.detail


def test_who_has_not_started_in_time_is_aborted():
    now = [0.0]
    core = core_of(max_running=1, clock=lambda: now[0], options={"waiting_timeout": 5})
    first = core.add([1, 2, 3], SamplingParams(max_tokens=30))
    second = core.add([4, 5, 6])
    step(core)
    now[0] = 4.9
    step(core)
    assert second.finish is None
    now[0] = 5.1
    step(core)
    assert second.finish == "abort"
    assert "5 seconds" in second.detail
    while core.has_work:
        step(core)
    assert first.finish == "length"


@pytest.mark.parametrize("overlap", [False, True])
def test_who_runs_for_too_long_is_aborted_wherever_it_stands(overlap):
    now = [0.0]
    core = core_of(max_running=2, clock=lambda: now[0], options={"running_timeout": 5}, overlap=overlap)
    long = core.add([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
    core.step()
    now[0] = 3.0
    late = core.add([4, 5, 6], SamplingParams(max_tokens=6, ignore_eos=True))
    for _ in range(3):
        core.step()
    assert (long.started, late.started) == (0.0, 3.0)
    now[0] = 5.1
    core.step()
    assert (long.finish, long.detail) == ("abort", "it ran for more than 5 seconds")
    while core.has_work:
        core.step()
    assert (late.finish, late.num_output) == ("length", 6)
    core.check()
    assert core.pool.num_free + core.kv.numbers().evictable == core.pool.num_pages


def test_the_last_one_that_finds_no_page_ends_with_a_reason():
    """Retraction keeps one. If even that one cannot go on, it ends, and the engine serves the next."""
    core = core_of(num_pages=10, audit=False)
    lost = core.pool.take(5)  # somebody else's
    request = core.add([1] * 16, SamplingParams(max_tokens=20))
    while core.has_work:
        step(core)
    assert request.finish == "error"
    assert "no progress" in request.detail
    core.pool.give(lost)
    after = core.add([2] * 16, SamplingParams(max_tokens=20))
    while core.has_work:
        step(core)
    assert after.finish == "length"
    core.check()


def test_depth_first_puts_those_that_read_no_cache_last():
    core = make_core(scheduler="radix", kvcache="radix", scheduler_options={"policy": "dfs-weight"}, max_running=1)
    core.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=1))
    while core.has_work:
        core.step()
    for name, reads in (("stranger", False), ("sibling", True), ("other", True)):
        tokens = [9, 9, 9, 9, 9] if name == "other" else [1, 2, 3, 4, 5]
        core.add(tokens, SamplingParams(max_tokens=1), request_id=name, read_cache=reads)
    started = []
    while core.has_work:
        core.step()
        started += [request.id for request in core.last_plan.admitted]
    assert started == ["sibling", "other", "stranger"]

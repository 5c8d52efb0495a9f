"""What the two schedulers decide, in the situations that define them."""

from __future__ import annotations

import pytest

from engine.core import SamplingParams, Why
from engine.testing import ShadowExecutor, make_core

both = pytest.mark.parametrize("scheduler", ["unified", "radix"])


def core_of(scheduler, **kwargs):
    options = kwargs.pop("options", None)
    return make_core(scheduler=scheduler, scheduler_options=options, executor=ShadowExecutor(), **kwargs)


def add(core, name, length, new=4, **kwargs):
    start = sum(map(ord, name))
    return core.add(
        [(start + at) % 1000 for at in range(length)], SamplingParams(max_tokens=new), request_id=name, **kwargs
    )


def step(core):
    plan = core.plan()
    core.commit(core.executor.execute(plan)) if plan else core.commit(_empty(plan))
    core.take_deltas()
    return plan


def _empty(plan):
    from engine.core import Outcome

    return Outcome(plan, ())


def rows(plan):
    return [(request.id, count) for request, count in zip(plan.requests, plan.counts, strict=True)]


def test_unified_mixes_decodes_and_chunks_in_one_budget():
    core = core_of("unified", max_batch_tokens=16)
    add(core, "a", 10)
    add(core, "b", 20)
    assert rows(step(core)) == [("a", 10), ("b", 6)]
    assert rows(step(core)) == [("a", 1), ("b", 14)]
    assert rows(step(core)) == [("a", 1), ("b", 1)]


def test_unified_threshold_leaves_budget_for_others():
    core = core_of("unified", max_batch_tokens=16, options={"long_prefill_token_threshold": 4})
    add(core, "long", 40)
    add(core, "b", 3)
    assert rows(step(core)) == [("long", 4), ("b", 3)]
    assert rows(step(core)) == [("long", 4), ("b", 1)]


def test_unified_preempts_the_last_admitted_and_admits_nobody_in_that_step():
    core = core_of("unified", num_pages=8, page_size=4, max_batch_tokens=64)
    add(core, "a", 15, new=10)
    add(core, "b", 15, new=10)
    add(core, "c", 3, new=10)
    step(core)
    assert [r.id for r in core.running] == ["a", "b"]
    assert core.why("c")[0] is Why.PAGES
    plan = step(core)
    while core.has_work and not plan.preempted:
        plan = step(core)
    assert [r.id for r in plan.preempted] == ["b"]
    assert not plan.admitted
    assert [r.id for r in core.waiting] == ["b", "c"]
    assert core.why("c")[0] is Why.PREEMPTION


def test_unified_priority_orders_the_queue_and_chooses_the_victim():
    core = core_of("unified", max_running=1, options={"policy": "priority"})
    add(core, "low", 5, priority=5)
    add(core, "high", 5, priority=1)
    assert rows(step(core)) == [("high", 5)]
    core = core_of("unified", num_pages=8, options={"policy": "priority"})
    add(core, "high", 15, new=10, priority=1)
    add(core, "low", 15, new=10, priority=5)
    add(core, "urgent", 15, new=10, priority=0)
    plan = step(core)
    while core.has_work and not plan.preempted:
        plan = step(core)
    assert plan.preempted[0].id == "high"


def test_radix_prefills_first_and_decodes_when_nobody_can_be_admitted():
    core = core_of("radix", num_pages=100)
    add(core, "a", 10)
    assert (step(core).mode, step(core).mode) == ("extend", "decode")
    add(core, "b", 10)
    plan = step(core)
    assert (plan.mode, rows(plan)) == ("extend", [("b", 10)])
    plan = step(core)
    assert (plan.mode, rows(plan)) == ("decode", [("a", 1), ("b", 1)])


def test_radix_chunks_one_prompt_at_a_time():
    core = core_of("radix", num_pages=100, options={"chunked_prefill_size": 8})
    add(core, "a", 20)
    add(core, "b", 20)
    assert [rows(step(core)) for _ in range(5)] == [
        [("a", 8)],
        [("a", 8)],
        [("a", 4), ("b", 4)],
        [("b", 8)],
        [("b", 8)],
    ]
    assert rows(step(core)) == [("a", 1), ("b", 1)]


def test_radix_reserves_for_the_future_of_those_that_run():
    core = core_of("radix", num_pages=25, page_size=4, max_batch_tokens=64)
    add(core, "a", 20, new=60)
    step(core)
    add(core, "b", 20, new=60)
    assert step(core).mode == "decode"
    assert core.why("b")[0] is Why.RESERVE
    generous = core_of(
        "radix", num_pages=25, page_size=4, max_batch_tokens=64, options={"schedule_conservativeness": 0.01}
    )
    add(generous, "a", 20, new=30)
    step(generous)
    add(generous, "b", 20, new=30)
    assert step(generous).mode == "extend"


def test_radix_retracts_fewest_generated_to_the_back_of_the_queue():
    core = core_of("radix", num_pages=25, page_size=4, max_batch_tokens=64, options={"schedule_conservativeness": 0.01})
    add(core, "a", 12, new=60)
    step(core)
    step(core)
    add(core, "b", 12, new=60)
    before = core.scheduler.new_token_ratio
    plan = step(core)
    while core.has_work and not plan.preempted:
        plan = step(core)
    assert [r.id for r in plan.preempted] == ["b"]
    assert [r.id for r in core.waiting] == ["b"]
    assert core.scheduler.new_token_ratio > before
    while core.has_work:
        step(core)
    assert core.executor.mismatch is None


def test_radix_mixed_chunk_lets_decodes_ride_along():
    core = core_of("radix", num_pages=100, options={"enable_mixed_chunk": True, "chunked_prefill_size": 8})
    add(core, "a", 6)
    step(core)
    add(core, "b", 20)
    plan = step(core)
    assert plan.mode == "mixed"
    assert rows(plan) == [("b", 4), ("a", 1)]


@pytest.mark.parametrize(("policy", "first"), [("fcfs", "cold"), ("lpm", "warm"), ("lof", "chatty")])
def test_radix_policies(policy, first):
    core = core_of("radix", num_pages=200, max_running=1, options={"policy": policy})
    add(core, "warm", 20, new=2)
    while core.has_work:
        step(core)
    step(core)  # an idle one: now the row of the one that ended is free
    add(core, "cold", 20, new=2)
    add(core, "chatty", 20, new=9)
    start = sum(map(ord, "warm"))
    core.add([(start + at) % 1000 for at in range(20)], SamplingParams(max_tokens=2), request_id="warm")
    assert step(core).admitted[0].id == first


@both
@pytest.mark.parametrize("kvcache", ["paged", "radix"])
def test_thrash_is_bounded(scheduler, kvcache):
    """Two growing requests in a pool for one and a half: both end, and little is computed twice."""
    core = make_core(
        scheduler=scheduler, kvcache=kvcache, num_pages=18, page_size=4, max_batch_tokens=8, executor=ShadowExecutor(),
        scheduler_options={"schedule_conservativeness": 0.05} if scheduler == "radix" else None,
    )  # fmt: skip
    requests = [add(core, name, 24, new=24) for name in ("a", "b")]
    while core.has_work:
        step(core)
    assert all(request.finish == "length" for request in requests)
    assert sum(request.preemptions for request in requests) <= 3
    assert core.counters.computed_tokens <= 2 * sum(request.num_tokens for request in requests)


def test_a_threshold_keeps_a_long_prompt_from_owning_the_engine():
    core = core_of(
        "unified", num_pages=600, page_size=4, max_batch_tokens=16, max_model_len=2000,
        options={"long_prefill_token_threshold": 8},
    )  # fmt: skip
    long = add(core, "long", 1600, new=1)
    step(core)
    shorts = [add(core, f"s{n}", 8, new=1) for n in range(3)]
    for _ in range(3):
        step(core)
    assert all(request.finish == "length" for request in shorts)
    assert long.finish is None
    for _ in range(300):
        step(core)
    assert long.finish == "length"

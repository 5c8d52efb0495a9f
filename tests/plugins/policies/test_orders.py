"""Who starts first, by each policy that orders the queue, and how long others may be overtaken."""

from __future__ import annotations

import random

import pytest

from engine.core import SamplingParams
from engine.core.registry import make
from engine.testing import ShadowExecutor, make_core


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def core_of(policy, **kwargs):
    kwargs = {"max_running": 1, "num_pages": 200, "max_batch_tokens": 64, **kwargs}
    return make_core(policies=[policy], executor=ShadowExecutor(), **kwargs)


def add(core, name, length=4, new=1, first=0, **metadata):
    tokens = [(first + at) % 1000 for at in range(length)]
    return core.add(tokens, SamplingParams(max_tokens=new), request_id=name, metadata=metadata)


def starts(core, steps=10_000):
    """Ids in the order of first starts, until nothing is left to do."""
    order = []
    for _ in range(steps):
        if not core.has_work:
            break
        plan = core.plan()
        order += [request.id for request in plan.admitted if not request.preemptions]
        core.commit(core.executor.execute(plan))
        core.take_deltas()
    assert core.hooks.faults() == []
    return order


# ---- fair-share


def test_fair_share_starts_the_tenant_that_was_served_least():
    core = core_of(make("policy", "fair-share"))
    for number in range(4):
        add(core, f"a{number}", tenant="a")
    add(core, "b0", tenant="b")
    add(core, "b1", tenant="b")
    assert starts(core) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_fair_share_counts_prompt_and_output_tokens_by_weight():
    policy = make("policy", "fair-share", {"prompt_weight": 1.0, "output_weight": 3.0, "weights": {"b": 2.0}})
    core = core_of(policy)
    add(core, "a", length=5, new=4, tenant="a")
    add(core, "b", length=5, new=4, tenant="b")
    starts(core)
    assert policy.counters == {"a": 5 + 3 * 4, "b": (5 + 3 * 4) / 2}


def test_fair_share_gives_service_in_proportion_to_weights():
    policy = make("policy", "fair-share", {"weights": {"big": 3.0}})
    core = core_of(policy)
    for number in range(40):
        add(core, f"big{number}", tenant="big")
        add(core, f"small{number}", tenant="small")
    first = starts(core)[:40]
    assert sum(name.startswith("big") for name in first) == 30


def test_fair_share_lifts_a_tenant_that_was_idle_and_no_higher():
    policy = make("policy", "fair-share")
    core = core_of(policy)
    for number in range(20):
        add(core, f"a{number}", tenant="a")
    for _ in range(10):
        core.step()
    for number in range(10):
        add(core, f"b{number}", tenant="b")
    order = starts(core)
    gap = [order.index(f"b{number}") for number in range(10)]
    assert gap[0] <= 1, "who was idle is not behind"
    assert gap[-1] >= 17, "nor has it saved up credit to starve the others"


def test_fair_share_bounds_the_difference_between_tenants_that_keep_waiting():
    policy = make("policy", "fair-share")
    core = core_of(policy, max_running=4)
    rng = random.Random(1)
    for number in range(60):
        add(core, f"x{number}", length=rng.randrange(1, 9), new=rng.randrange(1, 9), tenant="x")
        add(core, f"y{number}", length=rng.randrange(20, 30), new=rng.randrange(9, 18), tenant="y")
    most = 29 + 2 * 17  # what one request can cost
    while {r.metadata["tenant"] for r in core.waiting} == {"x", "y"}:
        core.step()
        assert abs(policy.counters.get("x", 0) - policy.counters.get("y", 0)) <= most * 5
    starts(core)


def test_a_tenant_that_aborts_pays_for_what_it_was_served():
    policy = make("policy", "fair-share")
    core = core_of(policy, max_running=2)
    add(core, "a", length=6, new=50, tenant="a")
    for _ in range(5):
        core.step()
    add(core, "b", tenant="b")
    core.step()
    core.abort("a")
    for number in range(100):  # those that vanished are settled every few times
        add(core, f"c{number}", tenant="c")
    starts(core)
    assert policy.counters["a"] == 6 + 2 * 6


# ---- deadline


def test_deadline_starts_who_is_due_first_and_takes_text_for_numbers():
    clock = Clock()
    core = core_of(make("policy", "deadline"), clock=clock)
    core_policy(core).clock = clock
    add(core, "none")
    add(core, "late", deadline=50)
    add(core, "soon", deadline="10")
    add(core, "in", deadline_in=20)
    assert starts(core) == ["soon", "in", "late", "none"]


def core_policy(core):
    return next(plugin for plugin in core._plugins if hasattr(plugin, "clock"))


def test_deadline_ages_everybody():
    clock = Clock()
    policy = make("policy", "deadline", {"max_wait": 30.0})
    policy.clock = clock
    core = core_of(policy, clock=clock)
    add(core, "patient")
    order = []
    for number in range(20):
        add(core, f"urgent{number}", new=2, deadline_in=5)
        plan = core.plan()
        order += [request.id for request in plan.admitted]
        core.commit(core.executor.execute(plan))
        clock.now += 5
    assert "patient" in order, "due at 30 s at the latest"
    assert order.index("patient") <= 30 / 5
    starts(core)


def test_deadline_puts_those_behind_whose_deadline_has_passed():
    clock = Clock()
    clock.now = 20.0
    for late_last, expected in ((True, ["fresh", "missed"]), (False, ["missed", "fresh"])):
        policy = make("policy", "deadline", {"late_last": late_last})
        policy.clock = clock
        core = core_of(policy, clock=clock)
        add(core, "missed", deadline=10)
        add(core, "fresh", deadline=30)
        assert starts(core) == expected


def test_laxity_counts_the_work_that_is_left():
    clock = Clock()

    def order(mode):
        clock.now = 0.0
        policy = make("policy", "deadline", {"mode": mode})
        policy.clock = clock
        core = core_of(policy, clock=clock)
        add(core, "warm", new=10)
        for _ in range(9):
            core.step()
            clock.now += 0.1
        add(core, "short", new=1, deadline=5.0)
        add(core, "long", new=30, deadline=6.0)
        return starts(core)

    assert order("edf") == ["short", "long"]
    assert order("laxity") == ["long", "short"]


# ---- shortest-predicted


def test_shortest_predicted_goes_by_what_is_said_then_by_what_was_learned():
    core = core_of(make("policy", "shortest-predicted"))
    add(core, "chat", new=30, tenant="chat")
    add(core, "label", new=2, tenant="label")
    starts(core)
    for name, metadata in {
        "c": {"tenant": "chat"}, "l": {"tenant": "label"}, "said": {"tenant": "chat", "predicted_tokens": 1},
    }.items():  # fmt: skip
        add(core, name, new=30, **metadata)
    assert starts(core) == ["said", "l", "c"]


@pytest.mark.parametrize("bound", [0, 3, 8])
@pytest.mark.parametrize("slots", [1, 3])
def test_shortest_predicted_delays_nobody_by_more_than_the_bound(bound, slots):
    core = core_of(make("policy", "shortest-predicted", {"max_overtaken": bound}), max_running=slots)
    rng = random.Random(bound)
    order = []
    for number in range(80):
        long = number % 5 == 0
        add(core, f"{number}", new=12 if long else 1, predicted_tokens=12 if long else rng.randrange(1, 4))
        if number % 3:
            plan = core.plan()
            order += [int(request.id) for request in plan.admitted]
            core.commit(core.executor.execute(plan))
    order += map(int, starts(core))
    delays = [place - number for place, number in enumerate(order)]
    assert max(delays) <= bound
    if bound:
        assert max(delays) > 0, "the bound does not forbid all overtaking"


# ---- k-lpm


@pytest.mark.parametrize("kvcache", ["paged", "radix"])
def test_k_lpm_takes_the_longest_prefix_and_each_kth_time_the_oldest(kvcache):
    core = core_of(make("policy", "k-lpm", {"k": 3}), kvcache=kvcache)
    add(core, "seed", length=33, first=100)
    starts(core)  # the first of three
    for number in range(4):
        add(core, f"cold{number}", length=33, first=300 + 40 * number)
    for number in range(4):
        add(core, f"warm{number}", length=33 - 4 * number, first=100)
    assert starts(core) == ["warm0", "cold0", "warm1", "warm2", "cold1", "warm3", "cold2", "cold3"]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_k_lpm_starts_the_oldest_within_k_times_its_turn(k):
    core = core_of(make("policy", "k-lpm", {"k": k}))
    add(core, "seed", length=33, first=100)
    starts(core)
    order = []
    for number in range(60):
        add(core, f"{number}", length=12, first=500 if number % 7 == 0 else 100)
        if number % 2:
            plan = core.plan()
            order += [int(request.id) for request in plan.admitted]
            core.commit(core.executor.execute(plan))
    order += map(int, starts(core))
    assert all(order.index(number) <= k * (number + 1) for number in range(60))
    if k == 1:
        assert order == sorted(order)


# ---- dlpm


def test_dlpm_prefers_prefixes_while_the_tenant_has_quantum():
    core = core_of(make("policy", "dlpm", {"quantum": 1000.0}))
    add(core, "seed", length=33, first=100, tenant="a")
    starts(core)
    add(core, "b0", length=33, first=300, tenant="b")
    for number in range(3):
        add(core, f"a{number}", length=30, first=100, tenant="a")
    assert starts(core) == ["a0", "a1", "a2", "b0"]


def test_dlpm_lets_the_other_tenant_in_when_the_quantum_is_used_up():
    policy = make("policy", "dlpm", {"quantum": 16.0})
    core = core_of(policy)
    add(core, "seed", length=33, first=100, tenant="a")
    starts(core)
    for number in range(12):
        add(core, f"a{number}", length=33, new=4, first=100, tenant="a")
        add(core, f"b{number}", length=33, new=4, first=300 + 40 * number, tenant="b")
    order = starts(core)
    assert "b0" in order[:2], "the seed was charged to tenant a"
    last_b = max(order.index(f"b{number}") for number in range(12))
    assert sum(name.startswith("a") for name in order[:last_b]) == 12, "locality is worth more service in equal shares"


def test_dlpm_bounds_the_difference_by_quantum_and_one_request():
    policy = make("policy", "dlpm", {"quantum": 50.0})
    core = core_of(policy, max_running=2)
    served = {"a": 0.0, "b": 0.0}
    for number in range(40):
        for tenant, first in (("a", 0), ("b", 500)):
            add(core, f"{tenant}{number}", length=20, new=3, first=first + 11 * number, tenant=tenant)
    while {request.metadata["tenant"] for request in core.waiting} == {"a", "b"}:
        plan = core.plan()
        for request in plan.admitted:
            served[request.metadata["tenant"]] += request.num_prompt - request.cached_tokens + 2 * 3
        core.commit(core.executor.execute(plan))
        core.take_deltas()
        assert abs(served["a"] - served["b"]) <= 2 * 50 + 4 * 26
    starts(core)

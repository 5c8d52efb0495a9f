"""Who is admitted, what is evicted and who is preempted, by each policy about memory or about being in time."""

from __future__ import annotations

import pytest

from engine.core import Candidate, EvictionPool, Request, SamplingParams, Why
from engine.core.registry import make
from engine.plugins.policies.past_future import peak
from engine.testing import ScriptedExecutor, ShadowExecutor, make_core

EOS = 999


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def core_of(policy, executor=None, **kwargs):
    kwargs = {"num_pages": 100, "max_batch_tokens": 64, "audit": True, **kwargs}
    return make_core(policies=[policy] if policy else [], executor=executor or ShadowExecutor(), **kwargs)


def add(core, name, length=4, new=1, first=0, **metadata):
    tokens = [(first + at) % 900 for at in range(length)]
    return core.add(tokens, SamplingParams(max_tokens=new), request_id=name, metadata=metadata)


def run(core, steps=5000, each=lambda: None):
    for _ in range(steps):
        if not core.has_work:
            break
        core.step()
        each()
    assert not core.has_work
    assert core.hooks.faults() == []


# ---- past-future


def test_the_peak_is_where_somebody_is_about_to_finish():
    assert peak([]) == 0
    assert peak([(5, 10)]) == 15
    assert peak([(1, 10), (9, 10)]) == 22, "both are there when the first ends; later there is one of 19"
    assert peak([(1, 10), (30, 10)]) == 40, "the long one alone is more"
    assert peak([(1, 10), (9, 10)], share=0.5) == 14, "what comes is nobody else's"


def stops_after(output):
    """Every request may have 60 tokens and stops after ``output``."""
    return ScriptedExecutor(lambda r: EOS if r.num_output + 1 >= output else 5, eos_ids=frozenset({EOS}))


def preemptions(policy, output):
    core = core_of(policy, stops_after(output), num_pages=30, max_running=8)
    for number in range(12):
        add(core, f"warm{number}", length=6, new=60, first=number * 7)
    run(core)
    before = core.counters.preemptions
    requests = [add(core, f"r{number}", length=6, new=60, first=number * 11) for number in range(20)]
    widest = []
    run(core, each=lambda: widest.append(len(core.running)))
    assert [request.num_output for request in requests] == [output] * 20
    return core.counters.preemptions - before, max(widest)


def test_past_future_forecasts_from_past_outputs():
    without, _ = preemptions(None, 40)
    with_it, width = preemptions(make("policy", "past-future", {"warmup": 8, "reserve": 0.0}), 40)
    assert with_it < without / 4
    assert width >= 2
    _, width = preemptions(make("policy", "past-future", {"warmup": 8}), 3)
    assert width == 8, "short outputs: no reason to wait"


def test_past_future_lets_nobody_pass_who_is_smaller():
    policy = make("policy", "past-future", {"warmup": 1})
    core = core_of(policy, num_pages=24, max_running=8)
    add(core, "warm", new=50, first=50)
    run(core)
    add(core, "a", length=20, new=50)
    core.step()
    add(core, "big", length=30, new=50, first=100)
    add(core, "tiny", length=1, new=1, first=200)
    core.step()
    assert core.why("big")[0] is Why.POLICY
    assert "forecast" in core.why("big")[1]
    assert core.why("tiny") == (Why.POLICY, "no room in the forecast for those before it")
    run(core)


# ---- early-reject


def reject_core(**options):
    clock = Clock()
    policy = make("policy", "early-reject", {"warmup": 4, **options})
    policy.clock = clock
    core = core_of(policy, clock=clock, max_running=2)
    for number in range(2):
        add(core, f"warm{number}", length=5, new=10, first=300 + 20 * number, tenant="x")
    return core, lambda: run(core, each=lambda: setattr(clock, "now", clock.now + 0.1)), clock


def test_early_reject_ends_at_once_what_the_backlog_makes_late():
    core, go, clock = reject_core()
    go()
    start = clock.now
    running = [add(core, f"run{n}", new=20, first=50 * n) for n in range(2)]
    queued = [add(core, f"q{n}", new=20, first=500 + 30 * n, predicted_tokens=20, deadline=start + 5) for n in range(6)]
    free = add(core, "free", new=5, first=800)
    steps = []
    while core.has_work:
        core.step()
        clock.now += 0.1
        steps.append([request.id for request in queued if request.finish == "error"])
    assert all(request.finish == "length" for request in [*running, *queued[:2], free])
    assert [request.finish for request in queued[4:]] == ["error"] * 2
    assert "deadline cannot be met" in queued[5].detail
    assert "q5" in steps[25], "found out when the first slots are free, not when its turn comes"
    assert core.hooks.faults() == []


def test_early_reject_never_touches_those_without_a_deadline_or_with_time():
    core, go, _ = reject_core()
    requests = [add(core, f"r{n}", new=10, first=40 * n, **({"deadline": 1e9} if n % 2 else {})) for n in range(10)]
    go()
    assert all(request.finish == "length" for request in requests)


def test_early_reject_may_be_about_the_first_token():
    for of, finish in (("completion", "error"), ("first-token", "length")):
        core, go, clock = reject_core(of=of)
        go()
        request = add(core, "r", new=40, predicted_tokens=40, deadline=clock.now + 1)
        add(core, "other", new=2, first=77)
        go()
        assert request.finish == finish


# ---- eviction of cached content


def pool_of(pages, kind="cache"):
    candidates = [Candidate(page, 1, age) for age, page in enumerate(pages)]
    return EvictionPool(kind, lambda: candidates)


def test_random_leaf_is_random_reproducible_and_enough():
    def answers(seed, **options):
        policy = make("policy", "random-leaf", {"seed": seed, **options})
        return [policy.evict(need, pool_of(range(100))) for need in (1, 5, 300)]

    assert answers(1) == answers(1) != answers(2)
    assert sorted(answers(1)[2]) == list(range(100))
    assert [len(keys) >= need for need, keys in zip((1, 5), answers(3), strict=False)] == [True, True]
    policy = make("policy", "random-leaf")
    assert policy.evict(1, pool_of([1], kind="running")) is None
    old = answers(4, sample=32)[0][0]
    assert old < 25, "of many drawn the least recently used goes"


@pytest.mark.parametrize("kvcache", ["paged", "radix"])
def test_random_leaf_beats_lru_on_a_cycle(kvcache):
    def hits(policy):
        core = core_of(policy, kvcache=kvcache, num_pages=26)
        cached = 0
        for turn in range(60):
            cached += finish(core, f"r{turn}", length=21, first=100 * (turn % 6)).cached_tokens
        return cached

    assert hits(None) == 0
    assert hits(make("policy", "random-leaf")) > 0


def finish(core, name, **kwargs):
    request = add(core, name, **kwargs)
    run(core)
    return request


@pytest.mark.parametrize("kvcache", ["paged", "radix"])
def test_reuse_forecast_keeps_what_its_category_reuses(kvcache):
    def hits(policy):
        core = core_of(policy, kvcache=kvcache, num_pages=40)
        cached = 0
        for turn in range(40):
            cached += finish(core, f"c{turn}", length=21, first=0, category="chat").cached_tokens
            for number in range(turn % 4 * 4):
                finish(core, f"q{turn}.{number}", length=21, first=(37 * (turn * 16 + number)) % 800 + 25, category="q")
        return cached

    assert hits(make("policy", "reuse-forecast")) > hits(None)


@pytest.mark.parametrize("kvcache", ["paged", "radix"])
def test_soft_retention_keeps_the_marked_for_their_time(kvcache):
    clock = Clock()
    policy = make("policy", "soft-retention", {"budget": 0.3})
    policy.clock = clock
    core = core_of(policy, kvcache=kvcache, num_pages=30, clock=clock)
    finish(core, "marked", length=21, retain=1, retain_ttl=10)
    for number in range(20):
        finish(core, f"flood{number}", length=21, first=25 + 31 * number)
    assert finish(core, "again", length=21).cached_tokens == 20
    clock.now = 11.0
    for number in range(20):
        finish(core, f"second{number}", length=21, first=40 + 31 * number)
    assert finish(core, "expired", length=21).cached_tokens == 0


@pytest.mark.parametrize("kvcache", ["paged", "radix"])
def test_soft_retention_never_blocks_admission(kvcache):
    policy = make("policy", "soft-retention", {"budget": 1.0})
    core = core_of(policy, kvcache=kvcache, num_pages=20)
    for number in range(4):
        finish(core, f"marked{number}", length=19, first=50 * number, retain=10, retain_ttl=1e9)
    assert len(policy.marks) >= 16
    request = finish(core, "large", length=70, first=500)
    assert request.finish == "length"
    assert request.preemptions == 0


def test_soft_retention_keeps_to_its_budget_and_drops_the_least_important():
    policy = make("policy", "soft-retention", {"budget": 0.5})
    core = core_of(policy, num_pages=20)
    finish(core, "low", length=33, retain=1)
    finish(core, "high", length=33, first=400, retain=2)
    assert len(policy.marks) <= 10
    assert [priority for priority, _ in policy.marks.values()].count(2.0) == 8
    finish(core, "lower", length=33, first=800, retain=1)
    assert [priority for priority, _ in policy.marks.values()].count(2.0) == 8, "the less important push nobody out"


# ---- victims


def victim(name, *, computed, cached=0, pages=None, preemptions=0):
    request = Request(name, [1] * (computed + 1), computed + 1, SamplingParams(), max_total=1000)
    request.computed, request.cached_tokens, request.preemptions = computed, cached, preemptions
    return Candidate(request, pages if pages is not None else -(-computed // 4), 0, request)


def choose(candidates, need=1, **options):
    policy = make("policy", "least-recompute", options)
    make_core(policies=[policy])
    answer = policy.evict(need, EvictionPool("running", lambda: candidates))
    return [request.id for request in answer]


def test_least_recompute_prefers_who_loses_least():
    assert choose([victim("big", computed=400), victim("small", computed=8)]) == ["small", "big"]
    assert choose([victim("own", computed=60), victim("hit", computed=80, cached=60)]) == ["hit", "own"]


def test_least_recompute_wants_enough_pages_and_spares_who_was_preempted_often():
    assert choose([victim("one", computed=4), victim("ten", computed=40)], need=5) == ["ten", "one"]
    assert choose([victim("again", computed=8, preemptions=3), victim("big", computed=80)]) == ["big", "again"]
    assert make("policy", "least-recompute").evict(1, pool_of([1])) is None


def test_least_recompute_saves_tokens_and_everybody_finishes():
    def recomputed(policy):
        options = {"enable_prefix_caching": False}
        core = core_of(policy, num_pages=60, max_running=16, kvcache_options=options, audit=False)
        requests = []
        for number in range(24):
            long = number % 4 == 3
            requests.append(add(core, f"r{number}", length=100 if long else 5, new=30, first=31 * number))
            for _ in range(3):
                core.step()
        run(core)
        assert all(request.num_output == 30 for request in requests)
        return core.counters.recomputed_tokens

    assert recomputed(make("policy", "least-recompute")) < recomputed(None)

"""Who is asked, in which order, and what becomes of bad answers."""

from __future__ import annotations

import logging

import pytest

from engine.core import (
    Connector,
    InvariantViolation,
    PluginError,
    Policy,
    Reject,
    SamplingParams,
    Scheduler,
    Transfer,
    TransferEvent,
    Wait,
    Why,
    hookimpl,
)
from engine.core.hooks import FAULT_LIMIT
from engine.core.hookspecs import hookspec  # noqa: F401  (the public marker must stay importable)
from engine.testing import ScriptedExecutor, make_core


def run(core, limit=500):
    started = []
    for _ in range(limit):
        if not core.has_work:
            return started
        plan = core.plan()
        started += [request.id for request in plan.admitted]
        core.commit(core.executor.execute(plan))
        core.take_deltas()
    raise AssertionError("not finished")


def add_many(core, lengths, **kwargs):
    return [
        core.add([n % 900] * n, SamplingParams(max_tokens=3), request_id=f"r{i}", **kwargs)
        for i, n in enumerate(lengths)
    ]


class Shortest(Policy):
    name = "shortest"

    @hookimpl
    def order(self, waiting):
        return sorted(waiting, key=lambda request: request.num_tokens)


class Backwards(Policy):
    name = "backwards"

    @hookimpl
    def order(self, waiting):
        return list(reversed(waiting))


@pytest.mark.parametrize("scheduler", ["unified", "radix"])
def test_order_changes_the_order_and_nothing_else(scheduler):
    def outputs(policies):
        core = make_core(scheduler=scheduler, policies=policies, max_running=1)
        requests = add_many(core, [9, 3, 12, 1])
        return run(core), [request.output for request in requests]

    plain, plain_text = outputs([])
    ordered, ordered_text = outputs([Shortest()])
    assert plain == ["r0", "r1", "r2", "r3"]
    assert ordered == ["r3", "r1", "r0", "r2"]
    assert plain_text == ordered_text


def test_the_first_policy_configured_is_asked_first():
    core = make_core(policies=[Shortest(), Backwards()], max_running=1)
    add_many(core, [9, 3, 12, 1])
    assert run(core)[0] == "r3"
    core = make_core(policies=[Backwards(), Shortest()], max_running=1)
    add_many(core, [1, 3, 12, 9])
    assert run(core)[0] == "r3"


def test_a_subset_leaves_the_others_waiting_with_a_reason():
    class OnlyShort(Policy):
        name = "only-short"
        limit = 5

        @hookimpl
        def order(self, waiting):
            return [request for request in waiting if request.num_tokens <= self.limit]

    policy = OnlyShort()
    core = make_core(policies=[policy], max_running=4)
    add_many(core, [9, 3])
    plan = core.plan()
    assert [r.id for r in plan.admitted] == ["r1"]
    assert core.why("r0") == (Why.ORDER, "")
    policy.limit = 100
    core.commit(core.executor.execute(plan))
    assert run(core) == ["r0"]


def test_admit_waits_with_words_and_rejects_with_an_error():
    class Guard(Policy):
        name = "guard"

        @hookimpl
        def admit(self, step, request):
            if request.metadata.get("banned"):
                return Reject("banned")
            if step.running:
                return Wait("one at a time, please")

    core = make_core(policies=[Guard()])
    first, second = add_many(core, [4, 4])
    third = core.add([1], metadata={"banned": True})
    plan = core.plan()
    assert plan.requests == (first,)
    assert core.why(second.id) == (Why.POLICY, "one at a time, please")
    assert (third.finish, third.detail) == ("error", "banned")
    core.commit(core.executor.execute(plan))
    run(core)
    assert second.num_output == 3


def test_objections_are_overridden_when_nothing_else_can_happen():
    class Never(Policy):
        name = "never"

        @hookimpl
        def admit(self, request):
            return Wait("never")

    core = make_core(policies=[Never()])
    (request,) = add_many(core, [4])
    plans = []
    while core.has_work:
        plans.append(core.plan())
        core.commit(core.executor.execute(plans[-1]))
        core.take_deltas()
    assert not plans[0]
    assert request.finish == "length"
    assert len(plans) < 10


GRABS = [
    pytest.param(lambda step, requests: step.seal(), id="seal"),
    pytest.param(lambda step, requests: step.start(requests[0], 1), id="start"),
    pytest.param(lambda step, requests: step.preempt(victim=requests[0]), id="preempt"),
    pytest.param(lambda step, requests: setattr(step, "budget", 10**6), id="budget"),
    pytest.param(lambda step, requests: step.running.clear(), id="running"),
    pytest.param(lambda step, requests: Reject(42), id="reject with a number"),
]


@pytest.mark.parametrize("grab", GRABS)
@pytest.mark.parametrize("scheduler", ["unified", "radix"])
def test_policies_get_no_pen(grab, scheduler):
    class Grabby(Policy):
        name = "grabby"

        @hookimpl
        def order(self, step, waiting):
            return grab(step, waiting)

        @hookimpl
        def admit(self, step, request):
            return grab(step, [request])

    def outputs(policies):
        core = make_core(scheduler=scheduler, policies=policies, max_batch_tokens=8, max_running=2)
        requests = add_many(core, [5] * 6)
        run(core)
        assert all(request.finish == "length" for request in requests)
        return [request.output for request in requests], core

    text, core = outputs([Grabby()])
    assert text == outputs([])[0]
    assert {name for name, *_ in core.hooks.faults()} == {"grabby"}


def test_an_empty_answer_of_evict_leaves_the_choice_to_the_scheduler():
    class NoVictims(Policy):
        name = "no-victims"

        @hookimpl
        def evict(self):
            return []

    core = make_core(
        policies=[NoVictims()], scheduler_options={"policy": "priority"}, num_pages=8, executor=ScriptedExecutor()
    )
    for name, priority in (("low", 5), ("high", 1)):
        core.add(
            list(range(priority, priority + 15)), SamplingParams(max_tokens=10), request_id=name, priority=priority
        )
    preempted = []
    while core.has_work:
        plan = core.plan()
        preempted += [request.id for request in plan.preempted]
        core.commit(core.executor.execute(plan))
        core.take_deltas()
    assert set(preempted) == {"low"}


def test_a_wish_to_be_first_is_refused():
    class Pushy(Policy):
        name = "pushy"

        @hookimpl(tryfirst=True)
        def order(self, waiting):
            return waiting

    with pytest.raises(PluginError, match="tryfirst"):
        make_core(policies=[Pushy()])


NONSENSE = [
    pytest.param(lambda waiting: [object()], id="unknown"),
    pytest.param(lambda waiting: list(waiting) * 2, id="duplicates"),
    pytest.param(lambda waiting: 17, id="a number"),
    pytest.param(lambda waiting: [[]], id="unhashable"),
    pytest.param(lambda waiting: 1 / 0, id="raises"),
]


@pytest.mark.parametrize("answer", NONSENSE)
def test_a_policy_that_answers_nonsense_is_contained(answer, caplog):
    class Bad(Policy):
        name = "bad"

        @hookimpl
        def order(self, waiting):
            return answer(waiting)

    def outputs(policies):
        core = make_core(policies=policies, max_running=1)
        requests = add_many(core, [5] * 15)
        return run(core), [request.output for request in requests], core

    with caplog.at_level(logging.WARNING):
        order, text, core = outputs([Bad()])
    assert (order, text) == outputs([])[:2]
    (faults,) = core.hooks.faults()
    assert (faults.plugin, faults.faults, faults.disabled) == ("bad", FAULT_LIMIT, True)
    assert "bad" in caplog.text
    assert "disabled after" in caplog.text


def test_bad_answers_of_admit_evict_and_commit_are_contained():
    class Bad(Policy):
        name = "bad"

        @hookimpl
        def admit(self, request):
            return "no"

        @hookimpl
        def evict(self, need, pool):
            return -1 if pool.kind == "cache" else [object(), "x"]

        @hookimpl
        def commit(self, outcome):
            raise RuntimeError("books lost")

    core = make_core(policies=[Bad()], num_pages=12)
    requests = add_many(core, [20, 20, 21, 22])
    run(core)
    assert all(request.finish == "length" for request in requests)
    (faults,) = core.hooks.faults()
    assert faults.plugin == "bad"
    assert set(faults.kinds) == {"answered", "raised"}


def test_a_misspelt_hook_is_an_error():
    class Typo(Policy):
        name = "typo"

        @hookimpl
        def odrer(self, waiting):
            return waiting

    with pytest.raises(PluginError, match="odrer"):
        make_core(policies=[Typo()])


def test_a_wrong_parameter_is_an_error():
    class Wrong(Policy):
        name = "wrong"

        @hookimpl
        def order(self, queue):
            return queue

    with pytest.raises(PluginError, match="queue"):
        make_core(policies=[Wrong()])


def test_only_a_scheduler_plans():
    class Usurper(Policy):
        name = "usurper"

        @hookimpl
        def plan(self, step):
            return step.seal()

    with pytest.raises(PluginError, match="only a scheduler may answer 'plan'"):
        make_core(policies=[Usurper()])


def test_a_policy_cannot_spoil_the_queue_in_place():
    class Vandal(Policy):
        name = "vandal"

        @hookimpl
        def order(self, waiting):
            waiting.clear()

    core = make_core(policies=[Vandal()])
    requests = add_many(core, [4, 4])
    run(core)
    assert all(request.finish == "length" for request in requests)
    assert core.hooks.faults()


def test_commit_is_told_the_cache_first_then_the_scheduler():
    told = []
    core = make_core(policies=[])

    class Listener(Policy):
        name = "listener"

        @hookimpl
        def commit(self, outcome):
            told.append(("policy", outcome.finished))

    class LoudScheduler(type(core.scheduler)):
        @hookimpl
        def commit(self, outcome):
            told.append(("scheduler", outcome.finished))

    class LoudCache(type(core.kv)):
        @hookimpl
        def commit(self, outcome):
            told.append(("cache", outcome.finished))

    core = make_core(scheduler=LoudScheduler(), kvcache=LoudCache(), policies=[Listener()])
    core.add([1], SamplingParams(max_tokens=1))
    core.step()
    assert [who for who, _ in told] == ["cache", "scheduler", "policy"]
    assert all(len(finished) == 1 for _, finished in told)


def test_a_plan_that_the_step_did_not_seal_is_refused():
    class Forger(Scheduler):
        name = "forger"

        @hookimpl
        def plan(self, step):
            plan = step.seal()
            return plan.__class__(*[getattr(plan, name) for name in plan.__slots__])

    core = make_core(scheduler=Forger())
    core.add([1])
    with pytest.raises(InvariantViolation, match="seal"):
        core.step()


def test_a_scheduler_that_does_nothing_ends_the_request_with_a_diagnosis():
    class Idle(Scheduler):
        name = "idle"

        @hookimpl
        def plan(self, step):
            return step.seal()

    core = make_core(scheduler=Idle())
    request = core.add([1])
    for _ in range(10):
        core.step()
    assert request.finish == "error"
    assert "scheduler 'idle' made no progress" in request.detail
    assert not core.has_work


def test_a_scheduler_that_starves_what_runs_loses_that_and_not_the_queue():
    class Starver(Scheduler):
        name = "starver"

        @hookimpl
        def plan(self, step):
            if not step.running:
                for request in step.queue():
                    step.start(request, 1)
                    break
            return step.seal()

    core = make_core(scheduler=Starver())
    first, second = add_many(core, [4, 4])
    for _ in range(6):
        core.step()
    assert first.finish == "error"
    assert "it runs, but was granted nothing" in first.detail
    assert second.finish is None


def test_a_scheduler_that_takes_back_what_it_sealed_does_not_spin():
    class Taker(Scheduler):
        name = "taker"

        @hookimpl
        def plan(self, step):
            for request in step.queue():
                step.start(request, 4)
            plan = step.seal()
            assert all(step.preempt(victim=request) is None for request in plan.requests)
            assert list(step.queue()) == []
            assert not any(step.grant(request, 1) for request in plan.requests)
            return plan

    core = make_core(scheduler=Taker())
    (request,) = add_many(core, [4])
    core.step()
    assert request.computed == 4


def test_a_step_is_sealed_once():
    class Twice(Scheduler):
        name = "twice"

        @hookimpl
        def plan(self, step):
            step.seal()
            return step.seal()

    core = make_core(scheduler=Twice())
    core.add([1])
    with pytest.raises(InvariantViolation, match="sealed once"):
        core.step()


def test_evict_chooses_what_goes():
    class DropNewest(Policy):
        name = "drop-newest"

        @hookimpl
        def evict(self, pool):
            if pool.kind == "cache":
                return [candidate.key for candidate in sorted(pool.candidates(), key=lambda c: -c.last_used)]

    def survivors(policies):
        core = make_core(policies=policies, num_pages=8, page_size=4, executor=ScriptedExecutor(lambda r: 1))
        for start in (0, 100, 200):
            core.add(list(range(start, start + 13)), SamplingParams(max_tokens=1))
            run(core)
        probes = [core.add(list(range(start, start + 13)), SamplingParams(max_tokens=1)) for start in (0, 100, 200)]
        return [core.kv.match(probe).tokens for probe in probes]

    assert survivors([])[0] < survivors([DropNewest()])[0]


def test_transfers_fence_pages_and_stray_events_are_counted():
    class Slow(Connector):
        name = "slow"

        def __init__(self):
            super().__init__()
            self.seen, self.events = [], []

        @hookimpl
        def transfer_kv(self, transfers):
            self.seen += transfers
            events, self.events = self.events, []
            return events

    connector = Slow()
    core = make_core(connectors=[connector], num_pages=8)
    request = core.add(list(range(8)), SamplingParams(max_tokens=2), request_id="a")
    waiting = core.add([1], SamplingParams(max_tokens=1), request_id="b", parked_on=["transfer t1"])
    core.step()
    core.transfer(Transfer("t1", "push", "b", tuple(request.pages)))
    core.abort("a")
    core.kv.reset()
    core.step()
    assert [wish.id for wish in connector.seen] == ["t1"]
    assert core.pool.num_free == 6, "pages under a transfer must not be reused"
    assert core.why("b") == (Why.PARKED, "transfer t1")
    connector.events = [TransferEvent("t0", "done"), TransferEvent("t1", "done"), TransferEvent("t1", "failed")]
    while core.has_work:
        core.step()
    core.kv.reset()
    assert core.pool.num_free == 8
    assert waiting.finish == "length"
    assert core.counters.stray_events == 2


def test_every_waiting_request_has_a_reason():
    core = make_core(max_running=1, num_pages=8)
    requests = add_many(core, [4, 4, 4])
    assert core.why("r0") == (Why.NOT_ASKED, "")
    core.step()
    assert core.why("r0") is None
    assert core.why("r1")[0] is Why.RUN_SLOTS
    assert core.why("r2")[0] is Why.BEHIND
    assert core.why("nobody") is None
    run(core)
    assert all(request.finish for request in requests)

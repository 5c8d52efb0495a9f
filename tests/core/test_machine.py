"""The whole of the core's bookkeeping under random operations: whatever is asked, nothing leaks and no KV is wrong.

A chaotic scheduler makes random use of everything that ``Step`` offers, aborts and failures land between planning and
commit, and an executor with a memory checks that every row reads exactly the KV of its own tokens.
"""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core import (
    Delta,
    InvalidRequest,
    Outcome,
    Plan,
    QueueFull,
    Request,
    SamplingParams,
    Scheduler,
    Step,
    hookimpl,
)
from engine.core.cache_events import CacheLog, TooOld
from engine.core.cache_index import CacheIndex
from engine.testing import ShadowExecutor, make_core

PAGES, VOCAB = 24, 50


class ChaosScheduler(Scheduler):
    """Grants, starts and preempts at random, several times a step, in any order."""

    name = "chaos"

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    @hookimpl
    def plan(self, step: Step) -> Plan:
        rng = self.rng
        for _ in range(rng.randrange(4)):
            action = rng.randrange(4)
            running = list(step.running)
            rng.shuffle(running)
            if action == 0:
                for request in running:
                    step.grant(request, rng.randrange(1, 9))
            elif action == 1:
                step.grant_decodes(running)
            elif action == 2 and running and rng.random() < 0.5:
                step.preempt(victim=rng.choice(running), front=rng.random() < 0.5)
            else:
                for request in step.queue():
                    if rng.random() < 0.2:
                        step.cached(request)
                    step.start(request, rng.randrange(0, 12))
                    if rng.random() < 0.3:
                        break
        return step.seal(drafting=rng.randrange(4))

    @hookimpl
    def order(self, waiting):
        chosen = list(waiting)
        self.rng.shuffle(chosen)
        return chosen[: self.rng.randrange(len(chosen) + 1)] if self.rng.random() < 0.3 else None

    @hookimpl
    def evict(self, need, pool):
        if self.rng.random() < 0.5:
            return None
        keys = [candidate.key for candidate in pool.candidates()]
        self.rng.shuffle(keys)
        return ["nonsense", *keys[: self.rng.randrange(len(keys) + 1)], None]


class EngineMachine(RuleBasedStateMachine):
    kvcache = "paged"
    page_size = 4
    scheduler = "chaos"
    drafting = False
    overlap = False
    telling = False

    def draft(self, request: Request) -> tuple[int, ...]:
        """Up to three tokens, each right with some luck."""
        drafts: list[int] = []
        for ahead in range(self.rng.randrange(4)):
            right = ((request.num_tokens + ahead) * 7) % VOCAB
            drafts.append(right if self.rng.random() < 0.7 else self.rng.randrange(VOCAB))
        return tuple(drafts)

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)
        self.executor = ShadowExecutor(lambda request: (request.num_tokens * 7) % VOCAB, vocab_size=VOCAB)
        if self.drafting:
            self.executor.drafter = self.draft
        self.log = CacheLog(self.page_size, history=8) if self.telling else None
        self.index = CacheIndex()
        self.core = make_core(
            cache_log=self.log,
            scheduler=ChaosScheduler(self.rng) if self.scheduler == "chaos" else self.scheduler,
            kvcache=self.kvcache,
            executor=self.executor,
            num_pages=PAGES,
            page_size=self.page_size,
            max_batch_tokens=24,
            max_running=6,
            max_waiting=20,
            max_model_len=PAGES * self.page_size + 5,
            overlap=self.overlap,
            scheduler_options={"num_spec_tokens": 3} if self.drafting and self.scheduler == "unified" else None,
        )
        self.plans: deque[Plan] = deque()  # in flight, oldest first
        self.outcomes: deque[Outcome] = deque()  # of the first of them, which are computed
        self.ended: dict[str, str] = {}
        self.added: set[str] = set()
        self.injected: set[str] = set()

    @rule(seed=st.integers(0, 2**32 - 1))
    def reseed(self, seed: int) -> None:
        self.rng.seed(seed)

    @rule(
        family=st.integers(0, 1),
        shared=st.sampled_from([0, 3, 8, 17, 30, 40]),
        own=st.sampled_from([0, 1, 4, 11]),
        new=st.integers(1, 30),
        salt=st.sampled_from(["", "", "", "s"]),
        parked=st.booleans(),
    )
    def add(self, family: int, shared: int, own: int, new: int, salt: str, parked: bool) -> None:
        tokens = [(family * 11 + at) % VOCAB for at in range(shared)] + [self.rng.randrange(VOCAB) for _ in range(own)]
        try:
            request = self.core.add(
                tokens, SamplingParams(max_tokens=new), salt=salt, parked_on=["grammar"] if parked else []
            )
            self.added.add(request.id)
        except (InvalidRequest, QueueFull):
            pass

    @rule(pick=st.integers(0, 10))
    def unpark(self, pick: int) -> None:
        if self.core.parked:
            parked = sorted(self.core.parked)
            self.core.ready(parked[pick % len(parked)], "grammar")

    @rule(pick=st.integers(0, 1000), twice=st.booleans())
    def abort(self, pick: int, twice: bool) -> None:
        live = sorted(self.core.requests)
        if live:
            victim = live[pick % len(live)]
            assert self.core.abort(victim)
            if twice:
                assert not self.core.abort(victim)

    @precondition(lambda self: len(self.plans) <= self.overlap)
    @rule()
    def make_plan(self) -> None:
        self.plans.append(self.core.plan())

    @precondition(lambda self: len(self.outcomes) < len(self.plans))
    @rule(row_fails=st.booleans(), pick=st.integers(0, 100))
    def execute(self, row_fails: bool, pick: int) -> None:
        plan = self.plans[len(self.outcomes)]
        if row_fails and plan:
            self.executor.row_errors = {plan.requests[pick % len(plan.requests)].id: "injected"}
            self.injected |= set(self.executor.row_errors)
        self.outcomes.append(self.executor.execute(plan) if plan else Outcome(plan, ()))
        self.executor.row_errors = {}

    @precondition(lambda self: self.plans)
    @rule(outcome=st.sampled_from(["ok", "ok", "ok", "ok", "fail", "row"]), pick=st.integers(0, 100))
    def end_plan(self, outcome: str, pick: int) -> None:
        plan = self.plans[0]
        if outcome == "fail" and plan:
            self.injected |= {request.id for request in plan.requests}
            self.core.fail_step(plan, "injected")
            self.plans.clear()
            self.outcomes.clear()
            return
        if not self.outcomes:
            self.execute(outcome == "row", pick)
        self.plans.popleft()
        result = self.outcomes.popleft()
        self.core.commit(result)
        if self.rng.random() < 0.1:
            with pytest.raises(Exception, match="own outcome"):
                self.core.commit(result)

    @rule(steps=st.integers(1, 6))
    @precondition(lambda self: not self.plans)
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.record(self.core.step())
        self.record(self.core.drain())

    @rule(everything=st.booleans())
    def evict(self, everything: bool) -> None:
        if everything:
            self.core.kv.reset()
        else:
            keys = [candidate.key for candidate in self.core.kv.candidates()]
            self.rng.shuffle(keys)
            self.core.kv.drop(keys[: self.rng.randrange(len(keys) + 1)])

    def follow(self, log: CacheLog) -> None:
        """What the events say is cached, is cached, and was computed."""
        try:
            if self.index.epoch is None:
                self.index.load(log.snapshot())
            while (batch := log.replay(self.index.epoch, self.index.sequence)).events:
                assert self.index.apply(batch) == "nothing"
        except TooOld:
            self.index.load(log.snapshot())
        dump = self.core.cache.dump()
        assert (self.index.epoch, self.index.sequence) == (dump["epoch"], dump["sequence"])
        assert sorted(key.hex() for key in self.index.pages()) == dump["keys"]
        assert (self.executor.marks[list(self.core.cache.watch.pages)] != 0).all(), "told before it was computed"

    @invariant()
    def sound(self) -> None:
        self.core.check()
        if self.log is not None:
            self.follow(self.log)
        assert self.executor.mismatch is None
        self.record(self.core.take_deltas())

    def record(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish is not None:
                assert delta.request_id not in self.ended, "a request ended twice"
                self.ended[delta.request_id] = delta.finish
                if delta.finish == "error" and self.scheduler != "chaos":  # chaos may idle until it is stopped
                    assert delta.request_id in self.injected, delta.detail

    def teardown(self) -> None:
        while self.plans:
            self.end_plan("ok", 0)
        for request_id in list(self.core.parked):
            self.core.ready(request_id, "grammar")
        for _ in range(3000):
            if not self.core.has_work:
                break
            self.record(self.core.step())
            self.sound()
        self.sound()
        assert not self.core.has_work, "the engine did not come to rest"
        assert set(self.ended) == self.added, "a request was lost"
        numbers = self.core.kv.numbers()
        assert numbers.pinned == 0
        assert numbers.free + numbers.evictable == PAGES
        self.core.kv.reset()
        assert self.core.pool.num_free == PAGES
        assert sorted(self.executor.forgotten) == sorted(self.added)


def _machine(
    scheduler: str, kvcache: str, page_size: int, *, overlap: bool = False, examples: int = 25, steps: int = 50
) -> type:
    machine = type(
        f"{scheduler}_{kvcache}_{page_size}_{overlap}",
        (EngineMachine,),
        {"scheduler": scheduler, "kvcache": kvcache, "page_size": page_size, "overlap": overlap},
    )
    case = machine.TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    return case


TestChaosPaged = _machine("chaos", "paged", 4)
TestChaosRadix = _machine("chaos", "radix", 4)
TestChaosPagedSlots = _machine("chaos", "paged", 1, examples=20)
TestChaosRadixSlots = _machine("chaos", "radix", 1, examples=20)
TestChaosPagedOverlap = _machine("chaos", "paged", 4, overlap=True)
TestChaosRadixOverlap = _machine("chaos", "radix", 4, overlap=True)
TestUnifiedPaged = _machine("unified", "paged", 4, examples=20)
TestUnifiedRadix = _machine("unified", "radix", 4, examples=20)
TestRadixPaged = _machine("radix", "paged", 4, examples=20)
TestRadixRadix = _machine("radix", "radix", 4, examples=20)


def walk(machine: EngineMachine, operations: int, seed: int) -> None:
    """The same operations, chosen by a plain random generator: long walks reach deep states cheaply."""
    rng = random.Random(seed)
    print(f"seed {seed}")
    for _ in range(operations):
        machine.sound()
        roll = rng.random()
        if roll < 0.3:
            if not machine.plans or (machine.overlap and len(machine.plans) == 1 and rng.random() < 0.7):
                machine.make_plan()
                if rng.random() < 0.5:
                    machine.execute(rng.random() < 0.05, rng.randrange(100))
            else:
                machine.end_plan(rng.choice(["ok"] * 6 + ["fail", "row"]), rng.randrange(100))
        elif roll < 0.5 and not machine.plans:
            machine.run(rng.randrange(1, 4))
        elif roll < 0.8:
            shared, own = rng.choice([0, 3, 8, 17, 30, 40]), rng.choice([0, 1, 4, 11])
            salt = rng.choice(["", "", "", "s"])
            machine.add(rng.randrange(2), shared, own, rng.randrange(1, 30), salt, rng.random() < 0.1)
        elif roll < 0.88:
            machine.abort(rng.randrange(1000), rng.random() < 0.5)
        elif roll < 0.95:
            machine.unpark(rng.randrange(10))
        elif roll < 0.97:
            machine.evict(rng.random() < 0.2)
        else:
            machine.reseed(rng.randrange(2**32))
    machine.teardown()


def _walker(scheduler: str, kvcache: str, page_size: int, **traits: bool) -> type[EngineMachine]:
    chosen = {"scheduler": scheduler, "kvcache": kvcache, "page_size": page_size, **traits}
    return type("Walk", (EngineMachine,), chosen)


CONFIGURATIONS = [
    (scheduler, kvcache, page_size)
    for scheduler in ("chaos", "unified", "radix")
    for kvcache in ("paged", "radix")
    for page_size in (1, 4)
]


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("drafting", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize(("scheduler", "kvcache", "page_size"), CONFIGURATIONS)
def test_long_walk(scheduler: str, kvcache: str, page_size: int, drafting: bool, overlap: bool) -> None:
    machine = _walker(scheduler, kvcache, page_size, drafting=drafting, overlap=overlap)
    for seed in range(4):
        walk(machine(), 1000, seed)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("kvcache", ["paged", "radix"])
@pytest.mark.parametrize("scheduler", ["chaos", "unified", "radix"])
def test_cache_events_describe_the_cache(scheduler: str, kvcache: str, overlap: bool) -> None:
    """An index that follows the events equals the cache, whatever happens, losses included."""
    for seed, drafting in enumerate((False, True)):
        walk(_walker(scheduler, kvcache, 4, drafting=drafting, overlap=overlap, telling=True)(), 600, seed)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("drafting", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize(("scheduler", "kvcache", "page_size"), CONFIGURATIONS)
def test_very_long_walk(scheduler: str, kvcache: str, page_size: int, drafting: bool, overlap: bool) -> None:
    machine = _walker(scheduler, kvcache, page_size, drafting=drafting, overlap=overlap)
    for seed in range(100, 110):
        walk(machine(), 5000, seed)

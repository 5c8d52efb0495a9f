"""KV that comes from connectors and goes to them: never wrong text, no page lost, nobody waits for ever."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest

from engine.core import SamplingParams, State, Why, hookimpl
from engine.core.memory import KVLayout
from engine.core.plan import Transfer, TransferEvent
from engine.core.protocols import Connector
from engine.testing import ShadowExecutor, make_core

COMBINATIONS = list(itertools.product(("unified", "radix"), ("paged", "radix"), (False, True)))
every_combination = pytest.mark.parametrize(("scheduler", "kvcache", "overlap"), COMBINATIONS)
PROMPT = [at % 97 for at in range(30)]


class Shelf(Connector):
    """A store that does what the test says: pages by key in a dictionary, answers when told to.

    Attributes:
        pages: what it holds.
        delay: calls that a transfer stays open.
        verdict: a transfer -> the event that ends it, instead of the honest one.
    """

    name = "shelf"
    loads = saves = True

    def __init__(self, delay=0, patience=5.0):
        super().__init__()
        self.pages: dict[bytes, bytes] = {}
        self.delay = delay
        self.patience = patience
        self.verdict = lambda wish: None
        self.seen: list[Transfer] = []
        self.open: list[list] = []

    def register(self, layout: KVLayout):
        self.layout = layout

    @hookimpl
    def transfer_kv(self, transfers):
        self.seen += transfers
        self.open += [[self.delay, wish] for wish in transfers if wish.kind != "cancel"]
        events = []
        for item in list(self.open):
            item[0] -= 1
            if item[0] < 0:
                self.open.remove(item)
                events.append(self.verdict(item[1]) or self.honest(item[1]))
        return [event for event in events if event is not DEAF]

    def honest(self, wish):
        if wish.kind == "probe":
            have = next((at for at, key in enumerate(wish.keys) if key not in self.pages), len(wish.keys))
            return TransferEvent(wish.id, "found", tokens=have * 4)
        for key, page in zip(wish.keys, wish.pages, strict=True):
            if wish.kind == "push":
                self.pages[key] = self.layout.read(page).tobytes()
            elif key not in self.pages:
                bad = wish.pages[wish.keys.index(key) :]
                return TransferEvent(wish.id, "failed", failed_pages=bad, reason="gone")
            else:
                self.layout.write(page, np.frombuffer(self.pages[key], np.uint8))
        return TransferEvent(wish.id, "done")


DEAF = TransferEvent("", "done")


class Slow(ShadowExecutor):
    """Computes in a thread of its own, and late: what is only planned is not in memory yet."""

    overlaps = True

    def execute(self, plan):
        time.sleep(0.0005)
        return super().execute(plan)


def core_of(shelf, *, scheduler="unified", kvcache="paged", overlap=False, **kwargs):
    settings = {"num_pages": 40, "page_size": 4, "max_batch_tokens": 16, **kwargs}
    executor = Slow() if overlap else ShadowExecutor()
    return make_core(
        scheduler=scheduler, kvcache=kvcache, overlap=overlap, connectors=[shelf], executor=executor, **settings
    )


def run(core, limit=3000):
    for _ in range(limit):
        if not core.has_work:
            core.check()
            assert core.executor.mismatch is None
            assert core.pool.num_free + core.kv.numbers().evictable == core.pool.num_pages
            assert core.pool.num_fenced == 0
            return
        core.step()
    raise AssertionError(f"not finished: {core.requests}")


@every_combination
def test_what_one_engine_saved_another_need_not_compute(scheduler, kvcache, overlap):
    shelf = Shelf(delay=2)
    for kind in ((scheduler, kvcache), ("unified", "paged")):  # whoever wrote it, whoever reads it
        core = core_of(shelf, scheduler=kind[0], kvcache=kind[1], overlap=overlap)
        cold = core.add(PROMPT, SamplingParams(max_tokens=8))
        run(core)
        core.close()
    assert cold.cached_tokens == 28, "whole pages, and never the last token"
    assert core.counters.loaded_tokens == 28
    other = core_of(shelf, scheduler=scheduler, kvcache=kvcache, overlap=overlap)
    warm = other.add([*PROMPT, *cold.output, 5], SamplingParams(max_tokens=8))
    run(other)
    assert warm.cached_tokens == 36, "what was generated was saved at the end"
    assert (warm.num_output, warm.finish) == (8, "length")
    other.close()


@every_combination
@pytest.mark.parametrize("good", [0, 3, 6])
def test_b23_a_load_that_fails_is_cut_back_to_the_first_bad_page(scheduler, kvcache, overlap, good):
    shelf = Shelf()
    first = core_of(shelf)
    first.add(PROMPT, SamplingParams(max_tokens=2))
    run(first)

    def partly(wish):
        if wish.kind != "pull":
            return None
        shelf.honest(Transfer(wish.id, "pull", wish.request_id, wish.pages[:good], wish.keys[:good]))
        shelf.layout.regions[0][list(wish.pages[good:])] = 77  # half of it came, and it is rubbish
        return TransferEvent(wish.id, "failed", failed_pages=wish.pages[good:], reason="the line broke")

    shelf.verdict = partly
    core = core_of(shelf, scheduler=scheduler, kvcache=kvcache, overlap=overlap)
    one = core.add(PROMPT, SamplingParams(max_tokens=8))
    run(core)
    assert one.cached_tokens == good * 4
    assert core.counters.failed_loads == 1
    assert core.counters.loaded_tokens == good * 4
    core.close()


@every_combination
def test_b22_answers_that_come_late_twice_or_for_nobody_are_counted(scheduler, kvcache, overlap):
    shelf = Shelf()
    first = core_of(shelf)
    first.add(PROMPT, SamplingParams(max_tokens=2))
    run(first)
    shelf.delay = 4
    core = core_of(shelf, scheduler=scheduler, kvcache=kvcache, overlap=overlap)
    names = [core.add(PROMPT, SamplingParams(max_tokens=4), request_id=f"r{number}").id for number in range(4)]
    for steps, name in zip((1, 5, 7, 2), names, strict=True):  # during the look-up, the load, after it
        for _ in range(steps):
            core.step()
        core.abort(name)
        core.step()
        core.check()
    run(core)
    cancelled = {wish.of.partition("#")[0] for wish in shelf.seen if wish.kind == "cancel"}
    assert {"r0", "r1"} <= cancelled, "in the look-up and in the load"
    assert not [wish for wish in shelf.seen if wish.kind == "pull" and wish.request_id == "r0"]
    strays = core.counters.stray_events
    core.transfer(Transfer("t", "push", "nobody"))
    shelf.verdict = lambda wish: TransferEvent("unknown", "done") if wish.id == "t" else None
    for _ in range(8):
        core.step()
    assert core.counters.stray_events == strays + 1
    core.close()


def test_whoever_does_not_answer_is_waited_for_so_long_and_no_longer():
    now = [0.0]
    shelf = Shelf(patience=2.0)
    shelf.verdict = lambda wish: DEAF
    core = core_of(shelf, clock=lambda: now[0])
    request = core.add(PROMPT, SamplingParams(max_tokens=2))
    for _ in range(3):
        core.step()
    assert core.why(request.id) == (Why.PARKED, "kv")
    now[0] = 2.1
    core.step()
    assert request.state is State.RUNNING
    assert core.counters.late_loads == 1
    assert [wish.kind for wish in shelf.seen] == ["probe", "cancel"]


@every_combination
def test_b24_pages_of_a_load_that_nobody_waits_for_are_not_reused_before_it_ends(scheduler, kvcache, overlap):
    """The load is slow, its request is aborted, others need all of the pool; then the bytes land after all."""
    shelf = Shelf()
    first = core_of(shelf)
    first.add(PROMPT, SamplingParams(max_tokens=2))
    run(first)
    core = core_of(shelf, scheduler=scheduler, kvcache=kvcache, overlap=overlap, num_pages=20)
    slow = core.add(PROMPT, SamplingParams(max_tokens=2))
    core.step()
    shelf.delay = 60
    core.step()
    (pull,) = [wish for wish in shelf.seen if wish.kind == "pull"]
    core.abort(slow.id)
    shelf.verdict = lambda wish: shelf.honest(wish) if wish is pull else None
    others = [
        core.add([number] * 20, SamplingParams(max_tokens=12), read_cache=False, request_id=f"o{number}")
        for number in range(6)
    ]
    while not all(request.finished for request in others):
        core.step()
        core.check()
        held = {page for request in core.running for page in request.pages}
        if pull in [wish for _, wish in shelf.open]:
            assert not held & set(pull.pages)
    assert [request.num_output for request in others] == [12] * 6
    run(core)
    core.close()


@every_combination
def test_a_load_waits_for_pages_and_pins_nothing_meanwhile(scheduler, kvcache, overlap):
    """All pages are in use; half of the prefix is cached here. The audit would see a pin that nobody answers for."""
    shelf = Shelf()
    first = core_of(shelf)
    first.add(PROMPT, SamplingParams(max_tokens=2))
    run(first)
    core = core_of(shelf, scheduler=scheduler, kvcache=kvcache, overlap=overlap, num_pages=12)
    greedy = core.add([*PROMPT[:16], *[96] * 16], SamplingParams(max_tokens=14), request_id="greedy")
    for _ in range(9):
        core.step()
    late = core.add(PROMPT, SamplingParams(max_tokens=2), request_id="late")
    waited = 0
    while not greedy.finished:
        core.step()
        core.check()
        waited += core.why("late") == (Why.PARKED, "kv")
    assert waited > 2
    run(core)
    assert late.cached_tokens >= 16
    core.close()


@pytest.mark.parametrize("kvcache", ["paged", "radix"])
def test_a_load_is_not_told_of_before_the_steps_have_landed_that_may_write_to_its_pages(kvcache):
    shelf = Shelf()
    first = core_of(shelf)
    first.add(PROMPT, SamplingParams(max_tokens=2))
    run(first)
    core = core_of(shelf, kvcache=kvcache, overlap=True, num_pages=12)
    other = core.add([95] * 40, SamplingParams(max_tokens=4), read_cache=False)
    core.add(PROMPT, SamplingParams(max_tokens=1))
    plan = core.plan()  # writes to pages of the other's, which is aborted: they are the load's now
    core.abort(other.id)
    for _ in range(3):
        core.exchange.move()
    assert shelf.seen[-1].kind == "probe"
    core.commit(core.executor.execute(plan))
    core.exchange.move()
    assert shelf.seen[-1].kind == "pull"
    core.take_deltas()
    run(core)
    core.close()


def test_saving_is_given_up_rather_than_the_pool():
    shelf = Shelf(delay=10**6)
    core = core_of(shelf, num_pages=24, max_running=4)
    for number in range(12):
        core.add([number] * 20, SamplingParams(max_tokens=4), read_cache=False)
    while any(True for request in core.requests.values()):
        core.step()
    assert core.counters.unsaved_pages > 0
    assert core.counters.flat()["finished_length"] == 12
    assert core.pool.num_pages - core.pool.num_free - core.kv.numbers().evictable <= 6, "a quarter at most is fenced"


def test_an_executor_whose_memory_nobody_can_reach_is_refused():
    from engine.core import ConfigError
    from engine.testing import ScriptedModel

    with pytest.raises(ConfigError, match="connector 'shelf' moves KV, and nobody but executor 'scripted'"):
        make_core(connectors=[Shelf()], executor=ScriptedModel())


@every_combination
@pytest.mark.parametrize("seed", range(3))
def test_walks_over_a_bad_line(scheduler, kvcache, overlap, seed):
    """Requests that share prefixes, over a store that is slow, forgets, breaks off, lies about what it has."""
    rng = random.Random(seed)
    shelf = Shelf()

    def verdict(wish):
        if rng.random() < 0.1:
            for key in rng.sample(sorted(shelf.pages), min(3, len(shelf.pages))):
                del shelf.pages[key]
        if wish.kind == "probe" and rng.random() < 0.2:
            return TransferEvent(wish.id, "found", tokens=rng.randrange(10_000))
        if rng.random() < 0.2:
            good = rng.randrange(len(wish.pages) + 1)
            part = shelf.honest(Transfer(wish.id, wish.kind, wish.request_id, wish.pages[:good], wish.keys[:good]))
            failed = wish.pages[good:] if rng.random() < 0.8 else ()
            if part.kind == "failed":
                failed = wish.pages[wish.pages.index(part.failed_pages[0]) :]
            return TransferEvent(wish.id, "failed", failed_pages=failed, reason="a bad line")
        return None

    shelf.verdict = verdict
    loaded = 0
    for _ in range(5):
        core = core_of(shelf, scheduler=scheduler, kvcache=kvcache, overlap=overlap, num_pages=30, max_running=4)
        added = 0
        while added < 40 or core.has_work:
            shelf.delay = rng.randrange(6)
            if added < 40 and rng.random() < 0.3:
                added += 1
                tokens = [*PROMPT[: rng.randrange(1, 30)], *[rng.randrange(97)] * rng.randrange(4)]
                core.add(tokens, SamplingParams(max_tokens=rng.randrange(1, 12)), salt=rng.choice(("", "", "s")))
            if core.requests and rng.random() < 0.05:
                core.abort(rng.choice(sorted(core.requests)))
            core.step()
        run(core)
        loaded += core.counters.loaded_tokens
        core.close()
    assert loaded > 0
    assert core.executor.mismatch is None


@pytest.mark.parametrize("seconds", [0.001, 4.0])
def test_a_store_that_is_slower_than_the_model_is_tried_now_and_then_only(seconds):
    """The clock goes by what is done: a step takes 0.1 s, a load ``seconds``."""
    now = [0.0]
    shelf = Shelf(patience=60.0)
    core = core_of(shelf, clock=lambda: now[0], num_pages=60)

    def verdict(wish):
        now[0] += seconds if wish.kind == "pull" else 0.0

    shelf.verdict = verdict
    prompts = [[number, *PROMPT] for number in range(40)]
    for prompt in (*prompts, *prompts):
        core.add(prompt, SamplingParams(max_tokens=1))
        while core.has_work:
            core.step()
            now[0] += 0.1
        core.kv.reset()
    loads = sum(wish.kind == "pull" for wish in shelf.seen)
    slow = core.counters.slow_loads
    assert loads + slow == 40
    assert loads == (40 if seconds < 1 else 3), "the first one is how it is found out"


def test_of_a_prompt_that_is_more_than_a_sinks_share_its_beginning_is_handed_on():
    shelf = Shelf()
    shelf.saving_share = 0.1  # 4 of 40 pages
    core = core_of(shelf, max_batch_tokens=64)
    core.add(PROMPT, SamplingParams(max_tokens=1))
    run(core)
    pushed = [len(wish.pages) for wish in shelf.seen if wish.kind == "push"]
    assert pushed[0] == 4
    assert len(shelf.pages) >= 4
    assert core.counters.unsaved_pages >= 3
    core.close()


@pytest.mark.parametrize("kvcache", ["paged", "radix"])
def test_nothing_is_handed_on_before_it_is_computed(kvcache):
    """Chunks in flight are planned and not there: a store that reads at once would keep what was there before."""
    shelf = Shelf()
    core = core_of(shelf, kvcache=kvcache, overlap=True)
    for number in range(6):
        core.add([number, *PROMPT, *PROMPT], SamplingParams(max_tokens=2))
    ahead = 0
    while core.has_work:
        core.step()
        saved = {key: np.frombuffer(page, np.int64) for key, page in shelf.pages.items()}
        assert all(page.all() for page in saved.values()), "an unwritten slot was saved"
        ahead += any(request.planned > request.computed for request in core.running)
    assert ahead > 4
    core.close()


def test_pages_that_no_transfer_gives_back_are_waited_for_so_long_and_then_said():
    now = [0.0]
    shelf = Shelf()
    core = core_of(shelf, num_pages=10, clock=lambda: now[0])
    shelf.verdict = lambda wish: DEAF
    pages = core.pool.take(6)
    core.transfer(Transfer("for ever", "push", "nobody", tuple(pages)))
    core.pool.give(pages)
    late = core.add([8] * 30, SamplingParams(max_tokens=2), read_cache=False)
    for _ in range(20):
        core.step()
        now[0] += 1.0
    assert not late.finished, "a transfer may take its time"
    for _ in range(60):
        core.step()
        now[0] += 1.0
    assert late.finish == "error"
    assert "held back by transfers that have not ended in 60 seconds" in late.detail


def test_a_slow_answer_is_an_answer():
    """Being slow is a fault, and what was asked for was heard all the same: no page is given up for it."""

    class Sluggish(Shelf):
        @hookimpl
        def transfer_kv(self, transfers):
            if transfers:
                time.sleep(0.003)
            return super().transfer_kv(transfers)

    shelf = Sluggish(delay=2)
    core = core_of(shelf, ask_seconds={"transfer_kv": 0.002}, max_batch_tokens=64)
    core.add(PROMPT, SamplingParams(max_tokens=2))
    run(core)
    assert core.hooks.faults()[0].kinds["slow"] > 0
    assert core.counters.failed_saves == core.counters.failed_loads == core.counters.stray_events == 0
    assert len(shelf.pages) == 7
    core.close()


def test_what_a_connector_had_taken_on_ends_when_it_is_disabled():
    """There is another one, so that the engine is not deaf."""

    class Broken(Shelf):
        name = "broken"
        down = False

        @hookimpl
        def transfer_kv(self, transfers):
            if self.down:
                raise RuntimeError("down")
            return super().transfer_kv(transfers)

    broken, good = Broken(delay=10**9), Shelf()
    core = make_core(connectors=[broken, good], executor=ShadowExecutor(), num_pages=40, page_size=4)
    request = core.add(PROMPT, SamplingParams(max_tokens=2))
    core.step()
    broken.down = True
    for _ in range(500):
        core.step()
        if not core.has_work:
            break
    assert core.hooks.silent == {"broken"}
    assert not core.has_work
    assert request.finished
    assert len(good.pages) == 7
    core.check()
    core.close()


def test_b27_what_was_found_and_is_not_fetched_after_all_is_let_go_of():
    """The request ends when its load has been decided on and nobody was told of it yet."""
    shelf = Shelf()
    first = core_of(shelf)
    first.add(PROMPT, SamplingParams(max_tokens=2))
    run(first)
    shelf.holds, shelf.seen = True, []
    core = core_of(shelf)
    request = core.add(PROMPT, SamplingParams(max_tokens=2))
    while not core.exchange._loading:
        core.step()
    assert [wish.kind for wish in shelf.seen] == ["probe"], "the load is not told yet"
    core.abort(request.id)
    run(core)
    assert [(wish.kind, wish.of) for wish in shelf.seen[1:]] == [("cancel", shelf.seen[0].id)]
    core.close()

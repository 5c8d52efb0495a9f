"""Hand-off between whole engines: never wrong text, no page lost, nobody waits for ever."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from handoff_kit import COMBINATIONS, PREFILL, PROMPT, close, engine, prefill, settle, wait_for

from engine.core import Connector, SamplingParams, TransferEvent, Why, hookimpl
from engine.core.registry import make
from engine.testing import ShadowExecutor, make_core

every_combination = pytest.mark.parametrize(("scheduler", "kvcache", "overlap"), COMBINATIONS)


@pytest.mark.parametrize("other", range(2), ids=["same kind", "another kind"])
@every_combination
def test_what_one_engine_computed_another_goes_on_with(mover, scheduler, kvcache, overlap, other):
    first = engine(mover, scheduler, kvcache, overlap)
    kind = COMBINATIONS[COMBINATIONS.index((scheduler, kvcache, overlap)) - 3 * other]
    second = engine(mover, *kind)
    told = second.describe()["connectors"][second.store.name]
    assert (told["address"], told["mover"]) == (second.store.address, mover.replace("direct", "pulled"))
    prefill(first)
    assert first.stats()[f"connector_{first.store.name}_leased_pages"] == 7
    request = second.add(PROMPT, SamplingParams(max_tokens=8), metadata={"kv_from": first.store.address})
    settle(first, second)
    assert request.cached_tokens == 28, "whole pages, and never the last token"
    assert second.counters.loaded_tokens == 28
    assert (request.num_output, request.finish) == (8, "length")
    assert first.store.stats()["leases_released"] == 1
    close(first, second)


@every_combination
def test_long_prompts_are_handed_on_chunk_by_chunk_while_they_are_computed(mover, scheduler, kvcache, overlap):
    """The one that decodes asks before the other is done: it waits a moment."""
    first, second = (
        engine(mover, scheduler, kvcache, overlap),
        engine(mover, scheduler, kvcache, overlap, options={"linger": 1.0}),
    )
    tokens = list(range(70))
    first.add(tokens, SamplingParams(max_tokens=1), metadata=PREFILL)
    first.step()
    request = second.add(tokens, SamplingParams(max_tokens=4), metadata={"kv_from": first.store.address})
    settle(first, second)
    assert request.cached_tokens == 68
    close(first, second)


def test_b27_receivers_that_never_come_cost_a_lease_and_no_page():
    core = engine(num_pages=64, options={"lease_seconds": 0.3})
    for number in range(60):
        prefill(core, [number] * 20)
    assert core.counters.unsaved_pages > 0, "leases are refused rather than the pool"
    assert core.store.stats()["leased_pages"] <= 32
    assert core.counters.flat()["finished_length"] == 60
    start = time.monotonic()
    settle(core)
    assert time.monotonic() - start < 0.8
    assert core.store.stats()["leases_expired"] > 0
    prefill(core, PROMPT)
    assert core.store.stats()["leased_pages"] == 7, "and on it goes"
    close(core)


def test_b27_who_needs_nothing_lets_go_at_once(mover):
    """The receiver has the prefix already, or its request is gone: the lease ends without a read."""
    first, second = engine(mover), engine(mover)
    hints = {"kv_from": first.store.address}
    second.add(PROMPT, SamplingParams(max_tokens=2))
    settle(second)
    start = time.monotonic()
    prefill(first)
    second.add(PROMPT, SamplingParams(max_tokens=2), metadata=hints)
    settle(first, second)
    prefill(first, [5] * 30)
    second.add([5] * 30, SamplingParams(max_tokens=2), request_id="gone", metadata=hints)
    second.step()
    wait_for(lambda: "gone" in second.store._claims)
    second.abort("gone")
    settle(first, second)
    assert time.monotonic() - start < 5
    assert first.store.stats()["leases_released"] == 2
    assert first.store.stats()["pages_given"] == 0
    close(first, second)


@every_combination
def test_a_request_that_needs_the_leased_pages_waits_for_them(scheduler, kvcache, overlap):
    core = engine("streamed", scheduler, kvcache, overlap, num_pages=16, options={"lease_seconds": 0.3})
    prefill(core)
    request = core.add([5] * 50, SamplingParams(max_tokens=4))
    settle(core)
    assert (request.finish, request.num_output) == ("length", 4)
    close(core)


def test_each_sink_has_a_share_of_the_pool():
    """Leases take all of theirs; the host tier goes on saving."""
    host = make("connector", "host", {})
    store = make("connector", "local", {"lease_seconds": 0.5})
    core = make_core(connectors=[store, host], executor=ShadowExecutor(), num_pages=64, page_size=4)
    for number in range(30):
        request = core.add([number] * 20, SamplingParams(max_tokens=1), metadata=PREFILL)
        while not request.finished:
            core.step()
        wait_for(lambda saved=5 * (number + 1): host.kept >= saved, doing=core.step)
    assert store.stats()["leased_pages"] <= 32
    assert core.counters.unsaved_pages > 0
    settle(core)
    core.close()


def test_hints_are_what_the_metadata_says_to_connectors():
    seen: list = []

    class Onlooker(Connector):
        name = "onlooker"
        loads = saves = True

        @hookimpl
        def transfer_kv(self, transfers):
            seen.extend(transfers)
            return [TransferEvent(wish.id, "found" if wish.kind == "probe" else "done") for wish in transfers]

    core = make_core(connectors=[Onlooker()], executor=ShadowExecutor())
    core.add(PROMPT, SamplingParams(max_tokens=2), metadata={"kv_from": "a:1", "kv_x": 1, "tenant": "a"})
    settle(core)
    assert [(wish.kind, dict(wish.hints)) for wish in seen] == [
        (kind, {"kv_from": "a:1", "kv_x": 1}) for kind in ("probe", "push")
    ]
    core.close()


def test_weights_that_change_while_pages_are_leased():
    """Old pages are served under old keys to nobody: who has other weights is refused."""
    from engine.core import EngineConfig, assemble

    def one():
        config = EngineConfig(executor="sim", connectors=["local"], page_size=4, num_pages=64)
        core = assemble(config)
        core.store = next(iter(core.exchange._sources))
        return core

    first, second = one(), one()
    prefill(first)
    first.update_weights({"w": 1}, version="two")
    hints = {"kv_from": first.store.address}
    request = second.add(PROMPT, SamplingParams(max_tokens=2), metadata=hints)
    while second.has_work:
        second.step()
    assert request.cached_tokens == 0
    assert second.counters.failed_loads == 1
    second.update_weights({"w": 1}, version="two")
    prefill(first)
    request = second.add(PROMPT, SamplingParams(max_tokens=2), metadata=hints)
    while second.has_work:
        second.step()
        first.step()
    assert request.cached_tokens == 28
    close(first, second)


ENGINE = """
    import sys, time
    from engine.core import SamplingParams
    from engine.core.registry import make
    from engine.testing import ShadowExecutor, make_core
    store = make("connector", "local", {"port": int(sys.argv[1])})
    core = make_core(connectors=[store], executor=ShadowExecutor(), num_pages=400, page_size=4)
    core.add([at % 97 for at in range(30)], SamplingParams(max_tokens=1), metadata={"kv_role": "prefill"})
    for _ in range(6):
        core.step()
    print(store.address, flush=True)
    while True:
        core.step()
        time.sleep(0.001)
"""


@pytest.mark.parametrize("fate", ["well", "killed", "stopped"])
def test_b27_the_engine_that_computed_is_another_process(fate):
    """Dead: said at once. Stopped: waited for half the patience. Either way the request goes on, computed here."""
    command = [sys.executable, "-c", textwrap.dedent(ENGINE), "0"]
    core = engine(options={"patience": 2.0})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if fate != "well":
                os.kill(process.pid, signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
            if fate == "killed":
                process.wait()
            start = time.monotonic()
            request = core.add(PROMPT, SamplingParams(max_tokens=8), metadata={"kv_from": address})
            settle(core)
            took = time.monotonic() - start
        finally:
            process.kill()
    assert (request.num_output, request.finish) == (8, "length")
    assert request.cached_tokens == (28 if fate == "well" else 0)
    assert took < {"well": 1.5, "killed": 0.9, "stopped": 1.9}[fate]
    assert core.counters.failed_loads == (fate != "well")
    close(core)


@every_combination
def test_what_the_peer_is_said_to_compute_now_comes_over_while_it_does(mover, scheduler, kvcache, overlap):
    """SGLang's way: the pages are taken before there is anything to put in them."""
    kind = (mover, scheduler, kvcache, overlap)
    first, second = engine(*kind), engine(*kind)
    tokens = list(range(70))
    hints = {"kv_from": first.store.address, "kv_expect": "true"}
    request = second.add(tokens, SamplingParams(max_tokens=4), metadata=hints)
    for _ in range(3):
        second.step()
    assert [len(one.pages) for one in second.exchange.stand_ins()] == [17]
    assert second.why(request.id) == (Why.PARKED, "kv")
    other = first.add(tokens, SamplingParams(max_tokens=1), metadata=PREFILL)
    for _ in range(3):
        first.step()
    wait_for(lambda: second.store.stats()["pages_taken"] >= 4, doing=second.step)
    assert not other.finished
    settle(first, second)
    assert request.cached_tokens == second.counters.loaded_tokens == 68
    assert second.counters.failed_loads == 0
    assert first.store.stats()["leases_released"] == 1
    close(first, second)


@pytest.mark.parametrize("promise", ["nobody computes it", "nobody is there", "half of it"])
def test_a_promise_that_is_not_kept_costs_time_and_no_text(promise):
    first, second = engine(), engine(options={"patience": 2.0})
    if promise == "half of it":
        prefill(first, PROMPT[:16])
    address = "127.0.0.1:1" if promise == "nobody is there" else first.store.address
    hints = {"kv_from": address, "kv_expect": True}
    request = second.add(PROMPT, SamplingParams(max_tokens=8), metadata=hints)
    settle(second)
    assert (request.num_output, request.finish) == (8, "length")
    assert request.cached_tokens == (16 if promise == "half of it" else 0)
    assert (second.counters.failed_loads, second.counters.late_loads) == (1, 0)
    settle(first)
    close(first, second)


def misbehaving(rng):
    """Motions fail, are slow, or end long after they were given up."""

    def script(motion):
        fate = rng.random()
        if fate < 0.15:
            motion.failing = rng.randrange(len(motion.pieces))
        elif fate < 0.3:
            motion.held = threading.Event()
            timer = threading.Timer(rng.random() * 0.5, motion.held.set)
            timer.daemon = True
            timer.start()
            late.append((timer, motion))

    late: list = []
    return script, late


@every_combination
@pytest.mark.parametrize("mover", ["pulled", "direct", "pushed"])
def test_b22_b23_walks_over_a_bad_library(mover, scheduler, kvcache, overlap, caplog):
    """It fails, is slow, writes late; requests are aborted on both sides: nobody reads a wrong page."""
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(7)
    kind, settings = (mover, scheduler, kvcache, overlap), {"patience": 0.5, "staging": "512B"}
    first = engine(*kind, options={"lease_seconds": 0.4, **settings}, num_pages=60)
    second = engine(*kind, options={"linger": 0.05, **settings}, num_pages=30)
    late = []
    for core in (first, second):
        core.store.copy.script, own = misbehaving(rng)
        late.append(own)
    added = 0
    while added < 15 or first.has_work or second.has_work:
        if added < 15 and rng.random() < 0.05:
            added += 1
            tokens = [*PROMPT[: rng.randrange(9, 30)], *[rng.randrange(97)] * rng.randrange(4)]
            hints = {"kv_from": first.store.address, "kv_expect": rng.random() < 0.3}
            first.add(tokens, SamplingParams(max_tokens=1), metadata=PREFILL)
            second.add(tokens, SamplingParams(max_tokens=rng.randrange(1, 9)), metadata=hints)
        for core in (first, second):
            if core.requests and rng.random() < 0.01:
                core.abort(rng.choice(sorted(core.requests)))
            core.step()
        for timer, motion in (*late[0], *late[1]):
            if motion.transport.late_writes and not timer.is_alive():
                motion.land()  # also where nobody looks any more
    settle(first, second)
    assert second.counters.loaded_tokens + second.counters.failed_loads + second.counters.late_loads > 0
    for timer, _ in (*late[0], *late[1]):
        timer.join()
    close(first, second)


@every_combination
@pytest.mark.parametrize("mover", ["pulled", "direct", "pushed"])
def test_b22_b24_a_request_that_is_aborted_while_its_bytes_move(mover, scheduler, kvcache, overlap):
    """Others need the whole pool meanwhile, and have it at once; the lease ends, too. Then the bytes land."""
    kind = (mover, scheduler, kvcache, overlap)
    first, second = engine(*kind), engine(*kind, num_pages=20)
    prefill(first)
    copy = (first if mover == "pushed" else second).store.copy
    let = threading.Event()
    copy.script = lambda motion: setattr(motion, "held", let)
    slow = second.add(PROMPT, SamplingParams(max_tokens=2), metadata={"kv_from": first.store.address})
    wait_for(lambda: copy.motions, doing=second.step)
    second.abort(slow.id)
    wait_for(lambda: not list(second.exchange.stand_ins()), doing=second.step)
    others = [second.add([number] * 20, SamplingParams(max_tokens=12), read_cache=False) for number in range(6)]
    for at in range(10_000):
        if all(request.finished for request in others):
            break
        second.step()
        second.check()
        if at == 20 and mover != "direct":
            copy.motions[0].land()
    let.set()
    settle(first, second)
    assert [request.num_output for request in others] == [12] * 6
    assert first.store.stats()["leases_released"] == 1
    close(first, second)


# ---- an engine behind its loop


def test_an_engine_that_only_leases_rests_and_new_weights_do_not_wait_for_it():
    from engine.core import EngineConfig
    from engine.core.serve.client import AsyncEngine

    async def say(engine, **fields):
        return [chunk async for chunk in engine.generate(PROMPT, SamplingParams(max_tokens=1), **fields)]

    async def main():
        local = {"name": "local", "lease_seconds": 60}
        config = EngineConfig(executor="sim", connectors=[local], page_size=4, num_pages=64)
        async with await AsyncEngine.start(config, in_process=True) as engine:
            await say(engine, metadata=PREFILL)
            before = await engine.stats()
            start = time.monotonic()
            await asyncio.sleep(0.5)
            after = await engine.stats()
            assert after["connector_local_leased_pages"] == 7
            assert after["steps"] - before["steps"] <= (time.monotonic() - start) / 0.02 + 5
            assert await say(engine), "it wakes"
            await asyncio.wait_for(engine.update_weights({"w": 1}, running="finish", version="two"), 30)
            while (await engine.stats())["connector_local_leased_pages"]:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 50))


def test_new_weights_of_an_llm_do_not_wait_for_leases():
    from engine import LLM

    local = {"name": "local", "lease_seconds": 3600}
    with LLM(executor="sim", connectors=[local], page_size=4, num_pages=64) as llm:
        prefill(llm.core)
        llm.update_weights({"w": 1}, running="finish", version="two")
        while llm.core.has_work:
            llm.core.step()
        assert llm.core.stats()["connector_local_leases_released"] == 1


def test_how_long_an_engine_may_rest():
    core = engine(options={"lease_seconds": 0.3})
    assert (core.settled, core.has_work) == (True, False)
    prefill(core)
    core.step()
    assert (core.settled, core.has_work, core.rest) == (True, True, 0.02)
    core.add([5] * 20, SamplingParams(max_tokens=1), metadata={"kv_from": core.store.address, "kv_expect": True})
    assert (core.settled, core.rest) == (False, 0.001)
    settle(core)
    assert (core.settled, core.has_work) == (True, False)
    close(core)

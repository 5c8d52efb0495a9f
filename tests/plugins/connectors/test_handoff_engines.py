"""Hand-off between whole engines: never wrong text, no page lost, nobody waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from handoff_kit import COMBINATIONS, PREFILL, PROMPT, close, engine, prefill, settle, wait_for

from engine.core import Connector, SamplingParams, TransferEvent, hookimpl
from engine.core.registry import make
from engine.testing import ShadowExecutor, make_core

every_combination = pytest.mark.parametrize(("scheduler", "kvcache", "overlap"), COMBINATIONS)


@pytest.mark.parametrize("other", range(2), ids=["same kind", "another kind"])
@every_combination
def test_what_one_engine_computed_another_goes_on_with(scheduler, kvcache, overlap, other):
    first = engine(scheduler, kvcache, overlap)
    kind = COMBINATIONS[COMBINATIONS.index((scheduler, kvcache, overlap)) - 3 * other]
    second = engine(*kind)
    assert second.describe()["connectors"]["local"]["address"] == second.store.address
    prefill(first)
    assert first.stats()["connector_local_leased_pages"] == 7
    request = second.add(PROMPT, SamplingParams(max_tokens=8), metadata={"kv_from": first.store.address})
    settle(first, second)
    assert request.cached_tokens == 28, "whole pages, and never the last token"
    assert second.counters.loaded_tokens == 28
    assert (request.num_output, request.finish) == (8, "length")
    assert first.store.stats()["leases_released"] == 1
    close(first, second)


@every_combination
def test_long_prompts_are_handed_on_chunk_by_chunk_while_they_are_computed(scheduler, kvcache, overlap):
    """The one that decodes asks before the other is done: it waits a moment."""
    first, second = engine(scheduler, kvcache, overlap), engine(scheduler, kvcache, overlap, options={"linger": 1.0})
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


def test_b27_who_needs_nothing_lets_go_at_once():
    """The receiver has the prefix already, or its request is gone: the lease ends without a read."""
    first, second = engine(), engine()
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
    core = engine(scheduler, kvcache, overlap, num_pages=16, options={"lease_seconds": 0.3})
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

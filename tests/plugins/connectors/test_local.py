"""Hand-off from engine to engine: what arrives is what was computed, and no fault of a peer holds anybody up."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from engine.core import ConfigError, Connector, ModelInfo, SamplingParams, TransferEvent, hookimpl
from engine.core.memory import KVLayout
from engine.core.plan import Transfer
from engine.core.registry import make
from engine.testing import ConnectorSuite, ShadowExecutor, make_core

COMBINATIONS = list(itertools.product(("unified", "radix"), ("paged", "radix"), (False, True)))
every_combination = pytest.mark.parametrize(("scheduler", "kvcache", "overlap"), COMBINATIONS)
PROMPT = [at % 97 for at in range(30)]
PREFILL = {"kv_role": "prefill"}


class TestLocalThatLeasesAll(ConnectorSuite):
    plugin = "local"
    options = {"lease": "all", "lease_seconds": 0.1}
    remembers = False


# ---- a connector alone, over memory whose bytes are known


def memory(pages=12, sizes=(48, 16), digest="a" * 32, seed=0) -> KVLayout:
    rng = np.random.default_rng(seed)
    return KVLayout(tuple(rng.integers(0, 256, (pages, size), dtype=np.uint8) for size in sizes), digest)


def where(page_size=4, fingerprint="f"):
    model = ModelInfo(name="m", vocab_size=9, max_model_len=9, fingerprint=fingerprint)
    return SimpleNamespace(limits=SimpleNamespace(page_size=page_size), model=model)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture
def opened():
    """Opens connectors, and closes them in the end: no thread and no file descriptor is left."""
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    stores = []

    def open_one(layout, *, page_size=4, fingerprint="f", **options):
        store = make("connector", "local", options)
        stores.append(store)
        store.start(where(page_size, fingerprint))
        store.register(layout)
        return store

    yield open_one
    for store in stores:
        store.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("engine-local")]
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


def wait_for(what, seconds=15.0, doing=lambda: None):
    until = time.monotonic() + seconds
    while not (answer := what()):
        assert time.monotonic() < until, "it takes too long"
        doing()
        time.sleep(0.001)
    return answer


def answer_of(store, name="t"):
    """The event that ends a transfer."""
    return wait_for(lambda: next((e for e in store.transfer_kv([]) if e.transfer_id == name), None))


def ask(store, kind, keys=(), pages=(), name="t", request="r", **hints):
    """One transfer, and the event that ends it."""
    keys = tuple(keys)
    events = store.transfer_kv([Transfer(name, kind, request, tuple(pages), keys, hints=hints)])
    return events[0] if events else answer_of(store, name)


def lease(store, keys, pages, name="p", request="r"):
    assert list(store.transfer_kv([Transfer(name, "push", request, tuple(pages), tuple(keys), hints=PREFILL)])) == []


@pytest.mark.parametrize("sizes", [(48, 16), (4096,), (), (64,) * 700], ids=["two", "one", "none", "many"])
def test_bytes_come_as_they_are_and_nothing_else_is_written(sizes, opened):
    source, target = memory(sizes=sizes), memory(sizes=sizes, seed=1)
    before = [target.read(page) for page in range(12)]
    sender, receiver = opened(source), opened(target)
    lease(sender, map(key, range(5)), [7, 3, 9, 0, 11])
    assert ask(receiver, "probe", map(key, range(8)), kv_from=sender.address).tokens == 5 * 4
    assert ask(receiver, "pull", map(key, range(1, 5)), [2, 10, 4, 5], kv_from=sender.address).kind == "done"
    for page, there in ((2, 3), (10, 9), (4, 0), (5, 11)):
        assert (target.read(page) == source.read(there)).all()
    for page in set(range(12)) - {2, 10, 4, 5}:
        assert (target.read(page) == before[page]).all()
    assert answer_of(sender, "p").kind == "done", "released by the receiver"
    assert sender.stats()["leases_released"] == 1
    assert sender.stats()["leased_pages"] == 0


def test_more_than_2048_scattered_pages(opened):
    source, target = memory(5000, (300, 100)), memory(5000, (300, 100), seed=1)
    rng = random.Random(0)
    theirs, ours = rng.sample(range(5000), 4500), rng.sample(range(5000), 4500)
    sender, receiver = opened(source), opened(target)
    lease(sender, map(key, range(4500)), theirs)
    assert ask(receiver, "probe", map(key, range(4500)), kv_from=sender.address).tokens == 4500 * 4
    assert ask(receiver, "pull", map(key, range(4500)), ours, kv_from=sender.address).kind == "done"
    assert all((target.read(a) == source.read(b)).all() for a, b in zip(ours, theirs, strict=True))


def test_b23_what_is_not_leased_fails_from_there_on(opened):
    sender, receiver = opened(memory()), opened(memory(seed=1))
    lease(sender, map(key, (0, 1, 3)), [0, 1, 3])
    event = ask(receiver, "pull", map(key, range(4)), [6, 7, 8, 9], kv_from=sender.address)
    assert (event.kind, event.failed_pages) == ("failed", (8, 9))
    assert event.reason == f"peer {sender.address}: the peer has 2 of 4 pages"
    event = ask(receiver, "pull", [key(9)], [6], kv_from=sender.address)
    assert (event.failed_pages, "lease had ended" in event.reason) == ((6,), True)
    assert ask(receiver, "probe", [key(9)], kv_from=sender.address).tokens == 0
    assert ask(receiver, "pull", [key(0)], [1, 2], kv_from=sender.address).reason == "1 keys for 2 pages"
    assert ask(receiver, "pull", [b"short"], [1], kv_from=sender.address).reason == "keys have 32 bytes"


def test_pages_out_of_range_fail_and_nothing_is_written(opened, caplog):
    """A mistake of the core's, on either side; the connector goes on working."""
    target = memory(seed=1)
    sender, receiver = opened(memory()), opened(target)
    before = target.regions[0].copy()
    for number, (theirs, ours) in enumerate(((0, 99), (99, 0))):
        lease(sender, [key(number)], [theirs], name=f"p{number}", request=f"p{number}")
        event = ask(receiver, "pull", [key(number)], [ours], kv_from=sender.address)
        assert (event.kind, event.failed_pages) == ("failed", (ours,))
    assert (target.regions[0] == before).all()
    assert "IndexError" in caplog.text
    lease(sender, [key(7)], [7], name="p7", request="p7")
    wait_for(lambda: ask(receiver, "pull", [key(7)], [0], kv_from=sender.address).kind == "done")


DIFFERENT = {
    "page size": ({"page_size": 8}, {}, "page size is 8 at .* and 4 at"),
    "page bytes": ({}, {"sizes": (48, 32)}, "page bytes is 80 at .* and 64 at"),
    "layout": ({}, {"digest": "b" * 32}, "layout is 'b+' at .* and 'a+' at"),
    "model": ({"fingerprint": "g"}, {}, "fingerprint is 'g' at .* and 'f' at"),
    "token": ({"token": "wrong"}, {}, "the token is another one"),
    "no token": ({"token": ""}, {}, "the token is another one"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_b28_who_does_not_fit_is_refused_in_words(what, opened, caplog):
    options, shape, words = DIFFERENT[what]
    sender = opened(memory(), token="secret", engine="upstairs")
    lease(sender, [key(0)], [0])
    receiver = opened(memory(**shape), **{"token": "secret", "engine": "downstairs", **options})
    event = ask(receiver, "probe", [key(0)], kv_from=sender.address)
    assert event.kind == "failed"
    assert re.search(words, event.reason), event.reason
    again = ask(receiver, "probe", [key(0)], kv_from=sender.address)
    assert "asked again in" in again.reason, "not connected to for every request"
    assert sender.stats()["peers_refused"] == 1
    assert "secret" not in caplog.text
    other = opened(memory(seed=1), token="secret")
    assert ask(other, "probe", [key(0)], kv_from=sender.address).tokens == 4


def test_whoever_does_not_know_the_token_is_refused_as_a_sender_too(opened):
    sender, receiver = opened(memory()), opened(memory(), token="secret")
    assert "it does not know the token" in ask(receiver, "probe", [key(0)], kv_from=sender.address).reason


BAD = [("nowhere", "host:port is expected"), (7, "host:port"), ("192.0.2.1:80", "not among the peers"), (":x", "host:")]


@pytest.mark.parametrize(("address", "words"), BAD)
def test_only_peers_are_asked(address, words, opened):
    event = ask(opened(memory()), "probe", [key(0)], kv_from=address)
    assert (event.kind, words in event.reason) == ("failed", True)


def test_without_hints_nothing_is_asked_and_nothing_is_leased(opened):
    store = opened(memory())
    assert ask(store, "probe", [key(0)]).tokens == 0
    assert ask(store, "push", [key(0)], [0]).kind == "done"
    assert ask(store, "pull", [key(0)], [0]).kind == "failed"
    assert store.stats()["leases"] == 0
    everybody = opened(memory(), lease="all")
    lease(everybody, [key(0)], [0])
    assert everybody.stats()["leases"] == 1


def test_a_port_that_is_taken_is_a_config_error(opened):
    taken = opened(memory()).address.rpartition(":")[2]
    with pytest.raises(ConfigError, match=f"connector local: cannot listen on 127.0.0.1:{taken}: Address already"):
        opened(memory(), port=int(taken))
    assert opened(memory(), role="decode").address == ""


@pytest.mark.parametrize("how", ["expires", "renewed", "released twice", "claimed by two"])
def test_b27_a_lease_ends_once_and_in_time(how, opened):
    from engine.plugins.connectors import _handoff_questions as wire
    from engine.plugins.connectors._handoff_peers import Peers

    sender = opened(memory(), lease_seconds=1.0)
    start = time.monotonic()
    lease(sender, [key(0), key(1)], [0, 1])
    lease(sender, [key(2)], [2], name="q")
    peers = Peers(sender._identity(), "", 2.0)
    line, peer = peers.take(sender.address, lambda line: None)
    assert peer.incarnation == sender.incarnation
    claim, count = wire.find(line, [key(0), key(1), key(2)], 0)
    assert count == 3
    if how == "renewed":
        for _ in range(6):
            time.sleep(0.25)
            assert wire.renew(line, claim)
            assert list(sender.transfer_kv([])) == []
        start = time.monotonic()
    elif how == "released twice":
        assert wire.release(line, claim)
        assert not wire.release(line, claim)
    elif how == "claimed by two":
        other, _ = wire.find(line, [key(0)], 0)
        assert wire.release(line, claim)
        assert list(sender.transfer_kv([])) == [], "one of them still wants it"
        assert wire.release(line, other)
    told: list = []
    wait_for(lambda: len(told) >= 2, doing=lambda: told.extend(sender.transfer_kv([])))
    assert sorted(event.transfer_id for event in told) == ["p", "q"]
    assert time.monotonic() - start < (2.0 if how in ("expires", "renewed") else 0.9)
    assert not wire.renew(line, claim)
    line.close()


def test_a_look_up_waits_a_moment_for_what_is_being_computed(opened):
    sender, receiver = opened(memory()), opened(memory(), linger=1.0)
    receiver.transfer_kv([Transfer("t", "probe", "r", (), (key(0), key(1)), hints={"kv_from": sender.address})])
    time.sleep(0.1)
    lease(sender, [key(0)], [0])
    time.sleep(0.1)
    assert list(receiver.transfer_kv([])) == []
    lease(sender, [key(1)], [1], name="q")
    assert answer_of(receiver).tokens == 8


def test_four_receivers_and_four_senders_at_once(opened):
    """Each receiver fetches from each sender, all at the same time."""
    shape = {"pages": 600, "sizes": (1024, 3000)}
    sources = [memory(seed=seed, **shape) for seed in range(4)]
    senders = [opened(source) for source in sources]
    for number, sender in enumerate(senders):
        for request in "abcd":  # a hand-off is for one receiver
            keys = map(key, range(number * 1000, number * 1000 + 120))
            lease(sender, keys, range(120), name=request, request=request)
    targets = [memory(seed=9, **shape) for _ in range(4)]
    receivers = [opened(target) for target in targets]
    errors: list = []

    def fetch(receiver, target):
        try:
            for number, sender in enumerate(senders):
                keys = tuple(map(key, range(number * 1000, number * 1000 + 120)))
                pages = tuple(range(number * 130, number * 130 + 120))
                hints = {"kv_from": sender.address}
                receiver.transfer_kv([Transfer(f"t{number}", "pull", f"r{number}", pages, keys, hints=hints)])
            left = {f"t{number}" for number in range(4)}
            until = time.monotonic() + 20
            while left and time.monotonic() < until:
                for event in receiver.transfer_kv([]):
                    assert event.kind == "done", event
                    left.discard(event.transfer_id)
                time.sleep(0.001)
            assert not left
            for number, source in enumerate(sources):
                for page in range(120):
                    assert (target.read(number * 130 + page) == source.read(page)).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=fetch, args=pair) for pair in zip(receivers, targets, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_reader_that_stalls_does_not_keep_a_lease_for_ever(opened):
    """It asks for more than the kernel buffers, and takes nothing."""
    from engine.plugins.connectors import _handoff_questions as wire
    from engine.plugins.connectors._handoff_peers import Peers
    from engine.plugins.connectors._handoff_wire import READ, Kind

    sender = opened(memory(1000, (65536,)), lease_seconds=0.3, patience=1.0)
    lease(sender, map(key, range(1000)), range(1000))
    line, _ = Peers(sender._identity(), "", 5.0).take(sender.address, lambda line: None)
    claim, count = wire.find(line, [key(number) for number in range(1000)], 0)
    assert count == 1000
    start = time.monotonic()
    line.send(Kind.READ, READ.pack(claim, True) + b"".join(map(key, range(1000))))
    time.sleep(0.4)
    assert list(sender.transfer_kv([])) == [], "its time is up, but somebody reads"
    assert answer_of(sender, "p").kind == "done"
    assert time.monotonic() - start < 1.5
    line.close()


# ---- two processes, one of which is stopped, killed, started again

CHILD = """
    import json, os, signal, sys, time
    from types import SimpleNamespace
    import numpy as np
    from engine.core import ModelInfo
    from engine.core.memory import KVLayout
    from engine.core.plan import Transfer
    from engine.core.registry import make

    asked = json.loads(sys.argv[1])
    content = np.random.default_rng(5).integers(0, 256, (asked["pages"], 65536), dtype=np.uint8)
    store = make("connector", "local", {"port": asked["port"], "lease_seconds": 30})
    model = ModelInfo(name="m", vocab_size=9, max_model_len=9, fingerprint="f")
    store.start(SimpleNamespace(limits=SimpleNamespace(page_size=4), model=model))
    store.register(KVLayout((content,), "a" * 32))
    keys = tuple(n.to_bytes(32, "big") for n in range(asked["pages"]))
    store.transfer_kv([Transfer("t", "push", "r", tuple(range(asked["pages"])), keys, hints={"kv_role": "prefill"})])
    print(store.address, flush=True)
    while True:
        store.transfer_kv([])
        if asked["signal"] and store.stats()["pages_given"] >= asked["after"]:
            os.kill(os.getpid(), asked.pop("signal"))
            asked["signal"] = 0
        time.sleep(0.0002)
"""
PAGES = 1500  # of 64 KiB: far more than the kernel buffers


@pytest.fixture
def sender_process():
    """Starts a process that leases ``PAGES`` pages, and sends itself a signal after so many have been read."""
    with contextlib.ExitStack() as stack:

        def begin(number=0, after=0, port=0, pages=PAGES):
            asked = json.dumps({"pages": pages, "port": port, "signal": int(number), "after": after})
            command = [sys.executable, "-c", textwrap.dedent(CHILD), asked]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            return process, process.stdout.readline().strip()

        yield begin


def content(pages=PAGES):
    return np.random.default_rng(5).integers(0, 256, (pages, 65536), dtype=np.uint8)


def good_pages(event, upto=PAGES):
    """Pages before the first failed one."""
    return event.failed_pages[0] if event.failed_pages else upto


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "given up by itself"])
def test_b24_a_sender_that_is_stopped_and_goes_on_writes_nothing_late(cancelled, opened, sender_process):
    process, address = sender_process(signal.SIGSTOP, after=200)
    target = memory(PAGES, (65536,))
    receiver = opened(target, patience=30.0 if cancelled else 2.0)
    keys, pages = tuple(map(key, range(PAGES))), tuple(range(PAGES))
    receiver.transfer_kv([Transfer("t", "pull", "r", pages, keys, hints={"kv_from": address})])
    start = time.monotonic()
    if cancelled:
        wait_for(lambda: receiver.stats()["pages_taken"] >= 100)
        time.sleep(0.3)
        start = time.monotonic()
        receiver.transfer_kv([Transfer("cancel t", "cancel", "r", of="t")])
    event = answer_of(receiver)
    assert time.monotonic() - start < (1.0 if cancelled else 2.0)
    assert event.kind == "failed"
    assert ("cancelled" if cancelled else "nothing moved for 1 seconds") in event.reason
    good = good_pages(event)
    assert 100 <= good < PAGES
    region = target.regions[0]
    assert (region[:good] == content()[:good]).all()
    region[:] = 99  # somebody else has these pages now
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)
    assert (region == 99).all(), "bytes landed after the transfer's end was told"


def test_a_sender_killed_in_the_middle_leaves_whole_pages(opened, sender_process):
    process, address = sender_process(signal.SIGKILL, after=200)
    target = memory(PAGES, (65536,))
    receiver = opened(target)
    start = time.monotonic()
    event = ask(receiver, "pull", map(key, range(PAGES)), range(PAGES), kv_from=address)
    assert (event.kind, time.monotonic() - start < 3) == ("failed", True)
    good = good_pages(event)
    assert 0 < good < PAGES
    assert (target.regions[0][:good] == content()[:good]).all()
    assert process.wait() == -signal.SIGKILL
    event = ask(receiver, "probe", [key(0)], kv_from=address)
    assert event.kind == "failed", "killed before: said at once"


def test_a_sender_started_anew_on_its_port_is_found_again_and_old_claims_are_void(opened, sender_process):
    process, address = sender_process(pages=8)
    receiver = opened(memory(8, (65536,)))
    assert ask(receiver, "probe", map(key, range(8)), kv_from=address).tokens == 32
    process.kill()
    process.wait()
    _, again = sender_process(port=int(address.rpartition(":")[2]), pages=8)
    assert again == address
    event = ask(receiver, "pull", map(key, range(8)), range(8), kv_from=address)
    assert (event.kind, event.reason) == ("failed", f"peer {address}: the peer was started anew")
    assert ask(receiver, "probe", map(key, range(8)), kv_from=address).tokens == 32
    assert ask(receiver, "pull", map(key, range(8)), range(8), kv_from=address).kind == "done"


def test_a_peer_that_failed_is_left_alone_for_a_moment_and_not_for_ever(opened, sender_process):
    port = socket.create_server(("127.0.0.1", 0))
    number = port.getsockname()[1]
    port.close()
    receiver = opened(memory(8, (65536,)))
    address = f"127.0.0.1:{number}"
    assert "Connection refused" in ask(receiver, "probe", [key(0)], kv_from=address).reason
    assert "asked again in 0." in ask(receiver, "probe", [key(0)], kv_from=address).reason
    sender_process(port=number, pages=8)
    wait_for(lambda: ask(receiver, "probe", [key(0)], kv_from=address).tokens == 4)


def test_a_peer_that_says_nothing_takes_some_threads_and_not_all(opened):
    """Half open: it takes the connection and never speaks. Requests to others go on."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        sender, receiver = opened(memory()), opened(memory(), patience=4.0)
        lease(sender, [key(0)], [0])
        start = time.monotonic()
        for number in range(40):
            hints = {"kv_from": address}
            receiver.transfer_kv([Transfer(f"s{number}", "probe", f"s{number}", (), (key(0),), hints=hints)])
        assert ask(receiver, "probe", [key(0)], kv_from=sender.address).tokens == 4
        assert time.monotonic() - start < 1.5
        ended: set = set()
        wait_for(lambda: len(ended) == 40, doing=lambda: ended.update(e.transfer_id for e in receiver.transfer_kv([])))
        assert time.monotonic() - start < 3.8


NONSENSE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"kv\x02" + b"\xff" * 8,
    b"kv\x02" + struct.pack(">II", 1, 3) + b"???",
    b"\x00" * 64,
]


@pytest.mark.parametrize("said", NONSENSE)
def test_nonsense_is_not_answered_and_hurts_nobody(said, opened):
    sender, receiver = opened(memory()), opened(memory(seed=1))
    lease(sender, [key(0)], [0])
    host, _, port = sender.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as line:
        line.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while line.recv(4096):
                pass
    assert ask(receiver, "pull", [key(0)], [0], kv_from=sender.address).kind == "done"


# ---- whole engines


def engine(scheduler="unified", kvcache="paged", overlap=False, executor=None, options=None, **settings):
    store = make("connector", "local", options or {})
    settings = {"num_pages": 40, "page_size": 4, "max_batch_tokens": 16, **settings}
    core = make_core(
        scheduler=scheduler, kvcache=kvcache, overlap=overlap, connectors=[store],
        executor=executor or ShadowExecutor(), **settings,
    )  # fmt: skip
    core.store = store
    return core


def settle(*cores, seconds=20.0):
    """Step all of them until there is nothing to do; nobody has read a wrong page, and every page is free."""
    until = time.monotonic() + seconds
    while any(core.has_work for core in cores):
        assert time.monotonic() < until, [core.stats() for core in cores]
        for core in cores:
            core.step()
    for core in cores:
        core.check()
        assert core.executor.mismatch is None
        assert core.counters.stray_events == 0
        assert core.pool.num_fenced == 0
        assert core.pool.num_free + core.kv.numbers().evictable == core.pool.num_pages


def prefill(core, tokens=PROMPT, **fields):
    """A request that ends with its prompt; its pages are leased when this returns."""
    request = core.add(tokens, SamplingParams(max_tokens=1), metadata=PREFILL, **fields)
    while not request.finished:
        core.step()
    core.step()
    return request


def close(*cores):
    for core in cores:
        core.close()


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


# ---- a bad line


class BadLine:
    """Stands between two engines: passes bytes on as ``pass_on`` says, (from the server?, bytes) -> pieces or None."""

    def __init__(self, target, pass_on):
        host, _, port = target.rpartition(":")
        self._target, self.pass_on = (host, int(port)), pass_on
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                ours, _ = self._listener.accept()
                theirs = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [ours, theirs]
            for pair in ((ours, theirs, False), (theirs, ours, True)):
                thread = threading.Thread(target=self._pump, args=pair)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source, target, from_server):
        try:
            while data := source.recv(65536):
                pieces = self.pass_on(from_server, data)
                if pieces is None:
                    break
                for piece in pieces:
                    target.sendall(piece)
        except OSError:
            pass
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self):
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()


def faults(rng, often):
    def pass_on(from_server, data):
        if rng.random() > often:
            return [data]
        at = rng.randrange(len(data))
        return rng.choice(
            (
                lambda: None,  # cut
                lambda: [data[:at]],  # lost
                lambda: [data, data[at:]],  # repeated
                lambda: [data[:at], data[:at], data[at:]],
                lambda: [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]],  # flipped
                lambda: time.sleep(rng.random() * 0.3) or [data],  # late
                lambda: [data[at:], data[:at]],
            )
        )()

    return pass_on


@pytest.mark.parametrize("seed", range(3))
@every_combination
def test_b22_b23_walks_over_a_bad_line(scheduler, kvcache, overlap, seed, caplog):
    """Bytes are lost, repeated, flipped, late; requests are aborted on both sides: nobody reads a wrong page."""
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(seed)
    first = engine(scheduler, kvcache, overlap, options={"lease_seconds": 0.5, "patience": 0.6}, num_pages=60)
    second = engine(scheduler, kvcache, overlap, options={"patience": 0.6, "linger": 0.05}, num_pages=30)
    line = BadLine(first.store.address, faults(rng, 0.1))
    hints = {"kv_from": line.address}
    added = 0
    try:
        while added < 15 or first.has_work or second.has_work:
            if added < 15 and rng.random() < 0.05:
                added += 1
                tokens = [*PROMPT[: rng.randrange(1, 30)], *[rng.randrange(97)] * rng.randrange(4)]
                salt = rng.choice(("", "", "s"))
                first.add(tokens, SamplingParams(max_tokens=1), salt=salt, metadata=PREFILL)
                second.add(tokens, SamplingParams(max_tokens=rng.randrange(1, 9)), salt=salt, metadata=hints)
            for core in (first, second):
                if core.requests and rng.random() < 0.01:
                    core.abort(rng.choice(sorted(core.requests)))
                core.step()
        settle(first, second)
        assert second.counters.loaded_tokens + second.counters.failed_loads + second.counters.late_loads > 0
    finally:
        line.close()
        close(first, second)


@every_combination
def test_b22_a_request_that_is_aborted_in_the_middle_of_its_load(scheduler, kvcache, overlap):
    """The line holds the last pages back; others need the whole pool meanwhile. The lease ends, too."""
    held = threading.Event()
    let = threading.Event()

    def hold(from_server, data):
        if from_server and len(data) > 100:  # pages, and not the few words before
            held.set()
            let.wait(10)
        return [data]

    first, second = engine(scheduler, kvcache, overlap), engine(scheduler, kvcache, overlap, num_pages=20)
    line = BadLine(first.store.address, lambda s, data: hold(s, data) if ready.is_set() else [data])
    ready = threading.Event()
    try:
        prefill(first)
        hints = {"kv_from": line.address}
        slow = second.add(PROMPT, SamplingParams(max_tokens=2), metadata=hints)
        second.step()
        wait_for(lambda: slow.id in second.store._claims)
        ready.set()
        wait_for(held.is_set, doing=second.step)
        second.abort(slow.id)
        others = [second.add([number] * 20, SamplingParams(max_tokens=12), read_cache=False) for number in range(6)]
        while not all(request.finished for request in others):
            second.step()
            second.check()
        let.set()
        settle(first, second)
        assert [request.num_output for request in others] == [12] * 6
        assert first.store.stats()["leases_released"] == 1, "told over a line of its own"
    finally:
        let.set()
        line.close()
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


@pytest.mark.model
def test_a_real_model_says_the_same_in_two_engines_as_in_one():
    from engine.core import EngineConfig, assemble
    from engine.core.models.source import resolve
    from engine.core.models.tokenizer import load_tokenizer

    tokens = load_tokenizer(resolve("default")).encode("The quick brown fox jumps over the lazy dog. " * 8)
    settings = {"num_pages": 64, "page_size": 16, "max_batch_tokens": 64}

    def one(*connectors):
        core = assemble(EngineConfig(connectors=connectors, **settings))
        core.store = next(iter(core.exchange._sinks), None)
        return core

    def run(core, *others, **fields):
        request = core.add(tokens, SamplingParams(max_tokens=12, temperature=0.0), **fields)
        until = time.monotonic() + 120
        while not request.finished and time.monotonic() < until:
            for each in (core, *others):
                each.step()
        return request

    alone = one()
    expected = run(alone).output
    first, second = one("local"), one("local")
    prefill(first, tokens)
    request = run(second, first, metadata={"kv_from": first.store.address})
    assert request.output == expected
    whole = (len(tokens) - 1) // 16 * 16
    assert request.cached_tokens == second.counters.loaded_tokens == whole > 64
    assert second.counters.computed_tokens == len(tokens) - whole + 11, "nothing is computed twice"
    close(alone, first, second)

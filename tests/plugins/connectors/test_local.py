"""``local``: pages over the line itself, and what a bad line does."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import struct
import sys
import threading
import time

import pytest
from handoff_kit import (
    COMBINATIONS,
    PREFILL,
    PROMPT,
    answer_of,
    ask,
    close,
    engine,
    key,
    lease,
    memory,
    prefill,
    settle,
    wait_for,
)

from engine.core import SamplingParams
from engine.testing import ConnectorSuite

every_combination = pytest.mark.parametrize(("scheduler", "kvcache", "overlap"), COMBINATIONS)


class TestLocalThatLeasesAll(ConnectorSuite):
    plugin = "local"
    options = {"lease": "all", "lease_seconds": 0.1}
    remembers = False


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
    first = engine(
        "streamed", scheduler, kvcache, overlap, options={"lease_seconds": 0.5, "patience": 0.6}, num_pages=60
    )
    second = engine("streamed", scheduler, kvcache, overlap, options={"patience": 0.6, "linger": 0.05}, num_pages=30)
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

    first, second = (
        engine("streamed", scheduler, kvcache, overlap),
        engine("streamed", scheduler, kvcache, overlap, num_pages=20),
    )
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

    first, second = one("local"), one("local")
    expected = run(first).output
    first.kv.reset()
    prefill(first, tokens)
    request = run(second, first, metadata={"kv_from": first.store.address})
    assert request.output == expected
    whole = (len(tokens) - 1) // 16 * 16
    assert request.cached_tokens == second.counters.loaded_tokens == whole > 64
    assert second.counters.computed_tokens == len(tokens) - whole + 11, "nothing is computed twice"
    assert second.describe()["connectors"]["local"]["mover"] == "pulled"
    if sys.platform == "linux":
        assert second.store.stats()["detours"] == 0, "copied out of the other's mapped memory"
    close(first, second)

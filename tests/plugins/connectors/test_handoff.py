"""Hand-off from engine to engine, a connector alone: the same for every way in which pages travel."""

from __future__ import annotations

import random
import re
import socket
import threading
import time

import pytest
from handoff_kit import (
    answer_of,
    ask,
    key,
    lease,
    memory,
    wait_for,
)

from engine.core import ConfigError
from engine.core.plan import Transfer


@pytest.mark.parametrize("sizes", [(48, 16), (4096,), (), (64,) * 700], ids=["two", "one", "none", "many"])
def test_bytes_come_as_they_are_and_nothing_else_is_written(sizes, mover, opened):
    source, target = memory(sizes=sizes), memory(sizes=sizes, seed=1)
    before = [target.read(page) for page in range(12)]
    sender, receiver = opened(source, mover), opened(target, mover)
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
    assert sender.stats()["pages_given"] == receiver.stats()["pages_taken"] == 4


def test_more_than_2048_scattered_pages(mover, opened):
    source, target = memory(5000, (300, 100)), memory(5000, (300, 100), seed=1)
    rng = random.Random(0)
    theirs, ours = rng.sample(range(5000), 4500), rng.sample(range(5000), 4500)
    sender, receiver = opened(source, mover), opened(target, mover)
    lease(sender, map(key, range(4500)), theirs)
    assert ask(receiver, "probe", map(key, range(4500)), kv_from=sender.address).tokens == 4500 * 4
    assert ask(receiver, "pull", map(key, range(4500)), ours, kv_from=sender.address).kind == "done"
    assert all((target.read(a) == source.read(b)).all() for a, b in zip(ours, theirs, strict=True))


def test_b23_what_is_not_leased_fails_from_there_on(mover, opened):
    sender, receiver = opened(memory(), mover), opened(memory(seed=1), mover)
    lease(sender, map(key, (0, 1, 3)), [0, 1, 3])
    event = ask(receiver, "pull", map(key, range(4)), [6, 7, 8, 9], kv_from=sender.address)
    assert (event.kind, event.failed_pages) == ("failed", (8, 9))
    assert event.reason == f"peer {sender.address}: the peer has 2 of 4 pages"
    event = ask(receiver, "pull", [key(9)], [6], kv_from=sender.address)
    assert (event.failed_pages, "lease had ended" in event.reason) == ((6,), True)
    assert ask(receiver, "probe", [key(9)], kv_from=sender.address).tokens == 0
    assert ask(receiver, "pull", [key(0)], [1, 2], kv_from=sender.address).reason == "1 keys for 2 pages"
    assert ask(receiver, "pull", [b"short"], [1], kv_from=sender.address).reason == "keys have 32 bytes"


def test_pages_out_of_range_fail_and_nothing_is_written(mover, opened, caplog):
    """A mistake of the core's, on either side; the connector goes on working."""
    target = memory(seed=1)
    sender, receiver = opened(memory(), mover), opened(target, mover)
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
def test_b28_who_does_not_fit_is_refused_in_words(what, mover, opened, caplog):
    options, shape, words = DIFFERENT[what]
    sender = opened(memory(), mover, token="secret", engine="upstairs")
    lease(sender, [key(0)], [0])
    receiver = opened(memory(**shape), mover, **{"token": "secret", "engine": "downstairs", **options})
    event = ask(receiver, "probe", [key(0)], kv_from=sender.address)
    assert event.kind == "failed"
    assert re.search(words, event.reason), event.reason
    again = ask(receiver, "probe", [key(0)], kv_from=sender.address)
    assert "asked again in" in again.reason, "not connected to for every request"
    assert sender.stats()["peers_refused"] == 1
    assert "secret" not in caplog.text
    other = opened(memory(seed=1), mover, token="secret")
    assert ask(other, "probe", [key(0)], kv_from=sender.address).tokens == 4


def test_whoever_does_not_know_the_token_is_refused_as_a_sender_too(opened):
    sender, receiver = opened(memory()), opened(memory(), token="secret")
    assert "it does not know the token" in ask(receiver, "probe", [key(0)], kv_from=sender.address).reason


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


def test_a_look_up_waits_a_moment_for_what_is_being_computed(mover, opened):
    sender, receiver = opened(memory(), mover), opened(memory(), mover, linger=1.0)
    receiver.transfer_kv([Transfer("t", "probe", "r", (), (key(0), key(1)), hints={"kv_from": sender.address})])
    time.sleep(0.1)
    lease(sender, [key(0)], [0])
    time.sleep(0.1)
    assert list(receiver.transfer_kv([])) == []
    lease(sender, [key(1)], [1], name="q")
    assert answer_of(receiver).tokens == 8


def test_four_receivers_and_four_senders_at_once(mover, opened):
    """Each receiver fetches from each sender, all at the same time."""
    shape = {"pages": 600, "sizes": (1024, 3000)}
    sources = [memory(seed=seed, **shape) for seed in range(4)]
    senders = [opened(source, mover) for source in sources]
    for number, sender in enumerate(senders):
        for request in "abcd":  # a hand-off is for one receiver
            keys = map(key, range(number * 1000, number * 1000 + 120))
            lease(sender, keys, range(120), name=request, request=request)
    targets = [memory(seed=9, **shape) for _ in range(4)]
    receivers = [opened(target, mover) for target in targets]
    errors: list = []

    def fetch(receiver, target):
        left = {f"t{number}" for number in range(4)}

        def hear(*wishes):
            for event in receiver.transfer_kv(list(wishes)):
                assert event.kind == "done", event
                left.discard(event.transfer_id)

        try:
            for number, sender in enumerate(senders):
                keys = tuple(map(key, range(number * 1000, number * 1000 + 120)))
                pages = tuple(range(number * 130, number * 130 + 120))
                hints = {"kv_from": sender.address}
                hear(Transfer(f"t{number}", "pull", f"r{number}", pages, keys, hints=hints))
            until = time.monotonic() + 60
            while left and time.monotonic() < until:
                hear()
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

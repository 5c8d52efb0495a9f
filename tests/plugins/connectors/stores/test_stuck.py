"""Stores that hang or fail: nobody waits for long, and what comes too late touches nothing."""

from __future__ import annotations

import threading

import pytest

from engine.core.plan import Transfer
from engine.plugins.connectors.host import HostStore

LONGEST = 20.0  # seconds after which a test gives up


class Stuck(HostStore):
    """Hangs where the test says, until it says otherwise."""

    name = "stuck"
    remote = True

    def __init__(self, options=None):
        super().__init__(options)
        self.hang = set()
        self.go = threading.Event()

    def _perhaps(self, what):
        if what in self.hang:
            self.go.wait(LONGEST)

    def has_many(self, keys):
        self._perhaps("probe")
        return super().has_many(keys)

    def get_many(self, keys):
        self._perhaps("pull")
        return super().get_many(keys)

    def put_many(self, keys, contents):
        self._perhaps("push")
        super().put_many(keys, contents)


def test_whatever_a_store_hangs_in_its_transfers_end_and_touch_no_page_after_that(opened, memory, key, ask, eventually):
    layout = memory()
    store = opened(Stuck(Stuck.Options(patience=0.2)), layout)
    ask(store, "push", [key(0), key(1)], [0, 1])
    before = layout.read(5).copy()
    store.hang = {"pull", "probe", "push"}
    store.transfer_kv([Transfer("load", "pull", "r", (5,), (key(0),))])
    eventually(lambda: not store._workers._queues["pull"])  # a worker is at it
    (event,) = store.transfer_kv([Transfer("c", "cancel", "r", of="load")])
    assert (event.transfer_id, event.kind, event.reason, event.failed_pages) == ("load", "failed", "cancelled", (5,))
    assert ask(store, "probe", [key(0)]).tokens == 0, "nobody is there to look"
    event = ask(store, "push", [key(3)], [3])
    assert (event.kind, event.reason) == ("failed", "the store hangs")
    store.go.set()
    eventually(lambda: store._workers._hanging == 0)
    assert (layout.read(5) == before).all()
    assert ask(store, "probe", [key(0), key(1)]).tokens == 8, "it goes on where it hung"
    assert list(store.transfer_kv([])) == []


def test_a_task_that_hangs_does_not_keep_transfers_waiting_for_ever(opened, memory, key, ask, eventually):
    """Copies between tiers, and clearing, are nobody's transfers: nobody cancels them."""
    store = opened(Stuck(Stuck.Options(patience=0.2)), memory())
    began = threading.Event()

    def task():
        began.set()
        store.go.wait(LONGEST)
        return False

    store.later(task)
    assert began.wait(LONGEST)
    event = ask(store, "push", [key(0)], [0])
    assert (event.kind, event.reason) == ("failed", "the store hangs")
    store.go.set()
    eventually(lambda: store._workers._hanging == 0)
    assert ask(store, "push", [key(0)], [0]).kind == "done"


def test_a_worker_that_is_left_behind_touches_no_page(opened, memory, key, ask, eventually, monkeypatch):
    monkeypatch.setattr("engine.plugins.connectors._jobs.GOODBYE", 0.1)
    layout = memory()
    store = opened(Stuck(), layout)
    ask(store, "push", [key(0)], [0])
    before = layout.read(5).copy()
    store.get_many = lambda keys: store.go.wait(LONGEST) and [layout.read(0)]
    store.transfer_kv([Transfer("load", "pull", "r", (5,), (key(0),))])
    threads = list(store._workers._threads)
    eventually(lambda: not store._workers._queues["pull"])
    store.close()
    store.go.set()
    for thread in threads:
        thread.join(LONGEST)
    assert (layout.read(5) == before).all()


@pytest.mark.parametrize(("kind", "reason"), [("probe", ""), ("pull", "no answer for"), ("push", "no answer for")])
def test_a_call_that_takes_too_long_is_not_waited_for(kind, reason, opened, memory, key, ask):
    store = opened(Stuck(Stuck.Options(patience=0.1)), memory())
    ask(store, "push", [key(0)], [0])
    store.hang = {kind}
    event = ask(store, kind, [key(0 if kind != "push" else 1)], [1] if kind != "probe" else ())
    assert event.kind == ("found" if kind == "probe" else "failed")
    assert reason in event.reason
    store.go.set()


def test_a_store_that_fails_is_left_alone_for_a_while(opened, memory, key, ask, caplog):
    store = opened(Stuck(), memory())
    ask(store, "push", [key(0)], [0])
    calls = []

    def broken(keys):
        calls.append(keys)
        raise ConnectionError("the line is down")

    store.has_many = broken
    for _ in range(5):
        assert (ask(store, "probe", [key(0)]).kind, ask(store, "probe", [key(0)]).tokens) == ("found", 0)
    assert len(calls) == 1
    assert "the line is down" in ask(store, "pull", [key(0)], [1]).reason
    assert [line.message for line in caplog.records] == [
        "connector stuck is left alone for a while: Unreachable: ConnectionError: the line is down"
    ]
    assert store.stats()["outages"] == 1

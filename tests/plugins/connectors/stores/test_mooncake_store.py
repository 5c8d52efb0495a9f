"""``mooncake-store``: a real master that is restarted, killed, stopped; a store that is full, and tampered with."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from engine.core import ConfigError, EngineConfig, assemble
from engine.core.plan import Transfer
from engine.testing import ConnectorSuite

SMALL = {"segment": "16MiB", "buffer": "16MiB"}


@pytest.fixture
def store(master, opened, memory):
    """Opens a store of the master."""

    def of(layout=None, **options):
        return opened("mooncake-store", layout or memory(), **{"master": master.address, **SMALL, **options})

    return of


@pytest.fixture
def core(master, engine_over):
    """Makes engines with the store as their tier."""
    return lambda **options: engine_over("mooncake-store", **{"master": master.address, **SMALL, **options})


def test_bytes_come_back_as_they_were_for_engines_of_one_kind(store, memory, key, ask):
    layout = memory()
    before = [layout.read(page) for page in range(5)]
    writer = store(layout)
    heard = []
    writer.notice = lambda kind, keys: heard.extend((kind, name) for name in keys)
    assert ask(writer, "push", map(key, range(5)), range(5)).kind == "done"
    other = memory()
    for region in other.regions:
        region[:] = 0
    reader = store(other)
    assert ask(reader, "probe", map(key, range(8))).tokens == 5 * 4
    assert ask(reader, "pull", map(key, range(5)), range(6, 11)).kind == "done"
    assert all((other.read(6 + number) == before[number]).all() for number in range(5))
    event = ask(reader, "pull", map(key, range(4, 7)), [6, 7, 8])
    assert (event.kind, event.failed_pages) == ("failed", (7, 8))
    assert ask(store(memory(digest="b" * 32)), "probe", [key(0)]).tokens == 0, "B28"
    assert writer.clear() == 0
    while ask(reader, "probe", [key(0)]).tokens or len(heard) < 10:
        pass
    assert sorted(heard) == sorted((kind, key(number)) for kind in ("stored", "removed") for number in range(5))


@pytest.mark.parametrize("how", ["flipped", "foreign"])
def test_wrong_content_under_a_key_is_never_used_and_is_gone_after(how, store, memory, key, ask):
    """A second put on a key keeps what is there: it is removed first."""
    layout = memory()
    one = store(layout)
    ask(one, "push", [key(0), key(1)], [0, 1])
    client, name = one._client, one._names([key(1)])[0]
    data = client.get(name)
    assert client.put(name, b"too late") == 0
    assert client.get(name) == data
    client.remove(name, True)
    client.put(name, {"flipped": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], "foreign": b"somebody's"}[how])
    event = ask(one, "pull", [key(0), key(1)], [6, 7])
    assert (event.failed_pages, "DamagedPage" in event.reason) == ((7,), True)
    assert ask(one, "push", [key(1)], [1]).kind == "done"
    assert ask(one, "pull", [key(1)], [7]).kind == "done"
    assert (layout.read(7) == layout.read(1)).all()


def test_engines_share_what_they_compute_and_a_restart_of_the_master_is_a_miss(core, master, eventually, answer):
    first, second = core(), core()
    cold = answer(first)
    assert cold[1] == 0
    assert answer(second) == (cold[0], 28)
    master.stop()
    assert answer(second) == (cold[0], 0), "it is down"
    assert second.stats()["connector_mooncake-store_outages"] == 1
    master.run()
    eventually(lambda: answer(first) == (cold[0], 28))  # it came back and knew nothing, and was told again
    assert first.counters.flat()["finished_error"] == 0


def test_a_master_that_is_stopped_holds_nobody_up_for_longer_than_patience(core, master, answer):
    """The library waits for it without end: its threads are given up, and go on when it does."""
    engine = core(patience=1.0)
    cold = answer(engine)
    assert answer(engine) == (cold[0], 28)
    os.kill(master.process.pid, signal.SIGSTOP)
    try:
        for _ in range(4):
            assert answer(engine) == (cold[0], 0)
    finally:
        os.kill(master.process.pid, signal.SIGCONT)


def test_a_full_store_is_a_failed_save(store, memory, key, ask):
    """Pages of six megabytes in sixteen. What is refused makes the master evict, so those before may be gone."""
    layout = memory(sizes=(6 * 2**20,))
    one = store(layout, buffer="64MiB")
    events = [ask(one, "push", [key(number)], [number]) for number in range(4)]
    failed = [event.reason for event in events if event.kind == "failed"]
    assert failed
    assert all("the store is full" in reason for reason in failed)
    assert events[0].kind == "done"
    for number in range(4):
        if ask(one, "pull", [key(number)], [5]).kind == "done":
            assert (layout.read(5) == layout.read(number)).all()


def test_a_load_that_is_cancelled_while_the_master_hangs_ends_at_once(master, store, memory, key, ask, eventually):
    layout = memory()
    one = store(layout)
    ask(one, "push", [key(0)], [0])
    before = layout.read(5).copy()
    os.kill(master.process.pid, signal.SIGSTOP)
    try:
        one.transfer_kv([Transfer("load", "pull", "r", (5,), (key(0),))])
        (event,) = one.transfer_kv([Transfer("c", "cancel", "r", of="load")])
        assert (event.kind, event.failed_pages) == ("failed", (5,))
    finally:
        os.kill(master.process.pid, signal.SIGCONT)
    eventually(lambda: one._workers._hanging == 0)
    assert (layout.read(5) == before).all()


def test_without_a_master_requests_are_computed(core, master, answer):
    master.stop()
    engine = core()
    assert answer(engine)[1] == 0
    assert engine.stats()["connector_mooncake-store_outages"] == 1


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match="needs Mooncake: pip install .* libibverbs1"):
        assemble(EngineConfig(executor="sim", connectors=["mooncake-store"]))


class TestMooncakeStore(ConnectorSuite):
    plugin = "mooncake-store"

    @pytest.fixture(autouse=True)
    def _server(self, master):
        self.options = {"master": master.address, **SMALL}

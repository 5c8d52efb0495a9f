"""``redis``: a real server that is shared, restarted, killed, stopped, full, and tampered with."""

from __future__ import annotations

import logging
import os
import signal
import sys

import pytest

from engine.core import ConfigError, EngineConfig, SamplingParams, assemble
from engine.core.config import load_config
from engine.core.effective import Effective
from engine.core.plan import Transfer
from engine.testing import ConnectorSuite

PROMPT = [at % 97 for at in range(30)]


@pytest.fixture
def store(redis_server, opened, memory):
    """Opens a store of the server."""

    def make(layout=None, **options):
        return opened("redis", layout or memory(), **{"url": redis_server.url, **options})

    return make


@pytest.fixture
def core(redis_server, engine_over):
    """Makes engines with the server as their tier."""
    return lambda **options: engine_over("redis", **{"url": redis_server.url, **options})


def test_bytes_come_back_as_they_were_and_another_engine_finds_them(store, memory, key, ask):
    layout = memory()
    before = [layout.read(page) for page in range(5)]
    assert ask(store(layout), "push", map(key, range(5)), range(5)).kind == "done"
    other = memory()
    for region in other.regions:
        region[:] = 0
    reader = store(other, ttl=100)
    assert ask(reader, "probe", map(key, range(8))).tokens == 5 * 4
    assert ask(reader, "pull", map(key, range(5)), range(6, 11)).kind == "done"
    assert all((other.read(6 + number) == before[number]).all() for number in range(5))
    event = ask(reader, "pull", map(key, range(4, 7)), [6, 7, 8])
    assert (event.kind, event.failed_pages) == ("failed", (7, 8))
    assert reader.stats() == {"hits": 6, "kept": 0, "errors": 0, "outages": 0}


def test_pages_end_with_their_time(redis_server, store, key, ask):
    import redis

    one = store(ttl=50)
    ask(one, "push", [key(0)], [0])
    with redis.Redis.from_url(redis_server.url) as client:
        (name,) = client.keys()
        assert name == b"sixhooks:" + b"a" * 32 + b":" + key(0)
        client.expire(name, 10)
        ask(one, "probe", [key(0)])
        assert client.ttl(name) > 10, "a look-up is a use"
        client.delete(name)
    assert ask(one, "probe", [key(0)]).tokens == 0


@pytest.mark.parametrize("how", ["flipped", "cut", "foreign", "of another key"])
def test_wrong_content_under_a_key_is_never_used_and_is_gone_after(how, redis_server, store, memory, key, ask):
    import redis

    layout = memory()
    one = store(layout)
    ask(one, "push", [key(0), key(1)], [0, 1])
    with redis.Redis.from_url(redis_server.url) as client:
        name = b"sixhooks:" + b"a" * 32 + b":" + key(1)
        data = client.get(name)
        client.set(
            name,
            {
                "flipped": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
                "cut": data[:-1],
                "foreign": b"what somebody else keeps here",
                "of another key": client.get(name[:-1] + b"\0"),
            }[how],
        )
        event = ask(one, "pull", [key(0), key(1)], [6, 7])
        assert (event.failed_pages, "DamagedPage" in event.reason) == ((7,), True)
        assert not client.exists(name)
    assert ask(one, "push", [key(1)], [1]).kind == "done"
    assert ask(one, "pull", [key(1)], [7]).kind == "done"
    assert (layout.read(7) == layout.read(1)).all()


def test_b28_engines_of_another_kind_share_a_server_and_never_a_page(store, memory, key, ask):
    """Layouts differ in size, in digest; and one reads under another prefix."""
    stores = [
        store(memory()),
        store(memory(sizes=(64,), digest="b" * 32)),
        store(memory(digest="c" * 32)),
        store(memory(), prefix="other"),
    ]
    for number, one in enumerate(stores):
        ask(one, "push", [key(number)], [number])
    for number, one in enumerate(stores):
        for other in stores:
            assert ask(other, "probe", [key(number)]).tokens == (4 if other is one else 0)


def test_two_engines_share_what_they_compute_and_a_restart_of_the_server_is_a_miss(core, redis_server, answer):
    first, second = core(), core()
    cold = answer(first)
    assert cold[1] == 0
    assert answer(second) == (cold[0], 28)
    assert answer(second, salt="other") == (cold[0], 0)
    redis_server.stop()
    assert answer(second) == (cold[0], 0), "it is down"
    redis_server.run()
    assert answer(first) == (cold[0], 0), "the server came back with nothing, and the line to it was dead"
    assert answer(first) == (cold[0], 28)
    assert first.counters.failed_loads == 0
    assert first.counters.flat()["finished_error"] == 0


def test_a_server_that_dies_in_the_middle_of_a_load_costs_the_rest_of_it(redis_server, store, memory, key, ask):
    layout = memory()
    one = store(layout)
    one._slice = 2
    ask(one, "push", map(key, range(6)), range(6))
    fetch = one.get_many

    def dying(keys):
        if keys[0] != key(0):
            redis_server.stop()
        return fetch(keys)

    one.get_many = dying
    event = ask(one, "pull", map(key, range(6)), range(6, 12))
    assert (event.kind, event.failed_pages) == ("failed", (8, 9, 10, 11))
    assert "Unreachable" in event.reason
    assert (layout.read(7) == layout.read(1)).all()


def test_a_server_that_is_stopped_holds_nobody_up_for_longer_than_patience(core, redis_server, answer):
    engine = core(patience=1.0)
    cold = answer(engine)
    os.kill(redis_server.process.pid, signal.SIGSTOP)
    try:
        assert answer(engine) == (cold[0], 0)
    finally:
        os.kill(redis_server.process.pid, signal.SIGCONT)
    assert engine.stats()["connector_redis_outages"] == 1


def test_a_full_server_is_a_failed_save_that_is_counted(core, redis_server, store, memory, key, ask, answer):
    engine = core()
    redis_server.stop()
    redis_server.run("--maxmemory", "100kb", "--maxmemory-policy", "noeviction")
    cold = answer(engine)
    assert cold[1] == 0
    assert engine.counters.failed_saves > 0
    event = ask(store(), "push", [key(0)], [0])
    assert (event.kind, "OutOfMemory" in event.reason) == ("failed", True)
    assert answer(engine) == (cold[0], 0)
    assert engine.stats()["connector_redis_outages"] == 0, "it is full, not away"


def test_clearing_forgets_this_layout_only(store, memory, key, ask, eventually):
    one, other = store(), store(memory(digest="b" * 32))
    heard = []
    one.notice = lambda kind, keys: heard.extend((kind, name) for name in keys)
    for each in (one, other):
        ask(each, "push", [key(0), key(1)], [0, 1])
    assert one.clear() == 0
    eventually(lambda: ask(one, "probe", [key(0)]).tokens == 0 and len(heard) == 4)
    assert sorted(heard) == sorted((kind, key(number)) for kind in ("stored", "removed") for number in (0, 1))
    assert ask(other, "probe", [key(0), key(1)]).tokens == 8


def test_of_the_pages_on_a_server_only_the_last_are_told_of(store, key, ask, monkeypatch):
    """It evicts without a word: what is told of must not become more for ever."""
    monkeypatch.setattr("engine.plugins.connectors._server.VOUCHED", 2)
    one, heard = store(), []
    one.notice = lambda kind, keys: heard.extend((kind, int.from_bytes(name, "big")) for name in keys)
    ask(one, "push", [key(0)], [0])
    ask(one, "push", [key(1)], [1])
    ask(one, "push", [key(2), key(3)], [2, 3])
    assert heard == [("stored", at) for at in range(4)] + [("removed", 0), ("removed", 1)]
    assert ask(one, "probe", [key(0)]).tokens == 4, "and found all the same"


def test_a_password_is_shown_nowhere(redis_server, core, caplog, answer):
    redis_server.stop()
    redis_server.run("--requirepass", "open sesame")
    url = redis_server.url.replace("unix://", "unix://:wrong-pass-1@")
    loaded = load_config(flags={"connectors": "redis", "connectors.redis.url": url, "executor": "sim"})
    effective = Effective(loaded)
    shown = [str(dict(effective.values())), effective.as_toml()]
    with caplog.at_level(logging.DEBUG):
        engine = assemble(loaded.config)
        request = engine.add(PROMPT, SamplingParams(max_tokens=4))
        while engine.has_work:
            engine.step()
        shown += [str(engine.describe()), str(engine.stats()), caplog.text]
        engine.close()
    assert (request.num_output, request.cached_tokens) == (4, 0)
    assert "invalid username-password pair" in caplog.text
    with pytest.raises(ConfigError) as caught:
        assemble(EngineConfig(executor="sim", connectors=[{"name": "redis", "url": "http://:wrong-pass-1@host"}]))
    shown.append(str(caught.value))
    assert not [text for text in shown if "wrong-pass" in text]
    engine = core(url=redis_server.url.replace("unix://", "unix://:open%20sesame@"))
    answer(engine)
    assert answer(engine)[1] == 28


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"connector redis needs redis: pip install 'sixhooks\[redis\]'"):
        assemble(EngineConfig(executor="sim", connectors=["redis"]))


def test_a_load_that_is_cancelled_while_the_server_hangs_ends_at_once(
    redis_server, store, memory, key, ask, eventually
):
    layout = memory()
    one = store(layout)
    ask(one, "push", [key(0)], [0])
    before = layout.read(5).copy()
    os.kill(redis_server.process.pid, signal.SIGSTOP)
    try:
        one.transfer_kv([Transfer("load", "pull", "r", (5,), (key(0),))])
        (event,) = one.transfer_kv([Transfer("c", "cancel", "r", of="load")])
        assert (event.kind, event.failed_pages) == ("failed", (5,))
    finally:
        os.kill(redis_server.process.pid, signal.SIGCONT)
    eventually(lambda: one._workers._hanging == 0)
    assert (layout.read(5) == before).all()


class TestRedis(ConnectorSuite):
    plugin = "redis"

    @pytest.fixture(autouse=True)
    def _server(self, redis_server):
        self.options = {"url": redis_server.url, "ttl": 100}
